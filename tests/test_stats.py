"""Quartiles and intervals: against scipy and by their laws."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from ffmem.stats import (
    DRAWS,
    Z95,
    bootstrap_weights,
    share,
    share_row,
    spread,
    wilson,
    with_interval,
)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilsons_interval_is_scipys(counts):
    part, n = counts
    low, high = wilson(part, n)
    expected = binomtest(part, n).proportion_ci(0.95, "wilson")
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert 0 <= low <= share(part, n) <= high <= 1


@given(st.lists(st.booleans()))
def test_a_row_of_a_share_has_its_interval_and_n(hits):
    part, n = sum(hits), len(hits)
    low, high = wilson(part, n)
    expected = {"rate": share(part, n), "low": low, "high": high, "n": n}
    assert share_row("rate", np.array(hits, bool)) == expected


@given(
    st.integers(1, 500).flatmap(
        lambda n: st.tuples(st.floats(0, n, allow_subnormal=False), st.just(n))
    )
)
def test_wilsons_interval_of_a_fraction_solves_its_equation_and_grows_with_it(counts):
    part, n = counts
    low, high = wilson(part, n)
    assert 0 <= low <= part / n <= high <= 1
    for end in (low, high):
        # The ends are where the share is z standard errors away.
        assert (part / n - end) ** 2 == pytest.approx(Z95**2 * end * (1 - end) / n, abs=1e-12)
    below, above = wilson(int(part), n), wilson(min(int(part) + 1, n), n)
    assert below[0] - 1e-12 <= low <= above[0] + 1e-12
    assert below[1] - 1e-12 <= high <= above[1] + 1e-12


def test_nothing_has_neither_share_nor_interval_nor_spread():
    assert share(0, 0) is None
    assert wilson(0, 0) == (None, None)
    assert spread(np.zeros(0)) == {"mean": None, "q1": None, "median": None, "q3": None, "n": 0}


@given(st.lists(st.integers(-100, 100), min_size=1, max_size=50))
def test_a_spread_is_in_order_and_within_its_numbers(numbers):
    found = spread(np.array(numbers))
    assert min(numbers) <= found["q1"] <= found["median"] <= found["q3"] <= max(numbers)
    assert found["mean"] == pytest.approx(sum(numbers) / len(numbers))
    assert found["n"] == len(numbers)
    assert all(type(number) in (int, float) for number in found.values())


def test_a_bootstrap_interval_is_that_of_items_drawn_one_by_one():
    rng = np.random.default_rng(1)
    wholes = rng.integers(1, 26, 12).astype(float)
    parts = np.floor(wholes * rng.random(12))
    weights = bootstrap_weights(12, seed=0)
    found = with_interval("share", parts, wholes, weights)
    assert found["share"] == parts.sum() / wholes.sum()
    drawn = rng.integers(0, 12, (20 * DRAWS, 12))
    shares = parts[drawn].sum(axis=1) / wholes[drawn].sum(axis=1)
    expected = np.quantile(shares, (0.025, 0.975)).tolist()
    assert [found["share_low"], found["share_high"]] == pytest.approx(expected, abs=0.02)
    one = with_interval("share", parts[:1], wholes[:1], bootstrap_weights(1, seed=0))
    assert one["share_low"] is one["share_high"] is None
    nothing = with_interval("share", parts, 0 * wholes, weights)
    assert set(nothing.values()) == {None}
