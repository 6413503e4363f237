"""Counts and extremes of every memory over all prefixes of a corpus.

Everything merges exactly under any tree: counts are integers, extremes are extremes, and a
lease's float64 sum is rounded once, to an integer multiple of 2⁻²⁰; integers add associatively.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Float64, Int64
from numpy import ndarray

UNIT = 2.0**-20
"""What one step of `sums` is worth."""


class Statistics(NamedTuple):
    """Of each memory, over `n_prefixes` prefixes."""

    n_prefixes: int
    active: Int64[ndarray, "layer memory"]
    """Prefixes with m > 0; in gated models, prefixes whose gate is open (pre-activation > 0)."""
    sums: Int64[ndarray, "layer memory"]
    maximum: Float32[ndarray, "layer memory"]
    minimum: Float32[ndarray, "layer memory"]

    @classmethod
    def empty(cls, n_layers: int, n_memories: int) -> "Statistics":
        """Return the statistics of an empty corpus."""
        shape = (n_layers, n_memories)
        return cls(
            0,
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int64),
            np.full(shape, -np.inf, np.float32),
            np.full(shape, np.inf, np.float32),
        )

    def merge(self, other: "Statistics") -> "Statistics":
        """Return the statistics of two disjoint parts of a corpus taken together."""
        return Statistics(
            self.n_prefixes + other.n_prefixes,
            self.active + other.active,
            self.sums + other.sums,
            np.maximum(self.maximum, other.maximum),
            np.minimum(self.minimum, other.minimum),
        )

    def mean(self) -> Float64[ndarray, "layer memory"]:
        """Return each memory's mean coefficient."""
        return self.sums * (UNIT / max(self.n_prefixes, 1))
