"""Rows of the database as what they stand for, and the questions that several methods ask."""

import json
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, Subquery, func, select

from ffmem.annotation.item import COMPOSITION, TRIGGERS, Item, Shown
from ffmem.annotation.revisions import sheet_of
from ffmem.annotation.sheet import Sheet
from ffmem.annotation.tables import AssignmentRow, ItemRow, PersonRow, RevisionRow

ANNOTATOR, ADJUDICATOR = "annotator", "adjudicator"
"""The roles."""

ADJUDICATORS = "adjudicators"
"""Whose name the shared sheets bear."""


class Standing(NamedTuple):
    """An item, whose sheet of it this is, and how it stands."""

    item: Item
    annotator: str
    role: str
    version: int
    """0: not begun."""
    saved_at: datetime | None
    sheet: Sheet


def blind(item: Item) -> Item:
    """Return an item as those see it who judge it."""
    return item._replace(kind=shown_kind(item.kind), cell=None, sign=0)


def shown_kind(kind: str) -> str:
    """Return what an item is called before those who judge it: a control is a list."""
    return COMPOSITION if kind == COMPOSITION else TRIGGERS


def belongs_to(name: str, role: str) -> ColumnElement[bool]:
    """Return the condition that an assignment is a person's, or the adjudicators'."""
    if role == ADJUDICATOR:
        return AssignmentRow.person_id.is_(None)
    owner = select(PersonRow.id).where(PersonRow.name == name, PersonRow.role == role)
    return AssignmentRow.person_id == owner.scalar_subquery()


def with_newest(wanted: Select[*tuple[Any, ...]]) -> Select[*tuple[Any, ...]]:
    """Return a question about assignments joined with the newest revision of each, if any."""
    newest = _newest()
    return wanted.outerjoin(newest, newest.c.assignment_id == AssignmentRow.id).outerjoin(
        RevisionRow,
        (RevisionRow.assignment_id == AssignmentRow.id) & (RevisionRow.version == newest.c.version),
    )


def all_sheets() -> Select[*tuple[Any, ...]]:
    """Return every assignment with its item, its person, and its newest revision."""
    wanted = (
        select(ItemRow, PersonRow, RevisionRow)
        .join(AssignmentRow, AssignmentRow.item_id == ItemRow.id)
        .outerjoin(PersonRow, PersonRow.id == AssignmentRow.person_id)
    )
    return with_newest(wanted).order_by(ItemRow.id, AssignmentRow.id)


def standing(row: ItemRow, person: PersonRow | None, newest: RevisionRow | None) -> Standing:
    """Return a row of `all_sheets`."""
    item = item_of(row)
    whose = (ADJUDICATORS, ADJUDICATOR) if person is None else (person.name, person.role)
    if newest is None:
        return Standing(item, *whose, 0, None, Sheet())
    sheet = sheet_of(newest.content, item)
    return Standing(item, *whose, newest.version, newest.saved_at, sheet)


def item_of(row: ItemRow) -> Item:
    """Return the item of a row."""
    texts = tuple(Shown(*text) for text in json.loads(row.texts))
    words = tuple(json.loads(row.words)) if row.words else ()
    return Item(row.key, row.kind, row.cell, row.sign, texts, words)


def _newest() -> Subquery:
    """Return the number of the newest version of every assignment."""
    newest = select(RevisionRow.assignment_id, func.max(RevisionRow.version).label("version"))
    return newest.group_by(RevisionRow.assignment_id).subquery()
