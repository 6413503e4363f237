"""A study: the items that people judge and every revision of their sheets, in one SQLite file.

    item      a list of texts, or a case of composition
    sheet     what one person says about one item; adjudicators share one sheet per item
    revision  a sheet as it was saved; rows are added, never changed or deleted

    version 0 is the empty sheet;  a save from the newest version v makes v + 1
    a save from any other version is a conflict, unless it says what the newest version says

So nobody overwrites a version they have not seen, and repeated saves are idempotent.

People who judge are blind: `queue` and `open_item` tell neither a memory from a control nor which
memory it is. The truth is in `judgments`, for when the study is over.
"""

import hmac
import json
import re
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from ffmem.errors import FfmemError, StorageFull, StoreError
from ffmem.indexing.store import Index, as_index
from ffmem.patterns.store import MIN_TRIGGERS
from ffmem.signatures import check_arguments

TRIGGERS, CONTROL, COMPOSITION = "triggers", "control", "composition"
"""Kinds of items: a memory's triggers, random prefixes, two words of a composition."""

ANNOTATOR, ADJUDICATOR, MACHINE = "annotator", "adjudicator", "machine"
"""Roles."""

ADJUDICATORS = "adjudicators"
"""The owner of the sheets that all adjudicators share."""

READY = 2
"""Annotators who must have handed in an item before it is adjudicated, if it has that many."""

MAX_PATTERNS = 30
MAX_CHARACTERS = 500
"""Maximum length of a description or a note."""

BUSY_SECONDS = 30
"""How long a transaction waits for others."""

BREAK_SECONDS = 300
"""Who saves nothing for so long does something else."""

APPLICATION_ID = 0x66666D61  # "ffma"
FORMAT = 1

SCHEMA = """
CREATE TABLE study (settings TEXT NOT NULL, created_at TEXT NOT NULL);
CREATE TABLE person (name TEXT PRIMARY KEY, code TEXT NOT NULL UNIQUE, role TEXT NOT NULL);
CREATE TABLE item (key TEXT PRIMARY KEY, kind TEXT NOT NULL, cell TEXT, sign INTEGER NOT NULL,
                   texts TEXT NOT NULL, words TEXT NOT NULL);
CREATE TABLE assignment (key TEXT NOT NULL REFERENCES item, owner TEXT NOT NULL,
                         place INTEGER NOT NULL, PRIMARY KEY (key, owner));
CREATE TABLE revision (key TEXT NOT NULL, owner TEXT NOT NULL, version INTEGER NOT NULL,
                       saved_by TEXT NOT NULL, saved_at TEXT NOT NULL, sheet TEXT NOT NULL,
                       done INTEGER NOT NULL, PRIMARY KEY (key, owner, version),
                       FOREIGN KEY (key, owner) REFERENCES assignment);
"""

COLUMNS = "a.key, a.owner, a.place, r.version, r.saved_by, r.saved_at, r.sheet"
WITH_NEWEST = """
FROM assignment a LEFT JOIN revision r ON r.key = a.key AND r.owner = a.owner AND r.version =
    (SELECT max(version) FROM revision WHERE key = a.key AND owner = a.owner)
"""
NEWEST = f"SELECT {COLUMNS} {WITH_NEWEST}"


class StudyExists(StoreError):
    """The file holds a study already."""


class NoStudy(StoreError):
    """There is no study in the file."""


class UnknownCode(FfmemError):
    """The code is unknown."""


class NotAssigned(FfmemError):
    """This person does not judge this item."""


class SaveConflict(FfmemError):
    """The sheet was saved from elsewhere in the meantime; `newest` is the current version."""

    def __init__(self, newest: "Judgment") -> None:
        super().__init__(
            f"This sheet was changed elsewhere: version {newest.version} is newer. Look at it, then"
            " accept it or overwrite it."
        )
        self.newest = newest


class Text(NamedTuple):
    """A prefix, its last token, its next token, and the rest of the sentence."""

    prefix: str
    last_token: str | None
    next_token: str | None
    rest: str


