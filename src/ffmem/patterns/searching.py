"""Search over what was said of patterns: `DIR/patterns/search.sqlite`.

The file is derived: made again when it is missing, damaged, or of other patterns than those kept
now. A pattern's number in it is its place, so that a search reads nothing but the found numbers:

    row = cell · 2²⁴ + (number · 4 + source) · 2 + (sign < 0)

Searched is what is shown: the description, and what the rule looks for, if it does not say so.
"""

import re
import secrets
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from ffmem.errors import FfmemError
from ffmem.files import committing, sha256
from ffmem.indexing.query import (
    Expression,
    Query,
    count_words,
    end_of_word,
    ends_in_word,
    has_word,
)
from ffmem.indexing.search import Excerpt, Match, SearchResult
from ffmem.indexing.search_db import DAMAGED, check_writable, connect, restore
from ffmem.indexing.store import Index
from ffmem.patterns.kept import SOURCES, Patterns, is_stale, kept
from ffmem.patterns.pattern import Pattern

VERSION = 1

_SCHEMA = """
CREATE TABLE origin (version INTEGER, state TEXT);
CREATE TABLE patterns (row INTEGER PRIMARY KEY, kind TEXT, text TEXT);
CREATE VIRTUAL TABLE words USING fts5(text, content='patterns', content_rowid='row', prefix='1 2',
    tokenize="unicode61 remove_diacritics 2 categories 'L* N* Co Mn Mc'");
"""

_CELL = 24
"""Bits of a row's number below the cell's."""

_OPEN, _CLOSE = (f"\x01{secrets.token_hex(8)}{side}" for side in "()")

_making = threading.Lock()


class FoundPattern(NamedTuple):
    """A memory that was found, and whose its best pattern is."""

    finding: Match
    kind: str
    source: str


class PatternHit(NamedTuple):
    """A memory that was found by its patterns, as `ffmem search --in patterns` prints it."""

    cell: str
    matches: int
    """Patterns of the memory that were found."""
    rank: int
    """Number of the best of them within its list."""
    side: str
    """Whether it is of the `positive` or the `negative` triggers."""
    snippet: str
    kind: str
    source: str


class PatternSearch:
    """Searches the patterns of one index, of all who saw some."""

    def __init__(self, index: Index, patterns: list[Patterns] | None = None) -> None:
        self.index = index
        self._patterns = kept(index) if patterns is None else patterns
        if not self._patterns:
            raise FfmemError(no_patterns(index))
        self._path = index.folder / "patterns" / "search.sqlite"
        self._make(only_if_old=True)
        self._base = connect(self._path)

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    def find(
        self, query: str, regex: bool = False, layer: int | None = None, limit: int = 20
    ) -> list[PatternHit]:
        """Return the memories with most such patterns, ties to the better, then the lower cell."""
        _, found = self.found_patterns(Query(query, regex), layer, 0, limit)
        return [
            PatternHit(*one.finding[:4], one.finding.excerpt.bracketed, one.kind, one.source)
            for one in found
        ]

    def found(
        self, query: Query, layer: int | None = None, offset: int = 0, limit: int = 20
    ) -> SearchResult:
        """Return how many memories are found, and those from the `offset`-th on, best first."""
        total, found = self.found_patterns(query, layer, offset, limit)
        return SearchResult(total, [one.finding for one in found])

    def found_patterns(
        self, query: Query, layer: int | None = None, offset: int = 0, limit: int = 20
    ) -> tuple[int, list[FoundPattern]]:
        """Return the same, each with the kind and the source of its best pattern."""
        query.check(layer, self.index)
        try:
            return self._look(query, layer, slice(offset, offset + limit))
        except DAMAGED:
            self.close()
            self._make(only_if_old=False)
            self._base = connect(self._path)
            return self._look(query, layer, slice(offset, offset + limit))

    def _look(self, query: Query, layer: int | None, part: slice) -> tuple[int, list[FoundPattern]]:
        expression = query.expression()
        if expression is None and not has_word(query.text):
            expression = query.literal()
        phrase = _phrase(query)
        if expression is None:
            found: Iterable[tuple[int]] = self._base.execute(
                "SELECT rowid FROM words WHERE words MATCH ? AND rowid BETWEEN ? AND ?",
                (phrase, *self._rows(layer)),
            )
        else:
            found = self._matching(query, expression, layer)
        rows = np.fromiter((row for (row,) in found), np.int64)
        total, best = _ranked(rows, part)
        return total, [self._found(*one, query, phrase, expression) for one in best]

    def _rows(self, layer: int | None) -> tuple[int, int]:
        """Return the first and the last number that a pattern of a layer can have."""
        starts = self.index.layout.starts
        first, past = (0, starts[-1]) if layer is None else starts[layer : layer + 2]
        return first << _CELL, (past << _CELL) - 1

    def _matching(
        self, query: Query, expression: Expression, layer: int | None
    ) -> Iterator[tuple[int]]:
        """Return the patterns whose text an expression matches."""
        chosen = "SELECT row, text FROM patterns WHERE row BETWEEN ? AND ?"
        if not query.regex:
            yield from self._base.execute(
                "SELECT row FROM patterns WHERE row BETWEEN ? AND ? AND instr(text, ?)",
                (*self._rows(layer), query.text),
            )
            return
        for row, text in self._base.execute(chosen, self._rows(layer)):
            if expression.search(text):
                yield (row,)

    def _found(
        self, row: int, matches: int, query: Query, phrase: str, expression: Expression | None
    ) -> FoundPattern:
        """Return one memory by the number of its best pattern."""
        kind, text = self._base.execute(
            "SELECT kind, text FROM patterns WHERE row = ?", (row,)
        ).fetchone()
        if expression is None:
            begin, end = self._span(row, phrase, count_words(query.text))
        else:
            begin, end = expression.search(text).span()
        cell = self.index.layout.at(row >> _CELL)
        rest = row & (1 << _CELL) - 1
        finding = Match(
            str(cell),
            matches,
            rest >> 3,
            "negative" if rest & 1 else "positive",
            Excerpt(text[:begin], text[begin:end], text[end:], ""),
        )
        return FoundPattern(finding, kind, SOURCES[rest >> 1 & 3])

    def _span(self, row: int, phrase: str, n_words: int) -> tuple[int, int]:
        """Return where the first match of a phrase stands in a text."""
        (marked,) = self._base.execute(
            "SELECT highlight(words, 0, ?, ?) FROM words WHERE words MATCH ? AND rowid = ?",
            (_OPEN, _CLOSE, phrase, row),
        ).fetchone()
        begin = marked.index(_OPEN)
        found = marked[begin + len(_OPEN) : marked.index(_CLOSE)]
        # FTS5 marks matches that overlap as one.
        return begin, begin + (end_of_word(found, n_words) if n_words > 1 else len(found))

    def _make(self, only_if_old: bool) -> None:
        """Write the file, unless it is of these very patterns."""
        with _making:  # of two threads, one makes it and the other finds it made
            if not (only_if_old and self._is_current()):
                _write(self._path, self.index, self._patterns)

    def _is_current(self) -> bool:
        if not self._path.exists():
            return False
        try:
            with closing(connect(self._path)) as base:
                found = base.execute("SELECT version, state FROM origin").fetchone()
        except sqlite3.DatabaseError:
            return False  # cut short, damaged or foreign
        return bool(found == (VERSION, _state(self._patterns)))


