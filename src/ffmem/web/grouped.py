"""What one box finds, in groups: memories by name, values by token, triggers and patterns by text.

The groups are found one by one, so that a group can be asked for alone and page by page. Very
frequent words are counted over the first triggers that hold them, and the answer says so.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from typing_extensions import TypedDict

from ffmem.cells import Cell
from ffmem.errors import FfmemError, StoreError, UnknownCell
from ffmem.indexing.query import Query
from ffmem.indexing.search import Excerpt, Match, SearchResult
from ffmem.indexing.search_db import NotSearchable
from ffmem.indexing.store import Index
from ffmem.indexing.tables import GROUP, layer_file, read_group
from ffmem.patterns.search import PatternSearch
from ffmem.web.library import Shelf
from ffmem.web.limits import TooMuch
from ffmem.web.pattern_view import UNREAD, at_hand

MOST_QUERY = 200
"""Characters of a query."""

SECONDS = 2.0
"""For a regular expression."""

MOST_TRIGGERS = {True: 100_000, False: 1_000_000}
"""Looked at for one answer: while somebody types, and otherwise."""

TOKENS = 6
"""Shown beside each memory."""

Name = Literal["memories", "values", "triggers", "patterns"]
Place = Literal["values", "triggers", "patterns"]
PLACES: tuple[Place, ...] = ("values", "triggers", "patterns")
"""Groups that are searched: values where they are static, patterns where an index has them."""

UNWRITABLE = (
    "This index has no search file (search.sqlite) yet, and its folder cannot be written to. All"
    " its memories can be browsed. To search, run `ffmem search` on it once where its folder may be"
    " written to."
)


class Entry(TypedDict):
    """A memory that was found."""

    cell: str
    layer: int
    memory: int
    matches: int | None
    """Entries of its lists that hold what was searched for; none if it was named itself."""
    rank: int | None
    """Of the best of them, from 1."""
    side: str | None
    """`top` or `bottom` of its value; `positive` or `negative` triggers."""
    kind: str | None
    """Of the best pattern: `shallow` or `semantic`; none if it was not found by its patterns."""
    source: str | None
    """Who saw that pattern: `human`, `explained` or `automatic`."""
    before: str
    match: str
    after: str
    rest: str
    """What follows the trigger's prefix in its sentence."""
    tokens: list[str]
    """What its value promotes for the sign that was found; empty while somebody types, and where
    memories have no static values."""


class Group(TypedDict):
    """What was found in one place."""

    name: Name
    total: int
    """Memories."""
    at_least: bool
    """Whether there are sentences that were not looked at: the total may be larger."""
    sentences: int | None
    """How many were looked at, if not all."""
    offset: int
    hits: list[Entry]


@dataclass(frozen=True)
class Search:
    """What a visitor searches for."""

    text: str
    place: Place | None = None
    """One place only; None: all."""
    layer: int | None = None
    prefix: bool = False
    """The last word may be the beginning of one."""

    @property
    def expression(self) -> str | None:
        """The regular expression between two slashes, if it is one."""
        is_one = len(self.text) > 2 and self.text[0] == self.text[-1] == "/"
        return self.text[1:-1] if is_one else None

    @property
    def query(self) -> Query:
        """What is looked up."""
        expression = self.expression
        most = MOST_TRIGGERS[self.prefix]
        if expression is not None:
            return Query(expression, regex=True, max_triggers=most, seconds=SECONDS)
        return Query(self.text, prefix=self.prefix, max_triggers=most, seconds=SECONDS)

    def parameters(self, **other: object) -> dict[str, object]:
        """Return what an address says of it."""
        named: dict[str, object] = {
            "q": self.text,
            "in": self.place,
            "layer": self.layer,
            "prefix": 1 if self.prefix else None,
        }
        return named | other


def groups(shelf: Shelf, search: Search, offset: int, limit: int) -> list[Group]:
    """Return every group, the first `limit` of each from the `offset`-th on."""
    if len(search.text) > MOST_QUERY:
        raise TooMuch(
            f"The search has {len(search.text):,} characters; the page takes {MOST_QUERY}."
            " Search for a part of it, or use `ffmem search`."
        )
    index = shelf.index
    found = _named(index, search)
    every = PLACES if index.manifest.model.has_values else PLACES[1:]
    for place in every if search.place is None else (search.place,):
        if place == "patterns":
            found += _patterns(shelf, search, offset, limit)
            continue
        part = _found(shelf, search, place, offset, limit)
        found.append(
            {
                "name": place,
                "total": part.total,
                "at_least": part.n_examined is not None,
                "sentences": part.n_examined,
                "offset": offset,
                "hits": _entries(index, part.hits, tokens=not search.prefix),
            }
        )
    return found


