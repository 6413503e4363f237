"""The way into a study: a code that somebody was given, the queue behind it, and the guide."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import RedirectResponse, Response

from ffmem.web import guide
from ffmem.web.entry import (
    Entered,
    Fields,
    NotEntered,
    cookie_name,
    entered,
    fields,
    forget,
    refuse_foreign,
    remember,
)
from ffmem.web.item_view import state_of
from ffmem.web.site import Site
from ffmem.web.state import Asked, State
from ffmem.web.studies import NoStudy

Form = Annotated[Fields, Depends(fields)]


def who(site: Site, request: Request, state: State) -> Entered:
    """Return who asks, in the study of the index that is looked at."""
    return entered(request, site.studies.of(site.shelf(state)))


def private(answer: Response) -> Response:
    """Return an answer that nobody but its reader may keep."""
    answer.headers["Cache-Control"] = "no-store"
    return answer


def add_entrance(routes: APIRouter, site: Site) -> None:
    """Add the ways in and out, and the queue."""

    def welcome(request: Request, state: State, wrong: str | None = None) -> Response:
        status = 403 if wrong else 200
        # `extra` would carry a code of the address into the page.
        page = site.page(request, state, "annotate_enter.html", status, wrong=wrong, extra={})
        return private(page)

    def first(one: Entered, state: State) -> str:
        """Return where somebody goes who comes in: those who never began, to the guide."""
        if one.person.role == "adjudicator":
            return state.link("/adjudicate")
        began = any(task.version for task in one.study.queue(one.person))
        return state.link("/annotate" if began else "/annotate/guide")

    @routes.get("/annotate", include_in_schema=False)
    def queue(request: Request, state: Asked, code: str | None = None) -> Response:
        try:
            study = site.studies.of(site.shelf(state))
        except NoStudy as error:
            return site.page(request, state, "annotate_none.html", 404, message=str(error))
        try:
            one = entered(request, study, code)
        except NotEntered as error:
            given = code or request.cookies.get(cookie_name(request))
            return welcome(request, state, str(error) if given else None)
        if code is not None:
            # A redirect would not do: after a link from elsewhere, a browser sends no strict
            # cookie along it. This page goes on by itself.
            there = first(one, state)
            answer = site.page(request, state, "annotate_entered.html", to=there, extra={})
            remember(request, answer, code)
            return private(answer)
        if one.person.role == "adjudicator":
            return RedirectResponse(state.link("/adjudicate"), 303)
        tasks = one.study.queue(one.person)
        ahead = next((task.key for task in tasks if not task.done), None)
        return private(
            site.page(
                request,
                state,
                "annotate.html",
                who=one,
                tasks=[(task, state_of(task)) for task in tasks],
                done=sum(task.done for task in tasks),
                ahead=ahead,
                began=any(task.version for task in tasks),
            )
        )

    @routes.post("/annotate", include_in_schema=False)
    def enter(request: Request, state: Asked, form: Form) -> Response:
        refuse_foreign(request)
        code = form.one("code")
        try:
            one = entered(request, site.studies.of(site.shelf(state)), code)
        except NotEntered as error:
            return welcome(request, state, str(error))
        answer = RedirectResponse(first(one, state), 303)
        remember(request, answer, code)
        return answer

    @routes.post("/annotate/leave", include_in_schema=False)
    def leave(request: Request, state: Asked) -> Response:
        refuse_foreign(request)
        answer = RedirectResponse(state.link("/annotate"), 303)
        forget(request, answer)
        return answer


def add_guide(routes: APIRouter, site: Site) -> None:
    """Add the guide, which everybody may read."""

    @routes.get("/annotate/guide", include_in_schema=False)
    def show_guide(
        request: Request,
        state: Asked,
        mark: Annotated[list[int] | None, Query()] = None,
        kind: str | None = None,
    ) -> Response:
        return site.page(
            request,
            state,
            "annotate_guide.html",
            practice=guide.PRACTICE,
            asked=guide.ASKED,
            checked=guide.checked(mark or [], kind) if mark or kind else None,
            marks=mark or [],
            kind=kind,
        )
