"""Summaries of samples: quartiles, and intervals of shares."""

import math
from typing import Any

import numpy as np
from jaxtyping import Shaped
from numpy import ndarray

Z95 = 1.959963984540054
"""The standard normal's 0.975 quantile: two-sided 95 %."""


def spread(numbers: Shaped[ndarray, " n"]) -> dict[str, Any]:
    """Return mean, q1, median, q3 and n of some numbers; None where there are none."""
    if not len(numbers):
        return {"mean": None, "q1": None, "median": None, "q3": None, "n": 0}
    exact = np.asarray(numbers, np.float64)
    q1, median, q3 = (float(q) for q in np.quantile(exact, (0.25, 0.5, 0.75)))
    return {"mean": float(exact.mean()), "q1": q1, "median": median, "q3": q3, "n": len(numbers)}


def share(part: int, n: int) -> float | None:
    """Return part / n; None of nothing."""
    return part / n if n else None


def wilson(part: int | float, n: int) -> tuple[float | None, float | None]:
    """Return Wilson's 95 % interval of a share; None of nothing.

    `part` need not be whole: 24.5 of 30 where two people differ about one.

    centre ± half, with centre = (p + z²/2n) / (1 + z²/n),
    half = z · √(p(1 − p)/n + z²/4n²) / (1 + z²/n)
    """
    if not n:
        return None, None
    p, zz = part / n, Z95 * Z95
    centre = (p + zz / (2 * n)) / (1 + zz / n)
    half = Z95 * math.sqrt(p * (1 - p) / n + zz / (4 * n * n)) / (1 + zz / n)
    # At the ends one bound is the share itself; arithmetic would leave 1e-17 there.
    return max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))
