"""Questions to rows of logits: the top token, the rank of a token, its probability.

On the CPU a slice of the vocabulary at a time stays in the cache, and no fresh array of the size
of all logits is needed. Fastest when the logits of one token lie side by side (`Head.bands` into
a room); right in any layout.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from numpy import ndarray
from torch import Tensor

SLICE = 1024
"""Tokens at a time."""

BLOCK = 64
"""The top is looked for in the block of so many tokens that has the largest logit."""


class Tops(NamedTuple):
    """The largest logit of each row."""

    tokens: Int64[ndarray, " row"]
    """Ties to the lower id."""
    logits: Float[Tensor, " row"]
    gaps: Float[Tensor, " row"]
    """How far it stands above the second; 0 of two equals."""


def tops(logits: Float[Tensor, "row vocab"]) -> Tops:
    """Return the top of each row, read once."""
    if logits.device.type != "cpu":
        values, _ = logits.topk(min(2, logits.shape[1]), dim=1)
        gaps = values[:, 0] - values[:, -1] if logits.shape[1] > 1 else values[:, 0] + torch.inf
        return Tops(_host(logits.argmax(dim=1)), values[:, 0], gaps)
    # argmax itself is twenty times as slow as amax; numpy's takes the first of equals.
    whole = logits.shape[1] // BLOCK * BLOCK
    blocks = logits.T[:whole].unflatten(0, (-1, BLOCK)).amax(dim=1)
    if whole < logits.shape[1]:
        blocks = torch.cat([blocks, logits.T[whole:].amax(dim=0, keepdim=True)])
    by_row, rows = np.ascontiguousarray(blocks.numpy().T), np.arange(len(logits))
    best = by_row.argmax(axis=1)
    places = BLOCK * best[:, None] + np.arange(BLOCK)
    inside = logits.gather(1, torch.from_numpy(np.minimum(places, logits.shape[1] - 1))).numpy()
    inside[places >= logits.shape[1]] = -np.inf
    within = inside.argmax(axis=1)
    largest = inside[rows, within]
    # The second is the largest of another block, or stands in the same one.
    by_row[rows, best], inside[rows, within] = -np.inf, -np.inf
    second = np.maximum(by_row.max(axis=1), inside.max(axis=1))
    top, gap = torch.from_numpy(largest), torch.from_numpy(largest - second)
    return Tops(np.asarray(BLOCK * best + within), top, gap)


def ranks(
    logits: Float[Tensor, "row vocab"], tokens: Int64[ndarray, " row"]
) -> Int64[ndarray, " row"]:
    """Return how many tokens of each row have a larger logit than its token: 0 for the top."""
    own = _at(logits, tokens)
    if logits.device.type != "cpu":
        return _host((logits > own[:, None]).sum(dim=1))
    counts = torch.zeros(len(logits))  # of ones in float32: exact up to 16 million
    for part, room in _slices(logits):
        counts += torch.gt(part, own, out=room).sum(dim=0)
    return _host(counts.long())


def log_totals(
    logits: Float[Tensor, "row vocab"], top: Float[Tensor, " row"]
) -> Float[Tensor, " row"]:
    """Return the log-sum-exp of each row, given the largest logit of each."""
    if logits.device.type != "cpu":
        return logits.logsumexp(dim=1)
    total = torch.zeros(len(logits))
    for part, room in _slices(logits):
        # Below e⁻⁸⁷ float32 is denormal, five times as slow, and nothing beside the top's 1.
        total += torch.sub(part, top, out=room).clamp_(min=-87).exp_().sum(dim=0)
    return top + total.log()


def _slices(logits: Float[Tensor, "row vocab"]) -> Iterator[tuple[Tensor, Tensor]]:
    """Return slices of the vocabulary, each with the same room to compute in."""
    room = torch.empty_like(logits.T[:SLICE])
    for part in logits.T.split(SLICE):
        yield part, room[: len(part)]


def probabilities(
    logits: Float[Tensor, "row vocab"],
    totals: Float[Tensor, " row"],
    tokens: Int64[ndarray, " row"],
) -> Float64[ndarray, " row"]:
    """Return the probability of one token in each row, given the rows' log-sum-exps."""
    return np.asarray(np.exp(_host(_at(logits, tokens).double() - totals.double())))


def _at(
    logits: Float[Tensor, "row vocab"], tokens: Int64[ndarray, " row"]
) -> Float[Tensor, " row"]:
    chosen = torch.from_numpy(tokens).to(logits.device)
    return logits.gather(1, chosen[:, None]).squeeze(1)


def _host(tensor: Tensor) -> ndarray:
    return np.asarray(tensor.cpu().numpy())
