"""The feed-forward layer as attention over its memories, exactly; and what a softmax loses of it.

    attention over slots:   Σᵢ φ(q · kᵢ) · vᵢ
    exact view:             FF(x) = Σᵢ f(x · kᵢ + b_Kᵢ) · vᵢ + b
    softmax view:           s · MN_τ(x) + b,    MN_τ(x) = Σᵢ softmaxᵢ((x · kᵢ + b_Kᵢ) / τ) · vᵢ

The exact view is attention with one head, the query x itself (W_q = W_o = 1), d_m fixed slots and
the kernel φ(s) = f(s + b_K), which nothing normalises. Gated layers have two keys per slot and the
kernel φ(s, t) = f(s) · t. The softmax view reads the same slots with weights that are positive and
sum to one. It is another function, whatever its temperature τ and scale s. How much of a layer it
misses is one number:

    loss = min over s, τ of  ‖y − b − s · MN_τ(x)‖² / ‖y − b‖²        0 ≤ loss ≤ 1
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from scipy.optimize import minimize_scalar
from torch import Tensor

Kernel = Callable[[Tensor], Tensor]
"""From the scores "place head key" to the weights "place head slot"."""

WIDEST = 64.0
"""Temperatures are searched from 1/64 to 64 times the spread of a layer's scores: from almost
all weight on one slot to almost the same weight on all."""

GRID = 25
"""Temperatures tried before the search narrows: the loss may have more than one valley."""


def attention_over_slots(
    query: Float[Tensor, "place head width"],
    keys: Float[Tensor, "head key width"],
    values: Float[Tensor, "head slot out"],
    kernel: Kernel,
) -> Float[Tensor, "place head out"]:
    """Return Σᵢ φ(q · kᵢ) · vᵢ, head by head; nothing is normalised unless the kernel does it."""
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
    """Return FF(x), read as one head of attention with the kernel φ(s) = f(s + b_K), plus b."""
    return _one_head(x, keys, values, lambda scores: f(scores + key_bias)) + bias


def gated_as_attention(
    x: Float[Tensor, "place hidden"],
    gates: tuple[Float[Tensor, "memory hidden"], Float[Tensor, " memory"]],
    ups: tuple[Float[Tensor, "memory hidden"], Float[Tensor, " memory"]],
    values: Float[Tensor, "memory hidden"],
    bias: Float[Tensor, " hidden"],
    f: Kernel,
) -> Float[Tensor, "place hidden"]:
    """Return FF(x) of a gated layer, with the kernel φ(s, t) = f(s) · t of the slot's two keys.

    `gates` and `ups` are keys and their bias.
    """
    keys, key_bias = torch.cat([gates[0], ups[0]]), torch.cat([gates[1], ups[1]])

    def kernel(scores: Tensor) -> Tensor:
        gate, up = (scores + key_bias).chunk(2, dim=-1)
        return f(gate) * up

    return _one_head(x, keys, values, kernel) + bias


def softmax_view(
    x: Float[Tensor, "place hidden"],
    keys: Float[Tensor, "memory hidden"],
    key_bias: Float[Tensor, " memory"],
    values: Float[Tensor, "memory hidden"],
    bias: Float[Tensor, " hidden"],
    temperature: float,
    scale: float = 1.0,
) -> Float[Tensor, "place hidden"]:
    """Return s · MN_τ(x) + b: the layer as neural memory."""
    return scale * _neural_memory(*absorbed(x, keys, key_bias), values, temperature) + bias


def absorbed(
    x: Float[Tensor, "place hidden"],
    keys: Float[Tensor, "memory hidden"],
    key_bias: Float[Tensor, " memory"],
) -> tuple[Float[Tensor, "place wider"], Float[Tensor, "memory wider"]]:
    """Return queries (x, 1) and keys (k, b_K): their products hold the bias, as plain attention."""
    return torch.cat([x, x.new_ones(len(x), 1)], 1), torch.cat([keys, key_bias[:, None]], 1)


class SoftmaxFit(NamedTuple):
    """The softmax view that is nearest to a layer on some inputs."""

    temperature: float
    """τ, in the unit of the scores x · k + b_K."""
    scale: float
    """s; negative where the neural memory points away from the layer."""
    loss: float
    """The share of ‖y − b‖² that it misses: 0 is the layer itself, 1 no better than nothing."""
    at_bound: bool
    """Whether τ is an end of the range that was searched, so that a farther one may be better."""


def fit_softmax_view(
    x: Float[Tensor, "place hidden"],
    keys: Float[Tensor, "memory hidden"],
    key_bias: Float[Tensor, " memory"],
    values: Float[Tensor, "memory hidden"],
    read: Float[Tensor, "place hidden"],
) -> SoftmaxFit:
    """Return the best scale, in closed form, and temperature, by search, for y − b = `read`."""
    if not (read != 0).any():
        raise ValueError("The layer adds nothing to any of these inputs: there is nothing to fit.")
    query, wider = absorbed(x, keys, key_bias)
    spread = _spread(query @ wider.T)

    def fitted(exponent: float) -> tuple[float, float]:
        return nearest(_neural_memory(query, wider, values, spread * WIDEST**exponent), read)

    best = _lowest(lambda exponent: fitted(exponent)[1])
    scale, loss = fitted(best)
    return SoftmaxFit(spread * WIDEST**best, scale, loss, abs(best) == 1)


def nearest(
    guess: Float[Tensor, "place hidden"], target: Float[Tensor, "place hidden"]
) -> tuple[float, float]:
    """Return the s that brings s · guess nearest to the target, and the share that it misses."""
    guess, target = guess.double(), target.double()
    own, both, whole = (guess * guess).sum(), (guess * target).sum(), (target * target).sum()
    scale = float(both / own) if own > 0 else 0.0
    return scale, float(((target - scale * guess) ** 2).sum() / whole)


def constant_loss(read: Float[Tensor, "place hidden"]) -> float:
    """Return the share of ‖y − b‖² that the best constant vector misses: a yardstick."""
    read = read.double()
    return float(((read - read.mean(dim=0)) ** 2).sum() / (read**2).sum())


def longest_share(read: Float[Tensor, "place hidden"]) -> float:
    """Return the share of ‖y − b‖² in the longest hundredth of the places, at least one."""
    squares = (read.double() ** 2).sum(dim=1)
    return float(squares.topk(-(-len(squares) // 100)).values.sum() / squares.sum())


def _one_head(x: Tensor, keys: Tensor, values: Tensor, kernel: Kernel) -> Tensor:
    """Return attention over slots with one head, whose query is x itself."""
    return attention_over_slots(x[:, None], keys[None], values[None], kernel)[:, 0]


def _neural_memory(query: Tensor, keys: Tensor, values: Tensor, temperature: float) -> Tensor:
    if not temperature > 0:
        raise ValueError(f"A temperature of {temperature} was asked for. Give one above 0.")
    return _one_head(query, keys, values, lambda scores: (scores / temperature).softmax(dim=-1))


def _spread(scores: Float[Tensor, "place memory"]) -> float:
    """Return how far the scores of one input lie apart: their mean standard deviation."""
    found = float(scores.double().std(dim=1, correction=0).mean())
    return found if found > 0 else 1.0  # all slots score the same: every temperature is as good


def _lowest(loss: Callable[[float], float]) -> float:
    """Return where in [−1, 1] a function is lowest: on a grid, then within its lowest cells."""
    grid = [2 * place / (GRID - 1) - 1 for place in range(GRID)]
    known = {place: loss(place) for place in grid}
    place = grid.index(min(grid, key=known.__getitem__))
    bounds = grid[max(0, place - 1)], grid[min(GRID - 1, place + 1)]
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-3})
    known[float(found.x)] = float(found.fun)
    return min(known, key=known.__getitem__)