class Item(NamedTuple):
    """One thing to judge."""

    key: str
    """A random name that reveals nothing."""
    kind: str
    """TRIGGERS, CONTROL or COMPOSITION."""
    cell: str | None
    """The memory, for TRIGGERS; the memory whose place a CONTROL takes."""
    sign: int
    """Sign of the coefficients in the list."""
    texts: tuple[Text, ...]
    """By rank; the one prefix of a case of composition."""
    words: tuple[str, ...] = ()
    """For a case of composition: top tokens of residual, feed-forward part and output."""

    @property
    def is_composition(self) -> bool:
        """Whether the question is about two words, not about patterns."""
        return self.kind == COMPOSITION

    def blind(self) -> "Item":
        """Return the item as people who judge it see it."""
        return self._replace(
            kind=COMPOSITION if self.is_composition else TRIGGERS, cell=None, sign=0
        )


def _storable(text: str) -> str:
    if re.search("[\x00\ud800-\udfff]", text):  # half of a surrogate pair is not UTF-8
        raise ValueError("holds characters that cannot be stored")
    return text


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be printable")
    return text


ShortText = Annotated[str, Field(max_length=MAX_CHARACTERS), AfterValidator(_storable)]


@dataclass(frozen=True)
class SheetPattern:
    """A pattern as an annotator describes it."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    id: Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_printable)]
    """Unique within the sheet; chosen by the client."""
    description: ShortText = ""
    kind: Literal["shallow", "semantic"] | None = None
    """None until an annotator answers."""
    marks: frozenset[int] = frozenset()
    """Texts that show it, from 1."""


@dataclass(frozen=True)
class Sheet:
    """One annotator's judgment of an item so far."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    patterns: Annotated[tuple[SheetPattern, ...], Field(max_length=MAX_PATTERNS)] = ()
    no_pattern: bool = False
    """The answer "there is no pattern here"."""
    related: bool | None = None
    """For a case of composition: whether the two words are related."""
    note: ShortText = ""
    done: bool = False
    """Handed in. It can be taken back."""

    def to_dict(self) -> dict[str, Any]:
        """Return the sheet as JSON."""
        patterns = [{**vars(one), "marks": sorted(one.marks)} for one in self.patterns]
        return {**vars(self), "patterns": patterns}

    @classmethod
    def parse(cls, content: Any, item: Item) -> "Sheet":
        """Return the sheet with this JSON; raise unless it can be about the item."""
        try:
            sheet = _SHEETS.validate_json(json.dumps(content), strict=True)
        except ValidationError as error:
            found = error.errors()[0]
            place = ".".join(map(str, found["loc"])) or "the sheet"
            raise FfmemError(f"The sheet is not valid: {place}: {found['msg']}.") from None
        n = len(item.texts)
        if len({pattern.id for pattern in sheet.patterns}) < len(sheet.patterns):
            raise FfmemError("Two patterns of the sheet have the same id.")
        if any(not 1 <= mark <= n for pattern in sheet.patterns for mark in pattern.marks):
            raise FfmemError(f"The marks of a pattern are numbers of texts, 1 to {n}.")
        if item.is_composition and (sheet.patterns or sheet.no_pattern):
            raise FfmemError("A case of composition has no patterns. Answer related or distant.")
        if not item.is_composition and sheet.related is not None:
            raise FfmemError("A list of texts has patterns. Only two words can be related.")
        return sheet

    def check(self, item: Item) -> None:
        """Raise unless the sheet can be about an item, and is finished if it is handed in."""
        self.parse(self.to_dict(), item)
        problems = self.problems(item)
        if self.done and problems:
            raise FfmemError(f"The sheet cannot be handed in yet. {' '.join(problems)}")

    def problems(self, item: Item) -> list[str]:
        """Return why the sheet cannot be handed in yet, one sentence each."""
        if item.is_composition:
            return [] if self.related is not None else ["Choose whether the two words are related."]
        if self.no_pattern and self.patterns:
            return [
                "“No pattern here” is checked, but there are patterns. Remove one or the other."
            ]
        if not self.patterns and not self.no_pattern:
            return ["Describe a pattern, or say that there is none."]
        found = []
        first: dict[tuple[str, str | None], int] = {}
        for number, pattern in enumerate(self.patterns, start=1):
            words = pattern.description.strip().casefold()
            if not words:
                found.append(f"Pattern {number} has no description.")
            if pattern.kind is None:
                found.append(f"Pattern {number} is not marked shallow or semantic.")
            if len(pattern.marks) < MIN_TRIGGERS:
                found.append(
                    f"Pattern {number} is marked in {len(pattern.marks)} of the texts; a pattern"
                    f" occurs in at least {MIN_TRIGGERS}."
                )
            earlier = first.setdefault((words, pattern.kind), number)
            if words and earlier != number:
                found.append(f"Patterns {earlier} and {number} are the same. Keep one of them.")
        return found


