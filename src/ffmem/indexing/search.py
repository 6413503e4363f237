"""Search over everything that an index shows: tokens of values, text of triggers.

`search.sqlite` is derived from the index and made again when it is missing or of another index.
It holds inverted lists: from a token to the values at whose ends it stands, and from a sentence
to the memories that it triggers, with the place where each prefix ends. A text is found by
SQLite's full-text index; a hit counts only if it ends within the prefix.
"""

import re
import secrets
import sqlite3
import time
import unicodedata
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from ffmem.cells import Cell
from ffmem.errors import FfmemError
from ffmem.indexing.memory import unshown
from ffmem.indexing.searchable import (
    TRIGGER_POSTING,
    VALUE_POSTING,
    connect,
    is_current,
    make_searchable,
)
from ffmem.indexing.store import Index

# What FTS5 is asked to put around a match: nothing that a corpus could hold on purpose.
_OPEN, _CLOSE = (f"\x01{secrets.token_hex(8)}{side}" for side in "()")


SECONDS = 20.0
"""How long a regular expression may take over a whole index."""


class Hit(NamedTuple):
    """A memory that was found: in how many entries, and where the best of them stands."""

    cell: str
    matches: int
    rank: int
    side: str
    """`top` or `bottom` of a value; `positive` or `negative` triggers."""
    snippet: str


