"""How the rooms of a study refuse: with the status that a browser's script can tell apart.

401 no code    403 another site    404 not yours    409 somebody else was faster
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from fastapi.routing import APIRoute

from ffmem.annotation.sheet import Conflict
from ffmem.annotation.study import NotAssigned
from ffmem.errors import FfmemError
from ffmem.web.entry import Foreign, NotEntered
from ffmem.web.limits import Refusal
from ffmem.web.site import Site
from ffmem.web.state import State

STATUSES: dict[type[FfmemError], int] = {
    NotEntered: 401,
    Foreign: 403,
    NotAssigned: 404,
    Conflict: 409,
}

WRITING: dict[int | str, dict[str, Any]] = {
    400: {"model": Refusal, "description": "The body of the request is no text."},
    401: {"model": Refusal, "description": "No code was given, or an unknown one."},
    403: {"model": Refusal, "description": "The request came from elsewhere."},
    409: {"model": Refusal, "description": "Somebody else changed the same words."},
}
"""What routes of a study may answer beside what all may."""


def answering(site: Site) -> type[APIRoute]:
    """Return a kind of route whose errors are told apart."""

    class Answering(APIRoute):
        """A route of a study."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            """Return what answers a request, errors included."""
            handle = super().get_route_handler()

            async def handler(request: Request) -> Response:
                try:
                    return await handle(request)
                except tuple(STATUSES) as error:
                    return _refused(site, request, error)

            return handler

    return Answering


def _refused(site: Site, request: Request, error: Exception) -> Response:
    status = next(number for kind, number in STATUSES.items() if isinstance(error, kind))
    if request.url.path.startswith("/api"):
        return JSONResponse({"error": str(error)}, status)
    name = request.query_params.get("index")
    state = State(name if name in site.library.shelves else None)
    if status == 401 and request.method == "GET":
        return RedirectResponse(state.link("/annotate"), 303)
    return site.page(request, state, "error.html", status, code=status, message=str(error))