_SHEETS = TypeAdapter(Sheet)


class Judgment(NamedTuple):
    """An item, and what one person or program says about it; or a revision of that."""

    item: Item
    annotator: str
    """A name; ADJUDICATORS for their shared sheet."""
    sheet: Sheet
    role: str = ANNOTATOR
    version: int = 0
    """0: not begun."""
    saved_at: str | None = None
    place: int = 0
    """In the person's queue, from 1."""
    saved_by: str | None = None
    """A name, or `import`."""


class Person(NamedTuple):
    """A participant of a study."""

    name: str
    code: str
    """Secret: it authenticates this person."""
    role: str

    @property
    def owner(self) -> str:
        """Whose sheets the person edits."""
        return ADJUDICATORS if self.role == ADJUDICATOR else self.name


class PersonProgress(NamedTuple):
    """One person's progress."""

    name: str
    role: str
    done: int
    of: int
    last_saved: str | None
    seconds_per_item: float | None
    """Median working time of the items handed in; None before the first."""


class Plan(NamedTuple):
    """What a new study holds."""

    items: tuple[Item, ...]
    orders: dict[str, tuple[str, ...]]
    """Keys of the items that each annotator judges, in that annotator's order."""
    adjudicators: tuple[str, ...]
    settings: dict[str, Any]


