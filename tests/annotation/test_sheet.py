"""Laws of joining two changes of a sheet, and what a sheet must be to be read or handed in."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ffmem.annotation.sheet import (
    MOST_CHARACTERS,
    MOST_PATTERNS,
    Conflict,
    Sheet,
    SheetPattern,
    merge,
)
from ffmem.errors import FfmemError

N = 8

marks = st.frozensets(st.integers(1, N))
texts = st.sampled_from(["", "ends with press", "news"])
kinds = st.sampled_from([None, "shallow", "semantic"])


def patterns(texts=texts, kinds=kinds):
    one = st.tuples(st.sampled_from("abcd"), texts, kinds, marks)
    return st.lists(one, max_size=4, unique_by=lambda pattern: pattern[0])


def made(content):
    """Return a sheet; made in the test, since checked types may not be made within strategies."""
    listed, *rest = content
    return Sheet(tuple(SheetPattern(*one) for one in listed), *rest)


sheets = st.tuples(
    patterns(), st.booleans(), st.sampled_from([None, True, False]), texts, st.booleans()
)
marked = st.tuples(patterns(st.just("x"), st.just("shallow")))
"""Sheets that differ in patterns and marks only: these never conflict."""


@given(sheets, sheets)
def test_where_one_changed_nothing_the_others_sheet_stands_to_the_letter(base, changed):
    base, changed = map(made, (base, changed))
    assert merge(base, changed, base) == changed
    assert merge(base, base, changed) == changed
    assert merge(base, changed, changed) == changed


@given(marked, marked, marked)
def test_a_mark_that_somebody_set_and_nobody_took_away_is_there(base, mine, theirs):
    base, mine, theirs = map(made, (base, mine, theirs))
    joined = {pattern.id: pattern.marks for pattern in merge(base, mine, theirs).patterns}

    def all_marks(sheet):
        return {(pattern.id, mark) for pattern in sheet.patterns for mark in pattern.marks}

    for id, mark in all_marks(mine) | all_marks(theirs):
        taken = any(
            (id, mark) in all_marks(base) and (id, mark) not in all_marks(side)
            for side in (mine, theirs)
        )
        if not taken:
            assert mark in joined[id]


@given(marked, marked, marked)
def test_a_mark_that_somebody_took_away_is_gone_where_both_kept_the_pattern(base, mine, theirs):
    base, mine, theirs = map(made, (base, mine, theirs))
    sides = [{p.id: p.marks for p in sheet.patterns} for sheet in (base, mine, theirs)]
    before, one, other = sides
    for pattern in merge(base, mine, theirs).patterns:
        if all(pattern.id in side for side in sides):
            taken = before[pattern.id] - (one[pattern.id] & other[pattern.id])
            assert not pattern.marks & taken


@given(marked, marked, marked)
def test_who_comes_first_makes_no_difference_but_to_the_order(base, mine, theirs):
    base, mine, theirs = map(made, (base, mine, theirs))
    one, other = merge(base, mine, theirs), merge(base, theirs, mine)
    assert set(one.patterns) == set(other.patterns)
    assert replace(one, patterns=()) == replace(other, patterns=())


@given(sheets, sheets, sheets)
def test_what_both_changed_differently_is_a_conflict_and_nothing_else_is(base, mine, theirs):
    base, mine, theirs = map(made, (base, mine, theirs))
    pairs = [(base, mine, theirs)]
    by_id = [{p.id: p for p in sheet.patterns} for sheet in (base, mine, theirs)]
    for id in by_id[1].keys() & by_id[2].keys():
        pairs.append(tuple(side.get(id, SheetPattern(id)) for side in by_id))
    clash = any(
        len({getattr(side, name) for side in three}) == 3
        for three in pairs
        for name in ("description", "kind", "note", "related")
        if hasattr(three[0], name)
    )
    if clash:
        with pytest.raises(Conflict, match=r"changed .* Look at both"):
            merge(base, mine, theirs)
    else:
        merge(base, mine, theirs)


@given(sheets, sheets, sheets)
def test_what_two_made_together_is_handed_in_only_if_it_is_finished(base, mine, theirs):
    base, mine, theirs = map(made, (base, mine, theirs))
    assume(mine not in (base, theirs) and theirs != base)
    try:
        joined = merge(base, mine, theirs)
    except Conflict:
        return
    assert not joined.done or not joined.problems(joined.related is not None)


def test_a_pattern_that_one_removed_and_the_other_changed_stays():
    pattern = SheetPattern("a", "x", "shallow", frozenset({1}))
    base, removed = Sheet((pattern,)), Sheet()
    changed = Sheet((replace(pattern, marks=frozenset({1, 2})),))
    assert merge(base, removed, changed).patterns == changed.patterns
    assert merge(base, changed, removed).patterns == changed.patterns
    assert merge(base, removed, replace(base, note="n")).patterns == ()


@given(sheets)
def test_a_sheet_is_the_same_after_a_round_trip(sheet):
    sheet = made(sheet)
    assert Sheet.of(sheet.to_dict(), N) == sheet


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        {"mark": 1},
        {"patterns": {}},
        {"patterns": [None]},
        {"patterns": [{"id": "a"}, {"id": "a"}]},
        {"patterns": [{"id": str(i)} for i in range(MOST_PATTERNS + 1)]},
        {"patterns": [{"id": ""}]},
        {"patterns": [{"id": "a\n"}]},
        {"patterns": [{"id": 3}]},
        {"patterns": [{"id": "a", "colour": 1}]},
        {"patterns": [{"id": "a", "kind": "deep"}]},
        {"patterns": [{"id": "a", "marks": [0]}]},
        {"patterns": [{"id": "a", "marks": [N + 1]}]},
        {"patterns": [{"id": "a", "marks": [True]}]},
        {"patterns": [{"id": "a", "marks": ["1"]}]},
        {"patterns": [{"id": "a", "marks": 1}]},
        {"patterns": [{"id": "a", "description": None}]},
        {"note": "x" * (MOST_CHARACTERS + 1)},
        {"note": "a\x00b"},
        {"note": "half a pair \ud83d"},
        {"done": 1},
        {"no_pattern": None},
        {"related": 1},
        {"related": 0},
        {"related": "yes"},
    ],
    ids=repr,
)
def test_anything_odd_is_refused(content):
    with pytest.raises(FfmemError, match=r"\.$"):
        Sheet.of(content, N)


def test_what_is_not_said_is_empty():
    assert Sheet.of({}, N) == Sheet()


GOOD = SheetPattern("a", "ends with press", "shallow", frozenset({1, 2, 3}))


@pytest.mark.parametrize(
    ("sheet", "sentence"),
    [
        (Sheet(), "Describe a pattern, or say that there is none."),
        (Sheet((GOOD,), no_pattern=True), "remove one or the other"),
        (Sheet((replace(GOOD, description=" "),)), "Pattern 1 has no description."),
        (Sheet((GOOD, replace(GOOD, id="b", kind=None))), "Pattern 2 is neither called"),
        (Sheet((replace(GOOD, marks=frozenset({1, 2})),)), "marked in 2 of the texts; a pattern"),
        (Sheet((GOOD, replace(GOOD, id="b", description=" Ends with PRESS"))), "say the same"),
    ],
)
def test_what_is_missing_is_said_in_a_sentence(sheet, sentence):
    assert any(sentence in problem for problem in sheet.problems())


def test_a_finished_sheet_has_no_problems():
    assert Sheet((GOOD,)).problems() == []
    assert Sheet(no_pattern=True).problems() == []
    assert Sheet(related=False).problems(is_composition=True) == []
    assert Sheet(no_pattern=True).problems(is_composition=True) != []
