import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ffmem.indexing.statistics import UNIT, Statistics

numbers = st.lists(st.integers(-(10**6), 10**6), min_size=6, max_size=6)


def part(values):
    sums = np.array(values, np.int64).reshape(2, 3)
    return Statistics(7, abs(sums), sums, sums.astype(np.float32), -sums.astype(np.float32))


@given(numbers, numbers, numbers)
def test_merging_is_exact_under_any_tree(a, b, c):
    a, b, c = part(a), part(b), part(c)
    left, right = a.merge(b).merge(c), c.merge(b.merge(a))
    for one, two in zip(left, right, strict=True):
        np.testing.assert_array_equal(one, two)
    assert left.n_prefixes == 21


def test_the_mean_is_the_sum_over_the_prefixes():
    one = part([7 * 2**20] * 6)
    np.testing.assert_allclose(one.mean(), 1.0)
    assert UNIT * 2**20 == 1


def test_nothing_is_the_neutral_element():
    some = part(range(6))
    for one, two in zip(Statistics.empty(2, 3).merge(some), some, strict=True):
        np.testing.assert_array_equal(one, two)
