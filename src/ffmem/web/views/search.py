"""The search page: one box for layers and memories by name, tokens, triggers and patterns.

Results come in groups, and each group can be paged through alone. Very frequent words are counted
over the first triggers that contain them, and the answer says so.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, Response
from pydantic import BeforeValidator

from ffmem.cells import Cell
from ffmem.errors import FfmemError, StoreError, UnknownCell
from ffmem.indexing.query import Query as TextQuery
from ffmem.indexing.search import Match
from ffmem.indexing.search_db import NotSearchable
from ffmem.indexing.store import Index
from ffmem.indexing.tables import GROUP, layer_file, read_group
from ffmem.patterns.search import PatternSearch
from ffmem.web.auth import is_cross_site
from ffmem.web.library import Shelf
from ffmem.web.limits import MOST_RESULTS, TooMuch
from ffmem.web.pattern_view import UNREAD, at_hand
from ffmem.web.site import Site, said
from ffmem.web.state import Asked, none_if_empty

FIRST = 8
"""Memories per group on a page that shows all groups."""

PAGE = 25
"""Memories on a page of one group."""

MOST_OFFSET = 1_000_000

MOST_QUERY = 200
"""Characters of a query."""

SECONDS = 2.0
"""Time limit of a regular expression."""

MOST_TRIGGERS = {True: 100_000, False: 1_000_000}
"""Triggers to examine: while you type, and otherwise."""

TOKENS = 6
"""Tokens beside each memory."""

Place = Literal["values", "triggers", "patterns"]
PLACES: tuple[Place, ...] = ("values", "triggers", "patterns")

UNWRITABLE = (
    "This index has no search file (search.sqlite) yet, and its folder cannot be written to. All"
    " its memories can be browsed. To search, run `ffmem search` on it once where its folder may be"
    " written to."
)


@dataclass(frozen=True)
class Hit:
    """A memory, or a layer, that was found."""

    cell: str
    """Its name."""
    layer: int
    memory: int | None = None
    """None for a layer."""
    matches: int | None = None
    """Entries of its lists that match; None if it was found by its name."""
    rank: int | None = None
    """Of the best match, from 1."""
    side: str | None = None
    """`top` or `bottom` of its value; `positive` or `negative` triggers."""
    before: str = ""
    match: str = ""
    after: str = ""
    rest: str = ""
    """What follows the trigger's prefix in its sentence."""
    tokens: list[str] = field(default_factory=list)
    """What its value promotes for this sign; empty while you type, and without static values."""
    kind: str | None = None
    """Of the best pattern: `shallow` or `semantic`."""
    source: str | None = None
    """Who found that pattern: `human`, `explained` or `automatic`."""


@dataclass(frozen=True)
class Group:
    """What was found in one place."""

    name: Literal["layers", "memories", "values", "triggers", "patterns"]
    total: int
    """Memories that match."""
    hits: list[Hit]
    offset: int = 0
    sentences: int | None = None
    """How many sentences were examined, if not all."""
    at_least: bool = False
    """Whether sentences were left out: the total may be larger."""


@dataclass(frozen=True)
class SearchAnswer:
    """The result of a search."""

    index: str
    query: str
    regex: bool
    """Whether the query is a regular expression, between two slashes."""
    prefix: bool
    layer: int | None
    notes: list[str]
    """How to read this kind of memory."""
    groups: list[Group]


@dataclass(frozen=True)
class Search:
    """What a visitor searches for."""

    text: str
    place: Place | None = None
    """None: everywhere."""
    layer: int | None = None
    prefix: bool = False
    """Whether the last word may be incomplete."""

    @property
    def expression(self) -> str | None:
        """The regular expression between two slashes, if it is one."""
        is_one = len(self.text) > 2 and self.text[0] == self.text[-1] == "/"
        return self.text[1:-1] if is_one else None

    @property
    def query(self) -> TextQuery:
        """What to look up."""
        most = MOST_TRIGGERS[self.prefix]
        if self.expression is not None:
            return TextQuery(self.expression, regex=True, max_triggers=most, seconds=SECONDS)
        return TextQuery(self.text, prefix=self.prefix, max_triggers=most, seconds=SECONDS)

    def parameters(self, **other: object) -> dict[str, object]:
        """Return its parameters in an address."""
        named = {"q": self.text, "in": self.place, "layer": self.layer}
        return {**named, "prefix": 1 if self.prefix else None, **other}


def search_of(
    q: Annotated[
        str, Query(description="A memory, layer, token, word, phrase or /expression/.")
    ] = "",
    place: Annotated[
        Place | None,
        BeforeValidator(none_if_empty),
        Query(alias="in", description="Search in values, triggers or patterns only."),
    ] = None,
    layer: Annotated[
        int | None, BeforeValidator(none_if_empty), Query(description="Only this layer, from 0.")
    ] = None,
    prefix: Annotated[bool, Query(description="Whether the last word may be incomplete.")] = False,
) -> Search:
    """Return the search that an address names."""
    return Search(q.strip("\r\n\t"), place, layer, prefix)


