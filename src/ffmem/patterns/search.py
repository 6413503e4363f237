"""Search in the descriptions of patterns: `DIR/patterns/search.sqlite`.

The file is derived: it is made again when it is missing, damaged, or of other patterns than the
present ones. A pattern's number in it says where the pattern is, so that a search reads nothing but
the numbers it finds:

    row = cell · 2²⁴ + number · 2³ + source · 2 + (sign < 0)
"""

import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from ffmem.errors import FfmemError
from ffmem.files import sha256
from ffmem.indexing.filters import NO_FILTERS, Filters
from ffmem.indexing.query import Expression, Query, count_words, has_word
from ffmem.indexing.search import Excerpt, Hits, Match, rank_cells
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
from ffmem.patterns.store import KINDS, SOURCES, Patterns, no_patterns, open_patterns

VERSION = 3

SCHEMA = f"""
CREATE TABLE patterns (row INTEGER PRIMARY KEY, kind TEXT, text TEXT);
CREATE TABLE kinds (kind TEXT PRIMARY KEY, cells BLOB);
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

    def to_dict(self) -> dict[str, Any]:
        """Return what `search --json` prints."""
        return self._asdict()


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
        self, query: str, regex: bool = False, filters: Filters = NO_FILTERS, limit: int = 20
    ) -> Hits:
        """Return the memories with most such patterns, ties to the better, then the lower cell."""
        total, found = self.search(Query(query, regex), filters, 0, limit)
        hits = [
            PatternHit(*one.match[:4], one.match.excerpt.bracketed, one.kind, one.source)
            for one in found
        ]
        return Hits(hits, query, "patterns", total)

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
        rows = np.fromiter(self._matching_rows(db, query, expression, filters), np.int64)
        postings = np.zeros(len(rows), VALUE_POSTING)
        postings["cell"] = rows >> _CELL
        postings["rank"] = (rows & (1 << _CELL) - 1) >> _NUMBER
        postings["side"] = np.where(rows & 1, -1, 1)
        kept = filters.keep(postings)
        rows, postings = rows[kept], postings[kept]
        # Of patterns with the same number, the first source's is the best, whatever their sign.
        postings["side"] = 1
        mask, keys = filters.memories(self.index), rows & (1 << _NUMBER) - 1
        total, best = rank_cells(self.index, postings, keys, mask, part)
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
        filters: Filters,
    ) -> Iterator[int]:
        """Yield the numbers of all patterns of a layer and kind, or of all, that match."""
        starts, layer = self.index.layout.starts, filters.layer
        first, past = (0, starts[-1]) if layer is None else starts[layer : layer + 2]
        within = (first << _CELL, (past << _CELL) - 1)
        of_kind, kind = ("", ()) if filters.kind is None else (" AND kind = ?", (filters.kind,))
        if expression is None:
            joined = " JOIN patterns ON patterns.row = words.rowid" if of_kind else ""
            found: Iterable[tuple[int]] = db.execute(
                f"SELECT words.rowid FROM words{joined} WHERE words MATCH ?"
                f" AND words.rowid BETWEEN ? AND ?{of_kind}",
                (query.phrase(), *within, *kind),
            )
        elif not query.regex:
            found = db.execute(
                f"SELECT row FROM patterns WHERE row BETWEEN ? AND ?{of_kind} AND instr(text, ?)",
                (*within, *kind, query.text),
            )
        else:
            rows = db.execute(
                f"SELECT row, text FROM patterns WHERE row BETWEEN ? AND ?{of_kind}",
                (*within, *kind),
            )
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
        for kind in KINDS:
            rows = db.execute(
                "SELECT DISTINCT row >> ? FROM patterns WHERE kind = ? ORDER BY 1", (_CELL, kind)
            )
            cells = np.fromiter((cell for (cell,) in rows), "<i4")
            db.execute("INSERT INTO kinds VALUES (?, ?)", (kind, cells.tobytes()))

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
