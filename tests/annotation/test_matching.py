"""The matching of two people's patterns against brute force."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.annotation.agreement import marks_agreement
from ffmem.annotation.couple import couples
from ffmem.annotation.matching import (
    jaccard,
    jaccard_of_kind,
    likeness,
    marks_confusion,
    match,
)
from tests.annotation.studies import judged, sheet, simulated

N = 8
patterns = st.lists(
    st.tuples(
        st.sampled_from(["shallow", "semantic"]), st.sets(st.integers(1, N), min_size=1, max_size=N)
    ),
    max_size=4,
)


def best_sum(left, right, score):
    """Return the largest sum of scores over all one-to-one matchings."""
    small, large = sorted([left, right], key=len)
    return max(
        sum(score(a, b) for a, b in zip(small, chosen, strict=True))
        for chosen in permutations(large, len(small))
    )


@given(patterns, patterns, st.sampled_from([jaccard, jaccard_of_kind]))
def test_no_other_matching_has_a_larger_sum(left, right, score):
    one, other = sheet(*left), sheet(*right)
    found = match(one.patterns, other.patterns, score)
    assert sum(m.jaccard for m in found) == pytest.approx(
        best_sum(one.patterns, other.patterns, score)
    )
    assert len({m.left for m in found}) == len({m.right for m in found}) == len(found)
    assert all(m.jaccard == score(one.patterns[m.left], other.patterns[m.right]) for m in found)


@given(patterns, patterns)
def test_every_pattern_is_one_column_of_the_cells(left, right):
    one, other = sheet(*left), sheet(*right)
    found = match(one.patterns, other.patterns)
    counts = marks_confusion(one, other, N)
    assert counts.sum() == N * (len(left) + len(right) - len(found))
    assert counts[1].sum() == sum(len(marks) for _, marks in left)
    assert counts[:, 1].sum() == sum(len(marks) for _, marks in right)
    shared = sum(len(one.patterns[m.left].marks & other.patterns[m.right].marks) for m in found)
    assert counts[1, 1] == shared


def test_kinds_part_patterns_of_the_same_marks_only_where_asked():
    one, other = sheet(("shallow", {1, 2, 3})), sheet(("semantic", {1, 2, 3}))
    assert match(one.patterns, other.patterns)[0].jaccard == 1
    assert match(one.patterns, other.patterns, jaccard_of_kind) == []
    apart = marks_confusion(one, other, 5, jaccard_of_kind)
    assert np.array_equal(apart, [[4, 3], [3, 0]])


@given(patterns, patterns)
def test_likeness_is_symmetric_between_0_and_1_and_1_of_the_same(left, right):
    one, other = sheet(*left), sheet(*right)
    assert 0 <= likeness(one, other) <= 1
    assert likeness(one, other) == pytest.approx(likeness(other, one))
    assert likeness(one, one) == pytest.approx(1)


def test_two_people_who_see_the_same_agree_fully_whatever_the_order_of_patterns():
    seen = [("shallow", {1, 2, 3}), ("semantic", {3, 4, 5, 6})]
    study = []
    for i in range(5):
        shifted = [(kind, {m + i for m in marks}) for kind, marks in seen]
        study += [judged(f"k{i}", "a", *shifted), judged(f"k{i}", "b", *reversed(shifted))]
    found = marks_agreement(couples(study))
    for name in ("matched_share", "mean_jaccard", "kappa", "alpha"):
        assert found[name] == pytest.approx(1)
    assert found["matches"] == 10
    assert found["chance"]["mean_jaccard"] < 1


def test_a_pattern_that_one_alone_saw_counts_against():
    both = ("shallow", {1, 2, 3, 4})
    study = [judged("k", "a", both), judged("k", "b", both, ("semantic", {10, 11, 12}))]
    found = marks_agreement(couples(study))
    assert found["matched_share"] == pytest.approx(2 / 3)
    assert found["mean_jaccard"] == 1
    assert found["comparisons"] == 50
    assert 0 < found["kappa"] < 1


def test_marks_of_careful_people_agree_more_than_chance_and_careless_ones_less():
    found = [
        marks_agreement(
            couples([j for j in simulated(error, keys=25) if j.item.kind == "triggers"])
        )
        for error in (0.0, 0.05, 0.2)
    ]
    kappas = [row["kappa"] for row in found]
    assert kappas[0] == 1
    assert kappas == sorted(kappas, reverse=True)
    assert all(row["kappa"] <= row["kappa_high"] for row in found)


def test_the_best_matching_of_noise_is_no_more_than_that_of_different_items():
    chance = np.random.default_rng(0)

    def noise():
        return [
            ("shallow", set((1 + chance.choice(25, 6, replace=False)).tolist())) for _ in range(3)
        ]

    noisy = [judged(f"k{i:02}", name, *noise()) for i in range(60) for name in "ab"]
    found = marks_agreement(couples(noisy))
    assert found["mean_jaccard"] > 0.1  # out of nothing: that is why chance stands beside it
    assert found["mean_jaccard"] == pytest.approx(found["chance"]["mean_jaccard"], abs=0.03)
    assert found["kappa"] == pytest.approx(found["chance"]["kappa"], abs=0.06)
