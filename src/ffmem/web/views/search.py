"""The search page: one box for layers, experts and memories by name, tokens, triggers and patterns.

Results come in groups, and each group can be paged through alone. Very frequent words are counted
over the first triggers that contain them, and the response says so. Of an unfinished index, only
names and values are searched.
"""

import re
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, Response
from numpy import ndarray
from pydantic import BeforeValidator, Field

from ffmem.cells import Cell
from ffmem.errors import FfmemError, StoreError, UnknownCell
from ffmem.indexing.filters import Filters
from ffmem.indexing.query import Query as TextQuery
from ffmem.indexing.search import Match
from ffmem.indexing.search_db import NotSearchable
from ffmem.indexing.store import Index
from ffmem.patterns.search import PatternSearch
from ffmem.web.auth import is_cross_site
from ffmem.web.catalog import ServedIndex
from ffmem.web.errors import LimitExceeded
from ffmem.web.patterns import UNREADABLE, stored_patterns
from ffmem.web.site import Site, error_context
from ffmem.web.state import StateParam, none_if_empty

GROUP_SIZE = 8
"""Memories per group on a page that shows all groups."""

PAGE_SIZE = 25
"""Memories on a page of one group."""

MAX_OFFSET = 1_000_000

MAX_RESULTS = 200
"""Memories per group in one request."""

MAX_QUERY = 200
"""Characters of a query."""

MAX_SECONDS = 2.0
"""Time limit of a regular expression."""

MAX_TRIGGERS = {True: 100_000, False: 1_000_000}
"""Triggers to examine: while you type, and otherwise."""

N_TOKENS = 6
"""Tokens beside each memory."""

Place = Literal["values", "triggers", "patterns"]
PLACES: tuple[Place, ...] = ("values", "triggers", "patterns")

TRIGGERS_LATER = (
    "Triggers and patterns cannot be searched yet: the index is unfinished, or its search file is"
    " being built. Values can be searched."
)

READ_ONLY = (
    "This index has no search file (search.sqlite) yet, and its folder is read-only. You can"
    " browse all its memories. To search, run `ffmem search` once where the folder is writable."
)


@dataclass(frozen=True)
class Hit:
    """A memory, or a layer, that was found."""

    cell: str
    """Its name."""
    layer: int
    memory: int | None = None
    """None for a layer or an expert."""
    matches: int | None = None
    """Entries of its lists that match; None if it was found by its name."""
    rank: int | None = None
    """Rank of the best match, from 1."""
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
    """Kind of the best pattern: `shallow` or `semantic`."""
    source: str | None = None
    """Who found that pattern: `human`, `explained` or `automatic`."""
    bank: str | None = None
    """Name of an expert in its layer, such as E12."""


@dataclass(frozen=True)
class Group:
    """What was found in one place."""

    name: Literal["layers", "experts", "memories", "values", "triggers", "patterns"]
    total: int
    """Memories that match."""
    hits: list[Hit]
    offset: int = 0
    sentences: int | None = None
    """How many sentences were examined, if not all."""
    at_least: bool = False
    """Whether sentences were left out: the total may be larger."""


@dataclass(frozen=True)
class SearchResponse:
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


Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class SearchQuery:
    """What a visitor searches for: URL parameters."""

    text: Annotated[
        str, Query(alias="q", description="A memory, layer, token, word, phrase or /expression/.")
    ] = ""
    place: Annotated[
        Place | None,
        BeforeValidator(none_if_empty),
        Query(alias="in", description="Search in values, triggers or patterns only."),
    ] = None
    layer: Annotated[
        int | None, BeforeValidator(none_if_empty), Query(description="Only this layer, from 0.")
    ] = None
    prefix: Annotated[bool, Query(description="Whether the last word may be incomplete.")] = False
    bank: Annotated[
        str | None,
        BeforeValidator(none_if_empty),
        Query(description="Only this bank: dense, S or E12."),
    ] = None
    sign: Annotated[
        Literal["1", "-1"] | None,
        BeforeValidator(none_if_empty),
        Query(description="1: tops of values and m > 0; -1: bottoms and m < 0."),
    ] = None
    rank: Annotated[
        Annotated[int, Field(ge=1, le=MAX_OFFSET)] | None,
        BeforeValidator(none_if_empty),
        Query(description="Only matches at this rank or better."),
    ] = None
    kind: Annotated[
        Literal["shallow", "semantic"] | None,
        BeforeValidator(none_if_empty),
        Query(description="Only such patterns, and memories that have one."),
    ] = None
    min_active: Annotated[
        Share | None,
        BeforeValidator(none_if_empty),
        Query(description="Smallest share of prefixes on which a memory is active."),
    ] = None
    max_active: Annotated[
        Share | None,
        BeforeValidator(none_if_empty),
        Query(description="Largest share of prefixes on which a memory is active."),
    ] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self.text.strip("\r\n\t"))

    @property
    def expression(self) -> str | None:
        """The regular expression between two slashes, if it is one."""
        is_one = len(self.text) > 2 and self.text[0] == self.text[-1] == "/"
        return self.text[1:-1] if is_one else None

    @property
    def text_query(self) -> TextQuery:
        """What to look up."""
        most = MAX_TRIGGERS[self.prefix]
        if self.expression is not None:
            return TextQuery(self.expression, regex=True, max_triggers=most, seconds=MAX_SECONDS)
        return TextQuery(self.text, prefix=self.prefix, max_triggers=most, seconds=MAX_SECONDS)

    @property
    def filters(self) -> Filters:
        """Which matches count, and of which memories."""
        return Filters(
            layer=self.layer,
            bank=self.bank,
            sign=None if self.sign is None else int(self.sign),
            rank=self.rank,
            kind=self.kind,
            min_active=self.min_active,
            max_active=self.max_active,
        )

    @property
    def more_filters(self) -> dict[str, object]:
        """The filters besides the layer that are set, by name."""
        names = ("bank", "sign", "rank", "kind", "min_active", "max_active")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def parameters(self, **other: object) -> dict[str, object]:
        """Return its URL parameters."""
        own = {"q": self.text, "in": self.place, "layer": self.layer}
        return {**own, "prefix": 1 if self.prefix else None, **self.more_filters, **other}


