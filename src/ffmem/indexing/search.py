"""Search in the values and the triggers of an index.

A query is looked up in `search.sqlite` (`search_db.py`): tokens of values by their text, sentences
by SQLite's full-text index; `Filters` restrict what counts. A sentence counts for a trigger only if
the match ends within the trigger's prefix. With `Query.prefix`, the last word may be incomplete,
and every beginning of a word finds what the whole word finds.
"""

import html
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from ffmem.cells import Cell
from ffmem.errors import FfmemError, NoStaticValues
from ffmem.indexing.filters import NO_FILTERS, Filters
from ffmem.indexing.memory import is_flat, visible, visible_token
from ffmem.indexing.query import (
    Expression,
    Query,
    count_words,
    end_of_range,
    has_word,
    token_beginnings,
    token_forms,
)
from ffmem.indexing.search_db import (
    CLOSE,
    OPEN,
    TRIGGER_END,
    TRIGGER_POSTING,
    VALUE_POSTING,
    SearchFile,
    highlighted_span,
    index_origin,
    make_search_db,
)
from ffmem.indexing.store import Index
from ffmem.text import html_table, pluralize

EXCERPT_CHARACTERS = 40
"""Characters to show on each side of a match."""

PREFIX_END = "│"
"""Marks where the prefix of a trigger ends, on a terminal and in a notebook."""


class Hit(NamedTuple):
    """A memory that matches: how often, and its best match."""

    cell: str
    matches: int
    rank: int
    side: str
    """`top` or `bottom` of a value; `positive` or `negative` triggers."""
    snippet: str
    """The token; or the trigger's prefix around the match, up to the prefix's end."""
    rest: str = ""
    """What follows the prefix in its sentence."""

    def to_dict(self) -> dict[str, Any]:
        """Return what `search --json` prints."""
        fields = self._asdict()
        if self.side in ("top", "bottom"):
            del fields["rest"]
        return fields


class Hits(list[Any]):
    """What a search found in one place: hits that show themselves as a table, a memory per line."""

    def __init__(
        self, hits: Iterable[Any], query: str, place: str, total: int, is_filtered: bool = False
    ) -> None:
        super().__init__(hits)
        self.is_filtered = is_filtered
        self.query = query
        self.place = place
        self.total = total
        """Memories that match; the list may hold only the first of them."""

    def _rows(self) -> list[tuple[str, ...]]:
        rows = []
        for hit in self:
            text = (visible_token if self.place == "values" else visible)(hit.snippet)
            row = [hit.cell, f"{hit.matches}×", f"{hit.side} {hit.rank}", text]
            if self.place == "triggers":
                row[-1] += f"{PREFIX_END}{visible(hit.rest)}"
            if self.place == "patterns":
                row.append(f"{hit.kind}, {hit.source}")
            rows.append(tuple(row))
        return rows

    def __str__(self) -> str:
        if not self:
            with_filters = " with these filters" if self.is_filtered else ""
            return f"No memory has {self.query!r} in its {self.place}{with_filters}."
        return "\n".join(
            f"{cell:12} {matches:>5}  best: {best:12} {'  '.join(rest)}"
            for cell, matches, best, *rest in self._rows()
        )

    __repr__ = __str__  # what a terminal shows

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        if not self:
            return f"<p>{html.escape(str(self))}</p>"
        header = ["memory", "matches", "best", self.place.removesuffix("s")]
        header += ["kind, source"] if self.place == "patterns" else []
        return html_table(self._rows(), header)


