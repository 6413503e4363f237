"""Krippendorff's α of any number of people's answers, for names without an order (nominal).

    α = 1 − (n − 1)·Σ_{c≠k} o(c, k) / Σ_{c≠k} n(c)·n(k)

o is the matrix of coincidences: every ordered pair of answers to one unit, weighted by 1 / (m − 1),
m being the answers to that unit. Units that one person alone answered do not count; answers may be
missing anywhere. Where all answers are the same, nothing could disagree, and α is not defined.
"""

import numpy as np
from jaxtyping import Shaped
from numpy import ndarray

from ffmem.annotation.bootstrap import ratio


def alpha(coincidences: Shaped[ndarray, "*draw label label"]) -> Shaped[ndarray, "*draw"]:
    """Return α of coincidences; NaN where undefined."""
    found = np.asarray(coincidences, np.float64)
    each = found.sum(-1)
    n = each.sum(-1)
    apart = n - np.trace(found, axis1=-2, axis2=-1)
    expected = n * n - (each * each).sum(-1)
    expected = np.where(expected < 1e-9 * n * n, 0.0, expected)
    return np.asarray(1 - ratio((n - 1) * apart, expected))
