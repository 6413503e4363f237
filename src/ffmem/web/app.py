"""The explorer as one application: the routes of every page, behind the guard."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Mount
from starlette.staticfiles import StaticFiles

from ffmem.errors import FfmemError
from ffmem.web import figures
from ffmem.web.auth import Guard, refused
from ffmem.web.library import Library
from ffmem.web.limits import RETRY_SECONDS, Busy, Refusal, status_of
from ffmem.web.site import Site
from ffmem.web.state import State
from ffmem.web.studies import Studies
from ffmem.web.views import annotate, api, edits, home, layer, memory, search, trace
from ffmem.web.worker import Worker

VIEWS = (home, layer, memory, search, trace, edits, figures, annotate, api)
"""Each has one or more pages, and the same as JSON below /api."""

REFUSALS: dict[int | str, dict[str, Any]] = {
    404: {"model": Refusal, "description": "There is no such memory, layer, figure or index."},
    422: {"model": Refusal, "description": "The request is wrong, or asks for too much."},
    503: {"model": Refusal, "description": "The model is busy."},
}
"""What every route of the API may answer beside its own answer."""


def make_app(
    library: Library,
    worker: Worker | None = None,
    studies: Studies | None = None,
    *,
    token: str | None = None,
    hosts: Sequence[str] = (),
    load_models: bool = False,
) -> FastAPI:
    """Return the application over some indexes; with a `token`, every visitor needs it.

    With `load_models`, models load as soon as it starts, in the background.
    """
    site = Site(library, worker or Worker(), studies or Studies())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if load_models:
            site.worker.load_all(library.shelves.values())
        yield
        site.worker.close()

    app = FastAPI(
        title="ffmem",
        version=version("ffmem"),
        description="The feed-forward layers of language models, read as key-value memories.",
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere; ours is /api
        redoc_url=None,
        openapi_url="/api/openapi.json",
        lifespan=lifespan,
    )
    for view in VIEWS:
        app.include_router(view.router(site), responses=REFUSALS)
    app.mount("/static", StaticFiles(directory=str(files("ffmem.web") / "static")), name="static")
    _handle_errors(app, site)
    app.add_middleware(Guard, token=token, hosts=hosts)
    return app


def allowed_methods(app: FastAPI, request: Request) -> list[str]:
    """Return the methods of an address; GET brings HEAD."""
    found = set()
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
        scope = {**request.scope, "method": method}
        for route in app.routes:
            if route.matches(scope)[0] is Match.FULL and not isinstance(route, Mount):
                found.add(method)
    return sorted(found | {"HEAD"}) if "GET" in found else sorted(found) or ["GET", "HEAD"]


def _handle_errors(app: FastAPI, site: Site) -> None:
    """Turn every error into a sentence: on a page, or as JSON below /api."""

    def answer(request: Request, status: int, message: str) -> Response:
        path = request.url.path
        if path.startswith(("/api", "/static/")):  # files need no token: their errors show no data
            return refused(path, status, message)
        name = request.query_params.get("index")
        state = State(name if name in site.library.shelves else None)
        return site.page(request, state, "error.html", status=status, code=status, message=message)

    @app.exception_handler(FfmemError)
    async def explained(request: Request, error: FfmemError) -> Response:
        answered = answer(request, status_of(error), str(error))
        if isinstance(error, Busy):
            answered.headers["Retry-After"] = str(RETRY_SECONDS)
        return answered

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return answer(request, 422, in_words(list(error.errors())))

    @app.exception_handler(HTTPException)
    async def missing(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            message = f"There is no page {request.url.path}."
        else:
            message = f"{error.detail}."
        answered = answer(request, error.status_code, message)
        if error.status_code == 405:
            answered.headers["Allow"] = ", ".join(allowed_methods(app, request))
        return answered

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        message = (
            f"The server failed ({type(error).__name__}). This is a bug in ffmem: its terminal"
            " shows more."
        )
        return answer(request, 500, message)


def in_words(errors: list[dict[str, Any]]) -> str:
    """Return what FastAPI found wrong with a request as one sentence."""
    found = []
    for error in errors:
        name = ".".join(str(part) for part in error["loc"] if part not in ("query", "path", "body"))
        found.append(f"{name or 'the request'}: {error['msg']}")
    return f"The request was not understood. {'; '.join(found)}."