class GroupedHits(dict[str, Hits]):
    """What a search found everywhere, by place: `found["triggers"][0].cell`."""

    def __init__(self, groups: Iterable[Hits], query: str, notes: list[str]) -> None:
        super().__init__((hits.place, hits) for hits in groups)
        self.query = query
        self.notes = notes
        """What could not be searched, and why."""

    def to_dict(self) -> dict[str, Any]:
        """Return what `search --json` prints."""
        groups = [
            {"place": place, "total": hits.total, "hits": [hit.to_dict() for hit in hits]}
            for place, hits in self.items()
        ]
        return {"query": self.query, "groups": groups, "notes": self.notes}

    def __str__(self) -> str:
        if not any(hits.total for hits in self.values()):
            is_filtered = any(hits.is_filtered for hits in self.values())
            with_filters = " with these filters" if is_filtered else ""
            nothing = f"No memory has {self.query!r} in its {' or '.join(self)}{with_filters}."
            return "\n".join([nothing, *self.notes])
        parts = []
        for place, hits in self.items():
            more = f", the first {len(hits)}" if hits.total > len(hits) > 0 else ""
            counted = pluralize(hits.total, "memories")
            parts.append(f"{place}: {counted}{more}" + (f"\n{hits}" if hits else ""))
        return "\n\n".join([*parts, *self.notes])

    __repr__ = __str__  # what a terminal shows

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        parts = [
            f"<h5>{place}: {pluralize(hits.total, 'memories')}</h5>{hits._repr_html_()}"
            for place, hits in self.items()
        ]
        return "".join([*parts, *(f"<p>{html.escape(note)}</p>" for note in self.notes)])


class Excerpt(NamedTuple):
    """A match with the text around it, in a token or in a sentence."""

    before: str
    match: str
    after: str
    rest: str
    """What follows the prefix in its sentence."""

    @property
    def bracketed(self) -> str:
        """The excerpt as text, with the match in brackets, up to the end of the prefix."""
        return f"{self.before}[{self.match}]{self.after}"

    @property
    def plain(self) -> str:
        """The excerpt as text."""
        return "".join(self)


class Match(NamedTuple):
    """A `Hit` with an `Excerpt` instead of a snippet."""

    cell: str
    matches: int
    rank: int
    side: str
    excerpt: Excerpt


class SearchResult(NamedTuple):
    """How many memories match, and some of them."""

    total: int
    hits: list[Match]
    n_examined: int | None = None
    """Sentences that were examined, if more of them match; else None."""


