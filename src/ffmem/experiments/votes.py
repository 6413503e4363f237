"""Whether any single memory says what its layer says (Figure 8).

A memory votes for top(m·v). Zero agreement: no vote is the layer's own token, top(y) by the
paper's text, top(o) by its code.

    all      every memory votes: for top(v); in gated models for top(sign(m)·v)
    active   those with m > 0, in gated models those with an open gate, vote for top(m·v)

With thousands of votes some hit a frequent token by chance. `chance` is the share of zero
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
        examples: slice,
        layer: int,
        tops: ValueTops,
        work: Work,
        targets: tuple[Int64[ndarray, " row"], Int64[ndarray, " row"]],
    ) -> None:
        """Count one layer's votes on some examples; `targets` are top(y) and top(o)."""
        for votes, electorates in self._ballots(tops, work):
            seats = self._seats(votes)
            for voters, voting in electorates:
                distinct = self._distinct(seats, voting)
                for target, tokens in enumerate(targets):
                    place = (examples, layer, target, voters)
                    agree = votes == tokens[:, None]
                    self._count(place, agree if voting is None else agree & voting, work)
                    bins = self.bins[tokens]
                    met = np.broadcast_to(distinct, (len(tokens), distinct.shape[1]))
                    hit = met[np.arange(len(tokens)), bins] / self.bin_sizes[bins]
                    self.chance[place] = 1 - hit

    def _count(
        self, place: tuple[Any, ...], agree: Bool[ndarray, "row memory"], work: Work
    ) -> None:
        """Tell how many memories agree, and which share of all contributions they carry."""
        carried = work.contributions
        assert carried is not None  # who has votes has values
        n, total = len(carried), carried.sum(axis=1, dtype=np.float64)
        # Few memories agree: their places cost less than sums over all of them.
        cells = np.flatnonzero(agree)
        example = cells // agree.shape[1]
        weight = np.zeros(n)
        np.add.at(weight, example, carried.reshape(-1)[cells])
        self.agreeing[place] = np.bincount(example, minlength=n)
        self.carried[place] = np.divide(weight, total, where=total > 0, out=np.zeros(n))

    def _ballots(self, tops: ValueTops, work: Work) -> list["Ballot"]:
        """Return votes and who votes: for `all`, then for `active`."""
        m = work.coefficients
        if work.gate is not None:
            return [(tops.at(m), [(0, None), (1, work.gate > 0)])]
        return [(tops.plain[None], [(0, None)]), (tops.at(m), [(1, m > 0)])]

    def _seats(self, votes: Int64[ndarray, "#row memory"]) -> "Seats":
        """Number the tokens that get any vote."""
        given = np.zeros(len(self.bins), bool)
        given[votes] = True
        tokens = np.flatnonzero(given)
        number = np.zeros(len(self.bins), np.int64)
        number[tokens] = np.arange(len(tokens))
        member = np.zeros((len(tokens), len(self.bin_sizes)), np.float32)
        member[np.arange(len(tokens)), self.bins[tokens]] = 1
        return number[votes], member

    def _distinct(
        self, seats: "Seats", voting: Bool[ndarray, "row memory"] | None
    ) -> Float32[ndarray, "#row bin"]:
        """Return how many different tokens of each frequency are voted for."""
        places, member = seats
        width = len(member) + 1  # the last column is for those who do not vote
        if voting is not None:
            places = np.where(voting, places, width - 1)
        seen = np.zeros((len(places), width), np.float32)
        seen.reshape(-1)[places + width * np.arange(len(places))[:, None]] = 1
        return np.asarray(seen[:, :-1] @ member)

    def variants(self) -> list[tuple[str, str, tuple[Any, ...]]]:
        """Return every target and kind of voters with its place in the arrays."""
        return [
            (target, memories, (slice(None), slice(None), i, j))
            for i, target in enumerate(TARGETS)
            for j, memories in enumerate(MEMORIES)
        ]


Ballot = tuple[Int64[ndarray, "#row memory"], list[tuple[int, Bool[ndarray, "row memory"] | None]]]
"""What memories vote for, in one row where it is the same for all examples, and who votes."""

Seats = tuple[Int64[ndarray, "#row memory"], Float32[ndarray, "seat bin"]]
"""The number of each vote's token among those voted for, and which frequency each token has."""
