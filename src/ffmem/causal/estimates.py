"""Cheap estimates of what switching a memory off does to log p(target): all memories at once.

    gradient     −Σ_position m · ∂log p/∂m                   one backward pass through the model
    direct       −m · (g · v),  g = ∂log p/∂h, σ frozen      at the position alone, past all layers
    integrated   −Σ_position m · mean_k ∂log p/∂m at αₖ · m  αₖ = (k − ½)/S, k = 1 … S

`gradient` is the first-order term of the change. `direct` (direct logit attribution) is what m · v
gives the target on its straight way to the vocabulary. `integrated` (knowledge neurons) scales all
coefficients of a layer from 0 to m; over the layer it sums to log p(layer off) − log p, closer
with more steps.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.causal.likelihood import frozen, log_probability
from ffmem.causal.parts import divisor
from ffmem.causal.upward import Change, Upward
from ffmem.progress import Step

NO_DIRECT = (
    "direct is not defined: this model's layers norm their whole output, so no part of it reaches"
    " the vocabulary by itself."
)


class Estimates(NamedTuple):
    """What each estimate says of every memory, as a change of log p; None: not there.

    Memories are numbered through all layers (`Layout.number`).
    """

    gradient: Float[Tensor, " memory"]
    direct: Float[Tensor, " memory"] | None
    """None where blocks norm their whole output."""
    integrated: Float[Tensor, " memory"] | None
    """None unless asked for."""


NAMES = Estimates._fields


def estimates(
    upward: Upward,
    target: int,
    positions: Sequence[int] | None = None,
    steps: int | None = None,
    step: Step = lambda n: None,
) -> Estimates:
    """Return the estimates of all memories; the integrated one if a number of steps is given."""
    return Estimates(
        gradient(upward, target, positions),
        direct(upward, target, positions),
        None if steps is None else integrated(upward, target, steps, positions, step),
    )


def gradient(
    upward: Upward, target: int, positions: Sequence[int] | None = None
) -> Float[Tensor, " memory"]:
    """Return −Σ m · ∂log p/∂m over the positions, through the whole model."""
    memories = upward.memories
    seen: dict[int, Tensor] = {}

    def keep(layer: int) -> Change:
        def change(coefficients: Tensor) -> Tensor:
            # Weights are frozen: the first layer's coefficients are where gradients begin.
            found = coefficients if coefficients.requires_grad else _leaf(coefficients)
            seen[layer] = found
            return found

        return change

    with torch.enable_grad():
        layers = memories.layout.memory_layers
        output = upward.outputs(0, 1, {layer: keep(layer) for layer in layers})
        score = log_probability(memories.head, output, target).sum()
    slopes = torch.autograd.grad(score, [seen[layer] for layer in layers])
    return torch.cat(
        [
            -_product(seen[layer], slope, positions).sum(dim=0)
            for layer, slope in zip(layers, slopes, strict=True)
        ]
    )


def direct(
    upward: Upward, target: int, positions: Sequence[int] | None = None
) -> Float[Tensor, " memory"] | None:
    """Return −m · (g · v) at the position; None in models whose blocks norm their output."""
    memories = upward.memories
    if memories.row.output_norm is not None:
        return None
    if positions is not None and upward.n_tokens - 1 not in positions:
        return torch.zeros(len(memories.layout), dtype=torch.float64)
    slope = frozen_slope(upward, target)
    found = []
    for layer in memories.layout.memory_layers:
        trace, values = upward.layers[layer], upward.values.of(layer)
        pulls = values.float() @ slope.to(values.device)
        parts = trace.coefficients[0].to(values.device).double() * pulls.double()
        found.append(-parts.cpu() / divisor(memories, layer, trace))
    return torch.cat(found)


def frozen_slope(upward: Upward, target: int) -> Float[Tensor, " hidden"]:
    """Return g: the gradient of log p at the last layer's output, the final σ frozen."""
    head = upward.memories.head
    sigma = head.denominator(upward.output)
    with torch.enable_grad():
        h = _leaf(upward.output.float())
        score = frozen(head, h, sigma)[:, target].sum()
    (slope,) = torch.autograd.grad(score, h)
    return slope[0]


def integrated(
    upward: Upward,
    target: int,
    steps: int,
    positions: Sequence[int] | None = None,
    step: Step = lambda n: None,
) -> Float[Tensor, " memory"]:
    """Return the integrated gradients of every layer, its coefficients scaled all together."""
    alphas = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    found = []
    for layer in upward.memories.layout.memory_layers:
        parts = [
            _scaled(upward, target, layer, part, positions) for part in alphas.split(upward.n_rows)
        ]
        found.append(-torch.stack(parts).sum(dim=0) / steps)
        step(1)
    return torch.cat(found)


def _scaled(
    upward: Upward,
    target: int,
    layer: int,
    alphas: Float[Tensor, " row"],
    positions: Sequence[int] | None,
) -> Float[Tensor, " memory"]:
    """Return Σ m · ∂log p/∂m with the layer's coefficients scaled, over rows and positions."""
    seen: list[Tensor] = []

    def change(coefficients: Tensor) -> Tensor:
        factor = torch.ones(len(alphas), upward.n_tokens, dtype=torch.float64)
        places = range(upward.n_tokens) if positions is None else positions
        factor[:, list(places)] = alphas[:, None]
        scaled = coefficients * factor[:, :, None].to(coefficients)
        seen[:] = [coefficients.detach(), _leaf(scaled)]
        return seen[1]

    with torch.enable_grad():
        output = upward.outputs(layer, len(alphas), {layer: change})
        score = log_probability(upward.memories.head, output, target).sum()
    coefficients, scaled = seen
    (slope,) = torch.autograd.grad(score, scaled)
    return _product(coefficients, slope, positions).sum(dim=0)


def _product(
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
