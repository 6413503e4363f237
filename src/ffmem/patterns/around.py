"""What is usual: prefixes that a topic is compared with, by how many content words they have.

A prefix of one word lies very close to some topics and far from all others, a long one in between:
so like is compared with like.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Float64, Int64
from numpy import ndarray

from ffmem.patterns.corpus_view import CorpusView
from ffmem.patterns.topics import TopicSpace

SHARES = (0.02, 0.05, 0.15)
"""Of the random prefixes of like size: so many are about a narrow, an ordinary, a wide topic."""

MARGIN = np.float32(1e-4)
"""Cosines that differ by less are the same."""


class Around(NamedTuple):
    """Prefixes that topics are compared with, by number of content words."""

    vectors: Float32[ndarray, "prefix axis"]
    """Those of one bin stand together."""
    starts: Int64[ndarray, " start"]
    """Where the bins begin in `vectors`, and the end."""
    least: Int64[ndarray, " bin"]
    """Least number of content words of each bin."""

    @classmethod
    def of(
        cls,
        view: CorpusView,
        space: TopicSpace,
        rows: Int64[ndarray, " prefix"],
        least: Int64[ndarray, " bin"] | None = None,
    ) -> "Around":
        """Return some rows of a view by bins, given ones or such that all are about as full."""
        sizes = view.word_slices[rows, 1] - view.word_slices[rows, 0]
        rows, sizes = rows[sizes > 0], sizes[sizes > 0]
        if least is None:
            shares = np.linspace(0, 1, 8)[1:-1]
            inner = np.quantile(sizes, shares, method="lower") if len(sizes) else np.zeros(0)
            least = np.unique(np.concatenate([[1], inner])).astype(np.int64)
        bins = np.searchsorted(least, sizes, side="right") - 1
        order = np.argsort(bins, kind="stable")
        nothing = np.full((len(rows), 1), -1, np.int32)
        starts = np.searchsorted(bins[order], np.arange(len(least) + 1))
        return cls(space.vectors(view, rows, nothing)[order], starts, least)

    def bins(self, sizes: Int64[ndarray, "..."]) -> Int64[ndarray, "..."]:
        """Return the bin of prefixes with so many content words (at least one)."""
        return np.maximum(np.searchsorted(self.least, sizes, side="right") - 1, 0)

    def cosines(self, centres: Float32[ndarray, "list axis"]) -> Float32[ndarray, "list prefix"]:
        """Return how close the prefixes are to the centres of topics."""
        found: ndarray = centres @ self.vectors.T
        return found

    def thresholds(
        self, cosines: Float32[ndarray, "list prefix"], share: float
    ) -> Float32[ndarray, "list bin"]:
        """Return the cosines that only a share of each bin exceed."""
        found = np.full((len(cosines), len(self.least)), np.inf, np.float32)
        for bin, (start, past) in enumerate(zip(self.starts[:-1], self.starts[1:], strict=True)):
            if past > start:
                place = past - start - 1 - int(share * (past - start))
                ordered = np.partition(cosines[:, start:past], place, axis=1)
                # Clearly above: of many equal ones none passes, however their sums are rounded.
                found[:, bin] = ordered[:, place] + MARGIN
        return found

    def shares(
        self, cosines: Float32[ndarray, "list prefix"], thresholds: Float32[ndarray, "list bin"]
    ) -> Float64[ndarray, "list bin"]:
        """Return which share of each bin reaches the thresholds."""
        sizes = np.diff(self.starts)
        reached = cosines >= np.repeat(thresholds, sizes, axis=1)
        sums = np.concatenate([np.zeros((len(cosines), 1)), reached.cumsum(axis=1)], axis=1)
        counts = sums[:, self.starts[1:]] - sums[:, self.starts[:-1]]
        reaching: ndarray = counts / np.maximum(sizes, 1)
        return reaching
