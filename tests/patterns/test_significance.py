import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, false_discovery_control

from ffmem.patterns.significance import false_discovery, surprise, tail

shares = st.floats(0, 1)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), shares), min_size=1))
def test_the_tail_is_binomial_where_hoeffding_bounds_it_and_one_elsewhere(tests):
    n = np.array([a + b for a, b, _ in tests])
    k, p = np.array([a for a, _, _ in tests]), np.array([share for _, _, share in tests])
    found = tail(k, n, p)
    bounded = (k >= n * p + 1) & (k > 0)
    np.testing.assert_allclose(
        found[bounded], binom.sf(k - 1, n, p)[bounded], rtol=1e-9, atol=1e-300
    )
    assert (found[~bounded] == 1).all()


@given(st.lists(shares, min_size=1, max_size=8), st.data())
def test_prefixes_of_different_lengths_are_bounded_by_their_mean(probabilities, data):
    n = len(probabilities)
    k = data.draw(st.integers(1, n))
    exact = sum(
        math.prod(p if shown else 1 - p for p, shown in zip(probabilities, outcome, strict=True))
        for outcome in itertools.product((True, False), repeat=n)
        if sum(outcome) >= k
    )
    mean = np.array([sum(probabilities) / n])
    assert exact <= tail(np.array([k]), np.array([n]), mean)[0] + 1e-9


@given(st.lists(shares, min_size=1))
def test_false_discovery_control_is_that_of_benjamini_and_hochberg(p_values):
    found = false_discovery(np.array(p_values))
    np.testing.assert_allclose(found, false_discovery_control(p_values))


def test_no_test_has_no_q_value():
    assert len(false_discovery(np.zeros(0))) == 0


@pytest.mark.parametrize(("wide", "sharp"), [((25, 1e-3), (12, 1e-5))])
def test_a_wide_pattern_surprises_more_than_a_sharp_one_of_half_the_triggers(wide, sharp):
    k, p = np.array([wide[0], sharp[0]]), np.array([wide[1], sharp[1]])
    found = surprise(k, np.array([25, 25]), p)
    assert found[0] > found[1] > 0
    assert surprise(np.array([1]), np.array([25]), np.array([0.5]))[0] == 0