def examples(index: Index) -> dict[str, str]:
    """Return something of each kind that there is to find in an index; empty if there is none."""
    cell = index.layout.cell(index.layout.memory_layers[-1], 0)
    tokens: Iterable[str] = ()
    if index.manifest.model.has_values:
        columns = read_group(index.folder / layer_file("values", cell.layer), 0, ["top_ids"])
        tokens = (index.token(id).strip() for id in columns["top_ids"].T.reshape(-1).tolist())
    words = re.findall(r"\w+", index.sentences.row(0).text or "")
    return {"cell": str(cell), "token": _a_word(tokens), "words": _a_word(words)}


def _a_word(texts: Iterable[str]) -> str:
    """Return the first plain word among some texts, if there is one."""
    return next((text for text in texts if text.isalpha() and text.islower() and text[3:]), "")


def _named(index: Index, search: Search) -> list[Group]:
    """Return the memory that is named, in a group of its own; nothing if none is."""
    if search.place is not None:
        return []
    try:
        cell = index.layout.resolve(search.text)
    except UnknownCell:
        return []
    if search.layer not in (None, cell.layer):
        return []
    tokens = _tokens(index, [(cell, "top")])[0]
    one = _entry(cell, Excerpt("", str(cell), "", ""), tokens)
    return [
        {
            "name": "memories",
            "total": 1,
            "at_least": False,
            "sentences": None,
            "offset": 0,
            "hits": [one],
        }
    ]


def _found(shelf: Shelf, search: Search, place: Place, offset: int, limit: int) -> SearchResult:
    try:
        with shelf.searching() as opened:
            return opened.search(search.query, place, search.layer, offset, limit)
    except NotSearchable:  # whose message names a folder of the server
        raise FfmemError(UNWRITABLE) from None


def _patterns(shelf: Shelf, search: Search, offset: int, limit: int) -> list[Group]:
    """Return the memories with such patterns, in a group of its own; nothing if there are none."""
    index, kept = shelf.index, at_hand(shelf.index).patterns
    if not kept:
        return []
    try:
        with closing(PatternSearch(index, kept)) as opened:
            total, found = opened.search(search.query, search.layer, offset, limit)
    except NotSearchable:
        raise FfmemError(UNWRITABLE) from None
    except StoreError:
        raise FfmemError(UNREAD) from None
    entries = _entries(index, [one.match for one in found], tokens=not search.prefix)
    for entry, one in zip(entries, found, strict=True):
        entry["kind"], entry["source"] = one.kind, one.source
    return [
        {
            "name": "patterns",
            "total": total,
            "at_least": False,
            "sentences": None,
            "offset": offset,
            "hits": entries,
        }
    ]


def _entries(index: Index, found: Sequence[Match], tokens: bool) -> list[Entry]:
    cells = [index.layout.resolve(hit.cell) for hit in found]
    gated = index.manifest.model.gated
    turned = [gated and hit.side in ("bottom", "negative") for hit in found]
    wanted = [(cell, "bottom" if turn else "top") for cell, turn in zip(cells, turned, strict=True)]
    shown = _tokens(index, wanted) if tokens else [[] for _ in found]
    return [
        _entry(cell, hit.excerpt, beside, hit.matches, hit.rank, hit.side)
        for hit, cell, beside in zip(found, cells, shown, strict=True)
    ]


def _entry(
    cell: Cell,
    excerpt: Excerpt,
    tokens: list[str],
    matches: int | None = None,
    rank: int | None = None,
    side: str | None = None,
) -> Entry:
    return {
        "cell": str(cell),
        "layer": cell.layer,
        "memory": cell.memory,
        "matches": matches,
        "rank": rank,
        "side": side,
        "kind": None,
        "source": None,
        "before": excerpt.before,
        "match": excerpt.match,
        "after": excerpt.after,
        "rest": excerpt.rest,
        "tokens": tokens,
    }


def _tokens(index: Index, wanted: Sequence[tuple[Cell, str]]) -> list[list[str]]:
    """Return the first tokens at one end of some values, reading every row group once."""
    if not index.manifest.model.has_values:
        return [[] for _ in wanted]
    places: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    for number, (cell, end) in enumerate(wanted):
        group, row = divmod(cell.memory, GROUP)
        places[cell.layer, group].append((number, row, end))
    found: dict[int, list[str]] = {}
    for (layer, group), rows in places.items():
        names = sorted({f"{end}_ids" for _, _, end in rows})
        columns = read_group(index.folder / layer_file("values", layer), group, names)
        for number, row, end in rows:
            ids = columns[f"{end}_ids"][row][:TOKENS].tolist()
            found[number] = [index.token(id) for id in ids]
    return [found[number] for number in range(len(found))]
