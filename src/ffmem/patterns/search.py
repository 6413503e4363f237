"""Search in the descriptions of patterns: `DIR/patterns/search.sqlite`.

The file is derived: it is made again when it is missing, damaged, or of other patterns than the
present ones. Of each memory, patterns are stored from the best to the worst.
"""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from ffmem.files import sha256
from ffmem.indexing.filters import NO_FILTERS, Filters
from ffmem.indexing.query import Expression, Query, count_words, has_word
from ffmem.indexing.search import Excerpt, Hits, Match
from ffmem.indexing.search_db import (
    CLOSE,
    OPEN,
    WORDS,
    SearchFile,
    highlighted_span,
    restore,
    write_search_file,
)
from ffmem.indexing.store import Index
from ffmem.patterns.store import KINDS, SOURCES, Patterns, open_patterns, require_patterns

VERSION = 3

SCHEMA = f"""
CREATE TABLE patterns (id INTEGER PRIMARY KEY, cell INTEGER, number INTEGER, source INTEGER,
    is_negative INTEGER, kind TEXT, text TEXT);
CREATE TABLE kinds (kind TEXT PRIMARY KEY, cells BLOB);
CREATE VIRTUAL TABLE words USING fts5(text, content='patterns', content_rowid='id', prefix='1 2',
    {WORDS});
"""


class PatternMatch(NamedTuple):
    """A memory that was found, with the kind and the source of its best pattern."""

    match: Match
    kind: str
    source: str


class PatternHit(NamedTuple):
    """A memory that was found by its patterns, as `ffmem search --in patterns` prints it."""

    cell: str
    matches: int
    """Patterns of the memory that match."""
    rank: int
    """Number of the best of them within its list."""
    side: str
    """Whether that list is of the `positive` or the `negative` triggers."""
    snippet: str
    kind: str
    source: str

    def to_dict(self) -> dict[str, Any]:
        """Return what `search --json` prints."""
        return self._asdict()


