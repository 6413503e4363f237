"""Cheap estimates of what ablating a memory does to log p(target), for all memories at once.

    gradient     −Σ_position m · ∂log p/∂m                   one backward pass through the model
    direct       −m · (g · v),  g = ∂log p/∂h, σ frozen      at the position alone, past all layers
    integrated   −Σ_position m · mean_k ∂log p/∂m at αₖ · m  αₖ = (k − ½)/S, k = 1 … S

`gradient` is the first-order term of the change. `direct` (direct logit attribution) is what m · v
adds to the target on its straight way to the vocabulary. `integrated` (knowledge neurons) scales
all coefficients of a layer from 0 to m; over the layer it sums to log p(layer off) − log p, closer
with more steps.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.cells import Cell, Layout
from ffmem.interventions.forward import (
    Change,
    PartialForward,
    log_probabilities,
    log_probability,
    post_norm_sigma,
)
from ffmem.progress import Step

NO_DIRECT = (
    "direct is not defined: this model's layers norm their whole output, so no part of it reaches"
    " the vocabulary by itself."
)


class Estimates(NamedTuple):
    """The estimated change of log p of every memory, numbered through all layers."""

    gradient: Float[Tensor, " memory"]
    direct: Float[Tensor, " memory"] | None
    """None if blocks norm their whole output."""
    integrated: Float[Tensor, " memory"] | None
    """None unless requested."""

    def at(self, layout: Layout, cells: Sequence[Cell]) -> dict[str, Float[Tensor, " cell"] | None]:
        """Return each estimate of some memories, by name."""
        numbers = torch.tensor([layout.number(cell) for cell in cells], dtype=torch.long)
        return {
            name: None if estimate is None else estimate[numbers]
            for name, estimate in self._asdict().items()
        }


NAMES = Estimates._fields


def estimate(
    forward: PartialForward,
    target: int,
    positions: Sequence[int] | None = None,
    steps: int | None = None,
    step: Step = lambda n: None,
) -> Estimates:
    """Return the estimates of all memories; the integrated one if `steps` are given."""
    return Estimates(
        gradient(forward, target, positions),
        direct(forward, target, positions),
        None if steps is None else integrated(forward, target, steps, positions, step),
    )


def gradient(
    forward: PartialForward, target: int, positions: Sequence[int] | None = None
) -> Float[Tensor, " memory"]:
    """Return −Σ m · ∂log p/∂m over the positions, through the whole model."""
    memories = forward.memories
    layers = memories.layout.memory_layers
    seen: dict[int, Tensor] = {}

    def keep(layer: int) -> Change:
        def change(coefficients: Tensor) -> Tensor:
            # Weights are frozen: gradients begin at the first layer's coefficients.
            seen[layer] = coefficients if coefficients.requires_grad else _leaf(coefficients)
            return seen[layer]

        return change

    with torch.enable_grad():
        output = forward.run(0, 1, {layer: keep(layer) for layer in layers})
        score = log_probability(memories.head, output, target).sum()
    slopes = torch.autograd.grad(score, [seen[layer] for layer in layers])
    return torch.cat(
        [
            -_sum_products(seen[layer], slope, positions).sum(dim=0)
            for layer, slope in zip(layers, slopes, strict=True)
        ]
    )


def direct(
    forward: PartialForward, target: int, positions: Sequence[int] | None = None
) -> Float[Tensor, " memory"] | None:
    """Return −m · (g · v) at the position; None in models whose blocks norm their output."""
    memories = forward.memories
    if memories.row.output_norm is not None:
        return None
    if positions is not None and forward.n_tokens - 1 not in positions:
        return torch.zeros(len(memories.layout), dtype=torch.float64)
    slope = frozen_slope(forward, target)
    found = []
    for layer in memories.layout.memory_layers:
        trace, values = forward.layers[layer], forward.values.of_layer(layer)
        slopes = values.float() @ slope.to(values.device)
        parts = trace.coefficients[0].to(values.device).double() * slopes.double()
        found.append(-parts.cpu() / post_norm_sigma(memories, layer, trace))
    return torch.cat(found)


def frozen_slope(forward: PartialForward, target: int) -> Float[Tensor, " hidden"]:
    """Return g: the gradient of log p at the last layer's output, with the final σ frozen."""
    head = forward.memories.head
    with torch.enable_grad():
        h = _leaf(forward.output.float())
        score = log_probabilities(head, h, head.denominator(forward.output))[:, target].sum()
    (slope,) = torch.autograd.grad(score, h)
    return slope[0]


