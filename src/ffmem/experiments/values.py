"""What values predict: the tokens that they promote, and how they rank given ones.

    z = head.folded(sign · v),    p = softmax(z),    rank(w) = #{w′: z(w′) > z(w)}      (§4)

Section 4 reads a value with coefficient 1 and the sign of the memory's top trigger: in gated models
the sign of a value means nothing without that of its coefficient. Under an adaptive softmax z are
already log-probabilities. Values are projected in rows and each row is reduced at once, without a
sort: nothing of size memories × vocabulary is ever held.

Section 5 asks for top(m·v). With a plain head it depends on the sign of m alone: the first or the
last of the tokens that the index keeps for the value. With an adaptive softmax it depends on m
itself, but only the best word of each band can ever be it:

    log p(w) of a band's best word = c·z_best − LSE(c·z),   for rare bands + c·C_band
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int8, Int32, Int64
from numpy import ndarray
from torch import Tensor

from ffmem.experiments.triggers import NO_SIGN, NONE, TopTriggers
from ffmem.indexing.store import Index
from ffmem.indexing.tables import layer_file, read_columns
from ffmem.models.memories import Memories

PROJECTED_BYTES = 256 << 20
"""Of logits at a time."""

PAIRS = 1 << 24
"""Logits held at a time while words of rare bands are weighed."""


class ValueReadings(NamedTuple):
    """Of every memory of a layer: what its value, times the sign that was read, predicts."""

    sign: Int8[ndarray, " memory"]
    """Of the top trigger; +1 where there is none."""
    top: Int32[ndarray, " memory"]
    """The most probable of all tokens, ties to the lower id."""
    probability: Float32[ndarray, " memory"]
    """Of the top token."""
    next_rank: Int32[ndarray, " memory"]
    """Of the top trigger's next token, 0 for the top; NONE where there is no top trigger."""
    last_rank: Int32[ndarray, " memory"]
    """Of the top trigger's last token; NONE where there is none, or no token in it."""


class Readings(NamedTuple):
    """What some values predict, and how they rank any tokens that were asked about."""

    top: Int32[ndarray, " memory"]
    probability: Float32[ndarray, " memory"]
    ranks: Int32[ndarray, "memory target"]


def read_values(memories: Memories, top_triggers: TopTriggers, layer: int) -> ValueReadings:
    """Return the readings of a layer's values under the signs of its top triggers."""
    sign = np.where(top_triggers.sign == NO_SIGN, 1, top_triggers.sign).astype(np.int8)
    targets = np.stack([top_triggers.next_token, top_triggers.last_token], axis=1)
    top, probability, ranks = readings(memories, layer, sign, targets)
    return ValueReadings(sign, top, probability, ranks[:, 0], ranks[:, 1])


def readings(
    memories: Memories,
    layer: int,
    sign: Int8[ndarray, " memory"],
    targets: Int64[ndarray, "memory target"],
) -> Readings:
    """Return the readings of sign · v of a layer, and the ranks of each memory's target tokens."""
    n = len(sign)
    found = Readings(
        np.empty(n, np.int32), np.empty(n, np.float32), np.full(targets.shape, NONE, np.int32)
    )
    for memory, z in enumerate(_rows(memories, layer, sign)):
        # One row at a time, which stays in the processor's cache: three passes over all rows,
        # or bool sums of a whole part, take several times as long.
        top = int(z.argmax())
        found.top[memory] = top
        found.probability[memory] = 1 / np.exp(z - z[top]).sum()
        for target, token in enumerate(targets[memory].tolist()):
            if token != NONE:
                found.ranks[memory, target] = np.count_nonzero(z > z[token])
    return found