class PatternSearch:
    """Searches the patterns of one index, of all sources."""

    def __init__(self, index: Index, patterns: list[Patterns] | None = None) -> None:
        self.index = index
        opened = require_patterns(index) if patterns is None else patterns
        self._file = SearchFile(
            index.folder / "patterns" / "search.sqlite",
            _origin(opened),
            lambda path: _write(path, index, opened),
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def find(
        self, query: str, regex: bool = False, filters: Filters = NO_FILTERS, limit: int = 20
    ) -> Hits:
        """Return the memories with most such patterns, ties to the better, then the lower cell."""
        total, found = self.search(Query(query, regex), filters, 0, limit)
        hits = [
            PatternHit(*one.match[:4], one.match.excerpt.bracketed, one.kind, one.source)
            for one in found
        ]
        return Hits(hits, query, "patterns", total, filters != NO_FILTERS)

    def search(
        self, query: Query, filters: Filters = NO_FILTERS, offset: int = 0, limit: int = 20
    ) -> tuple[int, list[PatternMatch]]:
        """Return how many memories match, and up to `limit` of them from `offset`, best first."""
        query.check()
        filters.check(self.index)
        part = slice(offset, offset + limit)
        return self._file.search(lambda db: self._search(db, query, filters, part))

    def with_kind(self, kind: str) -> ndarray:
        """Return a mask of the memories that have a pattern of a kind."""

        def read(db: sqlite3.Connection) -> ndarray:
            mask = np.zeros(len(self.index), bool)
            row = db.execute("SELECT cells FROM kinds WHERE kind = ?", (kind,)).fetchone()
            if row is not None:
                mask[np.frombuffer(row[0], "<i4")] = True
            return mask

        return self._file.search(read)

    def _search(
        self, db: sqlite3.Connection, query: Query, filters: Filters, part: slice
    ) -> tuple[int, list[PatternMatch]]:
        expression = query.expression()
        if expression is None and not has_word(query.text):
            expression = query.literal()
        within, wanted = _within(self.index, filters)
        matching, parameter = _matching(db, query, expression, within, wanted)
        ranked = db.execute(
            "WITH hits AS (SELECT cell, count(*) AS n, min(id) AS best FROM patterns"
            f" WHERE {within} AND {matching} GROUP BY cell)"
            " SELECT hits.cell, n, id FROM hits JOIN patterns ON id = best"
            " ORDER BY n DESC, number, id",
            (*wanted, parameter),
        ).fetchall()
        mask = filters.memories(self.index)
        if mask is not None:
            ranked = [row for row in ranked if mask[row[0]]]
        found = []
        for cell, n, id in ranked[part]:
            number, source, is_negative, kind, text = db.execute(
                "SELECT number, source, is_negative, kind, text FROM patterns WHERE id = ?", (id,)
            ).fetchone()
            begin, end = _span(db, id, text, query, expression)
            excerpt = Excerpt(text[:begin], text[begin:end], text[end:], "")
            side = "negative" if is_negative else "positive"
            match = Match(str(self.index.layout.at(cell)), n, number, side, excerpt)
            found.append(PatternMatch(match, kind, SOURCES[source]))
        return len(ranked), found


def _within(index: Index, filters: Filters) -> tuple[str, list[Any]]:
    """Return the SQL condition of the patterns that filters keep, and its parameters."""
    starts, layer = index.layout.starts, filters.layer
    first, past = (0, starts[-1]) if layer is None else starts[layer : layer + 2]
    conditions: list[tuple[str, Any]] = [("cell >= ?", first), ("cell < ?", past)]
    if filters.sign is not None:
        conditions.append(("is_negative = ?", filters.sign < 0))
    if filters.rank is not None:
        conditions.append(("number <= ?", filters.rank))
    if filters.kind is not None:
        conditions.append(("kind = ?", filters.kind))
    return " AND ".join(sql for sql, _ in conditions), [value for _, value in conditions]


def _matching(
    db: sqlite3.Connection,
    query: Query,
    expression: Expression | None,
    within: str,
    wanted: list[Any],
) -> tuple[str, str]:
    """Return the SQL condition of a pattern that matches, and its one parameter.

    SQL has no regular expressions, so those are matched here, among what filters keep.
    """
    if expression is None:
        return "id IN (SELECT rowid FROM words WHERE words MATCH ?)", query.phrase()
    if not query.regex:
        return "instr(text, ?)", query.text
    rows = db.execute(f"SELECT id, text FROM patterns WHERE {within}", wanted)
    ids = [id for id, text in rows if expression.search(text)]
    return "id IN (SELECT value FROM json_each(?))", json.dumps(ids)


def _span(
    db: sqlite3.Connection, id: int, text: str, query: Query, expression: Expression | None
) -> tuple[int, int]:
    """Return where the first match is in the text of a pattern."""
    if expression is not None:
        begin, end = expression.search(text).span()
        return begin, end
    (marked,) = db.execute(
        "SELECT highlight(words, 0, ?, ?) FROM words WHERE words MATCH ? AND rowid = ?",
        (OPEN, CLOSE, query.phrase(), id),
    ).fetchone()
    return highlighted_span(marked, count_words(query.text))


def restore_search(index: Index) -> bool:
    """Make the search file again if it does not fit; return whether it was replaced."""
    patterns = open_patterns(index)
    if not patterns:
        return False
    path = index.folder / "patterns" / "search.sqlite"
    return restore(path, lambda fresh: _write(fresh, index, patterns))


def _origin(patterns: list[Patterns]) -> tuple[int, str]:
    """Return the hashes that identify these patterns."""
    return VERSION, " ".join(sha256(one.folder / "manifest.json") for one in patterns)


def _write(path: Path, index: Index, patterns: list[Patterns]) -> None:
    def fill(db: sqlite3.Connection) -> None:
        db.executemany(
            "INSERT INTO patterns VALUES (NULL, ?, ?, ?, ?, ?, ?)", _rows(index, patterns)
        )
        for kind in KINDS:
            rows = db.execute("SELECT DISTINCT cell FROM patterns WHERE kind = ?", (kind,))
            cells = np.fromiter((cell for (cell,) in rows), "<i4")
            db.execute("INSERT INTO kinds VALUES (?, ?)", (kind, cells.tobytes()))

    missing = f"The patterns in {path.parent} have no current search file (search.sqlite)"
    write_search_file(path, _origin(patterns), SCHEMA, fill, missing)


def _rows(index: Index, sources: list[Patterns]) -> Iterator[tuple[int, int, int, bool, str, str]]:
    """Yield what the file keeps of every pattern: memory by memory, the best first."""
    for layer in range(index.n_layers):
        start = index.layout.starts[layer]
        yield from sorted(
            (
                start + memory,
                one.number,
                SOURCES.index(one.source),
                one.sign < 0,
                one.kind,
                one.text,
            )
            for patterns in sources
            for memory, several in patterns.layer(layer).items()
            for one in several
        )
