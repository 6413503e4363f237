"""How much two ranked lists have in common.

X_d is the number of entries that the first d of both lists share; s and l are the lengths of the
shorter and the longer list.

    Jaccard = X_l / (s + l − X_l)
    RBO = (1 − p)/p · (Σ_{d ≤ l} X_d/d · p^d + Σ_{s < d ≤ l} X_s·(d − s)/(s·d) · p^d)
          + ((X_l − X_s)/l + X_s/s) · p^l

The second is rank-biased overlap, extrapolated (Webber et al. 2010, equation 32): disagreement at
the top weighs most, and a list that ends goes on as it began. Both are symmetric. Of two empty
lists neither exists; of one both are 0.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int, Int64
from numpy import ndarray

from ffmem.indexing.sentences import NO_PREFIX

P = 0.9
"""How much each rank weighs, of the one before: 86 % of the weight is on the first ten."""

PAIRS = 1 << 22
"""Pairs of entries looked at together."""


class Overlap(NamedTuple):
    """Of each row's two lists; NaN where both are empty."""

    jaccard: Float64[ndarray, " row"]
    rbo: Float64[ndarray, " row"]


def overlap(first: Int[ndarray, "row rank"], second: Int[ndarray, "row rank"]) -> Overlap:
    """Return the overlap of the lists in each row: no entry twice, vacant slots last."""
    shared = _shared(first, second)
    lengths = np.stack([(lists != NO_PREFIX).sum(axis=1) for lists in (first, second)])
    shorter, longer = lengths.min(axis=0), lengths.max(axis=0)
    common = shared[:, -1]
    union = shorter + longer - common
    jaccard = np.where(union > 0, common / np.maximum(union, 1), np.nan)
    depths = np.arange(1, first.shape[1] + 1)
    # The sum would leave 1e-16 where nothing differs, and 1 must mean just that.
    alike = (shared == np.minimum(depths, shorter[:, None])).all(axis=1) & (shorter > 0)
    rbo = np.where(alike, 1.0, np.clip(_extrapolated(shared, shorter, longer), 0.0, 1.0))
    return Overlap(jaccard, np.where(longer > 0, rbo, np.nan))


def _shared(
    first: Int[ndarray, "row rank"], second: Int[ndarray, "row rank"]
) -> Int64[ndarray, "row rank"]:
    """Return X_d of each row, at every depth d."""
    n, width = first.shape
    entered = np.zeros((n, width), np.int64)
    step = max(1, PAIRS // (width * width))
    for begin in range(0, n, step):
        part = slice(begin, begin + step)
        equal = first[part, :, None] == second[part, None, :]
        row, one, other = np.nonzero(equal & (first[part, :, None] != NO_PREFIX))
        # An entry is shared from the depth on at which the later list has it.
        places = row * width + np.maximum(one, other)
        counted = np.bincount(places, minlength=len(equal) * width)
        entered[part] = counted.reshape(-1, width)
    return entered.cumsum(axis=1)


def _extrapolated(
    shared: Int64[ndarray, "row rank"],
    shorter: Int64[ndarray, " row"],
    longer: Int64[ndarray, " row"],
) -> Float64[ndarray, " row"]:
    """Return the rank-biased overlap of each row; 0 where a list is empty."""
    depths = np.arange(1, shared.shape[1] + 1)
    s, l = (np.maximum(lengths, 1)[:, None] for lengths in (shorter, longer))  # noqa: E741
    at_s, at_l = (np.take_along_axis(shared, lengths - 1, axis=1) for lengths in (s, l))
    seen = np.where(depths <= l, shared / depths, 0.0)
    assumed = np.where((depths > s) & (depths <= l), at_s * (depths - s) / (s * depths), 0.0)
    series = ((seen + assumed) * P**depths).sum(axis=1)
    tail = ((at_l - at_s) / l + at_s / s) * P**l
    found: ndarray = (1 - P) / P * series + tail[:, 0]
    return found
