"""Search in the values and the triggers of an index.

A query is looked up in `search.sqlite` (`search_db.py`): tokens of values by their text, sentences
by SQLite's full-text index. A sentence counts for a trigger only if the match ends within the
trigger's prefix. While you type, the last word is taken as a beginning; what a whole word finds,
every beginning of it finds too.
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from ffmem.cells import Cell
from ffmem.errors import FfmemError, NoStaticValues
from ffmem.indexing.query import (
    Excerpt,
    Expression,
    Query,
    count_words,
    end_of_range,
    end_of_word,
    ends_in_word,
    excerpt_of_sentence,
    excerpt_of_token,
    has_word,
    token_beginnings,
    token_forms,
)
from ffmem.indexing.search_db import (
    DAMAGED,
    TRIGGER_POSTING,
    VALUE_POSTING,
    connect,
    is_current,
    make_search_db,
)
from ffmem.indexing.store import Index

# Marks that FTS5 puts around a match: nothing that a corpus could contain on purpose.
_OPEN, _CLOSE = (f"\x01{secrets.token_hex(8)}{side}" for side in "()")

_NEVER = 2**31 - 1
"""An end that no prefix reaches."""


class Hit(NamedTuple):
    """A memory that was found: its number of matches, and the best one."""

    cell: str
    matches: int
    rank: int
    side: str
    """`top` or `bottom` of a value; `positive` or `negative` triggers."""
    snippet: str


class Finding(NamedTuple):
    """A `Hit` whose snippet is an `Excerpt`."""

    cell: str
    matches: int
    rank: int
    side: str
    excerpt: Excerpt


class Found(NamedTuple):
    """How many memories were found, and some of them."""

    total: int
    hits: list[Finding]
    looked_at: int | None = None
    """Sentences that were looked at, if more of them match; else None."""


def _check_place(place: str, index: Index) -> None:
    """Raise unless an index has this to search in."""
    if place == "patterns":
        raise FfmemError(
            "Search searches in values or triggers. For patterns, use"
            " ffmem.search(..., place='patterns') or `ffmem search --in patterns`."
        )
    if place not in {"values", "triggers"}:
        raise FfmemError(f"--in {place}: unknown value. Give one of values, triggers, patterns.")
    if place == "values" and not index.manifest.model.has_values:
        raise NoStaticValues(
            "Cannot search in values: the memories of this index have no static ones. Search in"
            " triggers (--in triggers) or patterns."
        )


class Search:
    """Searches one index."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._path = index.folder / "search.sqlite"
        if not is_current(self._path, index):
            make_search_db(self._path, index)
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
        """Return the memories with most matches; ties go to the better rank, then lower cell."""
        found = self.found(Query(query, regex), place, layer, 0, limit)
        return [
            Hit(*hit[:4], hit.excerpt.plain if place == "values" else hit.excerpt.bracketed)
            for hit in found.hits
        ]

    def found(
        self, query: Query, place: str, layer: int | None = None, offset: int = 0, limit: int = 20
    ) -> Found:
        """Return how many memories are found, and those from the `offset`-th on, best first."""
        query.check(layer, self.index)
        _check_place(place, self.index)
        look = self._in_values if place == "values" else self._in_triggers
        part = slice(offset, offset + limit)
        try:
            return look(query, query.expression(), layer, part)
        except DAMAGED:
            self.close()
            make_search_db(self._path, self.index)
            self._base = connect(self._path)
            return look(query, query.expression(), layer, part)

    def _in_values(
        self, query: Query, expression: Expression | None, layer: int | None, part: slice
    ) -> Found:
        """Find memories by tokens at the ends of their values, with or without leading space."""
        found = {id: (token, blob) for id, token, blob in self._tokens(query, expression)}
        postings = np.frombuffer(b"".join(blob for _, blob in found.values()), VALUE_POSTING)
        sizes = [len(blob) // VALUE_POSTING.itemsize for _, blob in found.values()]
        ids = np.repeat(np.asarray(list(found), np.int64), sizes)
        total, best = self._ranked(postings, ids, layer, part)
        hits = [
            Finding(
                str(cell),
                count,
                rank,
                "top" if side > 0 else "bottom",
                excerpt_of_token(found[id][0], query.text, expression),
            )
            for cell, count, rank, side, id in best
        ]
        return Found(total, hits)

    def _tokens(
        self, query: Query, expression: Expression | None
    ) -> Iterator[tuple[int, str, bytes]]:
        chosen = "SELECT id, token, postings FROM tokens"
        if expression is not None:
            for row in self._base.execute(chosen):
                if expression.search(row[1]):
                    yield row
            return
        wanted = sorted(token_forms(query.text))
        marks = ",".join("?" * len(wanted))
        yield from self._base.execute(f"{chosen} WHERE folded IN ({marks})", wanted)
        if query.prefix:
            for begin in sorted(token_beginnings(query.text)):
                yield from self._base.execute(
                    f"{chosen} WHERE folded >= ? AND folded < ?", (begin, end_of_range(begin))
                )

    def _in_triggers(
        self, query: Query, expression: Expression | None, layer: int | None, part: slice
    ) -> Found:
        """Find memories by the text of their prefixes."""
        if expression is None and not has_word(query.text):
            expression = query.literal()
        rows = self._words(query) if expression is None else self._matching(query, expression)
        postings = np.frombuffer(b"".join(rows.blobs), TRIGGER_POSTING)
        sizes = [len(blob) // TRIGGER_POSTING.itemsize for blob in rows.blobs]
        owners = np.repeat(np.arange(len(sizes)), sizes)
        inside = rows.reached(postings["end"], owners)
        total, best = self._ranked(postings[inside], inside, layer, part)
        hits = []
        for cell, count, rank, side, key in best:
            row, end = int(owners[key]), int(postings["end"][key])
            text = self._text(rows.sentences[row])
            span = rows.spans[row]
            if expression is not None:
                span = expression.search(text, end).span()
            name = "positive" if side > 0 else "negative"
            hits.append(Finding(str(cell), count, rank, name, excerpt_of_sentence(text, span, end)))
        return Found(total, hits, len(rows.sentences) if rows.cut else None)

    def _words(self, query: Query) -> "_Rows":
        """Return the sentences with the words of the query in a row, in any case and accents."""
        # Quoted, so that no operator of FTS5 gets through.
        phrase = '"' + query.text.replace("\0", " ").replace('"', '""') + '"'
        if query.prefix and ends_in_word(query.text):
            phrase += " *"
        n_words = count_words(query.text)
        cursor = self._base.execute(
            "SELECT words.rowid, highlight(words, 0, ?, ?), sentences.postings FROM words"
            " JOIN sentences ON sentences.sentence = words.rowid WHERE words MATCH ?",
            (_OPEN, _CLOSE, phrase),
        )
        rows = _Rows(query.most)
        for sentence, marked, blob in cursor:
            begin = marked.index(_OPEN)
            end = marked.index(_CLOSE) - len(_OPEN)
            if n_words > 1:  # FTS5 marks matches that overlap as one
                found = marked[begin + len(_OPEN) : end + len(_OPEN)]
                end = begin + end_of_word(found, n_words)
            if not rows.add(sentence, blob, end, (begin, end)):
                break
        return rows

    def _matching(self, query: Query, expression: Expression) -> "_Rows":
        """Return the sentences of which a prefix matches an expression."""
        rows = _Rows(query.most)
        texts = "SELECT sentence, text FROM sentences"
        if query.regex:
            cursor = self._base.execute(texts)
        else:
            cursor = self._base.execute(f"{texts} WHERE instr(text, ?)", (query.text,))
        for sentence, text in cursor:
            if not expression.possible(text):
                continue
            (blob,) = self._base.execute(
                "SELECT postings FROM sentences WHERE sentence = ?", (sentence,)
            ).fetchone()
            ends = sorted(set(np.frombuffer(blob, TRIGGER_POSTING)["end"].tolist()))
            least, single = expression.prefix_range(text, ends)
            if least is None and not single:
                continue
            if not rows.add(sentence, blob, _NEVER if least is None else least, (0, 0)):
                break
            rows.single += [(len(rows.sentences) - 1, end) for end in single]
        return rows

    def _ranked(
        self, postings: ndarray, keys: ndarray, layer: int | None, part: slice
    ) -> tuple[int, list[tuple[Cell, int, int, int, int]]]:
        """Return how many cells have postings, and some as (cell, count, rank, side, key).

        The cells with most postings come first; rank, side and key are of their best posting.
        """
        layout = self.index.layout
        cells = postings["cell"].astype(np.int64)
        # One integer per posting, smallest for the best: rank, then side, then key.
        worse = (postings["side"] < 0).astype(np.int64)
        packed = (postings["rank"].astype(np.int64) << 33) | (worse << 32) | keys
        if layer is not None:
            inside = (cells >= layout.starts[layer]) & (cells < layout.starts[layer + 1])
            cells, packed = cells[inside], packed[inside]
        best = np.full(len(self.index), np.iinfo(np.int64).max)
        np.minimum.at(best, cells, packed)
        counts = np.bincount(cells, minlength=len(self.index))
        found = counts.nonzero()[0]
        order = found[np.lexsort((found, best[found] >> 33, -counts[found]))][part]
        return len(found), [
            (
                layout.at(cell),
                int(counts[cell]),
                int(best[cell] >> 33),
                -1 if best[cell] >> 32 & 1 else 1,
                int(best[cell] & 0xFFFFFFFF),
            )
            for cell in order.tolist()
        ]

    def _text(self, sentence: int) -> str:
        found = self._base.execute("SELECT text FROM sentences WHERE sentence = ?", (sentence,))
        text: str = found.fetchone()[0]
        return text


@dataclass
class _Rows:
    """Sentences that match, with their postings and where prefixes must end."""

    most: int | None
    """Postings to look at; None: all."""
    sentences: list[int] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)
    least: list[int] = field(default_factory=list)
    """Every prefix of at least this many characters contains the match."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Where words match; an expression may match elsewhere in each prefix."""
    single: list[tuple[int, int]] = field(default_factory=list)
    """(row, end) of shorter prefixes that match, too."""
    n_postings: int = 0
    cut: bool = False
    """Whether a sentence was left out."""

    def add(self, sentence: int, blob: bytes, least: int, span: tuple[int, int]) -> bool:
        """Add a sentence unless there are enough; return whether it was added."""
        if self.most is not None and self.n_postings >= self.most:
            self.cut = True
            return False
        self.sentences.append(sentence)
        self.blobs.append(blob)
        self.least.append(least)
        self.spans.append(span)
        self.n_postings += len(blob) // TRIGGER_POSTING.itemsize
        return True

    def reached(self, ends: ndarray, owners: ndarray) -> ndarray:
        """Return which postings are of prefixes with a match; `owners` are their rows."""
        inside: ndarray = ends >= np.asarray(self.least, np.int64)[owners]
        if self.single:
            rows, single = np.asarray(self.single, np.int64).T
            inside |= np.isin(owners << 32 | ends, rows << 32 | single)
        return inside.nonzero()[0]
