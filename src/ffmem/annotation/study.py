"""A study of patterns: who judges which items, and everything they said, in a database.

Annotators are blind: what `queue` and `open_item` give tells neither a memory from a control, nor
which memory it is. Adjudicators, who share one sheet per item, are as blind. The truth is in
`judged`, which is for the end of the study.
"""

import hmac
import json
import random
import time
from collections.abc import Callable
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from ffmem.annotation import schema
from ffmem.annotation.database import Beaten, Database, closed_on_error
from ffmem.annotation.database import beside as beside
from ffmem.annotation.founding import found_study
from ffmem.annotation.item import Item, Judged
from ffmem.annotation.plan import Plan
from ffmem.annotation.revisions import IMPORT, REDO, SAVE, UNDO, Revision, Revisions, Saved
from ffmem.annotation.rows import (
    ADJUDICATOR,
    ANNOTATOR,
    Standing,
    all_sheets,
    belongs_to,
    blind,
    item_of,
    shown_kind,
    standing,
    with_newest,
)
from ffmem.annotation.sheet import Sheet
from ffmem.annotation.tables import AssignmentRow, ItemRow, PersonRow, RevisionRow, StudyRow
from ffmem.errors import FfmemError

ENOUGH = 2
"""People who must have handed in an item before it is adjudicated, where so many judge it."""

ATTEMPTS = 100
"""How often a save that others come before is tried again."""


class UnknownCode(FfmemError):
    """Nobody has this code."""


class NotAssigned(FfmemError):
    """An item is not for this person to judge."""


class Annotator(NamedTuple):
    """Somebody who takes part in a study."""

    name: str
    code: str
    """A secret: whoever has it is this person."""
    role: str
    """ANNOTATOR or ADJUDICATOR."""


class Task(NamedTuple):
    """An item in somebody's queue."""

    key: str
    kind: str
    """TRIGGERS, for controls too, or COMPOSITION."""
    done: bool
    version: int
    """0: not begun."""
    place: int
    """From 1."""


class Opened(NamedTuple):
    """An item before somebody who judges it."""

    item: Item
    """Blind: without cell, and called TRIGGERS even if it is a control."""
    sheet: Sheet
    version: int
    place: int
    of: int
    can_undo: bool
    can_redo: bool


class Adjudicated(NamedTuple):
    """An item before an adjudicator."""

    item: Item
    sheets: dict[str, Sheet]
    """What was handed in, by name."""
    own: Opened


class Progressed(NamedTuple):
    """How far somebody has come."""

    name: str
    role: str
    done: int
    of: int
    last_saved: datetime | None


