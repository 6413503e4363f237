"""Summaries of samples: quartiles, and intervals of shares; seeds."""

import math
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Shaped
from numpy import ndarray
from numpy.typing import ArrayLike

from ffmem.errors import FfmemError

Z95 = 1.959963984540054
"""The standard normal's 0.975 quantile: two-sided 95 %."""

DRAWS = 1000
"""Of a bootstrap."""


def check_seed(seed: int) -> None:
    """Raise unless both numpy and torch can draw from this seed."""
    if not 0 <= seed < 2**63:
        raise FfmemError(f"Seed {seed} is out of range. Use a whole number from 0 to 2⁶³ − 1.")


def spread(numbers: Shaped[ndarray, " n"]) -> dict[str, Any]:
    """Return mean, q1, median, q3 and n of some numbers; None where there are none."""
    if not len(numbers):
        return {"mean": None, "q1": None, "median": None, "q3": None, "n": 0}
    exact = np.asarray(numbers, np.float64)
    q1, median, q3 = (float(q) for q in np.quantile(exact, (0.25, 0.5, 0.75)))
    return {"mean": float(exact.mean()), "q1": q1, "median": median, "q3": q3, "n": len(numbers)}


def share(part: int, n: int) -> float | None:
    """Return part / n; None if n is 0."""
    return part / n if n else None


def wilson(part: int | float, n: int) -> tuple[float | None, float | None]:
    """Return Wilson's 95 % interval of a share; None if n is 0.

    `part` need not be whole: 24.5 of 30 where two people differ about one.

    center ± half, with center = (p + z²/2n) / (1 + z²/n),
    half = z · √(p(1 − p)/n + z²/4n²) / (1 + z²/n)
    """
    if not n:
        return None, None
    p, zz = part / n, Z95 * Z95
    center = (p + zz / (2 * n)) / (1 + zz / n)
    half = Z95 * math.sqrt(p * (1 - p) / n + zz / (4 * n * n)) / (1 + zz / n)
    # At the ends one bound is the share itself; arithmetic would leave 1e-17 there.
    return max(0.0, min(p, center - half)), min(1.0, max(p, center + half))


def share_row(name: str, hits: Bool[ndarray, " n"]) -> dict[str, Any]:
    """Return the share of true ones under a name, with its interval (low, high) and n."""
    n, part = len(hits), int(hits.sum())
    low, high = wilson(part, n)
    return {name: share(part, n), "low": low, "high": high, "n": n}


def bootstrap_weights(n: int, seed: int) -> Float[ndarray, "draw item"]:
    """Return how often each of n items is drawn with replacement; no draws of fewer than two.

    For statistics s of sums over items whose parts are not independent draws, such as the triggers
    of one memory: s(Σᵢ wᵢ·xᵢ), w ~ Multinomial(n; 1/n, …, 1/n).
    """
    if n < 2:
        return np.zeros((0, n))
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=DRAWS)
    return drawn.astype(np.float64)


def bootstrap_interval(draws: Shaped[ndarray, " draw"]) -> tuple[float | None, float | None]:
    """Return the 95 % interval of draws; None where fewer than half of them have a number."""
    known = draws[np.isfinite(draws)]
    if not len(known) or 2 * len(known) < len(draws):
        return None, None
    low, high = np.quantile(known, (0.025, 0.975))
    return float(low), float(high)


def ratio(above: ArrayLike, below: ArrayLike) -> Float[ndarray, "*draw"]:
    """Return quotients; NaN where there is nothing to divide by."""
    over, under = np.asarray(above, np.float64), np.asarray(below, np.float64)
    result = np.full(under.shape, np.nan)
    np.divide(over, under, out=result, where=under != 0)
    return result


def number(value: Float[ndarray, ""] | float) -> float | None:
    """Return a number for JSON; None for NaN."""
    return float(value) if np.isfinite(value) else None


def with_interval(
    name: str,
    parts: Shaped[ndarray, " item"],
    wholes: Shaped[ndarray, " item"],
    weights: Float[ndarray, "draw item"],
) -> dict[str, float | None]:
    """Return Σ parts / Σ wholes as `name`, and its bootstrap interval as name_low and name_high."""
    low, high = bootstrap_interval(ratio(weights @ parts, weights @ wholes))
    return {
        name: number(ratio(parts.sum(), wholes.sum())),
        f"{name}_low": low,
        f"{name}_high": high,
    }
