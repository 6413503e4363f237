"""Pages of an annotation study: enter a code, work through a queue, judge an item.

Annotators see texts and nothing else: no layer, no memory, no coefficient, and controls look like
everything else. Adjudicators also see what each annotator handed in, and edit one sheet together.
The page's script saves every change with the version it started from; if a newer version stands,
the response is 409 and holds that version.

A code is remembered in a cookie that other sites cannot use (SameSite=Strict); requests that write
must come from this site, and JSON must have the header x-ffmem.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import parse_qs, urlsplit

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from pydantic import Field

from ffmem.annotation.agreement import jaccard
from ffmem.annotation.study import (
    ADJUDICATOR,
    AnnotationStudy,
    Judgment,
    NotAssigned,
    Person,
    SaveConflict,
    Sheet,
    SheetPattern,
    Text,
    UnknownCode,
)
from ffmem.errors import FfmemError
from ffmem.indexing.memory import visible
from ffmem.web.errors import ErrorResponse, NoStudy, NotFound
from ffmem.web.site import Site
from ffmem.web.state import State, StateParam

HEADER = "x-ffmem"
"""Pages of other sites cannot send it."""

COOKIE_SECONDS = 60 * 60 * 24 * 180
"""Seconds for which a browser keeps a code."""

SAME_ROW = 0.2
"""Overlap of marks above which two people's patterns are shown in one row."""

PRACTICE = (
    ("Leave the dough under a cloth until it has", " doubled", True, "Dough is for bread."),
    ("The tram was late again, so we", " walked", False, "Nothing about baking."),
    ("Every crust in the shop window was dusted with", " flour", True, "A baker’s window."),
    ("Our oven is small, and three loaves are its", " limit", True, "An oven, loaves."),
    ("The bakery of ideas, as he called his office, was", " closed", False, "It is an office."),
    ("Salt goes in last, after the yeast has been", " stirred", True, "Yeast, salt: dough."),
)
"""Texts made up for the guide: before, last token, whether it is about baking, why."""

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "The body is not JSON."},
    401: {"model": ErrorResponse, "description": "The code is missing or unknown."},
    403: {"model": ErrorResponse, "description": "The request came from another site."},
    409: {
        "model": ErrorResponse,
        "description": "There is a newer version; it is in the response.",
    },
}

ItemStatus = Literal["not begun", "begun", "handed in"]


@dataclass(frozen=True)
class Change:
    """A sheet to save."""

    base: Annotated[int, Field(ge=0, le=2**31 - 1)]
    """The version that it was made from."""
    sheet: Sheet


@dataclass(frozen=True)
class SheetState:
    """The current version of a sheet."""

    version: int
    sheet: Sheet
    problems: list[str]
    """Why it cannot be handed in yet."""
    next: str | None
    """The next item that is not handed in."""


@dataclass(frozen=True)
class ItemState(SheetState):
    """An item and its sheet."""

    key: str
    form: Literal["patterns", "composition"]
    """What is asked: patterns in a list of texts, or whether two words are related."""
    texts: list[dict[str, str | None]]
    words: list[str]
    place: int
    of: int
    sheets: dict[str, Sheet] | None
    """For adjudicators: what each annotator handed in."""


@dataclass(frozen=True)
class QueueEntry:
    """An item in a queue."""

    key: str
    place: int
    state: ItemStatus


@dataclass(frozen=True)
class Queue:
    """What one person judges."""

    done: int
    of: int
    items: list[QueueEntry]