class AnnotationStudy:
    """A study in its file. Threads and processes may use it at the same time."""

    def __init__(self, path: str | Path) -> None:
        if "://" in str(path):
            raise StoreError("A study is a SQLite file: pass its path, not a URL.")
        self.path = Path(path).resolve()

    @classmethod
    def create(cls, path: str | Path, plan: Plan) -> "AnnotationStudy":
        """Write a new study, whole or not at all, readable by its owner only: it holds codes."""
        study = cls(path)
        try:
            study.path.touch(mode=0o600)
        except OSError as error:
            raise StoreError(
                f"Cannot create the study {study.path} ({error.strerror}). Its folder must exist"
                " and be writable."
            ) from None
        with study._transaction(writing=True) as db:
            if _is_study(db, study.path):
                raise StudyExists(
                    f"{study.path} already holds a study, which was not changed. Choose another"
                    " file with --db, or move this one away."
                )
            for statement in SCHEMA.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {FORMAT}")
            _insert_plan(db, plan)
        return study

    @classmethod
    def open(cls, path: str | Path) -> "AnnotationStudy":
        """Return the study in a file."""
        study = cls(path)
        if study.path.exists():
            with study._transaction() as db:
                if _is_study(db, study.path):
                    return study
        raise NoStudy(f"There is no study in {study.path}. Create one with `ffmem annotate init`.")

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The options, the index, and what was drawn."""
        with self._transaction() as db:
            settings: dict[str, Any] = json.loads(db.execute("SELECT * FROM study").fetchone()[0])
        return settings

    @cached_property
    def items(self) -> dict[str, Item]:
        """All items by key, with the truth. They never change."""
        with self._transaction() as db:
            rows = db.execute("SELECT key, kind, cell, sign, texts, words FROM item").fetchall()
        return {
            key: Item(key, kind, cell, sign, _parse_texts(texts), tuple(json.loads(words)))
            for key, kind, cell, sign, texts, words in rows
        }

    def people(self) -> list[Person]:
        """Return all participants, annotators first."""
        with self._transaction() as db:
            rows = db.execute("SELECT name, code, role FROM person ORDER BY rowid").fetchall()
        return [Person(*row) for row in rows]

    def find_person(self, code: str) -> Person:
        """Return the person with a code."""
        given, found = code.encode(errors="replace"), None
        for person in self.people():  # compare with all of them: the time must reveal nothing
            if hmac.compare_digest(given, person.code.encode()):
                found = person
        if found is None:
            raise UnknownCode(
                "Nobody in this study has this code. Copy your whole link, or ask the person who"
                " runs the study: `ffmem annotate people` prints the codes."
            )
        return found

    def judgments(self, owner: str | None = None, key: str | None = None) -> list[Judgment]:
        """Return every sheet, or those of an owner or item, with the truth. Not for annotators."""
        wanted = "WHERE a.owner = coalesce(:owner, a.owner) AND a.key = coalesce(:key, a.key)"
        with self._transaction() as db:
            rows = db.execute(
                f"{NEWEST} {wanted} ORDER BY a.rowid", {"owner": owner, "key": key}
            ).fetchall()
        return [self._judgment(*row) for row in rows]

    def handed_in(self) -> list[Judgment]:
        """Return the sheets that were handed in, with the truth."""
        return [one for one in self.judgments() if one.sheet.done]

    def queue(self, person: Person) -> list[Judgment]:
        """Return what a person judges, blind, in the person's order.

        Adjudicators judge what two annotators, or all of its annotators, have handed in.
        """
        own = self.judgments(person.owner)
        if person.role == ADJUDICATOR:
            ready = self._ready()
            own = [one for one in own if one.item.key in ready or one.version]
        own.sort(key=lambda one: one.place)
        return [
            one._replace(item=one.item.blind(), place=place) for place, one in enumerate(own, 1)
        ]

    def open_item(self, person: Person, key: str) -> Judgment:
        """Return an item that a person judges, blind."""
        found = self.judgments(person.owner, key) if key in self.items else []
        if not found:
            raise NotAssigned(
                f"There is no item {key[:40]!r} for {person.name} to judge. Choose one from your"
                " list."
            )
        if person.role == ADJUDICATOR and not found[0].version and key not in self._ready():
            raise NotAssigned(
                f"Item {key} is not ready: fewer than {READY} annotators have handed it in."
            )
        return found[0]._replace(item=found[0].item.blind())

    def sheets(self, key: str) -> dict[str, Sheet]:
        """Return what annotators handed in about an item, by name."""
        return {
            one.annotator: one.sheet
            for one in self.judgments(key=key)
            if one.sheet.done and one.role == ANNOTATOR
        }

    def save(self, person: Person, key: str, base: int, sheet: Sheet) -> Judgment:
        """Save a sheet that was made from version `base`; return the current one."""
        opened = self.open_item(person, key)
        sheet.check(opened.item)
        with self._transaction(writing=True) as db:
            now = self._newest(db, key, person.owner)
            if sheet != now.sheet:  # else a save that was sent twice
                if base != now.version:
                    raise SaveConflict(now._replace(item=opened.item))
                now = self._insert(db, now, sheet, person.name)
        return now._replace(item=opened.item)

    def import_sheet(self, owner: str, key: str, sheet: Sheet) -> bool:
        """Save a sheet from elsewhere if nothing was saved here yet; return whether it was saved.

        A sheet that was saved here once is not saved again; any other is a conflict.
        """
        sheet.check(self.items[key])
        with self._transaction(writing=True) as db:
            now = self._newest(db, key, owner)
            known = [Sheet(), *(one.sheet for one in self._history(db, key, owner))]
            if sheet in known:
                return False
            if now.version:
                raise SaveConflict(now)
            self._insert(db, now, sheet, "import")
        return True

    def history(self, owner: str, key: str) -> list[Judgment]:
        """Return every revision of a sheet, oldest first."""
        with self._transaction() as db:
            return self._history(db, key, owner)

    def progress(self) -> list[PersonProgress]:
        """Return everyone's progress."""
        with self._transaction() as db:
            rows = db.execute("SELECT saved_by, max(saved_at) FROM revision GROUP BY saved_by")
            last = dict(rows.fetchall())
        found, times = [], self.seconds_per_item()
        for person in self.people():
            queue = self.queue(person)
            done = sum(one.sheet.done for one in queue)
            name = person.name
            found.append(
                PersonProgress(name, person.role, done, len(queue), last.get(name), times.get(name))
            )
        return found

    def seconds_per_item(self) -> dict[str, float]:
        """Return each person's median working time of an item that they handed in.

            time of an item = Σ (save of the item − the person's save before), without breaks

        The page saves every change, so what is missing is the reading after a break, up to the
        first change. Saves of an import count for nobody.
        """
        with self._transaction() as db:
            rows = db.execute(
                "SELECT saved_by, key, saved_at, done FROM revision WHERE saved_by != 'import'"
                " ORDER BY saved_by, saved_at, version"
            ).fetchall()
        found = {}
        for name, group in groupby(rows, key=itemgetter(0)):
            saves = [(key, datetime.fromisoformat(at), done) for _, key, at, done in group]
            handed_in = {key for key, _, done in saves if done}
            seconds: dict[str, float] = {}
            for (_, before, _), (key, now, _) in pairwise(saves):
                passed = (now - before).total_seconds()
                if key in handed_in and passed <= BREAK_SECONDS:
                    seconds[key] = seconds.get(key, 0.0) + passed
            if seconds:
                found[name] = median(seconds.values())
        return found

    def _judgment(
        self,
        key: str,
        owner: str,
        place: int,
        version: int | None,
        saved_by: str | None,
        saved_at: str | None,
        sheet: str | None,
    ) -> Judgment:
        item = self.items[key]
        role = ADJUDICATOR if owner == ADJUDICATORS else ANNOTATOR
        filled = Sheet() if sheet is None else Sheet.parse(json.loads(sheet), item)
        return Judgment(item, owner, filled, role, version or 0, saved_at, place, saved_by)

    def _ready(self) -> set[str]:
        """Return the items that enough annotators have handed in."""
        with self._transaction() as db:
            rows = db.execute(
                f"SELECT a.key {WITH_NEWEST} WHERE a.owner != ? GROUP BY a.key"
                " HAVING coalesce(sum(r.done), 0) >= min(?, count(*))",
                (ADJUDICATORS, READY),
            ).fetchall()
        return {key for (key,) in rows}

    def _newest(self, db: sqlite3.Connection, key: str, owner: str) -> Judgment:
        row = db.execute(f"{NEWEST} WHERE a.key = ? AND a.owner = ?", (key, owner)).fetchone()
        return self._judgment(*row)

    def _history(self, db: sqlite3.Connection, key: str, owner: str) -> list[Judgment]:
        rows = db.execute(
            f"SELECT {COLUMNS} FROM assignment a JOIN revision r USING (key, owner)"
            " WHERE key = ? AND owner = ? ORDER BY r.version",
            (key, owner),
        ).fetchall()
        return [self._judgment(*row) for row in rows]

    def _insert(
        self, db: sqlite3.Connection, before: Judgment, sheet: Sheet, saved_by: str
    ) -> Judgment:
        """Add a revision after the newest one."""
        saved_at = datetime.now(UTC).isoformat()
        now = before._replace(
            sheet=sheet, version=before.version + 1, saved_by=saved_by, saved_at=saved_at
        )
        content = json.dumps(sheet.to_dict())
        db.execute(
            "INSERT INTO revision VALUES (?, ?, ?, ?, ?, ?, ?)",
            (now.item.key, now.annotator, now.version, saved_by, saved_at, content, sheet.done),
        )
        return now

    @contextmanager
    def _transaction(self, writing: bool = False) -> Iterator[sqlite3.Connection]:
        """Give a connection of its own; what the block did is committed when it ends, or undone.

        A connection per transaction needs no locks between threads, and finds a file that was
        moved away. After the commit the data is on the disk (synchronous=EXTRA).
        """
        try:
            with closing(
                sqlite3.connect(
                    f"{self.path.as_uri()}?mode=rw",
                    uri=True,
                    timeout=BUSY_SECONDS,
                    isolation_level=None,
                )
            ) as db:
                db.execute("PRAGMA synchronous = EXTRA")
                db.execute("PRAGMA foreign_keys = ON")
                # Take the write lock first: a reader cannot become a writer while others write.
                db.execute("BEGIN IMMEDIATE" if writing else "BEGIN")
                yield db
                db.execute("COMMIT")
        except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
            raise  # a bug
        except sqlite3.DatabaseError as error:
            raise self._explain(error) from None

    def _explain(self, error: sqlite3.DatabaseError) -> FfmemError:
        """Return an error that says what to do."""
        reason = str(error)
        if "disk is full" in reason:
            return StorageFull(
                f"The disk of the study {self.path} is full. Everything saved before is kept. Free"
                " some space and try again."
            )
        hints = {
            "readonly": "you may not write to it. Check the permissions of the file and its folder",
            "unable to open": "it cannot be opened. Was it moved or deleted?",
            "locked": "another process has been writing for too long. Try again",
            "not a database": "it is not a SQLite database. Choose another file with --db",
            "malformed": "it is damaged. Restore a backup, or create a new study and import"
            " an export",
        }
        hint = next((text for sign, text in hints.items() if sign in reason), reason)
        return StoreError(f"Cannot use the study {self.path}: {hint.rstrip('.')}.")


