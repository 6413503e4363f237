"""Intervals of whatever is a function of sums over items: items are drawn anew, with replacement.

    s(Σᵢ wᵢ·xᵢ),    w ~ Multinomial(n; 1/n, …, 1/n)

Items are the unit: the triggers of one memory are no independent draws.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Shaped
from numpy import ndarray

DRAWS = 1000

Numbers = Shaped[ndarray, "*draw"] | np.number[Any] | float | int
"""One number, or one of every draw."""

ENDS = (0.025, 0.975)
"""Quantiles of the draws: two-sided 95 %."""


def weights(n: int, seed: int) -> Float[ndarray, "draw item"]:
    """Return how often each of n items is drawn; no draw where one item is all there is."""
    if n < 2:
        return np.zeros((0, n))
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=DRAWS)
    return drawn.astype(np.float64)


def interval(numbers: Shaped[ndarray, " draw"]) -> tuple[float | None, float | None]:
    """Return the 95 % interval of draws; None where fewer than half of them have a number."""
    there = numbers[np.isfinite(numbers)]
    if not len(there) or 2 * len(there) < len(numbers):
        return None, None
    low, high = np.quantile(there, ENDS)
    return float(low), float(high)


def ratio(above: Numbers, below: Numbers) -> Float[ndarray, "*draw"]:
    """Return quotients; NaN where there is nothing to divide by."""
    over, under = np.asarray(above, np.float64), np.asarray(below, np.float64)
    result = np.full(under.shape, np.nan)
    np.divide(over, under, out=result, where=under != 0)
    return result


def as_number(value: Numbers) -> float | None:
    """Return a number for JSON; None for NaN."""
    return float(value) if np.isfinite(value) else None
