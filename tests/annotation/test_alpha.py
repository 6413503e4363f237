"""Krippendorff's α against the published example, the `krippendorff` package and its laws."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ffmem.annotation.agreement import ALIKE, NOTHING, agreement
from ffmem.annotation.couple import couples
from ffmem.annotation.questions import related_confusion, type_confusion
from ffmem.patterns.store import LABELS
from tests.annotation.studies import composed, judged

PUBLISHED = (
    "1 2 3 3 2 1 4 1 2 . . .",
    "1 2 3 3 2 2 4 1 2 5 . 3",
    ". 3 3 3 2 3 4 2 2 5 1 .",
    "1 2 3 3 2 4 4 1 2 5 1 .",
)
"""Krippendorff, Computing Krippendorff's Alpha-Reliability (2011): nominal α = .743."""


def alpha_of(rows):
    """Return α of answers (people × units, None for missing), each unit being an item."""
    from ffmem.annotation.alpha import alpha
    from ffmem.annotation.questions import counted

    labels = sorted({a for row in rows for a in row if a is not None})
    whole = np.zeros((len(labels), len(labels)))
    for unit in zip(*rows, strict=True):
        there = [labels.index(a) for a in unit if a is not None]
        for i, one in enumerate(there):
            for other in there[:i]:
                counts = counted([one], [other], len(labels))
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


labelled = st.lists(
    st.tuples(st.sets(st.sampled_from("abcd"), min_size=1), st.data()), min_size=1, max_size=8
)


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
    found = agreement(couples(sheets), type_confusion)
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
        row = agreement(couples(sheets), related_confusion)
        return row["alpha"], row["kappa"], row["agreeing"]

    assert found([2, 0, 1], True) == pytest.approx(found([0, 1, 2], False), nan_ok=True)


def test_perfect_agreement_is_1_with_an_interval_of_1():
    sheets = [composed(f"c{i}", name, i % 3 == 0) for i in range(12) for name in "abc"]
    found = agreement(couples(sheets), related_confusion)
    for name in ("alpha", "kappa", "agreeing"):
        assert found[name] == 1
    assert (found["alpha_low"], found["alpha_high"]) == pytest.approx((1, 1))
    assert (found["couples"], found["items"], found["comparisons"]) == (3, 12, 36)


def test_independent_answers_agree_as_chance_would():
    chance = np.random.default_rng(0)
    sheets = [
        composed(f"c{i:04}", name, bool(chance.random() < 0.3)) for i in range(900) for name in "ab"
    ]
    found = agreement(couples(sheets), related_confusion)
    for name in ("alpha", "kappa"):
        assert abs(found[name]) < 0.1
        assert found[f"{name}_low"] < 0 < found[f"{name}_high"]


def test_what_has_no_number_says_why():
    alone = agreement(couples([composed("c", "a", True)]), related_confusion)
    assert alone["alpha"] is alone["kappa"] is alone["alpha_low"] is alone["agreeing"] is None
    assert alone["alpha_why"] == alone["kappa_why"] == NOTHING
    alike = agreement(
        couples([composed(f"c{i}", n, True) for i in range(4) for n in "ab"]), related_confusion
    )
    assert alike["alpha"] is alike["kappa"] is alike["alpha_high"] is None
    assert alike["alpha_why"] == alike["kappa_why"] == ALIKE
    assert alike["agreeing"] == 1


def test_one_item_has_no_interval_and_items_are_the_unit_of_it():
    one = [type_sheet("i", n, ["shallow", "uncovered"] * 5) for n in "ab"]
    found = agreement(couples(one), type_confusion)
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
    narrow, broad = (agreement(couples(s), type_confusion) for s in (many, wide))
    # Ten times the triggers of the same items say nothing more about other items.
    assert narrow["alpha_high"] - narrow["alpha_low"] == pytest.approx(
        broad["alpha_high"] - broad["alpha_low"], rel=0.1
    )
