"""Search over everything that an index shows: tokens of values, text of triggers.

`search.sqlite` is derived from the index and made again when it is missing or of another index.
It holds inverted lists: from a token to the values at whose ends it stands, and from a sentence
to the memories that it triggers, with the place where each prefix ends. A text is found by
SQLite's full-text index; a hit counts only if it ends within the prefix.

While somebody types, the last word is taken as a beginning. What the whole word finds, every
beginning of it finds too.
"""

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from ffmem.cells import Cell
from ffmem.errors import FfmemError, NoStaticValues
from ffmem.indexing.excerpt import Excerpt, of_sentence, of_token
from ffmem.indexing.expression import Expression
from ffmem.indexing.searchable import (
    DAMAGED,
    TRIGGER_POSTING,
    VALUE_POSTING,
    connect,
    is_current,
    make_searchable,
)
from ffmem.indexing.store import Index
from ffmem.indexing.words import (
    count_words,
    end_of_word,
    ends_in_word,
    has_word,
    past,
    token_beginnings,
    token_forms,
)

# What FTS5 is asked to put around a match: nothing that a corpus could hold on purpose.
_OPEN, _CLOSE = (f"\x01{secrets.token_hex(8)}{side}" for side in "()")


SECONDS = 20.0
"""How long a regular expression may take over a whole index."""

_NEVER = 2**31 - 1
"""Where no prefix ends."""


class Hit(NamedTuple):
    """A memory that was found: in how many entries, and where the best of them stands."""

    cell: str
    matches: int
    rank: int
    side: str
    """`top` or `bottom` of a value; `positive` or `negative` triggers."""
    snippet: str


class Finding(NamedTuple):
    """A memory that was found, as `Hit` has it, with the found text in its parts."""

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
    """Sentences that were counted, if there are more with what was searched for; else None."""


class Query(NamedTuple):
    """What is searched for, and how much may be looked at."""

    text: str
    regex: bool = False
    prefix: bool = False
    """The last word may be the beginning of one."""
    most: int | None = None
    """Triggers to look at, in the order of the corpus and sentence by sentence; None: all."""
    seconds: float | None = None
    """For a regular expression; None: SECONDS."""

    def expression(self) -> Expression | None:
        """Return the regular expression, if it is one."""
        return Expression(self.text, self._seconds()) if self.regex else None

    def literal(self) -> Expression:
        """Return the text as an expression: FTS5 sees words only."""
        return Expression(re.escape(self.text), self._seconds())

    def refuse_odd(self, layer: int | None, index: Index) -> None:
        """Refuse what cannot be searched for, in a layer or in all."""
        if not self.text.strip():
            raise FfmemError("Nothing was searched for: give a word, a phrase or a token.")
        if any("\ud800" <= character <= "\udfff" for character in self.text):
            raise FfmemError(
                f"{self.text!r} holds half of a character (a lone surrogate), which no text does."
                " Search for whole ones."
            )
        if layer is not None:
            index.layout.check_layer(layer)

    def _seconds(self) -> float:
        return SECONDS if self.seconds is None else self.seconds


def _refuse_other(place: str, index: Index) -> None:
    """Refuse to search in anything but triggers, and values where there are any."""
    if place == "patterns":
        raise FfmemError(
            "Patterns have a search of their own (ffmem.patterns.searching.PatternSearch,"
            " `ffmem search --in patterns`). This one looks in values or triggers."
        )
    if place not in {"values", "triggers"}:
        raise FfmemError(f"--in takes values, triggers or patterns; {place!r} was given.")
    if place == "values" and not index.manifest.model.has_values:
        raise NoStaticValues(
            "Values were to be searched, and the memories of this index have none that is static:"
            " search in triggers (--in triggers) or patterns."
        )


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
        found = self.found(Query(query, regex), place, layer, 0, limit)
        return [
            Hit(*hit[:4], hit.excerpt.plain if place == "values" else hit.excerpt.bracketed)
            for hit in found.hits
        ]

    def found(
        self, query: Query, place: str, layer: int | None = None, offset: int = 0, limit: int = 20
    ) -> Found:
        """Return how many memories are found, and those from the `offset`-th on, best first."""
        query.refuse_odd(layer, self.index)
        _refuse_other(place, self.index)
        look = self._in_values if place == "values" else self._in_triggers
        part = slice(offset, offset + limit)
        try:
            return look(query, query.expression(), layer, part)
        except DAMAGED:
            self.close()
            make_searchable(self._path, self.index)
            self._base = connect(self._path)
            return look(query, query.expression(), layer, part)

    def _in_values(
        self, query: Query, expression: Expression | None, layer: int | None, part: slice
    ) -> Found:
        """Find values by the tokens at their ends: a whole token, with or without its space."""
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
                of_token(found[id][0], query.text, expression),
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
                    f"{chosen} WHERE folded >= ? AND folded < ?", (begin, past(begin))
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
            hits.append(Finding(str(cell), count, rank, name, of_sentence(text, span, end)))
        return Found(total, hits, len(rows.sentences) if rows.cut else None)

    def _words(self, query: Query) -> "_Rows":
        """Return the sentences that hold the words of the query in a row, any case or accent."""
        # A phrase: no operator of FTS5 gets through.
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
        """Return the sentences of which a beginning matches, with where it can end."""
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
            least, single = expression.reach(text, ends)
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
    """Sentences in which a text was found, with their postings and where prefixes must end."""

    most: int | None
    """How many postings are looked at; None: all."""
    sentences: list[int] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)
    least: list[int] = field(default_factory=list)
    """Every prefix of at least so many characters holds what was found."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Where words stand; an expression may stand elsewhere in each prefix."""
    single: list[tuple[int, int]] = field(default_factory=list)
    """(row, end) of shorter prefixes that hold it too."""
    n_postings: int = 0
    cut: bool = False
    """Whether a sentence was left out."""

    def add(self, sentence: int, blob: bytes, least: int, span: tuple[int, int]) -> bool:
        """Add one sentence, if there is room for it: whether there was."""
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
        """Return which postings are of prefixes that hold it; `owners` are their rows."""
        inside: ndarray = ends >= np.asarray(self.least, np.int64)[owners]
        if self.single:
            rows, single = np.asarray(self.single, np.int64).T
            inside |= np.isin(owners << 32 | ends, rows << 32 | single)
        return inside.nonzero()[0]