@check_arguments
def study(folder: str | Path | Index, *, db: str | Path | None = None) -> AnnotationStudy:
    """Open the annotation study of an index: DIR-annotations.sqlite, unless `db` names a file."""
    return AnnotationStudy.open(db or study_path(as_index(folder).folder))


def study_path(folder: Path) -> Path:
    """Return where the study of an index is: next to the folder, which `extend` replaces."""
    whole = folder.resolve()
    return whole.with_name(f"{whole.name}-annotations.sqlite")


def _is_study(db: sqlite3.Connection, path: Path) -> bool:
    """Return whether a database is a study; raise if it is something else."""
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if not tables:
        return False
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise StoreError(f"{path} is another program's database. Choose another file with --db.")
    if version != FORMAT:
        raise StoreError(
            f"The study {path} has format {version}; this ffmem reads format {FORMAT}. Install the"
            " ffmem that created it."
        )
    return True


def _insert_plan(db: sqlite3.Connection, plan: Plan) -> None:
    """Add settings, people with new codes, items and assignments."""
    created = datetime.now(UTC).isoformat()
    db.execute("INSERT INTO study VALUES (?, ?)", (json.dumps(plan.settings), created))
    roles = dict.fromkeys(plan.orders, ANNOTATOR) | dict.fromkeys(plan.adjudicators, ADJUDICATOR)
    people = [(name, secrets.token_urlsafe(16), role) for name, role in roles.items()]
    db.executemany("INSERT INTO person VALUES (?, ?, ?)", people)
    # By key: the order of rows must reveal nothing.
    items = sorted(plan.items, key=lambda item: item.key)
    db.executemany(
        "INSERT INTO item VALUES (?, ?, ?, ?, ?, ?)",
        [(*item[:4], json.dumps(item.texts), json.dumps(item.words)) for item in items],
    )
    orders = {**plan.orders, ADJUDICATORS: [item.key for item in items]}
    places = {
        (key, owner): place
        for owner, keys in orders.items()
        for place, key in enumerate(keys, start=1)
    }
    db.executemany(
        "INSERT INTO assignment VALUES (?, ?, ?)",
        [(*pair, places[pair]) for pair in sorted(places)],
    )


@lru_cache(2048)
def _parse_texts(content: str) -> tuple[Text, ...]:
    """Return the texts of an item. A page of the explorer reads all items for each request."""
    return tuple(Text(*text) for text in json.loads(content))