class Search:
    """Searches one index."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._path = index.folder / "search.sqlite"
        if not is_current(self._path, index):
            make_searchable(self._path, index)
        self._base = connect(self._path)

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    def find(
        self,
        query: str,
        place: str = "values",
        regex: bool = False,
        layer: int | None = None,
        limit: int = 20,
    ) -> list[Hit]:
        """Return the memories with most matches, ties to the better rank, then the lower cell."""
        if not query.strip():
            raise FfmemError("Nothing was searched for: give a word, a phrase or a token.")
        if layer is not None and not 0 <= layer < self.index.n_layers:
            raise FfmemError(
                f"There is no layer {layer}: the model has layers 0 to {self.index.n_layers - 1}."
            )
        if place == "patterns":
            raise FfmemError("This index has no patterns yet. Search in values or triggers.")
        if place not in {"values", "triggers"}:
            raise FfmemError(f"--in takes values, triggers or patterns; {place!r} was given.")
        pattern = _Pattern(query) if regex else None
        look = self._in_values if place == "values" else self._in_triggers
        try:
            return look(query, pattern, layer, limit)
        except sqlite3.DatabaseError:  # damaged somewhere: derived, so made again
            self.close()
            make_searchable(self._path, self.index)
            self._base = connect(self._path)
            return look(query, pattern, layer, limit)

    def _in_values(
        self, query: str, pattern: "_Pattern | None", layer: int | None, limit: int
    ) -> list[Hit]:
        """Find values by the tokens at their ends: a whole token, with or without its space."""
        found = list(self._tokens(query, pattern))
        names = {id: token for id, token, _ in found}
        postings = np.frombuffer(b"".join(blob for _, _, blob in found), VALUE_POSTING)
        sizes = [len(blob) // VALUE_POSTING.itemsize for _, _, blob in found]
        ids = np.repeat(np.asarray(list(names), np.int64), sizes)
        return [
            Hit(str(cell), count, rank, "top" if side > 0 else "bottom", names[id])
            for cell, count, rank, side, id in self._ranked(postings, ids, layer, limit)
        ]

    def _tokens(self, query: str, pattern: "_Pattern | None") -> Iterator[tuple[int, str, bytes]]:
        if pattern is None:
            query = unshown(query)
            wanted = {form.casefold() for form in (query, query.strip(), f" {query.strip()}")}
            marks = ",".join("?" * len(wanted))
            found = self._base.execute(
                f"SELECT id, token, postings FROM tokens WHERE folded IN ({marks})", sorted(wanted)
            )
            yield from found
            return
        for id, token, blob in self._base.execute("SELECT id, token, postings FROM tokens"):
            if pattern.search(token):
                yield id, token, blob

    def _in_triggers(
        self, query: str, pattern: "_Pattern | None", layer: int | None, limit: int
    ) -> list[Hit]:
        """Find memories by the text of their prefixes."""
        if pattern is None and not _has_word(query):
            pattern = _Pattern(re.escape(query))  # FTS5 sees words only
        found = self._words(query) if pattern is None else self._matching(pattern)
        if not found.sentences:
            return []
        postings = np.frombuffer(b"".join(found.blobs), TRIGGER_POSTING)
        sizes = [len(blob) // TRIGGER_POSTING.itemsize for blob in found.blobs]
        rows = np.repeat(np.arange(len(sizes)), sizes)
        inside = postings["end"] >= np.repeat(found.ends, sizes)  # the match is in the prefix
        ranked = self._ranked(postings[inside], rows[inside], layer, limit)
        return [
            Hit(
                str(cell),
                count,
                rank,
                "positive" if side > 0 else "negative",
                self._snippet(found.sentences[row], found.begins[row], found.ends[row]),
            )
            for cell, count, rank, side, row in ranked
        ]

    def _words(self, query: str) -> "_Found":
        """Return the sentences that hold the words of the query in a row, any case or accent."""
        # A phrase: no operator of FTS5 gets through.
        phrase = '"' + query.replace("\0", " ").replace('"', '""') + '"'
        rows = self._base.execute(
            "SELECT words.rowid, highlight(words, 0, ?, ?), sentences.postings FROM words"
            " JOIN sentences ON sentences.sentence = words.rowid WHERE words MATCH ?",
            (_OPEN, _CLOSE, phrase),
        )
        found = _Found([], [], [], [])
        for sentence, marked, blob in rows:
            begin = marked.index(_OPEN)
            found.add(sentence, blob, begin, marked.index(_CLOSE) - len(_OPEN))
        return found

    def _matching(self, pattern: "_Pattern") -> "_Found":
        """Return the prefixes that match a regular expression, those that end alike together."""
        # Without these signs, what matches in a prefix matches in its sentence too.
        looks_at_the_end = re.search(r"[$\\(]", pattern.expression) is not None
        found = _Found([], [], [], [])
        rows = self._base.execute("SELECT sentence, text, postings FROM sentences")
        for sentence, text, blob in rows:
            if not looks_at_the_end and pattern.search(text) is None:
                continue
            postings = np.frombuffer(blob, TRIGGER_POSTING)
            for end in sorted(set(postings["end"].tolist())):
                if match := pattern.search(text, end):
                    here = postings[postings["end"] == end].tobytes()
                    found.add(sentence, here, match.start(), match.end())
        return found

    def _ranked(
        self, postings: ndarray, keys: ndarray, layer: int | None, limit: int
    ) -> list[tuple[Cell, int, int, int, int]]:
        """Return (cell, count, rank, side, key) of the cells with most postings, of their best."""
        n_memories = self.index.n_memories
        cells = postings["cell"].astype(np.int64)
        # One integer per posting, smallest for the best: rank, then side, then key.
        worse = (postings["side"] < 0).astype(np.int64)
        packed = (postings["rank"].astype(np.int64) << 33) | (worse << 32) | keys
        if layer is not None:
            inside = cells // n_memories == layer
            cells, packed = cells[inside], packed[inside]
        best = np.full(len(self.index), np.iinfo(np.int64).max)
        np.minimum.at(best, cells, packed)
        counts = np.bincount(cells, minlength=len(self.index))
        found = counts.nonzero()[0]
        order = found[np.lexsort((found, best[found] >> 33, -counts[found]))][:limit]
        return [
            (
                Cell(*divmod(cell, n_memories)),
                int(counts[cell]),
                int(best[cell] >> 33),
                -1 if best[cell] >> 32 & 1 else 1,
                int(best[cell] & 0xFFFFFFFF),
            )
            for cell in order.tolist()
        ]

    def _snippet(self, sentence: int, begin: int, end: int, around: int = 40) -> str:
        found = self._base.execute("SELECT text FROM sentences WHERE sentence = ?", (sentence,))
        text: str = found.fetchone()[0]
        before, after = text[max(0, begin - around) : begin], text[end : end + around]
        left = "…" if begin > around else ""
        right = "…" if end + around < len(text) else ""
        return f"{left}{before}[{text[begin:end]}]{after}{right}"


class _Found(NamedTuple):
    """Entries in which a text was found: sentence, postings, and where the match stands."""

    sentences: list[int]
    blobs: list[bytes]
    begins: list[int]
    ends: list[int]

    def add(self, *entry: Any) -> None:
        """Add one entry."""
        columns: tuple[list[Any], ...] = self
        for column, value in zip(columns, entry, strict=True):
            column.append(value)


def _has_word(text: str) -> bool:
    """Whether FTS5 sees a word in a text."""
    kinds = {unicodedata.category(character) for character in text}
    return any(kind[0] in "LN" or kind in {"Co", "Mn", "Mc"} for kind in kinds)


class _Pattern:
    """A regular expression that gives up when all its searches have taken too long."""

    def __init__(self, expression: str) -> None:
        import regex  # unlike `re`, it can be stopped

        try:
            self._compiled = regex.compile(expression)
        except regex.error as error:
            raise FfmemError(f"{expression!r} is not a regular expression: {error}.") from None
        self.expression = expression
        self._until = time.monotonic() + SECONDS

    def search(self, text: str, end: int | None = None) -> Any:
        """Return the first match within the first `end` characters, None if there is none."""
        left = self._until - time.monotonic()
        try:
            if left > 0:
                return self._compiled.search(text, endpos=end, timeout=left)
        except TimeoutError:
            pass
        raise FfmemError(
            f"The regular expression {self.expression!r} takes too long: no answer after"
            f" {SECONDS:g} seconds. Make it simpler, or search for words."
        )