QueryParam = Annotated[SearchQuery, Depends(SearchQuery)]
Page = Annotated[int, Query(ge=1, le=MAX_OFFSET // PAGE_SIZE, description="Of one group, from 1.")]
Offset = Annotated[int, Query(ge=0, le=MAX_OFFSET, description="Memories to skip.")]
Limit = Annotated[int, Query(ge=1, le=MAX_RESULTS, description="Memories per group.")]


def router(site: Site) -> APIRouter:
    """Return the routes of search."""
    routes = APIRouter(tags=["search"])

    @routes.get("/search", response_class=HTMLResponse, include_in_schema=False)
    def page(request: Request, state: StateParam, query: QueryParam, page: Page = 1) -> Response:
        served = site.served(state)
        groups: list[Group] = []
        error = None
        is_empty, is_one_group = not query.text.strip(), query.place is not None
        # A link on another site fills in the expression; the visitor decides whether to run it.
        needs_consent = query.expression is not None and is_cross_site(request)
        if not is_empty and not needs_consent:
            offset, limit = ((page - 1) * PAGE_SIZE, PAGE_SIZE) if is_one_group else (0, GROUP_SIZE)
            try:
                groups = find(served, query, offset, limit)
            except FfmemError as problem:
                error = error_context(problem)
        return site.page(
            request,
            state,
            "search.html",
            status=422 if error else 200,
            served=served,
            query=query,
            groups=groups,
            error=error,
            needs_consent=needs_consent,
            page=page if is_one_group else None,
            escaped=re.escape(query.text),
            examples=examples(served.index) if is_empty else None,
            patterns=stored_patterns(served.index),
            per_page=PAGE_SIZE,
            seconds=MAX_SECONDS,
            max_length=MAX_QUERY,
        )

    @routes.get("/api/search")
    def api(
        state: StateParam, query: QueryParam, offset: Offset = 0, limit: Limit = 10
    ) -> SearchResponse:
        """Return the memories that match a name, token, text or /expression/, in groups."""
        served = site.served(state)
        notes = list(served.index.manifest.model.kind.notes)
        if served.search.values_only:
            notes.append(TRIGGERS_LATER)
        return SearchResponse(
            served.name,
            query.text,
            query.expression is not None,
            query.prefix,
            query.layer,
            notes,
            find(served, query, offset, limit),
        )

    return routes


def find(served: ServedIndex, query: SearchQuery, offset: int, limit: int) -> list[Group]:
    """Return every group, with `limit` hits each from the `offset`-th on."""
    if len(query.text) > MAX_QUERY:
        raise LimitExceeded(
            f"The search has {len(query.text):,} characters; the page takes {MAX_QUERY}."
            " Search for a part of it, or use `ffmem search`."
        )
    index = served.index
    query.filters.check(index)
    places = PLACES if index.manifest.model.has_values else PLACES[1:]
    groups = _by_name(index, query) if query.place is None and not query.more_filters else []
    among = None if query.kind is None else _with_kind(index, query.kind)
    for place in places if query.place is None else (query.place,):
        if place == "patterns":
            groups += _by_pattern(index, query, offset, limit)
            continue
        if place == "triggers" and served.search.values_only:
            if query.place is not None:
                raise FfmemError(TRIGGERS_LATER)
            continue
        try:
            found = served.search.search(
                query.text_query, place, query.filters, offset, limit, among
            )
        except NotSearchable:  # its message names a folder of the server
            raise FfmemError(READ_ONLY) from None
        hits = _hits(index, found.hits, with_tokens=not query.prefix)
        examined = found.n_examined
        groups.append(Group(place, found.total, hits, offset, examined, examined is not None))
    return groups


def examples(index: Index) -> dict[str, str]:
    """Return something of each kind to find in an index; empty if there is none."""
    cell = index.layout.cell(index.layout.memory_layers[-1], 0)
    tokens: Iterable[str] = ()
    if index.manifest.model.has_values:
        ids = index.columns("values", cell.layer, ["top_ids"])["top_ids"][:128]
        tokens = (index.token(id).strip() for id in ids.T.reshape(-1).tolist())
    words = re.findall(r"\w+", index.sentences.row(0).text or "")
    found = {"cell": str(cell), "layer": f"L{cell.layer}", "expert": ""}
    for layer, n_experts in enumerate(index.layout.n_experts):
        found["expert"] = f"L{layer}E{n_experts - 1}" if n_experts else found["expert"]
    for name, texts in (("token", tokens), ("words", words)):
        plain = (text for text in texts if text.isalpha() and text.islower() and len(text) > 3)
        found[name] = next(plain, "")
    return found


def _by_name(index: Index, query: SearchQuery) -> list[Group]:
    """Return the layer, the expert or the memory of this name, in a group of its own."""
    name = re.fullmatch(
        r"\s*(?:L|layer\s*)(\d{1,9})\s*([ES]\d{0,9})?\s*", query.text, re.IGNORECASE | re.ASCII
    )
    if name is not None:
        layer = int(name[1])
        if layer >= index.n_layers or query.layer not in (None, layer):
            return []
        if name[2]:
            bank = name[2].upper()
            there = bank in (one.name for one in index.layout.banks(layer))
            hit = Hit(f"L{layer}{bank}", layer, match=f"L{layer}{bank}", bank=bank)
            return [Group("experts", 1, [hit])] if there else []
        return [Group("layers", 1, [Hit(f"L{layer}", layer, match=f"L{layer}")])]
    try:
        cell = index.layout.resolve(query.text)
    except UnknownCell:
        return []
    if query.layer not in (None, cell.layer):
        return []
    (tokens,) = _tokens(index, [(cell, "top")])
    hit = Hit(str(cell), cell.layer, cell.memory, match=str(cell), tokens=tokens)
    return [Group("memories", 1, [hit])]


def _by_pattern(index: Index, query: SearchQuery, offset: int, limit: int) -> list[Group]:
    """Return the memories with matching patterns, in a group of its own; none without patterns."""
    sources = stored_patterns(index).sources
    if not sources:
        return []
    try:
        with closing(PatternSearch(index, sources)) as opened:
            total, found = opened.search(query.text_query, query.filters, offset, limit)
    except NotSearchable:
        raise FfmemError(READ_ONLY) from None
    except StoreError:
        raise FfmemError(UNREADABLE) from None
    hits = _hits(index, [one.match for one in found], with_tokens=not query.prefix)
    named = [
        replace(hit, kind=one.kind, source=one.source) for hit, one in zip(hits, found, strict=True)
    ]
    return [Group("patterns", total, named, offset)]


def _with_kind(index: Index, kind: str) -> ndarray:
    """Return a mask of the memories that have a pattern of a kind."""
    sources = stored_patterns(index).sources
    if not sources:
        raise FfmemError(
            f"Cannot filter by {kind} patterns: this index has none yet. Find them with"
            " `ffmem patterns detect`, or drop the filter."
        )
    try:
        with closing(PatternSearch(index, sources)) as opened:
            return opened.with_kind(kind)
    except NotSearchable:
        raise FfmemError(READ_ONLY) from None
    except StoreError:
        raise FfmemError(UNREADABLE) from None


def _hits(index: Index, matches: Sequence[Match], with_tokens: bool) -> list[Hit]:
    gated = index.manifest.model.gated
    cells = [index.layout.resolve(match.cell) for match in matches]
    ends = [
        (cell, "bottom" if gated and match.side in ("bottom", "negative") else "top")
        for cell, match in zip(cells, matches, strict=True)
    ]
    tokens = _tokens(index, ends) if with_tokens else [[] for _ in matches]
    return [
        Hit(
            *(str(cell), cell.layer, cell.memory, match.matches, match.rank, match.side),
            *match.excerpt,
            tokens=promoted,
        )
        for match, cell, promoted in zip(matches, cells, tokens, strict=True)
    ]


def _tokens(index: Index, ends: Sequence[tuple[Cell, str]]) -> list[list[str]]:
    """Return the first tokens at one end of some values."""
    if not index.manifest.model.has_values:
        return [[] for _ in ends]
    columns: dict[tuple[int, str], list[int]] = {}
    for cell, end in ends:
        columns.setdefault((cell.layer, f"{end}_ids"), []).append(cell.memory)
    ids = {
        (layer, name, memory): row[:N_TOKENS].tolist()
        for (layer, name), memories in columns.items()
        for memory, row in zip(
            memories, index.columns_at("values", layer, [name], memories)[name], strict=True
        )
    }
    return [
        [index.token(id) for id in ids[cell.layer, f"{end}_ids", cell.memory]] for cell, end in ends
    ]
