"""Cheap estimates of what ablating a memory does to log p(target), for all memories at once.

    gradient     −Σ_position m · ∂log p/∂m                   one backward pass through the model
    direct       −m · (g · v),  g = ∂log p/∂h, σ frozen      at the position alone, past all layers
    relp         −Σ_position m · ∂log p/∂m by linear rules   norms, patterns and gates held fixed
    integrated   −Σ_position m · mean_k ∂log p/∂m at αₖ · m  αₖ = (k − ½)/S, k = 1 … S

`gradient` is the first-order term of the change. `direct` (direct logit attribution) is what m · v
adds to the target on its straight way to the vocabulary. `relp` (`relevance.py`) is the gradient of
a pass in which everything but sums and products with weights is held fixed. `integrated` (knowledge
neurons) scales all coefficients of a layer from 0 to m; over the layer it sums to
log p(layer off) − log p, closer with more steps.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.cells import Cell, Layout
from ffmem.interventions.forward import BankRows, post_norm_sigma
from ffmem.interventions.partial_forward import PartialForward, log_probabilities, log_probability
from ffmem.interventions.relevance import GradientPass
from ffmem.models.families import RERUN
from ffmem.progress import Step

Estimates = dict[str, Float[Tensor, " memory"] | None]
"""The estimated change of log p of every memory, numbered through all layers, by the name of the
estimate. None: not defined for the model, or not requested."""


def estimate(
    forward: PartialForward,
    target: int,
    positions: Sequence[int] | None = None,
    steps: int = 0,
    step: Step = lambda n: None,
) -> Estimates:
    """Return the estimates of all memories; the integrated one if `steps` are given."""
    found: Estimates = {
        "gradient": gradient(forward, target, positions),
        "direct": direct(forward, target, positions),
        "relp": relp(forward, target, positions),
        "integrated": None,
    }
    if steps:
        found["integrated"] = integrated(forward, target, steps, positions, step)
    else:
        step(1)
    return found


def gradient(
    forward: PartialForward, target: int, positions: Sequence[int] | None = None
) -> Float[Tensor, " memory"]:
    """Return −Σ m · ∂log p/∂m over the positions, through the whole model."""
    head = forward.memories.head
    slope = output_slope(forward, lambda h, _: log_probabilities(head, h)[:, target])
    run = GradientPass(forward, linear=False)
    return -run.sum_by_memory(run.slopes(slope), positions)


def direct(
    forward: PartialForward, target: int, positions: Sequence[int] | None = None
) -> Float[Tensor, " memory"] | None:
    """Return −m · (g · v) at the position; None if layers do more than add y to the stream."""
    memories = forward.memories
    if any(row.output_norm is not None or row.residual == RERUN for row in memories.rows):
        return None
    if positions is not None and forward.n_tokens - 1 not in positions:
        return torch.zeros(len(memories.layout), dtype=torch.float64)
    slope = frozen_slope(forward, target)
    found = []
    for layer in memories.layout.memory_layers:
        trace = forward.layers[layer]
        slopes = torch.cat(
            [values.float() @ slope.to(values.device) for values in forward.values(layer)]
        )
        parts = trace.coefficients[0].to(slopes.device).double() * slopes.double()
        found.append(-parts.cpu() / post_norm_sigma(memories, layer, trace))
    return torch.cat(found)


def relp(
    forward: PartialForward, target: int, positions: Sequence[int] | None = None
) -> Float[Tensor, " memory"] | None:
    """Return −Σ m · ∂log p/∂m by linear rules; None if the model has steps without a rule."""
    slope = frozen_slope(forward, target)
    linear = GradientPass(forward)
    if not linear.is_complete(slope):
        return None
    return -linear.sum_by_memory(linear.slopes(slope), positions)


def frozen_slope(forward: PartialForward, target: int) -> Float[Tensor, " hidden"]:
    """Return g: the gradient of log p at the last layer's output, with the final σ frozen."""
    head = forward.memories.head
    return output_slope(forward, lambda h, sigma: log_probabilities(head, h, sigma)[:, target])


def output_slope(
    forward: PartialForward, score: Callable[[Tensor, Tensor], Tensor]
) -> Float[Tensor, " hidden"]:
    """Return the gradient of score(h, σ) at the last layer's output h, with σ of the final norm."""
    with torch.enable_grad():
        h = _leaf(forward.output.float())
        total = score(h, forward.memories.head.denominator(forward.output)).sum()
    (slope,) = torch.autograd.grad(total, h)
    return slope[0]


def integrated(
    forward: PartialForward,
    target: int,
    steps: int,
    positions: Sequence[int] | None = None,
    step: Step = lambda n: None,
) -> Float[Tensor, " memory"]:
    """Return integrated gradients, with all coefficients of a layer scaled together.

    The prompt runs once for each step, with the coefficients at the positions scaled.
    """
    layout, n_tokens = forward.memories.layout, forward.n_tokens
    found = torch.zeros(len(layout), dtype=torch.float64)
    banks: list[tuple[Tensor, Tensor, slice]] = []
    """By bank: m, 0 outside of the positions; m as the model uses it; the memories' numbers."""

    def scale(layer: int, alphas: Float[Tensor, " copy"], rows: BankRows) -> Tensor:
        m = rows.coefficients.detach()
        counts = torch.ones(len(m), 1, dtype=torch.bool, device=m.device)
        if positions is not None:
            at = torch.tensor(positions, device=m.device)
            counts = torch.isin(rows.tokens % n_tokens, at)[:, None]
        alpha = alphas.to(m)[rows.tokens // n_tokens][:, None]
        used = _leaf(torch.where(counts, m * alpha, m))  # weights are frozen: gradients begin here
        first = layout.starts[layer] + rows.memories.start
        banks.append((torch.where(counts, m, 0), used, slice(first, first + len(rows.memories))))
        return used

    for layer in layout.memory_layers:
        for alphas in ((torch.arange(steps).double() + 0.5) / steps).split(forward.n_rows):
            banks.clear()
            with torch.enable_grad():
                output = forward.run(layer, len(alphas), {layer: partial(scale, layer, alphas)})
                score = log_probability(forward.memories.head, output, target).sum()
            slopes = torch.autograd.grad(score, [used for _, used, _ in banks])
            for (m, _, numbers), slope in zip(banks, slopes, strict=True):
                found[numbers] -= (m.double() * slope.double()).sum(dim=0).cpu() / steps
        step(1)
    return found


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
    for numbers in estimates.values():
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