SearchOf = Annotated[Search, Depends(search_of)]
Page = Annotated[int, Query(ge=1, le=MOST_OFFSET // PAGE, description="Of one group, from 1.")]
Offset = Annotated[int, Query(ge=0, le=MOST_OFFSET, description="Memories to skip.")]
Limit = Annotated[int, Query(ge=1, le=MOST_RESULTS, description="Memories per group.")]


def router(site: Site) -> APIRouter:
    """Return the routes of search."""
    routes = APIRouter(tags=["search"])

    @routes.get("/search", response_class=HTMLResponse, include_in_schema=False)
    def page(request: Request, state: Asked, search: SearchOf, page: Page = 1) -> Response:
        shelf = site.shelf(state)
        groups: list[Group] = []
        error = None
        is_empty, alone = not search.text.strip(), search.place is not None
        # A link on another site fills in the expression; the visitor decides whether to run it.
        held = search.expression is not None and is_cross_site(request)
        if not is_empty and not held:
            try:
                offset, limit = ((page - 1) * PAGE, PAGE) if alone else (0, FIRST)
                groups = find(shelf, search, offset, limit)
            except FfmemError as refused:
                error = said(refused)
        return site.page(
            request,
            state,
            "search.html",
            status=422 if error else 200,
            search=search,
            groups=groups,
            error=error,
            held=held,
            page=page if alone else None,
            escaped=re.escape(search.text),
            examples=examples(shelf.index) if is_empty else None,
            hand=at_hand(shelf.index),
            per_page=PAGE,
            seconds=SECONDS,
            most=MOST_QUERY,
        )

    @routes.get("/api/search")
    def api(state: Asked, search: SearchOf, offset: Offset = 0, limit: Limit = 10) -> SearchAnswer:
        """Return the memories that match a name, token, text or /expression/, in groups."""
        shelf = site.shelf(state)
        return SearchAnswer(
            shelf.name,
            search.text,
            search.expression is not None,
            search.prefix,
            search.layer,
            shelf.index.manifest.model.kind.notes,
            find(shelf, search, offset, limit),
        )

    return routes


def find(shelf: Shelf, search: Search, offset: int, limit: int) -> list[Group]:
    """Return every group, with `limit` hits each from the `offset`-th on."""
    if len(search.text) > MOST_QUERY:
        raise TooMuch(
            f"The search has {len(search.text):,} characters; the page takes {MOST_QUERY}."
            " Search for a part of it, or use `ffmem search`."
        )
    index = shelf.index
    places = PLACES if index.manifest.model.has_values else PLACES[1:]
    groups = _by_name(index, search) if search.place is None else []
    for place in places if search.place is None else (search.place,):
        if place == "patterns":
            groups += _by_pattern(shelf, search, offset, limit)
            continue
        try:
            with shelf.searching() as opened:
                found = opened.search(search.query, place, search.layer, offset, limit)
        except NotSearchable:  # its message names a folder of the server
            raise FfmemError(UNWRITABLE) from None
        hits = _hits(index, found.hits, with_tokens=not search.prefix)
        examined = found.n_examined
        groups.append(Group(place, found.total, hits, offset, examined, examined is not None))
    return groups


def examples(index: Index) -> dict[str, str]:
    """Return something of each kind to find in an index; empty if there is none."""
    cell = index.layout.cell(index.layout.memory_layers[-1], 0)
    tokens: Iterable[str] = ()
    if index.manifest.model.has_values:
        columns = read_group(index.folder / layer_file("values", cell.layer), 0, ["top_ids"])
        tokens = (index.token(id).strip() for id in columns["top_ids"].T.reshape(-1).tolist())
    words = re.findall(r"\w+", index.sentences.row(0).text or "")
    found = {"cell": str(cell), "layer": f"L{cell.layer}"}
    for name, texts in (("token", tokens), ("words", words)):
        plain = (text for text in texts if text.isalpha() and text.islower() and len(text) > 3)
        found[name] = next(plain, "")
    return found


def _by_name(index: Index, search: Search) -> list[Group]:
    """Return the layer or the memory of this name, in a group of its own."""
    name = re.fullmatch(r"\s*(?:L|layer\s*)(\d{1,9})\s*", search.text, re.IGNORECASE | re.ASCII)
    if name is not None:
        layer = int(name[1])
        if layer >= index.n_layers or search.layer not in (None, layer):
            return []
        return [Group("layers", 1, [Hit(f"L{layer}", layer, match=f"L{layer}")])]
    try:
        cell = index.layout.resolve(search.text)
    except UnknownCell:
        return []
    if search.layer not in (None, cell.layer):
        return []
    (tokens,) = _tokens(index, [(cell, "top")])
    hit = Hit(str(cell), cell.layer, cell.memory, match=str(cell), tokens=tokens)
    return [Group("memories", 1, [hit])]


def _by_pattern(shelf: Shelf, search: Search, offset: int, limit: int) -> list[Group]:
    """Return the memories with matching patterns, in a group of its own; none without patterns."""
    index, stored = shelf.index, at_hand(shelf.index).patterns
    if not stored:
        return []
    try:
        with closing(PatternSearch(index, stored)) as opened:
            total, found = opened.search(search.query, search.layer, offset, limit)
    except NotSearchable:
        raise FfmemError(UNWRITABLE) from None
    except StoreError:
        raise FfmemError(UNREAD) from None
    hits = _hits(index, [one.match for one in found], with_tokens=not search.prefix)
    named = [
        replace(hit, kind=one.kind, source=one.source) for hit, one in zip(hits, found, strict=True)
    ]
    return [Group("patterns", total, named, offset)]


def _hits(index: Index, found: Sequence[Match], with_tokens: bool) -> list[Hit]:
    cells = [index.layout.resolve(match.cell) for match in found]
    gated = index.manifest.model.gated
    wanted = [
        (cell, "bottom" if gated and match.side in ("bottom", "negative") else "top")
        for cell, match in zip(cells, found, strict=True)
    ]
    tokens = _tokens(index, wanted) if with_tokens else [[] for _ in found]
    return [
        Hit(
            *(str(cell), cell.layer, cell.memory, match.matches, match.rank, match.side),
            *match.excerpt,
            tokens=beside,
        )
        for match, cell, beside in zip(found, cells, tokens, strict=True)
    ]


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
