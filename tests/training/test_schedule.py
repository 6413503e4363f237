from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ffmem.training.schedule import default_warmup, learning_rate


@given(st.integers(2, 400), st.floats(1e-5, 1))
def test_it_rises_to_the_highest_and_falls_towards_a_tenth(steps, highest):
    warmup = default_warmup(steps)
    rates = [learning_rate(step, steps, warmup, highest) for step in range(steps)]
    for step, (rate, following) in enumerate(pairwise(rates)):
        assert rate <= following if step < warmup else rate > following
    assert max(rates) == highest == rates[warmup]
    assert min(rates) > 0
    assert 0.1 * highest <= learning_rate(steps, steps, warmup, highest) <= 0.1001 * highest


def test_warming_up_takes_a_straight_line():
    rates = [learning_rate(step, 100, 4, 8.0) for step in range(5)]
    assert rates == [2, 4, 6, 8, 8]


def test_a_warm_up_longer_than_the_run_only_rises():
    assert [learning_rate(step, 3, 10, 10.0) for step in range(3)] == [1, 2, 3]
