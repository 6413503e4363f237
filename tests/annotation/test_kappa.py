"""Cohen's κ against its definition, scikit-learn and its laws."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.annotation.kappa import kappa
from ffmem.annotation.questions import counted

answers = st.integers(2, 40).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(0, 3), min_size=n, max_size=n)] * 2)
)


def by_definition(one, other):
    n = len(one)
    equal = sum(a == b for a, b in zip(one, other, strict=True)) / n
    mine, theirs = Counter(one), Counter(other)
    chance = sum(mine[label] * theirs[label] for label in mine) / n**2
    return (equal - chance) / (1 - chance) if chance < 1 else np.nan


@given(answers)
def test_kappa_is_what_its_definition_says(pair):
    assert float(kappa(counted(*pair, 4))) == pytest.approx(by_definition(*pair), nan_ok=True)


def test_kappa_is_that_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    chance = np.random.default_rng(0)
    for size in (5, 50, 500):
        one = chance.integers(0, 4, size)
        other = np.where(chance.random(size) < 0.6, one, chance.integers(0, 4, size))
        expected = metrics.cohen_kappa_score(one, other)
        assert float(kappa(counted(one.tolist(), other.tolist(), 4))) == pytest.approx(expected)


def test_the_textbook_example_has_its_value():
    """Fifty grant proposals, two readers: 20 and 15 alike, 5 and 10 not."""
    assert float(kappa(np.array([[20, 5], [10, 15]]))) == pytest.approx(0.4)


@given(answers, st.permutations(range(4)))
def test_neither_the_order_of_people_nor_the_names_of_answers_matter(pair, renamed):
    one, other = pair
    expected = pytest.approx(float(kappa(counted(one, other, 4))), nan_ok=True)
    assert float(kappa(counted(other, one, 4))) == expected
    again = ([renamed[a] for a in side] for side in pair)
    assert float(kappa(counted(*again, 4))) == expected


@given(st.lists(st.integers(0, 3), min_size=2, max_size=30))
def test_perfect_agreement_is_1_and_one_answer_alone_has_no_kappa(same):
    found = float(kappa(counted(same, same, 4)))
    assert np.isnan(found) if len(set(same)) == 1 else found == pytest.approx(1)


def test_independent_answers_have_a_kappa_near_0():
    chance = np.random.default_rng(1)
    one, other = chance.choice(3, (2, 20_000), p=[0.7, 0.2, 0.1]).tolist()
    assert abs(float(kappa(counted(one, other, 3)))) < 0.03