class Visitor(NamedTuple):
    """A person who entered a code."""

    study: AnnotationStudy
    person: Person

    @property
    def tag(self) -> str:
        """Tells one person's drafts in a browser from another's, without revealing the code."""
        code = self.person.code.encode()
        return hmac.new(code, b"mark", hashlib.sha256).hexdigest()[:16]

    def open(self, key: str) -> tuple[Judgment, list[Judgment]]:
        """Return an item of the person's queue, and the queue."""
        queue = self.study.queue(self.person)
        for one in queue:
            if one.item.key == key:
                return one, queue
        try:
            self.study.open_item(self.person, key)
        except NotAssigned as error:
            raise NotFound(str(error)) from None
        raise NotFound("This item has just changed. Load the page again.")

    def next_open(self, key: str) -> str | None:
        """Return the next item that is not handed in, after this one and then from the start."""
        keys = [(one.item.key, one.sheet.done) for one in self.study.queue(self.person)]
        here = next((place for place, (one, _) in enumerate(keys) if one == key), -1)
        ahead = keys[here + 1 :] + keys[: here + 1]
        return next((one for one, done in ahead if not done), None)

    def sheet_state(self, judgment: Judgment) -> dict[str, Any]:
        """Return a SheetState as JSON."""
        return {
            "version": judgment.version,
            "sheet": judgment.sheet.to_dict(),
            "problems": judgment.sheet.problems(judgment.item),
            "next": self.next_open(judgment.item.key),
        }


def router(site: Site) -> APIRouter:
    """Return the routes of annotators and adjudicators."""
    routes = APIRouter()
    _add_entry(routes, site)
    _add_pages(routes, site)
    _add_api(routes, site)
    return routes


def _add_entry(routes: APIRouter, site: Site) -> None:
    """Add the queue, and how to enter and leave."""

    def entry_form(request: Request, state: State, wrong: str | None = None) -> Response:
        # `extra` would copy a code from the address into the page.
        return _page(site, request, state, "enter", 403 if wrong else 200, wrong=wrong, extra={})

    @routes.get("/annotate", include_in_schema=False)
    def queue(request: Request, state: StateParam, code: str | None = None) -> Response:
        try:
            visitor = _get_visitor(site, request, state, code)
        except NoStudy:
            return _page(site, request, state, "none")
        except HTTPException as error:
            given = code or request.cookies.get(_cookie(request))
            return entry_form(request, state, f"{error.detail}." if given else None)
        tasks = visitor.study.queue(visitor.person)
        began = any(one.version for one in tasks)
        if code is not None:
            # A browser that follows a link from another site sends no strict cookie along a
            # redirect, so this page refreshes itself.
            to = state.link("/annotate" if began else "/annotate/guide")
            response = _page(site, request, state, "entered", to=to, extra={})
            _set_cookie(request, response, code)
            return response
        is_adjudicator = visitor.person.role == ADJUDICATOR
        return _page(
            site,
            request,
            state,
            "queue",
            visitor=visitor,
            tasks=[(one, _status(one)) for one in tasks],
            done=sum(one.sheet.done for one in tasks),
            ahead=next((one.item.key for one in tasks if not one.sheet.done), None),
            began=began,
            is_adjudicator=is_adjudicator,
            progress=visitor.study.progress() if is_adjudicator else [],
        )

    @routes.post("/annotate", include_in_schema=False)
    async def enter(request: Request, state: StateParam) -> Response:
        _check_same_site(request)
        body = (await request.body()).decode("utf-8", "replace")
        try:
            code = parse_qs(body, max_num_fields=20).get("code", [""])[-1]
        except ValueError:
            raise FfmemError("The form has too many fields. Send only your code.") from None
        try:
            visitor = _get_visitor(site, request, state, code)
        except HTTPException as error:
            return entry_form(request, state, f"{error.detail}.")
        began = any(one.version for one in visitor.study.queue(visitor.person))
        to = state.link("/annotate" if began else "/annotate/guide")
        response = RedirectResponse(to, 303)
        _set_cookie(request, response, code)
        return response

    @routes.post("/annotate/leave", include_in_schema=False)
    def leave(request: Request, state: StateParam) -> Response:
        _check_same_site(request)
        response = RedirectResponse(state.link("/annotate"), 303)
        response.delete_cookie(_cookie(request), path="/", httponly=True, samesite="strict")
        return response