def restore_search(index: Index) -> bool:
    """Make the search file again if it is not what the patterns give; return whether it was not."""
    patterns = kept(index)
    if not patterns:
        return False
    path = index.folder / "patterns" / "search.sqlite"
    return restore(path, lambda fresh: _write(fresh, index, patterns))


def _write(path: Path, index: Index, patterns: list[Patterns]) -> None:
    with committing(path) as temporary:
        check_writable(
            temporary,
            f"The patterns in {path.parent} have no search file (search.sqlite) of their present"
            " state",
        )
        with closing(sqlite3.connect(temporary)) as base:
            base.executescript("PRAGMA journal_mode = OFF;" + _SCHEMA)
            base.executemany("INSERT INTO patterns VALUES (?, ?, ?)", _texts(index, patterns))
            base.execute("INSERT INTO words (words) VALUES ('rebuild')")
            base.execute("INSERT INTO words (words) VALUES ('optimize')")
            base.execute("INSERT INTO origin VALUES (?, ?)", (VERSION, _state(patterns)))
            base.commit()


def _state(patterns: list[Patterns]) -> str:
    """Return what tells these patterns from others."""
    return " ".join(sha256(one.folder / "manifest.json") for one in patterns)


def _texts(index: Index, every: list[Patterns]) -> Iterator[tuple[int, str, str]]:
    for patterns in every:
        source = SOURCES.index(patterns.source)
        for layer in range(index.n_layers):
            for memory, several in patterns.layer(layer).items():
                cell = index.layout.starts[layer] + memory
                for one in several:
                    place = (one.number << 2 | source) << 1 | (one.sign < 0)
                    yield cell << _CELL | place, one.kind, text_of(one)


def text_of(pattern: Pattern) -> str:
    """Return what is searched and shown of a pattern."""
    said, what = pattern.description.casefold(), pattern.what.casefold().strip()
    if what in said or all(word in said for word in re.findall(r"\w+", what) or [what]):
        return pattern.description
    return f"{pattern.description} · {pattern.what}"


def no_patterns(index: Index) -> str:
    """Return why there are no patterns to look at, and what to do."""
    detect = f"`ffmem patterns detect {index.folder}`"
    if any(is_stale(index, source) for source in SOURCES):
        return (
            "The patterns of this index are of an earlier state of it: it was changed since."
            f" Find them again with {detect}."
        )
    return f"This index has no patterns yet. Find them with {detect}."


def _ranked(rows: ndarray, part: slice) -> tuple[int, list[tuple[int, int]]]:
    """Return how many cells have patterns, and of some the row of the best and the count.

    Rows of one cell are in the order of number, source, sign: the smallest is the best.
    """
    cells, counts = np.unique(rows >> _CELL, return_counts=True)
    best = np.full(len(cells), np.iinfo(np.int64).max)
    np.minimum.at(best, np.searchsorted(cells, rows >> _CELL), rows)
    numbers = (best & (1 << _CELL) - 1) >> 3
    order = np.lexsort((cells, numbers, -counts))[part]
    return len(cells), list(zip(best[order].tolist(), counts[order].tolist(), strict=True))


def _phrase(query: Query) -> str:
    """Return what FTS5 is asked for: words in a row, so that no operator gets through."""
    phrase = '"' + query.text.replace("\0", " ").replace('"', '""') + '"'
    return f"{phrase} *" if query.prefix and ends_in_word(query.text) else phrase
