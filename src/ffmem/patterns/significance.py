"""How improbable a pattern is by chance, and how much improbability many tests ask for.

A list shows a pattern in k of its n triggers. Were they random prefixes of the same lengths, each
would show it with its own probability pⱼ, the share of prefixes of that length:

    P(X ≥ k) ≤ P(Binomial(n, p̄) ≥ k)    where k ≥ n·p̄ + 1 (Hoeffding 1956)

Below that bound there is nothing to be found, and the p-value is 1. Over all tests of a run, the
false-discovery rate is controlled (Benjamini and Hochberg 1995).
"""

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray


def tail(
    k: Int64[ndarray, " test"], n: Int64[ndarray, " test"], p: Float64[ndarray, " test"]
) -> Float64[ndarray, " test"]:
    """Return how probable k or more of n are by chance, where each has mean probability p."""
    from scipy.special import bdtrc

    bound = (k >= n * p + 1) & (k > 0) & (n > 0)
    exact = bdtrc(np.maximum(k - 1, 0).astype(np.float64), np.maximum(n, 1), np.clip(p, 0.0, 1.0))
    return np.where(bound, exact, 1.0)


def false_discovery(p_values: Float64[ndarray, " test"]) -> Float64[ndarray, " test"]:
    """Return the q-values: the least false-discovery rate at which each test is accepted."""
    n = len(p_values)
    order = np.argsort(p_values, kind="stable")
    scaled = p_values[order] * n / np.arange(1, n + 1)
    lowest = np.minimum.accumulate(scaled[::-1])[::-1]
    q_values = np.empty(n)
    q_values[order] = np.minimum(lowest, 1.0)
    return q_values


def surprise(
    k: Int64[ndarray, " test"], n: Int64[ndarray, " test"], p: Float64[ndarray, " test"]
) -> Float64[ndarray, " test"]:
    """Return n·KL(k/n ‖ p) in nats: what orders patterns, wide ones and sharp ones together."""
    share = k / np.maximum(n, 1)
    p = np.clip(p, 1e-12, 1 - 1e-12)
    with np.errstate(divide="ignore", invalid="ignore"):
        shown = np.where(share > 0, share * np.log(share / p), 0.0)
        other = np.where(share < 1, (1 - share) * np.log((1 - share) / (1 - p)), 0.0)
    return np.where(share > p, n * (shown + other), 0.0)
