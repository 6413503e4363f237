"""Search in the descriptions of patterns: `DIR/patterns/search.sqlite`.

The file is derived: it is made again when it is missing, damaged, or of other patterns than the
present ones. Of each memory, patterns are stored from the best to the worst.
"""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ffmem.errors import FfmemError
from ffmem.files import sha256
from ffmem.indexing.query import Expression, Query, count_words, has_word
from ffmem.indexing.search import Excerpt, Match
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
from ffmem.patterns.store import SOURCES, Patterns, no_patterns, open_patterns

VERSION = 3

SCHEMA = f"""
CREATE TABLE patterns (id INTEGER PRIMARY KEY, cell INTEGER, number INTEGER, source INTEGER,
    is_negative INTEGER, kind TEXT, text TEXT);
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


class PatternSearch:
    """Searches the patterns of one index, of all sources."""

    def __init__(self, index: Index, patterns: list[Patterns] | None = None) -> None:
        self.index = index
        opened = open_patterns(index) if patterns is None else patterns
        if not opened:
            raise FfmemError(no_patterns(index))
        self._file = SearchFile(
            index.folder / "patterns" / "search.sqlite",
            _origin(opened),
            lambda path: _write(path, index, opened),
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def find(
        self, query: str, regex: bool = False, layer: int | None = None, limit: int = 20
    ) -> list[PatternHit]:
        """Return the memories with most such patterns, ties to the better, then the lower cell."""
        _, found = self.search(Query(query, regex), layer, 0, limit)
        return [
            PatternHit(*one.match[:4], one.match.excerpt.bracketed, one.kind, one.source)
            for one in found
        ]

    def search(
        self, query: Query, layer: int | None = None, offset: int = 0, limit: int = 20
    ) -> tuple[int, list[PatternMatch]]:
        """Return how many memories match, and up to `limit` of them from `offset`, best first."""
        query.check(layer, self.index)
        part = slice(offset, offset + limit)
        return self._file.search(lambda db: self._search(db, query, layer, part))

    def _search(
        self, db: sqlite3.Connection, query: Query, layer: int | None, part: slice
    ) -> tuple[int, list[PatternMatch]]:
        expression = query.expression()
        if expression is None and not has_word(query.text):
            expression = query.literal()
        starts = self.index.layout.starts
        first, past = (0, starts[-1]) if layer is None else starts[layer : layer + 2]
        matching, wanted = _matching(db, query, expression, first, past)
        ranked = db.execute(
            "WITH hits AS (SELECT cell, count(*) AS n, min(id) AS best FROM patterns"
            f" WHERE cell >= ? AND cell < ? AND {matching} GROUP BY cell)"
            " SELECT n, id FROM hits JOIN patterns ON id = best ORDER BY n DESC, number, id",
            (first, past, wanted),
        ).fetchall()
        found = []
        for n, id in ranked[part]:
            cell, number, source, is_negative, kind, text = db.execute(
                "SELECT cell, number, source, is_negative, kind, text FROM patterns WHERE id = ?",
                (id,),
            ).fetchone()
            begin, end = _span(db, id, text, query, expression)
            excerpt = Excerpt(text[:begin], text[begin:end], text[end:], "")
            side = "negative" if is_negative else "positive"
            match = Match(str(self.index.layout.at(cell)), n, number, side, excerpt)
            found.append(PatternMatch(match, kind, SOURCES[source]))
        return len(ranked), found


def _matching(
    db: sqlite3.Connection, query: Query, expression: Expression | None, first: int, past: int
) -> tuple[str, str]:
    """Return the SQL condition of a pattern that matches, and its one parameter.

    SQL has no regular expressions, so those are matched here, among the memories of a range.
    """
    if expression is None:
        return "id IN (SELECT rowid FROM words WHERE words MATCH ?)", query.phrase()
    if not query.regex:
        return "instr(text, ?)", query.text
    rows = db.execute("SELECT id, text FROM patterns WHERE cell >= ? AND cell < ?", (first, past))
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

    missing = (
        f"The patterns in {path.parent} have no search file (search.sqlite) of their present state"
    )
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
