import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.indexing.sentences import NO_PREFIX
from ffmem.interventions import compare as module
from ffmem.interventions.compare import P, measure_overlap

ranked = st.lists(st.integers(0, 12), max_size=8, unique=True)


def plain_rbo(one, other, p=P):
    """Equation 32 of Webber et al., term by term."""
    short, long = sorted((one, other), key=len)
    s, l = len(short), len(long)  # noqa: E741

    def x(d):
        return len(set(short[:d]) & set(long[:d]))

    first = sum(x(d) / d * p**d for d in range(1, l + 1))
    second = sum(x(s) * (d - s) / (s * d) * p**d for d in range(s + 1, l + 1))
    return (1 - p) / p * (first + second) + ((x(l) - x(s)) / l + x(s) / s) * p**l


def plain_rbo_of_equal_lengths(one, other, p=P):
    """Equation 30, for lists evaluated to the same depth k."""
    k = len(one)
    x = [len(set(one[:d]) & set(other[:d])) for d in range(1, k + 1)]
    return x[-1] / k * p**k + (1 - p) / p * sum(x[d - 1] / d * p**d for d in range(1, k + 1))


def matrix(lists, width=8):
    return np.array([[*one, *[NO_PREFIX] * (width - len(one))] for one in lists], np.int64)


def overlap_of(one, other):
    found = measure_overlap(matrix([one]), matrix([other]))
    return found.jaccard[0], found.rbo[0]


@given(ranked, ranked)
def test_overlaps_are_those_of_the_definitions(one, other):
    jaccard, rbo = overlap_of(one, other)
    if not one and not other:
        assert np.isnan(jaccard)
        assert np.isnan(rbo)
    elif not one or not other:
        assert (jaccard, rbo) == (0, 0)
    else:
        assert jaccard == len({*one} & {*other}) / len({*one} | {*other})
        assert rbo == pytest.approx(plain_rbo(one, other), abs=1e-12)
        assert 0 <= rbo <= 1


@given(st.permutations(range(8)), st.permutations(range(4, 12)))
def test_lists_of_equal_length_have_the_simpler_formulas_overlap(one, other):
    assert overlap_of(one, other)[1] == pytest.approx(plain_rbo_of_equal_lengths(one, other))


@given(st.lists(st.tuples(ranked, ranked), min_size=1, max_size=6), st.integers(1, 200))
def test_rows_do_not_touch_each_other_however_many_are_looked_at_together(pairs, at_once):
    ones, others = (matrix(side) for side in zip(*pairs, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_PAIRS", at_once)
        whole = measure_overlap(ones, others)
    single = [overlap_of(*pair) for pair in pairs]
    np.testing.assert_array_equal(np.stack(whole, axis=1), single)


@given(ranked, ranked)
def test_overlap_is_symmetric_to_the_last_bit(one, other):
    np.testing.assert_array_equal(overlap_of(one, other), overlap_of(other, one))


@given(ranked.filter(bool))
def test_a_list_overlaps_with_itself_entirely(one):
    assert overlap_of(one, one) == (1, 1)


def test_a_list_that_ends_goes_on_as_it_began():
    jaccard, rbo = overlap_of([1, 2, 3], [1, 2, 3, 4, 5, 6])
    assert (jaccard, rbo) == (0.5, 1)


def test_disagreement_at_the_top_weighs_most():
    top, bottom = [2, 1, 3, 4, 5, 6], [1, 2, 3, 4, 6, 5]
    base = [1, 2, 3, 4, 5, 6]
    assert overlap_of(base, top)[1] < overlap_of(base, bottom)[1] < 1


def test_the_worked_example_of_two_lists():
    """By hand: X = 0, 2, 3 at depths 1, 2, 3."""
    expected = 0.1 / 0.9 * (2 / 2 * 0.9**2 + 3 / 3 * 0.9**3) + 1 * 0.9**3
    assert overlap_of([1, 2, 3], [2, 1, 3])[1] == pytest.approx(expected)
