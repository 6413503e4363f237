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
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int8, Int32, Int64
from numpy import ndarray
from torch import Tensor

from ffmem.indexing.store import Index
from ffmem.indexing.triggers import NONE
from ffmem.models.head import Head
from ffmem.models.memories import Memories

PROJECTED_BYTES = 256 << 20
"""Bytes of logits at a time."""

PAIRS = 1 << 24
"""Logits held at a time while words of rare bands are weighed."""


class ValueReadings(NamedTuple):
    """What sign · v of every memory of a layer predicts."""

    sign: Int8[ndarray, " memory"]
    top: Int32[ndarray, " memory"]
    """The most probable of all tokens, ties to the lower id."""
    probability: Float32[ndarray, " memory"]
    """Probability of the top token."""
    next_rank: Int32[ndarray, " memory"]
    """Rank of the given token, 0 for the top; NONE without one."""


def read_values(
    memories: Memories,
    layer: int,
    sign: Int8[ndarray, " memory"],
    tokens: Int64[ndarray, " memory"],
) -> ValueReadings:
    """Return the readings of sign · v of a layer, and the rank of one token of each memory."""
    n = len(sign)
    found = ValueReadings(
        sign, np.empty(n, np.int32), np.empty(n, np.float32), np.full(n, NONE, np.int32)
    )
    for memory, z in enumerate(_rows(memories, layer, sign)):
        # One row at a time, which stays in the processor's cache: three passes over all rows,
        # or bool sums of a whole part, take several times as long.
        top = int(z.argmax())
        found.top[memory] = top
        found.probability[memory] = 1 / np.exp(z - z[top]).sum()
        if tokens[memory] != NONE:
            found.next_rank[memory] = np.count_nonzero(z > z[tokens[memory]])
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


def value_tops(index: Index, memories: Memories, layer: int) -> "PlainTops | AdaptiveTops":
    """Return what the values of a layer promote: `plain` is top(v), `at(m)` is top(m·v)."""
    return AdaptiveTops(memories, layer) if memories.head.adaptive else PlainTops(index, layer)


class PlainTops:
    """Under a plain head: the ends of each value's distribution, which the index keeps."""

    def __init__(self, index: Index, layer: int) -> None:
        ends = index.columns("values", layer, ["top_ids", "bottom_ids"])
        self.plain = ends["top_ids"][:, 0].astype(np.int64)
        """top(v)."""
        self.negative = ends["bottom_ids"][:, 0].astype(np.int64)
        """top(−v)."""

    def at(self, coefficients: Float32[ndarray, "row memory"]) -> Int64[ndarray, "row memory"]:
        """Return top(m·v) of every memory, top(v) where m = 0."""
        return np.where(coefficients < 0, self.negative, self.plain)


class Band(NamedTuple):
    """What decides whether a band's best word is the value's top word, for every memory."""

    size: int
    best: Int64[ndarray, " memory"]
    largest: Float32[ndarray, " memory"]
    """z of the best word."""
    mean: Float32[ndarray, " memory"]
    entry: Float32[ndarray, " memory"]
    """C: the logit of the band itself; 0 for the words of the first."""


class AdaptiveTops:
    """Under the adaptive softmax. A negative coefficient, in gated models, reads −v."""

    def __init__(self, memories: Memories, layer: int) -> None:
        parts = memories.head.norm.fold(memories.output_directions(layer))
        sizes = memories.config.band_sizes
        self.positive = BandTops(memories.head, parts, sizes)
        self.negative = BandTops(memories.head, -parts, sizes) if memories.gated else None
        self.plain = self.positive.at(np.ones((1, len(parts)), np.float32))[0]

    def at(self, coefficients: Float32[ndarray, "row memory"]) -> Int64[ndarray, "row memory"]:
        """Return top(m·v) of every memory, top(v) where m = 0."""
        tops: ndarray = self.positive.at(coefficients)
        if self.negative is not None:
            tops = np.where(coefficients < 0, self.negative.at(-coefficients), tops)
        return tops


class BandTops:
    """The tops of some values under coefficients above 0, band by band."""

    @torch.inference_mode()
    def __init__(self, head: Head, parts: Float[Tensor, "memory hidden"], sizes: list[int]) -> None:
        self.head, self.parts = head, parts
        found: list[list[Band]] = []
        for part in parts.split(max(1, PAIRS // sum(sizes))):
            first, *rare = head.project_clusters(part)
            words, entries = first[:, : sizes[0]], first[:, sizes[0] :]
            columns = [(words, torch.zeros(len(part))), *zip(rare, entries.unbind(1), strict=True)]
            found.append([_band(logits, entry) for logits, entry in columns])
        starts = np.cumsum([0, *sizes])
        self.bands = [
            Band(
                sizes[number],
                np.concatenate([band.best for band in bands]) + starts[number],
                *(np.concatenate(columns) for columns in list(zip(*bands, strict=True))[2:]),
            )
            for number, bands in enumerate(zip(*found, strict=True))
        ]

    @torch.inference_mode()
    def at(self, coefficients: Float32[ndarray, "row memory"]) -> Int64[ndarray, "row memory"]:
        """Return top(m·v), top(v) where m ≤ 0; rare bands are weighed only where they could win."""
        c = np.where(coefficients > 0, coefficients, 1).astype(np.float32)
        common, *rare = self.bands
        best = np.broadcast_to(common.best, c.shape).copy()
        strength = c * common.largest  # without Z, the same for all
        for number, band in enumerate(rare, start=1):
            lead = c * (band.entry + band.largest)
            # LSE(c·z) is at least its largest part, and by convexity log n + c·mean(z).
            least = np.maximum(c * band.largest, math.log(band.size) + c * band.mean)
            row, memory = np.nonzero(lead - least >= strength)
            if not len(row):
                continue
            exact = lead[row, memory] - self._log_totals(number, memory, c[row, memory])
            wins = exact > strength[row, memory]
            row, memory = row[wins], memory[wins]
            strength[row, memory] = exact[wins]
            best[row, memory] = band.best[memory]
        return best

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
            scale = torch.from_numpy(c[pairs])[:, None].to(logits)
            scaled = logits[torch.from_numpy(place)] * scale
            found[pairs] = scaled.logsumexp(dim=1).cpu().numpy()
        return found


def _band(logits: Float[Tensor, "row word"], entry: Float[Tensor, " row"]) -> Band:
    columns = (logits.amax(dim=1), logits.mean(dim=1), entry)
    best = logits.cpu().numpy().argmax(axis=1).astype(np.int64)
    return Band(logits.shape[1], best, *(column.float().cpu().numpy() for column in columns))
