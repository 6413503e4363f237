"""The room of search: one box for names of memories, tokens of values, triggers and patterns."""

import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi import Query as Parameter
from fastapi.responses import HTMLResponse, Response
from pydantic import BeforeValidator
from typing_extensions import TypedDict

from ffmem.errors import FfmemError
from ffmem.web.grouped import MOST_QUERY, SECONDS, Group, Place, Search, examples, groups
from ffmem.web.limits import MOST_RESULTS
from ffmem.web.pattern_view import at_hand
from ffmem.web.site import Site, said
from ffmem.web.state import Asked

FIRST = 8
"""Memories of each group on a page that shows all groups."""

PAGE = 25
"""Memories on a page of one group."""

MOST_OFFSET = 1_000_000


def _given(value: Any) -> Any:
    """Return what a field of a form holds; None for an empty one."""
    return None if value == "" else value


class Answer(TypedDict):
    """What a search found."""

    index: str
    query: str
    regex: bool
    """Whether the query is a regular expression, between two slashes."""
    prefix: bool
    layer: int | None
    notes: list[str]
    """What must be known of this kind of memory to read what was found."""
    groups: list[Group]


def asked(
    q: Annotated[str, Parameter(description="A memory, token, word, phrase or /expression/.")] = "",
    place: Annotated[
        Place | None,
        BeforeValidator(_given),
        Parameter(alias="in", description="Search in values, triggers or patterns only."),
    ] = None,
    layer: Annotated[
        int | None, BeforeValidator(_given), Parameter(description="Only this layer, from 0.")
    ] = None,
    prefix: Annotated[
        bool, Parameter(description="The last word may be the beginning of a longer one.")
    ] = False,
) -> Search:
    """Return the search that an address names."""
    return Search(q.strip("\r\n\t"), place, layer, prefix)


AsAsked = Annotated[Search, Depends(asked)]
Page = Annotated[int, Parameter(ge=1, le=MOST_OFFSET // PAGE, description="Of one group, from 1.")]
Offset = Annotated[int, Parameter(ge=0, le=MOST_OFFSET, description="Memories to leave out.")]
Limit = Annotated[int, Parameter(ge=1, le=MOST_RESULTS, description="Memories of each group.")]


def router(site: Site) -> APIRouter:
    """Return the routes of search."""
    routes = APIRouter(tags=["search"])

    @routes.get("/search", response_class=HTMLResponse, include_in_schema=False)
    def page(request: Request, state: Asked, search: AsAsked, page: Page = 1) -> Response:
        found, error = [], None
        alone = search.place is not None
        if search.text.strip():
            try:
                offset, limit = ((page - 1) * PAGE, PAGE) if alone else (0, FIRST)
                found = groups(site.shelf(state), search, offset, limit)
            except FfmemError as refused:
                error = said(refused)
        return site.page(
            request,
            state,
            "search.html",
            status=422 if error else 200,
            search=search,
            groups=found,
            error=error,
            page=page if alone else None,
            escaped=re.escape(search.text),
            examples=None if search.text.strip() else examples(site.shelf(state).index),
            hand=at_hand(site.shelf(state).index),
            per_page=PAGE,
            seconds=SECONDS,
            most=MOST_QUERY,
        )

    @routes.get("/api/search")
    def api(state: Asked, search: AsAsked, offset: Offset = 0, limit: Limit = 10) -> Answer:
        """Return the memories that a name, token, text or /expression/ finds, in groups."""
        shelf = site.shelf(state)
        return {
            "index": shelf.name,
            "query": search.text,
            "regex": search.expression is not None,
            "prefix": search.prefix,
            "layer": search.layer,
            "notes": shelf.index.manifest.model.kind.notes,
            "groups": groups(shelf, search, offset, limit),
        }

    return routes
