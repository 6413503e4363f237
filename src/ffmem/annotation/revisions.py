"""The revisions of one sheet: saved, joined, undone, never deleted.

    version 0 is the empty sheet;  a save from the newest version v makes v + 1
    a save from an older one makes merge(sheet of then, sent, sheet of now)
    undo and redo make a new revision with the sheet of an older one

Two saves at once both try to be v + 1: the database lets one of them, the other joins again.
"""

import hashlib
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from ffmem.annotation.item import COMPOSITION, Item
from ffmem.annotation.sheet import Conflict, Sheet, merge
from ffmem.annotation.tables import AssignmentRow, PersonRow, RevisionRow
from ffmem.errors import FfmemError

SAVE, MERGE, IMPORT, UNDO, REDO = "save", "merge", "import", "undo", "redo"
"""What made a revision."""

MOST_REQUEST = 100
"""Characters of the name that a client gives to a save."""


class Unfinished(FfmemError):
    """A sheet cannot be handed in yet; the message says why, and so does each of `problems`."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(" ".join(problems))
        self.problems = problems


class NothingThere(FfmemError):
    """There is nothing to undo, or to redo."""


class Saved(NamedTuple):
    """A sheet as it stands after a save."""

    version: int
    sheet: Sheet
    merged: bool
    """Whether it holds what somebody else saved meanwhile."""


class SaveConflict(Conflict):
    """What was sent and what stands cannot both be; `current` is what stands."""

    def __init__(self, message: str, current: Saved) -> None:
        super().__init__(message)
        self.current = current


class Revision(NamedTuple):
    """One entry of a sheet's history."""

    version: int
    saved_at: datetime
    sheet: Sheet
    what: str
    """SAVE, MERGE, IMPORT, UNDO or REDO."""
    by: str
    """Who saved it."""


class Steps(NamedTuple):
    """Where undo and redo lead."""

    back: list[int]
    """Versions whose sheets undo comes by, the present one last; 0 is the empty sheet."""
    forth: list[int]
    """Versions whose sheets redo comes by, the next one last."""


def steps(made: Iterable[tuple[int, str]]) -> Steps:
    """Return where undo and redo lead after the (version, what) of all revisions in order."""
    back, forth = [0], list[int]()
    for version, what in made:
        if what == UNDO:
            forth.append(back.pop())
        elif what == REDO:
            back.append(forth.pop())
        else:
            back.append(version)
            forth.clear()
    return Steps(back, forth)