class Search:
    """Searches one index."""

    def __init__(self, index: Index) -> None:
        index.check_files()  # the search file alone would answer without them
        self.index = index
        self._file = SearchFile(
            index.folder / "search.sqlite",
            index_origin(index),
            lambda path: make_search_db(path, index),
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def find(
        self,
        query: str,
        place: str = "values",
        regex: bool = False,
        filters: Filters = NO_FILTERS,
        limit: int = 20,
        among: ndarray | None = None,
    ) -> Hits:
        """Return the memories with most matches; ties go to the better rank, then lower cell."""
        result = self.search(Query(query, regex), place, filters, 0, limit, among)
        hits = [
            Hit(*hit[:4], hit.excerpt.plain)
            if place == "values"
            else Hit(*hit[:4], hit.excerpt.bracketed, hit.excerpt.rest)
            for hit in result.hits
        ]
        return Hits(hits, query, place, result.total, filters != NO_FILTERS)

    def search(
        self,
        query: Query,
        place: str,
        filters: Filters = NO_FILTERS,
        offset: int = 0,
        limit: int = 20,
        among: ndarray | None = None,
    ) -> SearchResult:
        """Return how many memories match, and up to `limit` of them from `offset`, best first.

        `among` is a mask of the memories to search.
        """
        query.check()
        filters.check(self.index)
        _check_place(place, self.index)
        search = self._search_values if place == "values" else self._search_triggers
        kept = _Kept(filters, _both(filters.memories(self.index), among))
        part = slice(offset, offset + limit)
        return self._file.search(lambda db: search(db, query, query.expression(), kept, part))

    def _search_values(
        self,
        db: sqlite3.Connection,
        query: Query,
        expression: Expression | None,
        kept: "_Kept",
        part: slice,
    ) -> SearchResult:
        """Find memories by the tokens at the ends of their values."""
        tokens = dict(_matching_tokens(db, query, expression))
        postings = np.frombuffer(b"".join(tokens.values()), VALUE_POSTING)
        sizes = [len(blob) // VALUE_POSTING.itemsize for blob in tokens.values()]
        ids = np.repeat(np.asarray(list(tokens), np.int64), sizes)
        return _rank_values(self.index, postings, ids, query, expression, kept, part)

    def _search_triggers(
        self,
        db: sqlite3.Connection,
        query: Query,
        expression: Expression | None,
        kept: "_Kept",
        part: slice,
    ) -> SearchResult:
        """Find memories by the text of their triggers' prefixes."""
        if expression is None and not has_word(query.text):
            expression = query.literal()
        matching = _MatchingSentences(query.max_triggers)
        if expression is None:
            _match_words(db, query, matching)
        else:
            _match_expression(db, query, expression, matching)
        postings = np.frombuffer(b"".join(matching.postings), TRIGGER_POSTING)
        past = np.cumsum([len(part) // TRIGGER_POSTING.itemsize for part in matching.postings])
        total, best = _rank_cells(self.index, postings, np.arange(len(postings)), kept, part)
        hits = []
        for cell, count, rank, side, key in best:
            row = int(np.searchsorted(past, key, "right"))
            ends, place = matching.ends[row], key - (int(past[row - 1]) if row else 0)
            end = int(ends["end"][np.searchsorted(ends["n"], place, "right")])
            (text,) = db.execute(
                "SELECT text FROM sentences WHERE sentence = ?", (matching.sentences[row],)
            ).fetchone()
            span = (
                matching.spans[row] if expression is None else expression.search(text, end).span()
            )
            name = "positive" if side > 0 else "negative"
            hits.append(Match(str(cell), count, rank, name, _sentence_excerpt(text, span, end)))
        return SearchResult(total, hits, len(matching.sentences) if matching.is_cut else None)


class _Kept(NamedTuple):
    """What a search keeps: conditions on postings, and a mask of memories."""

    filters: Filters
    memories: ndarray | None


def _both(one: ndarray | None, other: ndarray | None) -> ndarray | None:
    """Return where both masks hold; None is a mask that always does."""
    if one is None or other is None:
        return other if one is None else one
    both: ndarray = one & other
    return both


def search_values(
    index: Index,
    query: Query,
    filters: Filters = NO_FILTERS,
    offset: int = 0,
    limit: int = 20,
    among: ndarray | None = None,
) -> SearchResult:
    """Find memories by the tokens at the ends of their values, without a search file.

    It reads all values, so it takes longer than `Search`, and works on an unfinished index.
    """
    query.check()
    filters.check(index)
    _check_place("values", index)
    expression = query.expression()
    forms = token_forms(query.text)
    beginnings = tuple(token_beginnings(query.text)) if query.prefix else ()
    is_match = np.zeros(len(index.tokens), bool)
    for id, token in enumerate(index.tokens):
        if expression is not None:
            is_match[id] = expression.search(token) is not None
        else:
            folded = token.casefold()
            is_match[id] = folded in forms or folded.startswith(beginnings)
    postings, ids = [np.zeros(0, VALUE_POSTING)], [np.zeros(0, np.int64)]
    for number in range(index.n_layers) if filters.layer is None else [filters.layer]:
        columns = index.columns("values", number)
        listed = ~is_flat(columns["top_logits"], columns["bottom_logits"])
        for side, name in ((1, "top_ids"), (-1, "bottom_ids")):
            memories, ranks = np.nonzero(is_match[columns[name]] & listed[:, None])
            part = np.empty(len(memories), VALUE_POSTING)
            part["cell"], part["rank"] = index.layout.starts[number] + memories, ranks + 1
            part["side"] = side
            postings.append(part)
            ids.append(columns[name][memories, ranks].astype(np.int64))
    every = np.concatenate(postings), np.concatenate(ids)
    kept = _Kept(filters, _both(filters.memories(index), among))
    return _rank_values(index, *every, query, expression, kept, slice(offset, offset + limit))


def _rank_values(
    index: Index,
    postings: ndarray,
    ids: ndarray,
    query: Query,
    expression: Expression | None,
    kept: _Kept,
    part: slice,
) -> SearchResult:
    """Return the memories whose values list some tokens (`ids`, one per posting), best first."""
    total, best = _rank_cells(index, postings, ids, kept, part)
    hits = [
        Match(
            str(cell),
            count,
            rank,
            "top" if side > 0 else "bottom",
            _token_excerpt(index.token(id), query.text, expression),
        )
        for cell, count, rank, side, id in best
    ]
    return SearchResult(total, hits)


def _matching_tokens(
    db: sqlite3.Connection, query: Query, expression: Expression | None
) -> Iterator[tuple[int, bytes]]:
    """Yield the id and postings of every token that matches."""
    if expression is not None:
        for id, token, postings in db.execute("SELECT id, token, postings FROM tokens"):
            if expression.search(token):
                yield id, postings
        return
    select = "SELECT id, postings FROM tokens"
    forms = sorted(token_forms(query.text))
    marks = ",".join("?" * len(forms))
    yield from db.execute(f"{select} WHERE folded IN ({marks})", forms)
    if query.prefix:
        for begin in sorted(token_beginnings(query.text)):
            yield from db.execute(
                f"{select} WHERE folded >= ? AND folded < ?", (begin, end_of_range(begin))
            )


def _match_words(db: sqlite3.Connection, query: Query, into: "_MatchingSentences") -> None:
    """Find the sentences with the words of the query in a row, in any case and accents."""
    n_words = count_words(query.text)
    rows = db.execute(
        "SELECT words.rowid, highlight(words, 0, ?, ?), sentences.ends FROM words"
        " JOIN sentences ON sentences.sentence = words.rowid WHERE words MATCH ?",
        (OPEN, CLOSE, query.phrase()),
    )
    for sentence, marked, ends_blob in rows:
        begin, end = highlighted_span(marked, n_words)
        ends = np.frombuffer(ends_blob, TRIGGER_END)
        containing = ends[ends["end"] >= end]  # the prefixes that contain the match
        if not into.add(db, sentence, int(ends["n"][-1]), containing, (begin, end)):
            return


def _match_expression(
    db: sqlite3.Connection, query: Query, expression: Expression, into: "_MatchingSentences"
) -> None:
    """Find the sentences of which a prefix matches an expression."""
    rows = db.execute("SELECT sentence, text FROM sentences")
    if not query.regex:
        rows = db.execute(
            "SELECT sentence, text FROM sentences WHERE instr(text, ?)", (query.text,)
        )
    for sentence, text in rows:
        if not expression.may_match(text):
            continue
        (blob,) = db.execute(
            "SELECT ends FROM sentences WHERE sentence = ?", (sentence,)
        ).fetchone()
        ends = np.frombuffer(blob, TRIGGER_END)
        matching = expression.matching_ends(text, sorted(ends["end"].tolist()))
        if not matching:
            continue
        is_match = np.isin(ends["end"], matching)
        if not into.add(db, sentence, int(ends["n"][-1]), ends, (0, 0), is_match):
            return


def _rank_cells(
    index: Index, postings: ndarray, keys: ndarray, kept: _Kept, part: slice
) -> tuple[int, list[tuple[Cell, int, int, int, int]]]:
    """Return how many cells have postings, and a part of them as (cell, count, rank, side, key).

    Cells with most postings come first; rank, side and key are those of the best one. Millions may
    match, of which few are shown: whatever cannot be in the part is dropped before it is sorted.
    """
    is_kept = kept.filters.keep(postings)
    cells = postings["cell"].astype(np.int64)
    if kept.memories is not None:
        is_kept &= kept.memories[cells]
    if not is_kept.all():
        postings, keys, cells = postings[is_kept], keys[is_kept], cells[is_kept]
    if len(cells) and cells.max() >= len(index):
        raise LookupError("a posting names a memory that the index does not have")
    matches = np.bincount(cells, minlength=len(index))
    having = np.bincount(matches, minlength=1)  # how many cells have 0, 1, 2, … postings
    total = len(matches) - int(having[0])
    at_least = np.cumsum(having[::-1])[::-1]
    least = max(1, int(np.count_nonzero(at_least >= part.stop)) - 1)
    may_be_listed = matches >= least
    inside = np.flatnonzero(may_be_listed[cells])
    cells, postings, keys = cells[inside], postings[inside], keys[inside]
    # One integer per posting, smallest for the best: rank, then side, then key.
    is_negative = (postings["side"] < 0).astype(np.int64)
    packed = (postings["rank"].astype(np.int64) << 33) | (is_negative << 32) | keys
    listed = np.flatnonzero(may_be_listed)
    best = np.full(len(listed), np.iinfo(np.int64).max)
    np.minimum.at(best, np.searchsorted(listed, cells), packed)
    score = (best >> 33) - (matches[listed] << 31)
    candidates = np.flatnonzero(score <= _nth_smallest(score, part.stop))
    order = candidates[np.argsort(score[candidates], kind="stable")][part]
    return total, [
        (
            index.layout.at(cell),
            int(matches[cell]),
            key >> 33,
            -1 if key >> 32 & 1 else 1,
            key & 0xFFFFFFFF,
        )
        for cell, key in zip(listed[order].tolist(), best[order].tolist(), strict=True)
    ]


def _nth_smallest(numbers: ndarray, n: int) -> int:
    """Return the n-th smallest number; the largest if there are fewer, and 0 if there is none."""
    n = min(n, len(numbers)) or len(numbers)
    return int(np.partition(numbers, n - 1)[n - 1]) if n else 0


@dataclass
class _MatchingSentences:
    """Sentences that match, with their postings, up to a number of triggers to examine."""

    max_triggers: int | None
    sentences: list[int] = field(default_factory=list)
    postings: list[bytes] = field(default_factory=list)
    """Those whose prefix contains a match."""
    ends: list[ndarray] = field(default_factory=list)
    """Where the prefixes of these postings end."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Where words match; an expression may match elsewhere in each prefix."""
    n_examined: int = 0
    """Triggers of these sentences."""
    is_cut: bool = False
    """Whether a matching sentence was left out."""

    def add(
        self,
        db: sqlite3.Connection,
        sentence: int,
        n_triggers: int,
        ends: ndarray,
        span: tuple[int, int],
        is_match: ndarray | None = None,
    ) -> bool:
        """Add a sentence with the triggers that end at its first `ends`, or at some of them.

        Return False if there are enough already.
        """
        if self.max_triggers is not None and self.n_examined >= self.max_triggers:
            self.is_cut = True
            return False
        self.n_examined += n_triggers
        size = TRIGGER_POSTING.itemsize * (int(ends["n"][-1]) if len(ends) else 0)
        with db.blobopen("sentences", "postings", sentence, readonly=True) as blob:
            postings = blob.read(size)  # not the rest: there may be megabytes
        if len(postings) != size:
            raise LookupError("postings are missing")
        if is_match is not None and not is_match.all():
            counts = np.diff(ends["n"], prepend=0)
            every = np.frombuffer(postings, TRIGGER_POSTING)
            postings = every[np.repeat(is_match, counts)].tobytes()
            ends = ends[is_match].copy()
            ends["n"] = np.cumsum(counts[is_match])
        self.sentences.append(sentence)
        self.postings.append(postings)
        self.ends.append(ends)
        self.spans.append(span)
        return True


def _check_place(place: str, index: Index) -> None:
    """Raise unless `place` can be searched in this index."""
    if place == "patterns":
        raise FfmemError(
            "Search searches in values or triggers. For patterns, use"
            " ffmem.search(..., place='patterns') or `ffmem search --in patterns`."
        )
    if place not in {"values", "triggers"}:
        raise FfmemError(
            f"--in {place}: unknown value. Use one of all, values, triggers, patterns."
        )
    if place == "values" and not index.manifest.model.has_values:
        raise NoStaticValues(
            "Cannot search in values: the memories of this index have no static ones. Search in"
            " triggers (--in triggers) or patterns."
        )


def _sentence_excerpt(text: str, span: tuple[int, int], end: int) -> Excerpt:
    """Return a match in a sentence whose first `end` characters are the prefix.

    It shows the match, and where the prefix ends: what is between them may be left out.
    """
    begin, past = span
    first, half = max(0, begin - EXCERPT_CHARACTERS), EXCERPT_CHARACTERS // 2
    before = ("…" if first > 0 else "") + text[first:begin]
    end = max(past, end)
    after = text[past:end]
    if len(after) > 2 * EXCERPT_CHARACTERS:
        after = f"{after[:EXCERPT_CHARACTERS]} … {after[-half:]}"
    rest = text[end : end + half] + ("…" if end + half < len(text) else "")
    return Excerpt(before, text[begin:past], after, rest)


def _token_excerpt(token: str, query: str, expression: Expression | None) -> Excerpt:
    """Return a token with the part of it that matches."""
    if expression is not None:
        begin, end = expression.search(token).span()
        return Excerpt(token[:begin], token[begin:end], token[end:], "")
    folded, end = token.casefold(), len(token)
    if folded not in token_forms(query):
        begun = max((form for form in token_beginnings(query) if folded.startswith(form)), key=len)
        end = next(n for n in range(len(token) + 1) if len(token[:n].casefold()) >= len(begun))
    return Excerpt("", token[:end], token[end:], "")
