"""Agreement against definitions, published values, other packages and brute force."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ffmem.annotation.agreement import (
    ALIKE,
    NOTHING,
    agreement,
    agreements,
    alpha,
    count_answers,
    jaccard,
    kappa,
    likeness,
    machine_judgments,
    marks_confusion,
    match,
    pairs,
    related_confusion,
    type_confusion,
)
from ffmem.annotation.study import CONTROL, TRIGGERS, Item, Text
from ffmem.cells import Cell
from ffmem.patterns.labels import LABELS
from tests.annotation.kept_patterns import copied, first_three, keep, listed
from tests.annotation.studies import composed, judged, sheet, simulated

# Cohen's κ

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
    assert float(kappa(count_answers(*pair, 4))) == pytest.approx(by_definition(*pair), nan_ok=True)


def test_kappa_is_that_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    chance = np.random.default_rng(0)
    for size in (5, 50, 500):
        one = chance.integers(0, 4, size)
        other = np.where(chance.random(size) < 0.6, one, chance.integers(0, 4, size))
        expected = metrics.cohen_kappa_score(one, other)
        assert float(kappa(count_answers(one.tolist(), other.tolist(), 4))) == pytest.approx(
            expected
        )


def test_the_textbook_example_has_its_value():
    """Fifty grant proposals, two readers: 20 and 15 alike, 5 and 10 not."""
    assert float(kappa(np.array([[20, 5], [10, 15]]))) == pytest.approx(0.4)


@given(answers, st.permutations(range(4)))
def test_kappa_depends_neither_on_who_comes_first_nor_on_names(pair, renamed):
    one, other = pair
    expected = pytest.approx(float(kappa(count_answers(one, other, 4))), nan_ok=True)
    assert float(kappa(count_answers(other, one, 4))) == expected
    again = ([renamed[a] for a in side] for side in pair)
    assert float(kappa(count_answers(*again, 4))) == expected


@given(st.lists(st.integers(0, 3), min_size=2, max_size=30))
def test_perfect_agreement_is_1_and_one_answer_alone_has_no_kappa(same):
    found = float(kappa(count_answers(same, same, 4)))
    assert np.isnan(found) if len(set(same)) == 1 else found == pytest.approx(1)


def test_independent_answers_have_a_kappa_near_0():
    chance = np.random.default_rng(1)
    one, other = chance.choice(3, (2, 20_000), p=[0.7, 0.2, 0.1]).tolist()
    assert abs(float(kappa(count_answers(one, other, 3)))) < 0.03


# Krippendorff's α

PUBLISHED = (
    "1 2 3 3 2 1 4 1 2 . . .",
    "1 2 3 3 2 2 4 1 2 5 . 3",
    ". 3 3 3 2 3 4 2 2 5 1 .",
    "1 2 3 3 2 4 4 1 2 5 1 .",
)
"""Krippendorff, Computing Krippendorff's Alpha-Reliability (2011): nominal α = .743."""


def alpha_of(rows):
    """Return α of answers (people × units, None for missing), each unit being an item."""
    labels = sorted({a for row in rows for a in row if a is not None})
    whole = np.zeros((len(labels), len(labels)))
    for unit in zip(*rows, strict=True):
        there = [labels.index(a) for a in unit if a is not None]
        for i, one in enumerate(there):
            for other in there[:i]:
                counts = count_answers([one], [other], len(labels))
                whole += (counts + counts.T) / (len(there) - 1)
    return float(alpha(whole))


def read(lines):
    return [[None if a == "." else int(a) for a in line.split()] for line in lines]


def test_the_published_example_has_its_published_value():
    assert alpha_of(read(PUBLISHED)) == pytest.approx(0.743, abs=5e-4)


ratings = st.tuples(st.integers(2, 5), st.integers(1, 12)).flatmap(
    lambda shape: st.lists(
        st.lists(st.none() | st.integers(0, 3), min_size=shape[1], max_size=shape[1]),
        min_size=shape[0],
        max_size=shape[0],
    )
)


@given(ratings)
def test_alpha_is_that_of_the_package_whatever_is_missing(rows):
    package = pytest.importorskip("krippendorff")
    paired = [u for u in zip(*rows, strict=True) if sum(a is not None for a in u) > 1]
    assume(len({a for unit in paired for a in unit if a is not None}) > 1)
    data = [[np.nan if a is None else a for a in row] for row in rows]
    expected = package.alpha(reliability_data=data, level_of_measurement="nominal")
    assert alpha_of(rows) == pytest.approx(expected)


def type_sheet(key, name, labels):
    """Return the sheet whose patterns give triggers these labels."""
    marks = {
        kind: {i for i, label in enumerate(labels, 1) if label in (kind, "both")}
        for kind in ("shallow", "semantic")
    }
    return judged(key, name, *((k, m) for k, m in marks.items() if m), n=len(labels))