@torch.inference_mode()
def _rows(
    memories: Memories, layer: int, sign: Int8[ndarray, " memory"]
) -> Iterator[Float32[ndarray, " vocab"]]:
    """Return the logits of sign · v of every memory, one after the other."""
    values = memories.output_directions(layer)
    signs = torch.from_numpy(sign).to(values.device, values.dtype)[:, None]
    rows = max(1, PROJECTED_BYTES // (4 * memories.vocabulary))
    for part, signed in zip(values.split(rows), signs.split(rows), strict=True):
        yield from memories.head.folded(part * signed).cpu().numpy()


class ValueTops(ABC):
    """What the memories of one layer promote."""

    plain: Int64[ndarray, " memory"]
    """top(v): at coefficient 1."""

    @abstractmethod
    def at(self, coefficients: Float32[ndarray, "row memory"]) -> Int64[ndarray, "row memory"]:
        """Return top(m·v) of every memory; top(v) where m = 0."""


class PlainTops(ValueTops):
    """Under a plain head: the ends of each value's distribution, which the index keeps."""

    def __init__(
        self, plain: Int64[ndarray, " memory"], negative: Int64[ndarray, " memory"]
    ) -> None:
        self.plain = plain
        self.negative = negative
        """top(−v)."""

    @classmethod
    def read(cls, index: Index, layer: int) -> "PlainTops":
        """Return what an index keeps of a layer's values."""
        ends = read_columns(index.folder / layer_file("values", layer), ["top_ids", "bottom_ids"])
        return cls(*(ends[name][:, 0].astype(np.int64) for name in ("top_ids", "bottom_ids")))

    def at(self, coefficients: Float32[ndarray, "row memory"]) -> Int64[ndarray, "row memory"]:
        """Return top(m·v) by the sign of m."""
        return np.where(coefficients < 0, self.negative, self.plain)


class Band(NamedTuple):
    """What decides whether a band's best word is the value's top word, for every memory."""

    size: int
    best: Int64[ndarray, "*row memory"]
    largest: Float32[ndarray, "*row memory"]
    """z of the best word."""
    mean: Float32[ndarray, "*row memory"]
    entry: Float32[ndarray, "*row memory"]
    """C: the logit of the band itself; 0 for the words of the first."""

    def where(self, negative: Bool[ndarray, "row memory"], of_negative: "Band") -> "Band":
        """Return the columns of two bands by the sign of each coefficient."""
        pairs = zip(self[1:], of_negative[1:], strict=True)
        return Band(self.size, *(np.where(negative, minus, plus) for plus, minus in pairs))


class AdaptiveTops(ValueTops):
    """Under the adaptive softmax; in ungated models for coefficients of 0 or more.

    −v has the logits −z: its best words are those of smallest z.
    """

    @torch.inference_mode()
    def __init__(self, memories: Memories, layer: int) -> None:
        self.head = memories.head
        self.parts = self.head.norm.fold(memories.output_directions(layer))
        self.bands = self._bands(memories.config.band_sizes, 1)
        self.negative = self._bands(memories.config.band_sizes, -1) if memories.gated else None
        self.plain = self.at(np.ones((1, len(self.parts)), np.float32))[0]

    def _bands(self, sizes: list[int], sign: int) -> list[Band]:
        rows = max(1, PAIRS // sum(sizes))
        found: list[list[Band]] = []
        for part in self.parts.split(rows):
            head, *tails = self.head.project_clusters(sign * part)
            words, entries = head[:, : sizes[0]], head[:, sizes[0] :]
            zero = torch.zeros(len(part))
            columns = [(words, zero), *zip(tails, entries.unbind(1), strict=True)]
            found.append([_band(logits, entry) for logits, entry in columns])
        first = np.cumsum([0, *sizes])
        return [
            Band(
                sizes[number],
                np.concatenate([band.best for band in bands]) + first[number],
                *(np.concatenate(columns) for columns in list(zip(*bands, strict=True))[2:]),
            )
            for number, bands in enumerate(zip(*found, strict=True))
        ]

    @torch.inference_mode()
    def at(self, coefficients: Float32[ndarray, "row memory"]) -> Int64[ndarray, "row memory"]:
        """Return top(m·v); rare bands are weighed only where they could win."""
        negative = coefficients < 0 if self.negative else np.zeros(coefficients.shape, bool)
        c = np.where(negative, -coefficients, coefficients)
        c = np.where(c > 0, c, 1).astype(np.float32)
        common, *rare = self._signed(negative)
        best = np.broadcast_to(common.best, c.shape).copy()
        strength = c * common.largest  # less Z, which is the same for all
        for number, band in enumerate(rare, start=1):
            lead = c * (band.entry + band.largest)
            # LSE(c·z) is at least its largest part, and by convexity log n + c·mean(z).
            least = np.maximum(c * band.largest, math.log(band.size) + c * band.mean)
            pair = np.nonzero(lead - least >= strength)
            if not len(pair[0]):
                continue
            signed = np.where(negative[pair], -c[pair], c[pair])
            exact = lead[pair] - self._log_totals(number, pair[1], signed)
            wins = exact > strength[pair]
            pair = (pair[0][wins], pair[1][wins])
            strength[pair] = exact[wins]
            best[pair] = np.broadcast_to(band.best, c.shape)[pair]
        return best

    def _signed(self, negative: Bool[ndarray, "row memory"]) -> list[Band]:
        """Return the bands of v, or of −v where the coefficient is negative."""
        if not self.negative or not negative.any():
            return self.bands
        both = zip(self.bands, self.negative, strict=True)
        return [plus.where(negative, minus) for plus, minus in both]

    def _log_totals(
        self, number: int, memory: Int64[ndarray, " pair"], c: Float32[ndarray, " pair"]
    ) -> Float32[ndarray, " pair"]:
        """Return LSE(c·z) over a rare band, for pairs of a memory and a coefficient."""
        found = np.empty(len(memory), np.float32)
        order = np.argsort(memory, kind="stable")
        size = max(1, PAIRS // self.bands[number].size)
        for first in range(0, len(order), size):
            pairs = order[first : first + size]
            distinct, place = np.unique(memory[pairs], return_inverse=True)
            logits = self.head.project_clusters(self.parts[torch.from_numpy(distinct)])[number]
            scaled = logits[torch.from_numpy(place)] * torch.from_numpy(c[pairs])[:, None].to(
                logits
            )
            found[pairs] = scaled.logsumexp(dim=1).cpu().numpy()
        return found


def _band(logits: Float[Tensor, "row word"], entry: Float[Tensor, " row"]) -> Band:
    columns = (logits.amax(dim=1), logits.mean(dim=1), entry)
    best = logits.cpu().numpy().argmax(axis=1).astype(np.int64)
    return Band(logits.shape[1], best, *(column.float().cpu().numpy() for column in columns))
