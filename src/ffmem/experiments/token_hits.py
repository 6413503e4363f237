"""Whether any single memory says what its layer says (Figure 8).

A memory's token is top(m·v). It hits if that is the layer's own token: top(y) by the paper's text,
top(o) by its code. Zero agreement: no memory hits.

    all      every memory counts, with top(v); in gated models with top(sign(m)·v)
    active   those with m > 0, in gated models those with an open gate, count with top(m·v)

Of thousands of memories, some hit a frequent token by chance. `chance` is the share of zero
agreement that a random token as frequent as the layer's would have: frequencies are binned by
⌊log₂(count + 1)⌋ of the index's corpus.
"""

from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64
from numpy import ndarray

from ffmem.experiments.activity import Work
from ffmem.experiments.value_tops import ValueTops

TARGETS, MEMORIES = ("y", "o"), ("all", "active")


class TokenHits:
    """By example, layer, target and group of memories: how many hit, and what chance would give."""

    def __init__(
        self, n_examples: int, n_layers: int, frequencies: Int64[ndarray, " vocab"]
    ) -> None:
        shape = (n_examples, n_layers, len(TARGETS), len(MEMORIES))
        self.agreeing: Int64[ndarray, "example layer target memories"] = np.zeros(shape, np.int64)
        self.carried: Float64[ndarray, "example layer target memories"] = np.zeros(shape)
        self.chance: Float64[ndarray, "example layer target memories"] = np.zeros(shape)
        self.bins: Int64[ndarray, " vocab"] = np.floor(np.log2(frequencies + 1)).astype(np.int64)
        self.bin_sizes = np.bincount(self.bins)

    def read(
        self,
        examples: slice,
        layer: int,
        tops: ValueTops,
        work: Work,
        targets: tuple[Int64[ndarray, " row"], Int64[ndarray, " row"]],
    ) -> None:
        """Count one layer's hits on some examples; `targets` are top(y) and top(o)."""
        for tokens, groups in self._memory_tokens(tops, work):
            compact = self._compact(tokens)
            for group, counts in groups:
                distinct = self._distinct(compact, counts)
                for target, wanted in enumerate(targets):
                    place = (examples, layer, target, group)
                    hits = tokens == wanted[:, None]
                    self._count(place, hits if counts is None else hits & counts, work)
                    bins = self.bins[wanted]
                    met = np.broadcast_to(distinct, (len(wanted), distinct.shape[1]))
                    by_chance = met[np.arange(len(wanted)), bins] / self.bin_sizes[bins]
                    self.chance[place] = 1 - by_chance

    def _count(self, place: tuple[Any, ...], hits: Bool[ndarray, "row memory"], work: Work) -> None:
        """Count the memories that hit, and which share of all contributions they carry."""
        carried = work.contributions
        assert carried is not None  # hits are counted only where there are values
        n, total = len(carried), carried.sum(axis=1, dtype=np.float64)
        # Few memories hit: their places cost less than sums over all of them.
        cells = np.flatnonzero(hits)
        example = cells // hits.shape[1]
        weight = np.zeros(n)
        np.add.at(weight, example, carried.reshape(-1)[cells])
        self.agreeing[place] = np.bincount(example, minlength=n)
        self.carried[place] = np.divide(weight, total, where=total > 0, out=np.zeros(n))

    def _memory_tokens(self, tops: ValueTops, work: Work) -> list["MemoryTokens"]:
        """Return each memory's token and which memories count: for `all`, then for `active`."""
        m = work.coefficients
        if work.gate is not None:
            return [(tops.at(m), [(0, None), (1, work.gate > 0)])]
        return [(tops.plain[None], [(0, None)]), (tops.at(m), [(1, m > 0)])]

    def _compact(self, tokens: Int64[ndarray, "#row memory"]) -> "CompactTokens":
        """Number the tokens that any memory has."""
        given = np.zeros(len(self.bins), bool)
        given[tokens] = True
        found = np.flatnonzero(given)
        number = np.zeros(len(self.bins), np.int64)
        number[found] = np.arange(len(found))
        in_bin = np.zeros((len(found), len(self.bin_sizes)), np.float32)
        in_bin[np.arange(len(found)), self.bins[found]] = 1
        return number[tokens], in_bin

    def _distinct(
        self, compact: "CompactTokens", counts: Bool[ndarray, "row memory"] | None
    ) -> Float32[ndarray, "#row bin"]:
        """Return how many different tokens of each frequency bin the memories have."""
        numbers, in_bin = compact
        width = len(in_bin) + 1  # the last column is for memories that do not count
        if counts is not None:
            numbers = np.where(counts, numbers, width - 1)
        seen = np.zeros((len(numbers), width), np.float32)
        seen.reshape(-1)[numbers + width * np.arange(len(numbers))[:, None]] = 1
        return np.asarray(seen[:, :-1] @ in_bin)

    def variants(self) -> list[tuple[str, str, tuple[Any, ...]]]:
        """Return every target and group of memories with its place in the arrays."""
        return [
            (target, memories, (slice(None), slice(None), i, j))
            for i, target in enumerate(TARGETS)
            for j, memories in enumerate(MEMORIES)
        ]


MemoryTokens = tuple[
    Int64[ndarray, "#row memory"], list[tuple[int, Bool[ndarray, "row memory"] | None]]
]
"""The token of each memory, in one row where it is the same for all examples, and for each group
(`all`, `active`) which memories count; None for every one."""

CompactTokens = tuple[Int64[ndarray, "#row memory"], Float32[ndarray, "token bin"]]
"""The number of each memory's token among those that occur, and the frequency bin of each such."""
