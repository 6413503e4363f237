"""Chance is bounded, and few and different patterns are shown."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from ffmem.patterns.features import LAST_WORD
from ffmem.patterns.shallow import (
    WORD_GROUP,
    Option,
    TriggerLists,
    find_shallow,
    is_fresh,
    related_limit,
    related_words,
    select,
    surprise,
    tail_probability,
)
from tests.patterns.planted import BEGIN_ALIKE, COLORS, DAYS, STEMS

bits = st.integers(0, 2**12 - 1)
options = st.lists(st.tuples(st.floats(0, 100), bits, st.integers(0, 5)), max_size=8).map(
    lambda rows: [
        Option(number, surprise, marks, marks, effort)
        for number, (surprise, marks, effort) in enumerate(rows)
    ]
)


def ranks(*numbers):
    return sum(1 << (number - 1) for number in numbers)


def option(number, surprise, marks, effort=0):
    return Option(number, surprise, marks, marks, effort)


@given(options)
def test_every_pattern_told_adds_three_triggers_to_those_before_it(options):
    covered = 0
    for number in select(options):
        assert (options[number].marks & ~covered).bit_count() >= 3
        covered |= options[number].marks
    assert all((one.marks & ~covered).bit_count() < 3 for one in options)


@given(options, st.randoms())
def test_their_order_does_not_matter(options, rng):
    shuffled = rng.sample(options, len(options))
    assert select(shuffled) == select(options)


def test_a_sharp_pattern_gives_way_to_a_wider_one_that_is_worth_it():
    sharp, wide = option(0, 10.0, ranks(1, 2, 3, 4)), option(1, 6.0, ranks(*range(1, 8)))
    assert select([sharp, wide]) == [1]
    assert select([sharp, wide._replace(surprise=4.0)]) == [0, 1]
    assert select([sharp, option(1, 6.0, ranks(1, 2, 3, 4, 5, 6))]) == [0]


def test_of_two_that_mark_the_same_the_readable_one_is_told():
    token, word = option(0, 10.0, ranks(1, 2, 3), effort=3), option(1, 9.0, ranks(1, 2, 3))
    assert select([token, word]) == [1]


def test_repetitions_do_not_make_a_pattern_new():
    first = option(0, 10.0, ranks(1, 2, 3))
    second = Option(1, 5.0, ranks(4, 5, 6), ranks(4), 0)
    assert select([first, second]) == [0]


shares = st.floats(0, 1)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), shares), min_size=1))
def test_the_tail_is_binomial_where_hoeffding_bounds_it_and_one_elsewhere(tests):
    n = np.array([a + b for a, b, _ in tests])
    k, p = np.array([a for a, _, _ in tests]), np.array([share for _, _, share in tests])
    found = tail_probability(k, n, p)
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
    assert exact <= tail_probability(np.array([k]), np.array([n]), mean)[0] + 1e-9


@pytest.mark.parametrize(("wide", "sharp"), [((25, 1e-3), (12, 1e-5))])
def test_a_wide_pattern_surprises_more_than_a_sharp_one_of_half_the_triggers(wide, sharp):
    k, p = np.array([wide[0], sharp[0]]), np.array([wide[1], sharp[1]])
    found = surprise(k, np.array([25, 25]), p)
    assert found[0] > found[1] > 0
    assert surprise(np.array([1]), np.array([25]), np.array([0.5]))[0] == 0


def groups_of(related, *several):
    """Return the words of “ends with one of” in lists of triggers that end with some words."""
    features, rows_of = related
    rng = np.random.default_rng(0)
    wanted = [
        rng.permutation([rows_of[words[n % len(words)]][n // len(words)] for n in range(40)])
        for words in several
    ]
    others = [rng.permutation(len(features.numbers))[:40] for _ in range(60)]
    rows = np.array(wanted + others)
    n = len(rows)
    lists = TriggerLists(np.arange(n), np.ones(n, np.int8), rows, is_fresh(features, rows))
    found = find_shallow(features, lists)
    word_of = {int(features.endings[r[0], LAST_WORD]): word for word, r in rows_of.items()}
    groups = found.where((found.kind == WORD_GROUP) & (found.owner < len(several)))
    assert (found.words[found.kind != WORD_GROUP] == -1).all()
    return {
        owner: {word_of[entry] for entry in entries if entry >= 0}
        for owner, entries in zip(groups.owner.tolist(), groups.words.tolist(), strict=True)
    }


def test_words_of_one_group_belong_together(related):
    mixed = ("monday", "red", "noon")
    found = groups_of(
        related, DAYS, COLORS, STEMS, mixed, ("friday", "sold"), BEGIN_ALIKE, ("monday", "(")
    )
    assert found == {0: set(DAYS), 1: set(COLORS), 2: set(STEMS)}


def test_every_pair_of_a_group_is_related(related):
    features, rows_of = related
    limit = related_limit(features)
    entries = np.array(sorted({int(features.endings[r[0], LAST_WORD]) for r in rows_of.values()}))
    entries = entries[entries >= 0]
    rng = np.random.default_rng(1)
    sizes = []
    for _ in range(50):
        group = related_words(features, rng.permutation(entries)[:12], limit)
        sizes.append(len(group))
        for one, other in itertools.combinations(group, 2):
            close = features.neighbors[one] @ features.neighbors[other] >= limit
            stems = [set(features.stems[word].tolist()) - {0} for word in (one, other)]
            assert close or stems[0] & stems[1]
    assert max(sizes) > 2