class AnnotationStudy:
    """A study in its database; may be used by several threads and processes at once."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def create(cls, url: str | Path, plan: Plan) -> "AnnotationStudy":
        """Return a new study of what was planned; all of it is there, or nothing."""
        with closed_on_error(Database(url)) as database:
            database.make_private()
            with database.writing() as session:
                schema.make(session.connection(), database.name)
                found_study(session, plan)
            return cls(database)

    @classmethod
    def open(cls, url: str | Path) -> "AnnotationStudy":
        """Return the study in a database, whose tables are brought up to date."""
        with closed_on_error(Database(url)) as database:
            if database.is_missing:
                raise schema.no_study(database.name)
            with database.reading() as session:
                current = schema.is_current(session.connection(), database.name)
            if not current:
                with database.writing() as session:
                    schema.bring_up_to_date(session.connection(), database.name)
            return cls(database)

    def __enter__(self) -> "AnnotationStudy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to the database."""
        self._database.close()

    @property
    def name(self) -> str:
        """Where the study is kept, without any password."""
        return self._database.name

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What the study was asked to be, of which index, and what was drawn."""
        with self._database.reading() as session:
            settings: dict[str, Any] = json.loads(session.scalars(select(StudyRow.settings)).one())
        return settings

    def people(self) -> list[Annotator]:
        """Return everybody who takes part, the annotators first."""
        with self._database.reading() as session:
            rows = session.scalars(select(PersonRow).order_by(PersonRow.id)).all()
            return [Annotator(row.name, row.code, row.role) for row in rows]

    def enter(self, code: str) -> Annotator:
        """Return who has a code."""
        given, found = code.encode(errors="replace"), None
        for person in self.people():  # all of them, so that time tells nothing
            if hmac.compare_digest(given, person.code.encode()):
                found = person
        if found is None:
            raise UnknownCode(
                "Nobody in this study has this code. Copy the whole link that you were given, or"
                " ask who runs the study: `ffmem annotate people` tells the codes."
            )
        return found

    def queue(self, person: Annotator) -> list[Task]:
        """Return what a person has to judge, in the person's own order."""
        with self._database.reading() as session:
            return self._queue(session, person)

    def open_item(self, person: Annotator, key: str) -> Opened:
        """Return an item, and the person's sheet of it."""
        with self._database.reading() as session:
            return self._opened(session, person, key)

    def save(self, person: Annotator, key: str, base: int, sheet: Sheet, request: str) -> Saved:
        """Save a sheet that was made from version `base`; the same request twice is one save."""
        return self._changed(person, key, lambda r, by: r.save(by, base, sheet, request, SAVE))

    def undo(self, person: Annotator, key: str, base: int, request: str) -> Saved:
        """Go back to the sheet before, as a new revision."""
        return self._changed(person, key, lambda r, by: r.step(by, base, request, UNDO))

    def redo(self, person: Annotator, key: str, base: int, request: str) -> Saved:
        """Take an undo back, as a new revision."""
        return self._changed(person, key, lambda r, by: r.step(by, base, request, REDO))

    def take_in(self, person: Annotator, key: str, sheet: Sheet, request: str) -> Saved:
        """Save a sheet that was made elsewhere, from an empty one: nothing here gives way to it."""
        return self._changed(
            person, key, lambda r, by: r.save(by, 0, sheet, request, IMPORT), is_open=True
        )

    def history(self, person: Annotator, key: str) -> list[Revision]:
        """Return every revision of the person's sheet of an item, the oldest first."""
        with self._database.reading() as session:
            return self._revisions(session, person, key)[0].history()

    def judged(self, role: str | None = None) -> list[Judged]:
        """Return everything that was handed in, with the truth; not for annotators."""
        return [
            Judged(one.item, one.annotator, one.sheet, one.role)
            for one in self.standing()
            if one.sheet.done and role in (None, one.role)
        ]

    def standing(self) -> list[Standing]:
        """Return every sheet as it stands, begun or not, with the truth; not for annotators."""
        with self._database.reading() as session:
            rows = session.execute(all_sheets()).all()
            return [standing(*row) for row in rows]

    def progress(self) -> list[Progressed]:
        """Return how far everybody has come."""
        with self._database.reading() as session:
            saved = (
                select(PersonRow.name, func.max(RevisionRow.saved_at).label("last"))
                .join(RevisionRow, RevisionRow.person_id == PersonRow.id)
                .group_by(PersonRow.name)
            )
            last = {row.name: row.last for row in session.execute(saved)}
            people = session.scalars(select(PersonRow).order_by(PersonRow.id)).all()
            found = []
            for row in people:
                queue = self._queue(session, Annotator(row.name, row.code, row.role))
                done = sum(task.done for task in queue)
                found.append(Progressed(row.name, row.role, done, len(queue), last.get(row.name)))
            return found

    def adjudication(self, key: str) -> Adjudicated:
        """Return an item with all sheets that were handed in, and that of the adjudicators."""
        with self._database.reading() as session:
            own = self._opened(session, Annotator("", "", ADJUDICATOR), key)
            rows = session.execute(all_sheets().where(ItemRow.key == key))
            handed_in = [standing(*row) for row in rows]
        sheets = {
            one.annotator: one.sheet
            for one in handed_in
            if one.role == ANNOTATOR and one.sheet.done
        }
        return Adjudicated(own.item, sheets, own)

    def _queue(self, session: Session, person: Annotator) -> list[Task]:
        wanted = (
            select(ItemRow.key, ItemRow.kind, AssignmentRow, RevisionRow.done, RevisionRow.version)
            .join(AssignmentRow, AssignmentRow.item_id == ItemRow.id)
            .where(belongs_to(person.name, person.role))
            .order_by(AssignmentRow.place)
        )
        rows = session.execute(with_newest(wanted)).all()
        if person.role == ADJUDICATOR:
            ready = self._ready(session)
            rows = [row for row in rows if row.AssignmentRow.item_id in ready or row.version]
        return [
            Task(row.key, shown_kind(row.kind), bool(row.done), row.version or 0, place)
            for place, row in enumerate(rows, start=1)
        ]

    def _ready(self, session: Session) -> set[int]:
        """Return the items that enough people have handed in."""
        handed_in = with_newest(
            select(AssignmentRow.item_id, RevisionRow.done).select_from(AssignmentRow)
        ).where(AssignmentRow.person_id.is_not(None))
        judges: dict[int, list[bool]] = {}
        for item, done in session.execute(handed_in):
            judges.setdefault(item, []).append(bool(done))
        return {item for item, done in judges.items() if sum(done) >= min(ENOUGH, len(done))}

    def _opened(self, session: Session, person: Annotator, key: str) -> Opened:
        revisions, item = self._revisions(session, person, key)
        queue = self._queue(session, person)
        places = {task.key: task.place for task in queue}
        if key not in places:
            raise NotAssigned(
                f"{key!r} is not open to adjudicators yet: fewer than {ENOUGH} people have handed"
                " it in."
            )
        now, (back, forth) = revisions.now(), revisions.steps()
        can_undo, can_redo = len(back) > 1, bool(forth)
        place = places[key]
        return Opened(blind(item), now.sheet, now.version, place, len(queue), can_undo, can_redo)

    def _revisions(
        self, session: Session, person: Annotator, key: str, locked: bool = False
    ) -> tuple[Revisions, Item]:
        wanted = (
            select(AssignmentRow, ItemRow)
            .join(ItemRow, ItemRow.id == AssignmentRow.item_id)
            .where(ItemRow.key == key, belongs_to(person.name, person.role))
        )
        if locked:  # not against those who only refer to the row: that could be a deadlock
            wanted = wanted.with_for_update(of=AssignmentRow, key_share=True)
        row = session.execute(wanted).first()
        if row is None:
            raise NotAssigned(
                f"{key!r} is no item that is for {person.name or 'adjudicators'} to judge."
                " Go back to the queue and choose one there."
            )
        item = item_of(row.ItemRow)
        return Revisions(session, row.AssignmentRow, item), item

    def _changed(
        self,
        person: Annotator,
        key: str,
        change: Callable[[Revisions, int], Saved],
        is_open: bool = False,
    ) -> Saved:
        """Return what a change came to; where somebody was faster, it is made again on theirs."""
        for attempt in range(ATTEMPTS):
            try:
                with self._database.writing() as session:
                    # Whoever lost once waits in line, so that nobody loses for ever.
                    revisions, _ = self._revisions(session, person, key, locked=attempt > 0)
                    if person.role == ADJUDICATOR and not is_open:
                        self._opened(session, person, key)
                    by = select(PersonRow.id).where(PersonRow.name == person.name)
                    return change(revisions, session.scalars(by).one())
            except (IntegrityError, Beaten):
                time.sleep(random.uniform(0, 0.02))
        raise FfmemError(f"Too many are saving {key!r} at once. Nothing is lost: save again.")
