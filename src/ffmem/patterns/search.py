"""Search in the descriptions of patterns: `DIR/patterns/search.sqlite`.

The file is derived: it is made again when it is missing, damaged, or of other patterns than the
present ones. A pattern's number in it says where the pattern is, so that a search reads nothing but
the numbers it finds:

    row = cell · 2²⁴ + number · 2³ + source · 2 + (sign < 0)
"""

import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ffmem.errors import FfmemError
from ffmem.files import sha256
from ffmem.indexing.query import Expression, Query, count_words, has_word
from ffmem.indexing.search import Excerpt, Match, rank_cells
from ffmem.indexing.search_db import (
    CLOSE,
    OPEN,
    VALUE_POSTING,
    WORDS,
    SearchFile,
    highlighted_span,
    restore,
    write_search_file,
)
from ffmem.indexing.store import Index
from ffmem.patterns.store import SOURCES, Patterns, no_patterns, open_patterns

VERSION = 2

SCHEMA = f"""
CREATE TABLE patterns (row INTEGER PRIMARY KEY, kind TEXT, text TEXT);
CREATE VIRTUAL TABLE words USING fts5(text, content='patterns', content_rowid='row', prefix='1 2',
    {WORDS});
"""

_CELL, _NUMBER = 24, 3
"""Bits of a row's number below the cell's and below the pattern's."""


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
        rows = np.fromiter(self._matching_rows(db, query, expression, layer), np.int64)
        postings = np.zeros(len(rows), VALUE_POSTING)
        postings["cell"] = rows >> _CELL
        postings["rank"] = (rows & (1 << _CELL) - 1) >> _NUMBER
        # Of patterns with the same number, the first source's is the best.
        total, best = rank_cells(self.index, postings, rows & (1 << _NUMBER) - 1, layer, part)
        found = []
        for cell, count, number, _, key in best:
            flat = self.index.layout.starts[cell.layer] + cell.memory
            row = flat << _CELL | number << _NUMBER | key
            kind, text = db.execute(
                "SELECT kind, text FROM patterns WHERE row = ?", (row,)
            ).fetchone()
            begin, end = _span(db, row, text, query, expression)
            excerpt = Excerpt(text[:begin], text[begin:end], text[end:], "")
            side = "negative" if key & 1 else "positive"
            match = Match(str(cell), count, number, side, excerpt)
            found.append(PatternMatch(match, kind, SOURCES[key >> 1]))
        return total, found

    def _matching_rows(
        self,
        db: sqlite3.Connection,
        query: Query,
        expression: Expression | None,
        layer: int | None,
    ) -> Iterator[int]:
        """Yield the numbers of all patterns of a layer, or of all, that match."""
        starts = self.index.layout.starts
        first, past = (0, starts[-1]) if layer is None else starts[layer : layer + 2]
        within = (first << _CELL, (past << _CELL) - 1)
        if expression is None:
            found: Iterable[tuple[int]] = db.execute(
                "SELECT rowid FROM words WHERE words MATCH ? AND rowid BETWEEN ? AND ?",
                (query.phrase(), *within),
            )
        elif not query.regex:
            found = db.execute(
                "SELECT row FROM patterns WHERE row BETWEEN ? AND ? AND instr(text, ?)",
                (*within, query.text),
            )
        else:
            rows = db.execute("SELECT row, text FROM patterns WHERE row BETWEEN ? AND ?", within)
            found = ((row,) for row, text in rows if expression.search(text))
        return (row for (row,) in found)


def _span(
    db: sqlite3.Connection, row: int, text: str, query: Query, expression: Expression | None
) -> tuple[int, int]:
    """Return where the first match is in the text of a pattern."""
    if expression is not None:
        begin, end = expression.search(text).span()
        return begin, end
    (marked,) = db.execute(
        "SELECT highlight(words, 0, ?, ?) FROM words WHERE words MATCH ? AND rowid = ?",
        (OPEN, CLOSE, query.phrase(), row),
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
    """Return what tells these patterns from others."""
    return VERSION, " ".join(sha256(one.folder / "manifest.json") for one in patterns)


def _write(path: Path, index: Index, patterns: list[Patterns]) -> None:
    def fill(db: sqlite3.Connection) -> None:
        db.executemany("INSERT INTO patterns VALUES (?, ?, ?)", _texts(index, patterns))

    missing = (
        f"The patterns in {path.parent} have no search file (search.sqlite) of their present state"
    )
    write_search_file(path, _origin(patterns), SCHEMA, fill, missing)


def _texts(index: Index, every: list[Patterns]) -> Iterator[tuple[int, str, str]]:
    for patterns in every:
        source = SOURCES.index(patterns.source)
        for layer in range(index.n_layers):
            for memory, several in patterns.layer(layer).items():
                cell = index.layout.starts[layer] + memory
                for one in several:
                    place = one.number << _NUMBER | source << 1 | (one.sign < 0)
                    yield cell << _CELL | place, one.kind, one.text
