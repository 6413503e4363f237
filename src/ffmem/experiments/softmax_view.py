"""The feed-forward layer as attention over its memories, and what a softmax loses of it.

    attention over slots:   Σᵢ φ(q · kᵢ) · vᵢ
    exact view:             FF(x) = Σᵢ f(x · kᵢ + b_Kᵢ) · vᵢ + b
    softmax view:           s · MN_τ(x) + b,    MN_τ(x) = Σᵢ softmaxᵢ((x · kᵢ + b_Kᵢ) / τ) · vᵢ

The exact view is attention with one head, x itself as the query (W_q = W_o = 1), d_m fixed slots
and the kernel φ(s) = f(s + b_K), without normalization. Gated layers have two keys per slot and the
kernel φ(s, t) = f(s) · t.

The softmax view reads the same slots with weights that are positive and sum to one. It is a
different function, whatever its temperature τ and scale s. The share of a layer it misses is

    loss = min over s, τ of  ‖y − b − s · MN_τ(x)‖² / ‖y − b‖²        0 ≤ loss ≤ 1

`neural_memory.py` compares the layer with MN as it stands (s = τ = 1); here MN gets its best
temperature and scale in each layer. In gated models, MN takes the gate's keys.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from scipy.optimize import minimize_scalar
from torch import Tensor

from ffmem.errors import CorpusError
from ffmem.experiments.base import Row
from ffmem.models.memories import Memories
from ffmem.models.trace import LayerTrace

Kernel = Callable[[Tensor], Tensor]
"""From scores "place head key" to weights "place head slot"."""

MAX_RATIO = 64.0
"""Temperatures are searched from 1/64 to 64 times the spread of a layer's scores: from almost all
weight on one slot to almost equal weights."""

GRID = 25
"""Temperatures tried before the search narrows: the loss may have several local minima."""


def attention_over_slots(
    query: Float[Tensor, "place head width"],
    keys: Float[Tensor, "head key width"],
    values: Float[Tensor, "head slot out"],
    kernel: Kernel,
) -> Float[Tensor, "place head out"]:
    """Return Σᵢ φ(q · kᵢ) · vᵢ for each head; nothing is normalized unless the kernel does it."""
    scores = torch.einsum("phw,hkw->phk", query, keys)
    return torch.einsum("phs,hso->pho", kernel(scores), values)


def feed_forward_as_attention(
    x: Float[Tensor, "place hidden"],
    keys: Float[Tensor, "memory hidden"],
    key_bias: Float[Tensor, " memory"],
    values: Float[Tensor, "memory hidden"],
    bias: Float[Tensor, " hidden"],
    f: Kernel,
) -> Float[Tensor, "place hidden"]:
    """Return FF(x) as one head of attention with the kernel φ(s) = f(s + b_K), plus b."""
    return _one_head(x, keys, values, lambda scores: f(scores + key_bias)) + bias


def gated_as_attention(
    x: Float[Tensor, "place hidden"],
    gates: tuple[Float[Tensor, "memory hidden"], Float[Tensor, " memory"]],
    ups: tuple[Float[Tensor, "memory hidden"], Float[Tensor, " memory"]],
    values: Float[Tensor, "memory hidden"],
    bias: Float[Tensor, " hidden"],
    f: Kernel,
) -> Float[Tensor, "place hidden"]:
    """Return FF(x) of a gated layer, with the kernel φ(s, t) = f(s) · t of each slot's two keys.

    `gates` and `ups` are (keys, bias).
    """
    keys, key_bias = torch.cat([gates[0], ups[0]]), torch.cat([gates[1], ups[1]])

    def kernel(scores: Tensor) -> Tensor:
        gate, up = (scores + key_bias).chunk(2, dim=-1)
        return f(gate) * up

    return _one_head(x, keys, values, kernel) + bias


def neural_memory(
    x: Float[Tensor, "place hidden"],
    keys: Float[Tensor, "memory hidden"],
    key_bias: Float[Tensor, " memory"],
    values: Float[Tensor, "memory hidden"],
    temperature: float,
) -> Float[Tensor, "place hidden"]:
    """Return MN_τ(x)."""
    if not temperature > 0:
        raise ValueError(f"The temperature is {temperature}; it must be above 0.")
    return _one_head(
        x, keys, values, lambda scores: ((scores + key_bias) / temperature).softmax(dim=-1)
    )


def _one_head(x: Tensor, keys: Tensor, values: Tensor, kernel: Kernel) -> Tensor:
    """Return attention over slots with one head, whose query is x itself."""
    return attention_over_slots(x[:, None], keys[None], values[None], kernel)[:, 0]


class SoftmaxFit(NamedTuple):
    """The softmax view closest to a layer on some inputs."""

    temperature: float
    """τ, in the unit of the scores x · k + b_K."""
    scale: float
    """s; negative where the neural memory points away from the layer."""
    loss: float
    """The share of ‖y − b‖² it misses: 0 is the layer itself, 1 is no better than nothing."""
    at_bound: bool
    """Whether τ is an end of the search range, so that one beyond it may be better."""


def fit_softmax_view(
    x: Float[Tensor, "place hidden"],
    keys: Float[Tensor, "memory hidden"],
    key_bias: Float[Tensor, " memory"],
    values: Float[Tensor, "memory hidden"],
    target: Float[Tensor, "place hidden"],
) -> SoftmaxFit:
    """Fit the scale (in closed form) and the temperature (by search) to `target` = y − b."""
    if not (target != 0).any():
        raise ValueError("The layer adds nothing to any of these inputs: there is nothing to fit.")
    spread = float((x @ keys.T + key_bias).double().std(dim=1, correction=0).mean())
    spread = spread if spread > 0 else 1.0  # equal scores: every temperature is as good
    target = target.double()

    def fit_scale(exponent: float) -> tuple[float, float]:
        """Return s, and the share that s · MN misses."""
        read = neural_memory(x, keys, key_bias, values, spread * MAX_RATIO**exponent).double()
        norm = (read * read).sum()
        scale = float((read * target).sum() / norm) if norm > 0 else 0.0
        return scale, float(((target - scale * read) ** 2).sum() / (target**2).sum())

    best = _argmin(lambda exponent: fit_scale(exponent)[1])
    scale, loss = fit_scale(best)
    return SoftmaxFit(spread * MAX_RATIO**best, scale, loss, abs(best) == 1)


def _argmin(loss: Callable[[float], float]) -> float:
    """Return where in [−1, 1] a function is lowest: on a grid, then around its lowest point."""
    grid = [2 * place / (GRID - 1) - 1 for place in range(GRID)]
    losses = {place: loss(place) for place in grid}
    lowest = grid.index(min(grid, key=losses.__getitem__))
    bounds = grid[max(0, lowest - 1)], grid[min(GRID - 1, lowest + 1)]
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-3})
    losses[float(found.x)] = float(found.fun)
    return min(losses, key=losses.__getitem__)


def constant_loss(target: Float[Tensor, "place hidden"]) -> float:
    """Return the share of ‖y − b‖² that the best constant vector misses: a yardstick."""
    target = target.double()
    return float(((target - target.mean(dim=0)) ** 2).sum() / (target**2).sum())


def longest_share(target: Float[Tensor, "place hidden"]) -> float:
    """Return the share of ‖y − b‖² in the longest hundredth of the places, at least one.

    Where it is large, the loss speaks of these few places.
    """
    squares = (target.double() ** 2).sum(dim=1)
    return float(squares.topk(-(-len(squares) // 100)).values.sum() / squares.sum())


def softmax_loss(memories: Memories, batches: Iterable[Int[Tensor, "_ _"]]) -> list[Row]:
    """Return a row per layer: the best softmax view over all places but each text's first.

    A batch is "batch position", without padding; batches may differ in both. The first position is
    an attention sink in many models, so long that the squares of all other places would not count.
    Inputs and outputs of all layers are held: 8 · layers · hidden bytes per token.
    """
    inputs: list[list[Tensor]] = [[] for _ in range(memories.n_layers)]
    outputs: list[list[Tensor]] = [[] for _ in range(memories.n_layers)]

    def read(layer: int, trace: LayerTrace) -> None:
        inputs[layer].append(trace.ff_input[:, 1:].flatten(0, 1).float())
        outputs[layer].append(trace.value_output[:, 1:].flatten(0, 1).float())

    for tokens in batches:
        with memories.trace_layers(read, tokens):
            memories.forward(tokens)
    if not any(map(len, inputs[0])):
        raise CorpusError("No text has a second token to look at. Give longer texts.")
    return [
        _layer_row(memories, layer, torch.cat(inputs[layer]), torch.cat(outputs[layer]))
        for layer in range(memories.n_layers)
    ]


@torch.inference_mode()
def _layer_row(memories: Memories, layer: int, x: Tensor, output: Tensor) -> Row:
    """Return how close a softmax comes to one layer."""
    target = output - memories.bias(layer).float()
    row: Row = {"layer": layer, "n": len(x)}
    if not (target != 0).any():  # no memory is active: nothing can be lost
        return row | dict.fromkeys((*SoftmaxFit._fields, "constant", "longest"))
    keys, values = memories.keys(layer).float(), memories.values(layer).float()
    fit = fit_softmax_view(x, keys, memories.key_bias(layer).float(), values, target)
    yardsticks = {"constant": constant_loss(target), "longest": longest_share(target)}
    return row | fit._asdict() | yardsticks
