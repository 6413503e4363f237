"""Cohen's κ of two people's answers.

    κ = (p − e) / (1 − e),    p = share of equal answers,    e = Σ_c p₁(c)·p₂(c)

1 is perfect agreement, 0 what chance gives to the same habits. It does not depend on who of the two
comes first, nor on what the answers are called. Where both always give the same one answer, e = 1,
and κ is not defined.
"""

import numpy as np
from jaxtyping import Shaped
from numpy import ndarray

from ffmem.annotation.bootstrap import ratio


def kappa(confusion: Shaped[ndarray, "*draw label label"]) -> Shaped[ndarray, "*draw"]:
    """Return κ of how often one said the row and the other the column; NaN where undefined."""
    counts = np.asarray(confusion, np.float64)
    n = counts.sum((-2, -1))
    equal = ratio(np.trace(counts, axis1=-2, axis2=-1), n)
    chance = ratio((counts.sum(-1) * counts.sum(-2)).sum(-1), n * n)
    # Counts are whole, but weighted ones leave 1e-17 where 1 − e should be 0.
    return ratio(equal - chance, np.where(1 - chance < 1e-12, 0.0, 1 - chance))
