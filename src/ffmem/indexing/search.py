"""Search over everything that an index shows: tokens of values, text of triggers.

`search.sqlite` is derived from the index and made again when it is missing or of another index.
It holds inverted lists: from a token to the values at whose ends it stands, and from a sentence
to the memories that it triggers, with the place where each prefix ends. A text is found by
SQLite's full-text index; a hit counts only if it ends within the prefix.
"""

import re
import secrets
import sqlite3
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from ffmem.cells import Cell
from ffmem.errors import FfmemError
from ffmem.indexing.searchable import (
    TRIGGER_POSTING,
    VALUE_POSTING,
    is_current,
    make_searchable,
)
from ffmem.indexing.store import Index

# What FTS5 is asked to put around a match: nothing that a corpus could hold on purpose.
_OPEN, _CLOSE = (f"\x01{secrets.token_hex(8)}{side}" for side in "()")


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
        path = index.folder / "search.sqlite"
        if not is_current(path, index):
            make_searchable(path, index)
        self._base = sqlite3.connect(f"file:{path}?mode=ro", uri=True)

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
        pattern = _compiled(query) if regex else None
        if place == "values":
            return self._in_values(query, pattern, layer, limit)
        if place == "triggers":
            return self._in_triggers(query, pattern, layer, limit)
        if place == "patterns":
            raise FfmemError("This index has no patterns yet. Search in values or triggers.")
        raise FfmemError(f"--in takes values, triggers or patterns; {place!r} was given.")

    def _in_values(
        self, query: str, pattern: re.Pattern[str] | None, layer: int | None, limit: int
    ) -> list[Hit]:
        """Find values by the tokens at their ends: a whole token, with or without its space."""
        parts, names = [], {}
        for id, token, blob in self._tokens(query, pattern):
            postings = np.frombuffer(blob, VALUE_POSTING)
            parts.append((postings, np.full(len(postings), id)))
            names[id] = token
        ranked = self._ranked(parts, layer, limit)
        return [
            self._hit(cell, count, posting, ("top", "bottom"), names[int(key)])
            for cell, count, posting, key in ranked
        ]

    def _tokens(
        self, query: str, pattern: re.Pattern[str] | None
    ) -> Iterator[tuple[int, str, bytes]]:
        if pattern is None:
            wanted = {query, query.strip(), f" {query.strip()}"}
            marks = ",".join("?" * len(wanted))
            found = self._base.execute(
                f"SELECT id, token, postings FROM tokens WHERE token COLLATE NOCASE IN ({marks})",
                sorted(wanted),
            )
            yield from found
            return
        for id, token, blob in self._base.execute("SELECT id, token, postings FROM tokens"):
            if pattern.search(token):
                yield id, token, blob

    def _in_triggers(
        self, query: str, pattern: re.Pattern[str] | None, layer: int | None, limit: int
    ) -> list[Hit]:
        """Find memories by the text of their prefixes."""
        parts, places = [], {}
        for sentence, blob, begin, end in self._sentences(query, pattern):
            postings = np.frombuffer(blob, TRIGGER_POSTING)
            postings = postings[postings["end"] >= end]  # the match lies within the prefix
            if len(postings):
                parts.append((postings, np.full(len(postings), sentence)))
                places[sentence] = (begin, end)
        ranked = self._ranked(parts, layer, limit)
        return [
            self._hit(
                cell,
                count,
                posting,
                ("positive", "negative"),
                self._snippet(int(key), *places[int(key)]),
            )
            for cell, count, posting, key in ranked
        ]

    def _sentences(
        self, query: str, pattern: re.Pattern[str] | None
    ) -> Iterator[tuple[int, bytes, int, int]]:
        """Return every sentence with a match: its postings, and where its first match stands."""
        if pattern is not None:
            rows = self._base.execute("SELECT sentence, text, postings FROM sentences")
            for sentence, text, blob in rows:
                if match := pattern.search(text):
                    yield sentence, blob, match.start(), match.end()
            return
        phrase = '"' + query.replace('"', '""') + '"'  # a phrase: no operator of FTS5 gets through
        rows = self._base.execute(
            "SELECT words.rowid, highlight(words, 0, ?, ?), sentences.postings FROM words"
            " JOIN sentences ON sentences.sentence = words.rowid WHERE words MATCH ?",
            (_OPEN, _CLOSE, phrase),
        )
        for sentence, marked, blob in rows:
            begin = marked.index(_OPEN)
            yield sentence, blob, begin, marked.index(_CLOSE) - len(_OPEN)

    def _ranked(
        self, parts: list[tuple[ndarray, ndarray]], layer: int | None, limit: int
    ) -> list[tuple[int, int, Any, int]]:
        """Return (cell, count, best posting, its key) of the cells with most postings."""
        if not parts:
            return []
        postings = np.concatenate([part[0] for part in parts])
        keys = np.concatenate([part[1] for part in parts])
        if layer is not None:
            inside = postings["cell"] // self.index.n_memories == layer
            postings, keys = postings[inside], keys[inside]
        order = np.lexsort((keys, -postings["side"], postings["rank"], postings["cell"]))
        postings, keys = postings[order], keys[order]
        cells, first, counts = np.unique(postings["cell"], return_index=True, return_counts=True)
        best = np.lexsort((cells, postings["rank"][first], -counts))[:limit]
        return [
            (int(cells[i]), int(counts[i]), postings[first[i]], int(keys[first[i]])) for i in best
        ]

    def _hit(
        self, cell: int, count: int, posting: Any, sides: tuple[str, str], snippet: str
    ) -> Hit:
        name = str(Cell(*divmod(cell, self.index.n_memories)))
        side = sides[0] if posting["side"] > 0 else sides[1]
        return Hit(name, count, int(posting["rank"]), side, snippet)

    def _snippet(self, sentence: int, begin: int, end: int, around: int = 40) -> str:
        found = self._base.execute("SELECT text FROM sentences WHERE sentence = ?", (sentence,))
        text: str = found.fetchone()[0]
        before, after = text[max(0, begin - around) : begin], text[end : end + around]
        left = "…" if begin > around else ""
        right = "…" if end + around < len(text) else ""
        return f"{left}{before}[{text[begin:end]}]{after}{right}"


def _compiled(query: str) -> re.Pattern[str]:
    try:
        return re.compile(query)
    except re.error as error:
        raise FfmemError(f"{query!r} is not a regular expression: {error}.") from None
