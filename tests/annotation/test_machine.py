"""Machines' patterns as sheets of the items that people judged."""

import pytest

from ffmem.annotation.item import CONTROL, TRIGGERS, Item, Shown
from ffmem.annotation.machine import kept_agreements, machine_judged
from ffmem.cells import Cell
from tests.annotation.kept_patterns import copied, first_three, keep, listed


@pytest.fixture
def own(index, tmp_path):
    return copied(index, tmp_path / "index")


def item(index, cell, sign=1, kind=TRIGGERS, most=25):
    shown = [Shown(one.prefix, None, None, "") for one in listed(index, Cell.of(cell), sign)]
    return Item(f"{kind} {cell} {sign}", kind, str(cell), sign, tuple(shown[:most]))


def test_a_machine_says_of_an_item_what_is_kept_of_its_list(own):
    keep(own, "automatic", first_three)
    items = [item(own, Cell(1, memory)) for memory in range(6)]
    found = machine_judged(own, items)
    assert [(one.item, one.annotator, one.role) for one in found] == [
        (one, "automatic", "machine") for one in items
    ]
    for one in found:
        expected = first_three(Cell.parse(one.item.cell), 1, len(one.item.texts))
        seen = [(p.kind, sorted(p.marks)) for p in one.sheet.patterns]
        assert seen == [(kind, list(ranks)) for kind, ranks in expected]
        assert one.sheet.no_pattern == (not expected)
        assert one.sheet.done
        assert not one.sheet.problems()


def test_marks_beyond_the_texts_that_people_saw_do_not_count(own):
    keep(own, "automatic", lambda cell, sign, n: [("shallow", range(1, n + 1))] if n > 3 else [])
    full = next(one for one in own if len(listed(own, one, 1)) > 3)
    (seen,) = machine_judged(own, [item(own, full, most=3)])
    assert seen.sheet.patterns[0].marks == {1, 2, 3}
    (none,) = machine_judged(own, [item(own, full, most=2)])
    assert none.sheet.patterns == ()
    assert none.sheet.no_pattern


def test_the_other_sign_controls_and_unexamined_lists_are_not_the_machines(own):
    keep(
        own, "automatic", lambda cell, sign, n: [("shallow", (1, 2, 3))] if sign < 0 < n - 2 else []
    )
    positive = machine_judged(own, [item(own, "L0N1")])
    assert [one.sheet.patterns for one in positive] == [()]
    assert machine_judged(own, [item(own, "L0N1", kind=CONTROL)]) == []
    assert machine_judged(own, [item(own, "L0N1")._replace(sign=-2)]) == []


def test_peoples_own_patterns_are_no_machines(own):
    keep(own, "human", first_three)
    assert machine_judged(own, [item(own, "L0N1")]) == []
    assert kept_agreements(own) == {}


def test_every_machine_is_compared_with_people_where_both_are_kept(own):
    keep(own, "human", first_three)
    keep(own, "automatic", first_three)
    keep(own, "explained", lambda cell, sign, n: [])
    found = kept_agreements(own)
    assert set(found) == {"automatic_human", "explained_human"}
    for question in ("coverage", "type", "marks"):
        assert found["automatic_human"][question]["alpha"] == pytest.approx(1)
    assert found["explained_human"]["coverage"]["kappa"] == pytest.approx(0)
    assert found["explained_human"]["marks"]["matched_share"] == 0
