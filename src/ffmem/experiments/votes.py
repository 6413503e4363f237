"""Whether any single memory says what its layer says (Figure 8).

A memory votes for top(m·v). Zero agreement: no vote is the layer's own token, top(y) by the
paper's text, top(o) by its code.

    all      every memory votes: for top(v); in gated models for top(sign(m)·v)
    active   those with m > 0, in gated models those with an open gate, vote for top(m·v)

With thousands of votes some hit a frequent token by chance. `chance` is the share of zero
agreement that a random token as frequent as the layer's would have: frequencies are binned by
⌊log₂(count + 1)⌋ of the index's corpus.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64
from numpy import ndarray

from ffmem.experiments.value_tops import ValueTops

TARGETS, MEMORIES = ("y", "o"), ("all", "active")


class Votes:
    """By example, layer, target and voters: how many agree, and what chance would give."""

    def __init__(
        self, n_examples: int, n_layers: int, frequencies: Int64[ndarray, " vocab"]
    ) -> None:
        shape = (n_examples, n_layers, len(TARGETS), len(MEMORIES))
        self.agreeing: Int64[ndarray, "example layer target voters"] = np.zeros(shape, np.int64)
        self.carried: Float64[ndarray, "example layer target voters"] = np.zeros(shape)
        self.chance: Float64[ndarray, "example layer target voters"] = np.zeros(shape)
        self.bins: Int64[ndarray, " vocab"] = np.floor(np.log2(frequencies + 1)).astype(np.int64)
        self.bin_sizes = np.bincount(self.bins)

    def read(
        self,
        examples: slice | ndarray,
        layer: int,
        tops: ValueTops,
        work: "Work",
        targets: tuple[Int64[ndarray, " row"], Int64[ndarray, " row"]],
    ) -> None:
        """Count one layer's votes on some examples; `targets` are top(y) and top(o)."""
        assert work.contributions is not None  # who has votes has values
        total = work.contributions.sum(axis=1, dtype=np.float64)
        for voters, (votes, voting) in enumerate(self._ballots(tops, work)):
            distinct = self._distinct(votes, voting)
            for target, tokens in enumerate(targets):
                agree = (votes == tokens[:, None]) & voting
                place = (examples, layer, target, voters)
                self.agreeing[place] = agree.sum(axis=1)
                weight = (work.contributions * agree).sum(axis=1, dtype=np.float64)
                self.carried[place] = np.divide(weight, total, where=total > 0, out=weight * 0)
                bins = self.bins[tokens]
                hit = distinct[np.arange(len(tokens)), bins] / self.bin_sizes[bins]
                self.chance[place] = 1 - hit

    def _ballots(self, tops: ValueTops, work: "Work") -> list[tuple[ndarray, ndarray]]:
        """Return votes and who votes: for `all`, then for `active`."""
        m = work.coefficients
        everybody = np.ones(m.shape, bool)
        if work.gate is not None:
            votes = tops.at(m)
            return [(votes, everybody), (votes, work.gate > 0)]
        plain = np.broadcast_to(tops.plain, m.shape)
        return [(plain, everybody), (tops.at(m), m > 0)]

    def _distinct(
        self, votes: Int64[ndarray, "row memory"], voting: Bool[ndarray, "row memory"]
    ) -> Float32[ndarray, "row bin"]:
        """Return how many different tokens of each frequency are voted for."""
        tokens = np.flatnonzero(np.bincount(votes.ravel(), minlength=len(self.bins)))
        number = np.zeros(len(self.bins), np.int64)
        number[tokens] = np.arange(len(tokens))
        seen = np.zeros((len(votes), len(tokens) + 1), np.float32)
        places = np.where(voting, number[votes], len(tokens))
        np.put_along_axis(seen, places, 1, axis=1)
        member = np.zeros((len(tokens), len(self.bin_sizes)), np.float32)
        member[np.arange(len(tokens)), self.bins[tokens]] = 1
        return np.asarray(seen[:, :-1] @ member)

    def variants(self) -> list[tuple[str, str, tuple[Any, ...]]]:
        """Return every target and kind of voters with its place in the arrays."""
        return [
            (target, memories, (slice(None), slice(None), i, j))
            for i, target in enumerate(TARGETS)
            for j, memories in enumerate(MEMORIES)
        ]


class Work(NamedTuple):
    """What the memories of a layer do on some examples."""

    coefficients: Float32[ndarray, "row memory"]
    gate: Float32[ndarray, "row memory"] | None
    contributions: Float32[ndarray, "row memory"] | None
    """|m|·‖v‖; None where values are not static."""