def integrated(
    forward: PartialForward,
    target: int,
    steps: int,
    positions: Sequence[int] | None = None,
    step: Step = lambda n: None,
) -> Float[Tensor, " memory"]:
    """Return integrated gradients, with all coefficients of a layer scaled together."""
    alphas = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    found = []
    for layer in forward.memories.layout.memory_layers:
        parts = [
            _scaled_slopes(forward, target, layer, part, positions)
            for part in alphas.split(forward.n_rows)
        ]
        found.append(-torch.stack(parts).sum(dim=0) / steps)
        step(1)
    return torch.cat(found)


def _scaled_slopes(
    forward: PartialForward,
    target: int,
    layer: int,
    alphas: Float[Tensor, " row"],
    positions: Sequence[int] | None,
) -> Float[Tensor, " memory"]:
    """Return Σ m · ∂log p/∂m over rows and positions, at scaled coefficients of a layer."""
    seen: list[Tensor] = []

    def change(coefficients: Tensor) -> Tensor:
        factor = torch.ones(len(alphas), forward.n_tokens, dtype=torch.float64)
        factor[:, list(range(forward.n_tokens) if positions is None else positions)] = alphas[
            :, None
        ]
        scaled = _leaf(coefficients * factor[:, :, None].to(coefficients))
        seen[:] = [coefficients.detach(), scaled]
        return scaled

    with torch.enable_grad():
        output = forward.run(layer, len(alphas), {layer: change})
        score = log_probability(forward.memories.head, output, target).sum()
    coefficients, scaled = seen
    (slope,) = torch.autograd.grad(score, scaled)
    return _sum_products(coefficients, slope, positions).sum(dim=0)


def _sum_products(
    coefficients: Float[Tensor, "row position memory"],
    slope: Float[Tensor, "row position memory"],
    positions: Sequence[int] | None,
) -> Float[Tensor, "row memory"]:
    """Return Σ m · ∂log p/∂m over the positions."""
    products = coefficients.detach().double() * slope.double()
    if positions is not None:
        products = products[:, list(positions)]
    return products.sum(dim=1).cpu()


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


# Which memories to measure exactly


def choose_candidates(
    layout: Layout, estimates: Estimates, n: int, named: Iterable[Cell] = ()
) -> list[Cell]:
    """Return n memories with large estimates, and the named ones.

    The largest |estimate| of each kind are taken in turn: the first of every kind, the second, ….
    """
    orders = []
    for numbers in estimates:
        if numbers is None:
            continue
        best = np.argsort(-np.abs(numbers.numpy()), kind="stable")[:n].tolist()
        orders.append([layout.at(number) for number in best])
    in_turn = list(dict.fromkeys(chain.from_iterable(zip(*orders, strict=True))))[:n]
    return list(dict.fromkeys([*in_turn, *named]))


def rank_correlation(
    estimate: Float[Tensor, " cell"] | None, changes: Float[Tensor, " cell"]
) -> float | None:
    """Return Spearman's rank correlation; None if one side is missing or does not vary."""
    from scipy.stats import spearmanr

    if estimate is None or len(estimate.unique()) < 2 or len(changes.unique()) < 2:
        return None
    return float(spearmanr(estimate.numpy(), changes.numpy()).statistic)
