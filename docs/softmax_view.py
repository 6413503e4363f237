"""How close a softmax over its keys comes to each feed-forward layer: the table of memories.md.

    python docs/softmax_view.py MODEL FILE      a row per layer, over the lines of a text file

    loss = min over s, τ of  ‖y − b − s · MN_τ(x)‖² / ‖y − b‖²        0 ≤ loss ≤ 1
    MN_τ(x) = Σᵢ softmaxᵢ((x · kᵢ + b_Kᵢ) / τ) · vᵢ

In gated models, MN takes the gate's keys. The experiment neural-memory compares the layer with MN
as it stands (s = τ = 1); here MN gets its best temperature and scale in each layer.
"""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

import ffmem
from ffmem.models.memories import Memories
from ffmem.models.trace import LayerTrace

MAX_RATIO = 64.0
"""Temperatures are searched from 1/64 to 64 times the spread of a layer's scores: from almost all
weight on one slot to almost equal weights."""

GRID = 25
"""Temperatures tried before the search narrows: the loss may have several local minima."""


class SoftmaxFit(NamedTuple):
    """The softmax closest to a layer on some inputs."""

    temperature: float
    """τ, in the unit of the scores x · k + b_K."""
    scale: float
    """s; negative where the neural memory points away from the layer."""
    loss: float
    """The share of ‖y − b‖² it misses: 0 is the layer itself, 1 is no better than nothing."""


def neural_memory(scores: Tensor, values: Tensor, temperature: float) -> Tensor:
    """Return MN_τ(x), given the scores x · k + b_K."""
    return (scores / temperature).softmax(dim=-1) @ values


def fit_softmax(scores: Tensor, values: Tensor, target: Tensor) -> SoftmaxFit:
    """Fit the scale (in closed form) and the temperature (by search) to `target` = y − b."""
    spread = float(scores.double().std(dim=1, correction=0).mean()) or 1.0
    target = target.double()

    def fit_scale(exponent: float) -> tuple[float, float]:
        """Return s, and the share that s · MN misses."""
        read = neural_memory(scores, values, spread * MAX_RATIO**exponent).double()
        norm = (read * read).sum()
        scale = float((read * target).sum() / norm) if norm > 0 else 0.0
        return scale, float(((target - scale * read) ** 2).sum() / (target**2).sum())

    best = _argmin(lambda exponent: fit_scale(exponent)[1])
    return SoftmaxFit(spread * MAX_RATIO**best, *fit_scale(best))


def _argmin(loss: Callable[[float], float]) -> float:
    """Return where in [−1, 1] a function is lowest: on a grid, then around its lowest point."""
    grid = [2 * place / (GRID - 1) - 1 for place in range(GRID)]
    losses = {place: loss(place) for place in grid}
    lowest = grid.index(min(grid, key=losses.__getitem__))
    bounds = grid[max(0, lowest - 1)], grid[min(GRID - 1, lowest + 1)]
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-3})
    losses[float(found.x)] = float(found.fun)
    return min(losses, key=losses.__getitem__)


@torch.inference_mode()
def softmax_loss(memories: Memories, batches: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Return a row per layer: the best softmax over all places but each text's first.

    The first position is an attention sink in many models, so long that the squares of all other
    places would not count. `constant` is what the best constant vector misses; `longest` the share
    of ‖y − b‖² in the longest hundredth of the places, of which the loss speaks where it is large.
    """
    inputs: list[list[Tensor]] = [[] for _ in range(memories.n_layers)]
    outputs: list[list[Tensor]] = [[] for _ in range(memories.n_layers)]

    def read(layer: int, trace: LayerTrace) -> None:
        inputs[layer].append(trace.ff_input[:, 1:].flatten(0, 1).float())
        output = trace.value_output.float() - memories.bias_at(layer, trace).float()
        outputs[layer].append(output[:, 1:].flatten(0, 1))

    for tokens in batches:
        with memories.trace_layers(read, tokens):
            memories.forward(tokens)
    rows = []
    for layer in range(memories.n_layers):
        target = torch.cat(outputs[layer])
        keys, bias = memories.keys(layer).float(), memories.key_bias(layer).float()
        scores = torch.cat(inputs[layer]) @ keys.T + bias
        fit = fit_softmax(scores, memories.values(layer).float(), target)
        squares = (target.double() ** 2).sum(dim=1)
        around_mean = ((target - target.mean(dim=0)).double() ** 2).sum()
        longest = squares.topk(-(-len(squares) // 100)).values.sum()
        row = {"layer": layer, "n": len(target), **fit._asdict()}
        shares = {"constant": around_mean / squares.sum(), "longest": longest / squares.sum()}
        rows.append(row | {name: float(share) for name, share in shares.items()})
    return rows


if __name__ == "__main__":
    model = ffmem.load(sys.argv[1])
    lines = Path(sys.argv[2]).read_text(encoding="utf-8").splitlines()
    ids = [encoding.ids for encoding in model.tokenizer.encode([line for line in lines if line])]
    for row in softmax_loss(model, (torch.tensor([one]) for one in ids if len(one) > 1)):
        print(row)