@given(st.data())
def test_alpha_of_a_study_is_that_of_the_package(data):
    """Items of several triggers, each judged by some of four people."""
    package = pytest.importorskip("krippendorff")
    people, sheets, columns = "abcd", [], []
    for place in range(data.draw(st.integers(1, 6))):
        n = data.draw(st.integers(1, 4))
        names = data.draw(st.sets(st.sampled_from(people), min_size=1))
        unit = {
            name: data.draw(st.lists(st.sampled_from(LABELS), min_size=n, max_size=n))
            for name in names
        }
        sheets += [type_sheet(f"i{place}", name, unit[name]) for name in sorted(names)]
        columns += [
            [LABELS.index(unit[name][i]) if name in unit else np.nan for name in people]
            for i in range(n)
        ]
    paired = [[a for a in column if a == a] for column in columns]
    found = agreement(pairs(sheets), type_confusion)
    if len({a for column in paired if len(column) > 1 for a in column}) < 2:
        assert found["alpha"] is None
        assert found["alpha_why"] in (NOTHING, ALIKE)
        return
    expected = package.alpha(
        reliability_data=np.array(columns, float).T, level_of_measurement="nominal"
    )
    assert found["alpha"] == pytest.approx(expected)


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=2, max_size=9))
def test_neither_the_order_of_people_nor_the_names_of_answers_matter(answers):
    def found(order, swapped):
        sheets = [
            composed(f"c{i}", "abc"[place], row[order[place]] != swapped)
            for i, row in enumerate(answers)
            for place in range(3)
        ]
        row = agreement(pairs(sheets), related_confusion)
        return row["alpha"], row["kappa"], row["agreeing"]

    assert found([2, 0, 1], True) == pytest.approx(found([0, 1, 2], False), nan_ok=True)


def test_perfect_agreement_is_1_with_an_interval_of_1():
    sheets = [composed(f"c{i}", name, i % 3 == 0) for i in range(12) for name in "abc"]
    found = agreement(pairs(sheets), related_confusion)
    for name in ("alpha", "kappa", "agreeing"):
        assert found[name] == 1
    assert (found["alpha_low"], found["alpha_high"]) == pytest.approx((1, 1))
    assert (found["pairs"], found["items"], found["comparisons"]) == (3, 12, 36)


def test_independent_answers_agree_as_chance_would():
    chance = np.random.default_rng(0)
    sheets = [
        composed(f"c{i:04}", name, bool(chance.random() < 0.3)) for i in range(900) for name in "ab"
    ]
    found = agreement(pairs(sheets), related_confusion)
    for name in ("alpha", "kappa"):
        assert abs(found[name]) < 0.1
        assert found[f"{name}_low"] < 0 < found[f"{name}_high"]


def test_what_has_no_number_says_why():
    alone = agreement(pairs([composed("c", "a", True)]), related_confusion)
    assert alone["alpha"] is alone["kappa"] is alone["alpha_low"] is alone["agreeing"] is None
    assert alone["alpha_why"] == alone["kappa_why"] == NOTHING
    alike = agreement(
        pairs([composed(f"c{i}", n, True) for i in range(4) for n in "ab"]), related_confusion
    )
    assert alike["alpha"] is alike["kappa"] is alike["alpha_high"] is None
    assert alike["alpha_why"] == alike["kappa_why"] == ALIKE
    assert alike["agreeing"] == 1


def test_one_item_has_no_interval_and_items_are_the_unit_of_it():
    one = [type_sheet("i", n, ["shallow", "uncovered"] * 5) for n in "ab"]
    found = agreement(pairs(one), type_confusion)
    assert found["alpha"] == 1
    assert found["alpha_low"] is found["alpha_high"] is None
    wide = [
        type_sheet(f"i{i}", name, ["shallow" if i % 2 or name == "b" else "uncovered"] * n)
        for n in (2,)
        for i in range(20)
        for name in "ab"
    ]
    many = [
        type_sheet(f"i{i}", name, ["shallow" if i % 2 or name == "b" else "uncovered"] * 20)
        for i in range(20)
        for name in "ab"
    ]
    narrow, broad = (agreement(pairs(s), type_confusion) for s in (many, wide))
    # Ten times the triggers of the same items say nothing more about other items.
    assert narrow["alpha_high"] - narrow["alpha_low"] == pytest.approx(
        broad["alpha_high"] - broad["alpha_low"], rel=0.1
    )


# Matching of patterns

