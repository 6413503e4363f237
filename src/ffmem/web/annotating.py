"""The room of annotators: their queue, one item after the other, and what saves their sheets.

An annotator sees texts and nothing else: no layer, no memory, no coefficient, and controls look
like everything else. Every change is saved by itself; a change that is sent twice is one change.
"""

import secrets
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from pydantic import Field
from typing_extensions import TypedDict

from ffmem.annotation.sheet import Conflict, Sheet
from ffmem.annotation.study import Opened
from ffmem.errors import FfmemError
from ffmem.web.answering import WRITING, answering
from ffmem.web.entrance import add_entrance, add_guide, private, who
from ffmem.web.entry import (
    Entered,
    Fields,
    fields,
    refuse_foreign,
    refuse_unmarked,
    refuse_unsigned,
)
from ffmem.web.item_view import (
    ItemJson,
    SheetJson,
    Stand,
    TaskState,
    colour,
    following,
    is_composition,
    item_json,
    lines,
    stand,
    state_of,
)
from ffmem.web.sending import sent
from ffmem.web.site import Site
from ffmem.web.state import Asked, State

Version = Annotated[int, Field(ge=0, le=2**31 - 1, description="The version it started from.")]
RequestId = Annotated[
    str,
    Field(
        min_length=8,
        max_length=64,
        pattern=r"^[A-Za-z0-9_-]+$",
        description="Made by the sender; the same one twice is one change.",
    ),
]
Form = Annotated[Fields, Depends(fields)]


class Step(TypedDict):
    """A step back or forth among what was saved."""

    base: Version
    request: RequestId


class Change(Step):
    """A sheet to save."""

    sheet: SheetJson


class Place(TypedDict):
    """An item of the queue."""

    key: str
    place: int
    state: TaskState


class Queue(TypedDict):
    """What one person has to do."""

    done: int
    of: int
    items: list[Place]


def router(site: Site) -> APIRouter:
    """Return the routes of annotators."""
    routes = APIRouter(route_class=answering(site))
    add_entrance(routes, site)
    add_guide(routes, site)
    _items(routes, site)
    _twins(routes, site)
    return routes


def _items(routes: APIRouter, site: Site) -> None:
    """Add the page of an item, and the form that it is without scripts."""

    @routes.get("/annotate/{key}", include_in_schema=False)
    def item(request: Request, key: str, state: Asked, rest: bool = False) -> Response:
        one = who(site, request, state)
        if one.person.role == "adjudicator":
            return RedirectResponse(state.link(f"/adjudicate/{key}"), 303)
        return item_page(site, request, state, one, rest=rest)

    def item_page(
        site: Site, request: Request, state: State, one: Entered, **more: Any
    ) -> Response:
        key = request.path_params["key"]
        opened = one.study.open_item(one.person, key)
        tasks = one.study.queue(one.person)
        here = next(place for place, task in enumerate(tasks) if task.key == key)
        context = editor(opened, one) | more
        context |= {
            "previous": tasks[here - 1].key if here else None,
            "following": tasks[here + 1].key if here + 1 < len(tasks) else None,
            "done": sum(task.done for task in tasks),
        }
        status = 409 if context["conflict"] else 200
        return private(site.page(request, state, "annotate_item.html", status, **context))

    @routes.post("/annotate/{key}", include_in_schema=False)
    def send(request: Request, key: str, state: Asked, form: Form) -> Response:
        refuse_foreign(request)
        one = who(site, request, state)
        refuse_unsigned(one, form.one("form_token"))
        clash = sent(one, key, form)
        if clash is not None:
            return item_page(site, request, state, one, **clash)
        ahead = key
        if form.one("what") == "hand-in":
            opened = one.study.open_item(one.person, key)
            ahead = (following(one.study, one.person, key) or "") if opened.sheet.done else key
        return RedirectResponse(state.link(f"/annotate/{ahead}".rstrip("/")), 303)


def _twins(routes: APIRouter, site: Site) -> None:
    """Add what scripts and programs ask for."""

    @routes.get("/api/annotate", summary="What the owner of a code has to do", responses=WRITING)
    def queue(request: Request, state: Asked) -> Queue:
        one = who(site, request, state)
        tasks = one.study.queue(one.person)
        return {
            "done": sum(task.done for task in tasks),
            "of": len(tasks),
            "items": [
                {"key": task.key, "place": task.place, "state": state_of(task)} for task in tasks
            ],
        }

    @routes.get("/api/annotate/{key}", summary="One item and its sheet", responses=WRITING)
    def item(request: Request, key: str, state: Asked) -> ItemJson:
        one = who(site, request, state)
        return item_json(one.study.open_item(one.person, key))

    @routes.post(
        "/api/annotate/{key}",
        summary="Save a sheet",
        responses=WRITING,
        response_model=Stand,
    )
    def save(request: Request, key: str, state: Asked, change: Change) -> Any:
        refuse_unmarked(request)
        one = who(site, request, state)
        opened = one.study.open_item(one.person, key)
        sheet = Sheet.of(change["sheet"], len(opened.item.texts))
        problems = sheet.problems(is_composition(opened.item))
        if sheet.done and problems:
            raise FfmemError(f"It cannot be handed in yet. {' '.join(problems)}")
        try:
            saved = one.study.save(one.person, key, change["base"], sheet, change["request"])
        except Conflict as error:
            return _conflict(one, key, error)
        return _after(one, key, saved.merged)

    @routes.post(
        "/api/annotate/{key}/{what}",
        summary="Go back to what was saved before, or forth again",
        responses=WRITING,
        response_model=Stand,
    )
    def step(
        request: Request, key: str, what: Literal["undo", "redo"], state: Asked, change: Step
    ) -> Any:
        refuse_unmarked(request)
        one = who(site, request, state)
        act = one.study.undo if what == "undo" else one.study.redo
        try:
            act(one.person, key, change["base"], change["request"])
        except Conflict as error:
            return _conflict(one, key, error)
        return _after(one, key, False)


def _after(one: Entered, key: str, merged: bool) -> Stand:
    """Return where a sheet stands now, and where to go if it was handed in."""
    opened = one.study.open_item(one.person, key)
    ahead = following(one.study, one.person, key) if opened.sheet.done else None
    return stand(opened, merged, ahead)


def _conflict(one: Entered, key: str, error: Conflict) -> Response:
    """Return both sides of a conflict: the sender has one, this is the other."""
    now = stand(one.study.open_item(one.person, key))
    return JSONResponse({"error": str(error), **now}, 409)


def editor(opened: Opened, one: Entered) -> dict[str, Any]:
    """Return what the templates of the editor need."""
    return {
        "who": one,
        "key": opened.item.key,
        "opened": opened,
        "sheet": opened.sheet,
        "lines": lines(opened.item),
        "has_rest": any(text.rest for text in opened.item.texts),
        "words": opened.item.words,
        "composition": is_composition(opened.item),
        "problems": opened.sheet.problems(is_composition(opened.item)),
        "stand": stand(opened),
        "request_id": secrets.token_urlsafe(12),
        "blank": f"p-{secrets.token_hex(6)}",
        "colour": colour,
        "version": opened.version,
        "clashes": [],
        "conflict": None,
        "rest": False,
    }
