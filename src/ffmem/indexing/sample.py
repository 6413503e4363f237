"""A fixed sample of prefixes whose coefficients are all kept.

The sample is the `SIZE` prefixes of smallest hash(hash of the source, place in the source). It
depends on nothing else, so that the samples of parts merge to the sample of the whole:

    sample(A ∪ B) == the SIZE smallest of sample(A) ∪ sample(B)
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int64, UInt64
from numpy import ndarray

SIZE = 512


class Sample(NamedTuple):
    """Some prefixes in ascending order, and every memory's coefficient on each."""

    hashes: UInt64[ndarray, " prefix"]
    prefixes: Int64[ndarray, " prefix"]
    coefficients: Float32[ndarray, "layer memory prefix"]

    @classmethod
    def empty(cls, n_layers: int, n_memories: int) -> "Sample":
        """Return the sample of an empty corpus."""
        nothing = np.zeros((n_layers, n_memories, 0), np.float32)
        return cls(np.zeros(0, np.uint64), np.zeros(0, np.int64), nothing)

    def shifted(self, places: int) -> "Sample":
        """Return the same sample in a corpus that has `places` more prefixes in front."""
        return self._replace(prefixes=self.prefixes + places)

    def merge(self, other: "Sample") -> "Sample":
        """Return the sample of two disjoint parts of a corpus taken together."""
        hashes = np.concatenate([self.hashes, other.hashes])
        prefixes = np.concatenate([self.prefixes, other.prefixes])
        kept = _smallest(hashes, prefixes)
        both = np.concatenate([self.coefficients, other.coefficients], axis=-1)
        return Sample(hashes[kept], prefixes[kept], both[..., kept])


def draw(
    source_hash: str, lengths: Iterable[Int64[ndarray, " _"]], empty_prefix: bool
) -> tuple[UInt64[ndarray, " prefix"], Int64[ndarray, " prefix"]]:
    """Return hashes and places of a source's sample, from its sentences' lengths in order.

    A sentence of n tokens owns n + 1 places. The prefixes are those of length 1 … n, or 0 … n − 1
    where the empty prefix counts (`--compat ff-layers`).
    """
    hashes, places = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    base = 0
    for part in lengths:
        ends = np.cumsum(part + 1)
        is_prefix: Bool[ndarray, " place"] = np.ones(int(ends[-1]) if len(ends) else 0, bool)
        is_prefix[ends - 1 if empty_prefix else ends - part - 1] = False
        here = is_prefix.nonzero()[0] + base
        base += len(is_prefix)
        hashes = np.concatenate([hashes, hashed(source_hash, here)])
        places = np.concatenate([places, here])
        kept = _smallest(hashes, places)
        hashes, places = hashes[kept], places[kept]
    return hashes, places


def hashed(source_hash: str, places: Int64[ndarray, " place"]) -> UInt64[ndarray, " place"]:
    """Return a well-mixed 64-bit number (splitmix64) for each place of a source."""
    seed = np.uint64(int(source_hash[:16], 16))
    with np.errstate(over="ignore"):  # arithmetic modulo 2⁶⁴ is the point
        z = seed + (places.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _smallest(
    hashes: UInt64[ndarray, " prefix"], prefixes: Int64[ndarray, " prefix"]
) -> Int64[ndarray, " kept"]:
    """Return where the `SIZE` smallest hashes stand, in ascending order of prefix."""
    kept = np.lexsort((prefixes, hashes))[:SIZE]
    return kept[np.argsort(prefixes[kept], kind="stable")]