def _add_pages(routes: APIRouter, site: Site) -> None:
    """Add the guide and the page of an item."""

    @routes.get("/annotate/guide", include_in_schema=False)
    def guide(request: Request, state: StateParam) -> Response:
        return _page(site, request, state, "guide", practice=PRACTICE)

    @routes.get("/annotate/{key}", include_in_schema=False)
    def item(request: Request, key: str, state: StateParam) -> Response:
        try:
            visitor = _get_visitor(site, request, state)
        except HTTPException:
            return RedirectResponse(state.link("/annotate"), 303)
        opened, tasks = visitor.open(key)
        keys = [one.item.key for one in tasks]
        is_adjudicator = visitor.person.role == ADJUDICATOR
        sheets = visitor.study.sheets(key) if is_adjudicator else {}
        rows = align_patterns(sheets)
        return _page(
            site,
            request,
            state,
            "item",
            visitor=visitor,
            opened=opened,
            of=len(tasks),
            done=sum(one.sheet.done for one in tasks),
            previous=keys[opened.place - 2] if opened.place > 1 else None,
            following=keys[opened.place] if opened.place < len(keys) else None,
            sheet_state=visitor.sheet_state(opened),
            lines=[_split(text) for text in opened.item.texts],
            is_adjudicator=is_adjudicator,
            sheets=sheets,
            rows=rows,
            chips=_chips(rows),
            copies={name: copy_sheet(name, sheet).to_dict() for name, sheet in sheets.items()},
        )


def _add_api(routes: APIRouter, site: Site) -> None:
    """Add what scripts and programs ask for."""

    @routes.get("/api/annotate", summary="Your queue", responses=ERRORS)
    def queue(request: Request, state: StateParam) -> Queue:
        visitor = _get_visitor(site, request, state)
        tasks = visitor.study.queue(visitor.person)
        entries = [QueueEntry(one.item.key, one.place, _status(one)) for one in tasks]
        return Queue(sum(one.sheet.done for one in tasks), len(tasks), entries)

    @routes.get(
        "/api/annotate/{key}",
        summary="An item and its sheet",
        responses=ERRORS,
        response_model=ItemState,
    )
    def item(request: Request, key: str, state: StateParam) -> Response:
        visitor = _get_visitor(site, request, state)
        opened, tasks = visitor.open(key)
        is_adjudicator = visitor.person.role == ADJUDICATOR
        sheets = visitor.study.sheets(key) if is_adjudicator else {}
        # Field by field, so that neither memory nor kind can slip out.
        response = {
            **visitor.sheet_state(opened),
            "key": opened.item.key,
            "form": "composition" if opened.item.is_composition else "patterns",
            "texts": [text._asdict() for text in opened.item.texts],
            "words": list(opened.item.words),
            "place": opened.place,
            "of": len(tasks),
            "sheets": {name: sheet.to_dict() for name, sheet in sheets.items()}
            if is_adjudicator
            else None,
        }
        return _private(JSONResponse(response))

    @routes.post(
        "/api/annotate/{key}",
        summary="Save a sheet",
        responses=ERRORS,
        response_model=SheetState,
    )
    def save(request: Request, key: str, state: StateParam, change: Change) -> Response:
        _check_same_site(request)
        if HEADER not in request.headers:
            raise HTTPException(403, f"Requests that write must have the header {HEADER}")
        visitor = _get_visitor(site, request, state)
        try:
            saved = visitor.study.save(visitor.person, key, change.base, change.sheet)
        except NotAssigned as error:
            raise NotFound(str(error)) from None
        except SaveConflict as conflict:
            state_now = visitor.sheet_state(conflict.newest)
            return JSONResponse({"error": str(conflict), **state_now}, 409)
        return JSONResponse(visitor.sheet_state(saved))


