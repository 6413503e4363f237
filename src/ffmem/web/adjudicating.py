"""The room of adjudicators: what several annotators said about an item, and one sheet for all.

Adjudicators see who said what, and still neither the memory nor whether the item is a control.
They share one sheet per item, which two of them may change at once.
"""

import hashlib
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import RedirectResponse, Response
from typing_extensions import TypedDict

from ffmem.annotation.sheet import Sheet
from ffmem.annotation.study import Adjudicated, NotAssigned
from ffmem.web.aligned import Row, aligned
from ffmem.web.annotating import editor
from ffmem.web.answering import WRITING, answering
from ffmem.web.entrance import private, who
from ffmem.web.entry import Entered, Fields, fields, refuse_foreign, refuse_unsigned
from ffmem.web.item_view import (
    ItemJson,
    SheetJson,
    colour,
    following,
    item_json,
    sheet_json,
    state_of,
)
from ffmem.web.sending import sent
from ffmem.web.site import Site
from ffmem.web.state import Asked, State

Form = Annotated[Fields, Depends(fields)]


class AdjudicatedJson(TypedDict):
    """An item, what everybody says about it, and the adjudicators' own sheet."""

    own: ItemJson
    sheets: dict[str, SheetJson]
    """By name."""


def router(site: Site) -> APIRouter:
    """Return the routes of adjudicators."""
    routes = APIRouter(route_class=answering(site))

    @routes.get("/adjudicate", include_in_schema=False)
    def queue(request: Request, state: Asked) -> Response:
        one = adjudicator(request, state)
        tasks = one.study.queue(one.person)
        return private(
            site.page(
                request,
                state,
                "adjudicate.html",
                who=one,
                tasks=[(task, state_of(task)) for task in tasks],
                done=sum(task.done for task in tasks),
                ahead=next((task.key for task in tasks if not task.done), None),
                progress=one.study.progress(),
            )
        )

    def adjudicator(request: Request, state: State) -> Entered:
        one = who(site, request, state)
        if one.person.role != "adjudicator":
            raise NotAssigned("This is for adjudicators, and your code is an annotator’s.")
        return one

    def item_page(request: Request, state: State, one: Entered, **more: Any) -> Response:
        key = request.path_params["key"]
        found = one.study.adjudication(key)
        tasks = one.study.queue(one.person)
        here = next((place for place, task in enumerate(tasks) if task.key == key), None)
        around = _around([task.key for task in tasks], here)
        context = {**editor(found.own, one), **_side_by_side(found), **around, **more}
        status = 409 if context["conflict"] else 200
        return private(site.page(request, state, "adjudicate_item.html", status, **context))

    @routes.get("/adjudicate/{key}", include_in_schema=False)
    def item(request: Request, key: str, state: Asked, rest: bool = False) -> Response:
        return item_page(request, state, adjudicator(request, state), rest=rest)

    @routes.post("/adjudicate/{key}", include_in_schema=False)
    def send(request: Request, key: str, state: Asked, form: Form) -> Response:
        refuse_foreign(request)
        one = adjudicator(request, state)
        refuse_unsigned(one, form.one("form_token"))
        clash = sent(one, key, form, _taken(one.study.adjudication(key), form.one("take")))
        if clash is not None:
            return item_page(request, state, one, **clash)
        ahead = key
        if form.one("what") == "hand-in" and one.study.adjudication(key).own.sheet.done:
            ahead = following(one.study, one.person, key) or ""
        return RedirectResponse(state.link(f"/adjudicate/{ahead}".rstrip("/")), 303)

    @routes.get(
        "/api/adjudicate/{key}", summary="What everybody says of an item", responses=WRITING
    )
    def twin(request: Request, key: str, state: Asked) -> AdjudicatedJson:
        found = adjudicator(request, state).study.adjudication(key)
        sheets = {name: sheet_json(sheet) for name, sheet in found.sheets.items()}
        return {"own": item_json(found.own), "sheets": sheets}

    return routes


def copied(name: str, sheet: Sheet) -> Sheet:
    """Return somebody's sheet to take from; whoever takes a pattern of it, it is the same one."""

    def named(id: str) -> str:
        return "t-" + hashlib.sha256(f"{name}\n{id}".encode()).hexdigest()[:16]

    patterns = tuple(replace(pattern, id=named(pattern.id)) for pattern in sheet.patterns)
    return replace(sheet, patterns=patterns, note="", done=False)


def _side_by_side(found: Adjudicated) -> dict[str, Any]:
    """Return the annotators' sheets as the page shows them."""
    rows = aligned(found.sheets)
    names = list(found.sheets)
    offered = {name: copied(name, sheet) for name, sheet in found.sheets.items()}
    return {
        "names": names,
        "sheets": found.sheets,
        "rows": rows,
        "offered": {name: sheet_json(sheet) for name, sheet in offered.items()},
        "chips": _chips(rows),
    }


def _chips(rows: list[Row]) -> dict[tuple[str, int], list[tuple[int, str]]]:
    """Return by name and text: the person's patterns there, in the colour of their row."""
    found: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for place, row in enumerate(rows, start=1):
        for name, (number, pattern) in row.items():
            for mark in pattern.marks:
                found.setdefault((name, mark), []).append((number, colour(place)))
    return {key: sorted(chips) for key, chips in found.items()}


def _taken(found: Adjudicated, asked: str) -> Sheet | None:
    """Return what a button takes: `PERSON`, or `PERSON.PATTERN`, both counted from 0."""
    if not asked:
        return None
    person, _, pattern = asked.partition(".")
    names = list(found.sheets)
    if not person.isdecimal() or int(person) >= len(names):
        raise NotAssigned(f"There is nobody {asked!r} to take a pattern from.")
    whole = copied(names[int(person)], found.sheets[names[int(person)]])
    if not pattern:
        return whole
    if not pattern.isdecimal() or int(pattern) >= len(whole.patterns):
        raise NotAssigned(f"There is no pattern {asked!r} to take.")
    return Sheet((whole.patterns[int(pattern)],))


def _around(keys: list[str], here: int | None) -> dict[str, Any]:
    """Return an item's neighbours in the queue."""
    if here is None:
        return {"previous": None, "following": None}
    return {
        "previous": keys[here - 1] if here else None,
        "following": keys[here + 1] if here + 1 < len(keys) else None,
    }