class Revisions:
    """The revisions of one assignment, within a session."""

    def __init__(self, session: Session, row: AssignmentRow, item: Item) -> None:
        self._session = session
        self._row = row
        self._item = item

    def now(self) -> Saved:
        """Return the sheet as it stands."""
        newest = self._session.scalars(
            select(RevisionRow)
            .where(RevisionRow.assignment_id == self._row.id)
            .order_by(RevisionRow.version.desc())
            .limit(1)
        ).first()
        return Saved(0, Sheet(), False) if newest is None else self._saved(newest)

    def at(self, version: int) -> Sheet:
        """Return the sheet of a version."""
        if version == 0:
            return Sheet()
        row = self._session.scalars(
            select(RevisionRow).where(
                RevisionRow.assignment_id == self._row.id, RevisionRow.version == version
            )
        ).first()
        if row is None:
            raise FfmemError(
                f"Version {version} of the sheet of {self._item.key} was never saved; the newest"
                f" is {self.now().version}. Load the page again."
            )
        return self._saved(row).sheet

    def steps(self) -> Steps:
        """Return where undo and redo lead."""
        made = self._session.execute(
            select(RevisionRow.version, RevisionRow.what)
            .where(RevisionRow.assignment_id == self._row.id)
            .order_by(RevisionRow.version)
        )
        return steps((version, what) for version, what in made)

    def history(self) -> list[Revision]:
        """Return every revision, the oldest first."""
        rows = self._session.execute(
            select(RevisionRow, PersonRow.name)
            .join(PersonRow, PersonRow.id == RevisionRow.person_id)
            .where(RevisionRow.assignment_id == self._row.id)
            .order_by(RevisionRow.version)
        )
        return [
            Revision(row.version, row.saved_at, self._saved(row).sheet, row.what, name)
            for row, name in rows
        ]

    def save(self, by: int, base: int, sheet: Sheet, request: str, what: str = SAVE) -> Saved:
        """Add what was sent, joined with what was saved since `base`."""
        sent = _digest(what, sheet)
        before = self._sent_before(request, sent)
        if before is not None:
            return before
        refuse_unfit(self._item, sheet)
        start, now = self.at(base), self.now()
        if sheet == start:
            return now  # nothing was changed: there is nothing to undo either
        try:
            joined = merge(start, sheet, now.sheet)
            refuse_unfit(self._item, joined)
        except FfmemError as error:
            raise SaveConflict(str(error), now) from None
        # Somebody else's work is in it only where it is not simply what was sent.
        merged = joined != sheet
        made = MERGE if merged and what == SAVE else what
        return self._add(by, now.version + 1, joined, request, sent, made, merged)

    def step(self, by: int, base: int, request: str, what: str) -> Saved:
        """Add a revision with the sheet that UNDO or REDO leads to."""
        sent = _digest(what, Sheet())
        before = self._sent_before(request, sent)
        if before is not None:
            return before
        now, (back, forth) = self.now(), self.steps()
        if base != now.version:
            raise SaveConflict(
                f"Somebody saved this sheet meanwhile, so there is something else to {what} than"
                " you saw. Look at it, and try again.",
                now,
            )
        targets = back[-2:-1] if what == UNDO else forth[-1:]
        if not targets:
            raise NothingThere(f"There is nothing to {what}.")
        return self._add(by, now.version + 1, self.at(targets[0]), request, sent, what, False)

    def _sent_before(self, request: str, sent: str) -> Saved | None:
        """Return what a request came to, if it was carried out already."""
        if not 0 < len(request) <= MOST_REQUEST or not request.isprintable():
            raise FfmemError(
                f"The name of a request is a text of 1 to {MOST_REQUEST} characters that can be"
                f" printed; {request[:MOST_REQUEST]!r} was given."
            )
        row = self._session.scalars(
            select(RevisionRow).where(
                RevisionRow.assignment_id == self._row.id, RevisionRow.request == request
            )
        ).first()
        if row is None:
            return None
        if row.sent != sent:
            raise SaveConflict(
                f"The request {request!r} was used for another save. Send a new one.", self.now()
            )
        return self._saved(row)

    def _add(
        self, by: int, version: int, sheet: Sheet, request: str, sent: str, what: str, merged: bool
    ) -> Saved:
        self._session.add(
            RevisionRow(
                assignment_id=self._row.id,
                version=version,
                request=request,
                sent=sent,
                what=what,
                person_id=by,
                done=sheet.done,
                content=json.dumps(sheet.to_dict()),
                saved_at=datetime.now(UTC),
            )
        )
        self._session.flush()
        return Saved(version, sheet, merged)

    def _saved(self, row: RevisionRow) -> Saved:
        return Saved(row.version, sheet_of(row.content, self._item), row.what == MERGE)


def sheet_of(content: str, item: Item) -> Sheet:
    """Return the sheet in a row of the database."""
    return Sheet.of(json.loads(content), len(item.texts))


def refuse_unfit(item: Item, sheet: Sheet) -> None:
    """Raise unless a sheet can be about an item, and is finished where it is handed in."""
    # What a client sends was read by `Sheet.of`; what a program makes, and a merge, was not.
    Sheet.of(sheet.to_dict(), len(item.texts))
    if item.kind == COMPOSITION and (sheet.patterns or sheet.no_pattern):
        raise FfmemError("A case of composition has no patterns: say whether it is related.")
    if item.kind != COMPOSITION and sheet.related is not None:
        raise FfmemError("A list of texts has patterns; only two words can be related.")
    problems = sheet.problems(item.kind == COMPOSITION)
    if sheet.done and problems:
        raise Unfinished(problems)


def _digest(what: str, sheet: Sheet) -> str:
    """Return what tells two requests apart that call themselves the same."""
    content = json.dumps([what, sheet.to_dict()], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