def align_patterns(sheets: Mapping[str, Sheet]) -> list[dict[str, tuple[int, SheetPattern]]]:
    """Return everybody's patterns in rows: by name, a pattern and its number on the sheet.

    The two with the largest overlap of marks share a row first, then the next two, as long as
    nobody is in a row twice. It helps adjudicators to compare; agreement is measured elsewhere.
    """
    rows = [
        {name: (number, pattern)}
        for name, sheet in sheets.items()
        for number, pattern in enumerate(sheet.patterns, start=1)
    ]
    while True:
        best, pair = SAME_ROW, None
        for one, other in combinations(rows, 2):
            if not one.keys() & other.keys():
                close = min(jaccard(a[1], b[1]) for a in one.values() for b in other.values())
                if close > best:
                    best, pair = close, (one, other)
        if pair is None:
            break
        rows = [row for row in rows if row is not pair[0] and row is not pair[1]]
        rows.append(pair[0] | pair[1])
    marked = [sum(len(pattern.marks) for _, pattern in row.values()) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i]), -marked[i], sorted(rows[i])))
    return [rows[i] for i in order]


def copy_sheet(name: str, sheet: Sheet) -> Sheet:
    """Return a copy of a sheet for adjudicators to take patterns from.

    Pattern ids depend on the source alone, so that two adjudicators add a pattern once.
    """

    def new_id(id: str) -> str:
        return "t-" + hashlib.sha256(f"{name}\n{id}".encode()).hexdigest()[:16]

    patterns = tuple(replace(pattern, id=new_id(pattern.id)) for pattern in sheet.patterns)
    return replace(sheet, patterns=patterns, note="", done=False)


def _chips(
    rows: list[dict[str, tuple[int, SheetPattern]]],
) -> dict[tuple[str, int], list[tuple[int, int]]]:
    """Return by name and text: numbers of the person's patterns there, and their rows."""
    found: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for place, row in enumerate(rows, start=1):
        for name, (number, pattern) in row.items():
            for mark in pattern.marks:
                found.setdefault((name, mark), []).append((number, place))
    return {key: sorted(chips) for key, chips in found.items()}


def _get_visitor(site: Site, request: Request, state: State, code: str | None = None) -> Visitor:
    """Return the visitor by a code or the cookie; raise 401 if it is nobody's."""
    study = site.study(state)
    given = request.cookies.get(_cookie(request), "") if code is None else code.strip()
    if not given:
        raise HTTPException(401, "This needs your code. Enter it at /annotate")
    try:
        return Visitor(study, study.find_person(given))
    except UnknownCode as error:
        raise HTTPException(401, str(error).rstrip(".")) from None


def _cookie(request: Request) -> str:
    """Return the cookie's name. Cookies know no ports, so every server has one of its own."""
    return f"ffmem-annotator-{(request.scope.get('server') or ('', ''))[1]}"


def _set_cookie(request: Request, response: Response, code: str) -> None:
    response.set_cookie(
        _cookie(request),
        code.strip(),
        max_age=COOKIE_SECONDS,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
        path="/",
    )


def _check_same_site(request: Request) -> None:
    """Refuse a request that a page of another site sent."""
    site, origin = (request.headers.get(name) for name in ("sec-fetch-site", "origin"))
    if origin == "null":  # hidden by the browser, which still says whether it is the same site
        own = site in ("same-origin", "none")
    else:
        same = origin is None or urlsplit(origin).netloc == request.headers.get("host")
        own = same and site in (None, "same-origin", "none")
    if not own:
        raise HTTPException(403, "Pages of other sites cannot write here")


def _page(
    site: Site, request: Request, state: State, view: str, status: int = 200, **context: Any
) -> Response:
    return _private(site.page(request, state, "annotate.html", status, view=view, **context))


def _private(response: Response) -> Response:
    response.headers["Cache-Control"] = "no-store"
    return response


def _status(judgment: Judgment) -> ItemStatus:
    return "handed in" if judgment.sheet.done else "begun" if judgment.version else "not begun"


def _split(text: Text) -> tuple[str, str, str]:
    """Return a text as the page shows it: before the last token, the last token, the rest."""
    prefix, last = text.prefix, text.last_token or ""
    # A token that is part of a character is shown as bytes, and so is the prefix's end.
    before = prefix[: len(prefix) - len(last)] if last and prefix.endswith(last) else prefix
    return visible(before), visible(prefix[len(before) :]), visible(text.rest)