N = 8
patterns = st.lists(
    st.tuples(
        st.sampled_from(["shallow", "semantic"]), st.sets(st.integers(1, N), min_size=1, max_size=N)
    ),
    max_size=4,
)


def best_sum(left, right):
    """Return the largest sum of likeness over all one-to-one matchings."""
    small, large = sorted([left, right], key=len)
    return max(
        sum(jaccard(a, b) for a, b in zip(small, chosen, strict=True))
        for chosen in permutations(large, len(small))
    )


@given(patterns, patterns)
def test_no_other_matching_has_a_larger_sum(left, right):
    one, other = sheet(*left), sheet(*right)
    found = match(one.patterns, other.patterns)
    assert sum(m.jaccard for m in found) == pytest.approx(best_sum(one.patterns, other.patterns))
    assert len({m.left for m in found}) == len({m.right for m in found}) == len(found)
    assert all(m.jaccard == jaccard(one.patterns[m.left], other.patterns[m.right]) for m in found)


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
    found = agreements(pairs(study))["marks"]
    for name in ("matched_share", "mean_jaccard", "kappa", "alpha"):
        assert found[name] == pytest.approx(1)
    assert found["matches"] == 10
    assert found["chance"]["mean_jaccard"] < 1


def test_a_pattern_that_one_alone_saw_counts_against():
    both = ("shallow", {1, 2, 3, 4})
    study = [judged("k", "a", both), judged("k", "b", both, ("semantic", {10, 11, 12}))]
    found = agreements(pairs(study))["marks"]
    assert found["matched_share"] == pytest.approx(2 / 3)
    assert found["mean_jaccard"] == 1
    assert found["comparisons"] == 50
    assert 0 < found["kappa"] < 1


def test_marks_of_careful_people_agree_more_than_chance_and_careless_ones_less():
    found = [
        agreements(pairs([j for j in simulated(error, keys=25) if j.item.kind == "triggers"]))[
            "marks"
        ]
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
    found = agreements(pairs(noisy))["marks"]
    assert found["mean_jaccard"] > 0.1  # out of nothing: that is why chance stands beside it
    assert found["mean_jaccard"] == pytest.approx(found["chance"]["mean_jaccard"], abs=0.03)
    assert found["kappa"] == pytest.approx(found["chance"]["kappa"], abs=0.06)


# Programs beside people


@pytest.fixture
def own(index, tmp_path):
    return copied(index, tmp_path / "index")


def item_of(index, cell, sign=1, kind=TRIGGERS, most=25):
    shown = [Text(one.prefix, None, None, "") for one in listed(index, Cell.of(cell), sign)]
    return Item(f"{kind} {cell} {sign}", kind, str(cell), sign, tuple(shown[:most]))


def test_a_machine_says_of_an_item_what_is_kept_of_its_list(own):
    keep(own, "automatic", first_three)
    items = [item_of(own, Cell(1, memory)) for memory in range(6)]
    found = machine_judgments(own, items)
    assert [(one.item, one.annotator, one.role) for one in found] == [
        (one, "automatic", "machine") for one in items
    ]
    for one in found:
        expected = first_three(Cell.parse(one.item.cell), 1, len(one.item.texts))
        seen = [(p.kind, sorted(p.marks)) for p in one.sheet.patterns]
        assert seen == [(kind, list(ranks)) for kind, ranks in expected]
        assert one.sheet.no_pattern == (not expected)
        assert one.sheet.done
        assert not one.sheet.problems(one.item)


def test_marks_beyond_the_texts_that_people_saw_do_not_count(own):
    keep(own, "automatic", lambda cell, sign, n: [("shallow", range(1, n + 1))] if n > 3 else [])
    full = next(one for one in own if len(listed(own, one, 1)) > 3)
    (seen,) = machine_judgments(own, [item_of(own, full, most=3)])
    assert seen.sheet.patterns[0].marks == {1, 2, 3}
    (none,) = machine_judgments(own, [item_of(own, full, most=2)])
    assert none.sheet.patterns == ()
    assert none.sheet.no_pattern


def test_the_other_sign_controls_and_unexamined_lists_are_not_the_machines(own):
    keep(
        own, "automatic", lambda cell, sign, n: [("shallow", (1, 2, 3))] if sign < 0 < n - 2 else []
    )
    positive = machine_judgments(own, [item_of(own, "L0N1")])
    assert [one.sheet.patterns for one in positive] == [()]
    assert machine_judgments(own, [item_of(own, "L0N1", kind=CONTROL)]) == []
    assert machine_judgments(own, [item_of(own, "L0N1")._replace(sign=-2)]) == []


def test_peoples_own_patterns_are_no_machines(own):
    keep(own, "human", first_three)
    assert machine_judgments(own, [item_of(own, "L0N1")]) == []
