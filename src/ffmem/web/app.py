"""The explorer as one application: the routes of every page, behind the guard."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Mount
from starlette.staticfiles import StaticFiles

from ffmem.errors import FfmemError
from ffmem.indexing.status import RunChangedError
from ffmem.web.auth import Guard, error_response
from ffmem.web.catalog import Catalog
from ffmem.web.errors import Busy, ErrorResponse, NotReady, http_status
from ffmem.web.site import Site
from ffmem.web.state import State
from ffmem.web.views import (
    annotate,
    api,
    circuit,
    edits,
    figures,
    home,
    layer,
    memory,
    search,
    trace,
)
from ffmem.web.worker import ModelWorker

VIEWS = (home, layer, memory, search, trace, circuit, edits, figures, annotate, api)
"""Each has one or more pages, and the same as JSON below /api."""

RETRY_SECONDS = 5
"""When to retry a request that got 503."""

ERRORS: dict[int | str, dict[str, Any]] = {
    404: {"model": ErrorResponse, "description": "No such memory, layer, figure or index."},
    422: {"model": ErrorResponse, "description": "The request is invalid, or exceeds a limit."},
    503: {"model": ErrorResponse, "description": "The model is busy, or the index just started."},
}
"""Errors that every route of the API may return."""


def make_app(
    catalog: Catalog,
    worker: ModelWorker | None = None,
    *,
    db: str | None = None,
    token: str | None = None,
    hosts: Sequence[str] = (),
    load_models: bool = False,
) -> FastAPI:
    """Return the application over some indexes; with a `token`, every visitor needs it.

    `db` is the file of the annotation study; None: the one next to each index. With `load_models`,
    the models of finished indexes load as soon as it starts, in the background.
    """
    site = Site(catalog, worker or ModelWorker(), db)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if load_models:  # an unfinished index is still using the cores
            finished = [one for one in catalog.folders.values() if not one.is_growing]
            site.worker.load_all(one.current() for one in finished)
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
    app.state.site = site
    for view in VIEWS:
        app.include_router(
            view.router(site), responses=ERRORS, dependencies=[Depends(check_parameters)]
        )
    app.mount("/static", StaticFiles(directory=str(files("ffmem.web") / "static")), name="static")
    api.describe_results(app)
    _handle_errors(app, site)
    app.add_middleware(Guard, token=token, hosts=hosts)
    return app


def check_parameters(request: Request) -> None:
    """Raise on URL parameters that a route of the API does not have: they may be misspelled."""
    described = request.app.openapi()["paths"].get(request.scope["route"].path)
    if described is None:  # a page, whose links may come from anywhere
        return
    parameters = described[request.method.lower().replace("head", "get")].get("parameters", [])
    known = [one["name"] for one in parameters if one["in"] == "query"]
    unknown = [name for name in request.query_params if name not in known]
    if unknown:
        raise FfmemError(
            f"There is no parameter {unknown[0][:40]!r} here."
            f" There are: {', '.join(known) or 'none'}."
        )


def allowed_methods(app: FastAPI, request: Request) -> list[str]:
    """Return the methods that a URL supports; GET implies HEAD."""
    found = set()
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
        scope = {**request.scope, "method": method}
        for route in app.routes:
            if route.matches(scope)[0] is Match.FULL and not isinstance(route, Mount):
                found.add(method)
    return sorted(found | {"HEAD"}) if "GET" in found else sorted(found) or ["GET", "HEAD"]


def _handle_errors(app: FastAPI, site: Site) -> None:
    """Turn every error into a sentence: on a page, or as JSON below /api."""

    def respond(request: Request, status: int, message: str) -> Response:
        path = request.url.path
        if path.startswith(("/api", "/static/")):  # files need no token: their errors show no data
            return error_response(path, status, message)
        name = request.query_params.get("index")
        state = State(name if name in site.catalog.folders else None)
        try:
            context = {"code": status, "message": message}
            return site.page(request, state, "error.html", status, **context)
        except NotReady as error:
            return error_response(path, 503, str(error), page="preparing.html")

    @app.exception_handler(FfmemError)
    async def on_known_error(request: Request, error: FfmemError) -> Response:
        response = respond(request, http_status(error), str(error))
        if isinstance(error, Busy | NotReady):
            response.headers["Retry-After"] = str(RETRY_SECONDS)
        return response

    @app.exception_handler(RunChangedError)
    async def on_finished_run(request: Request, error: RunChangedError) -> Response:
        """Ask again: the unfinished index that the request has read is probably finished now."""
        name = request.query_params.get("index")
        if site.catalog.folder(name if name in site.catalog.folders else None).refresh():
            return RedirectResponse(str(request.url), 307)
        return await on_known_error(request, NotReady("The index is changing. Please retry."))

    @app.exception_handler(RequestValidationError)
    async def on_invalid_request(request: Request, error: RequestValidationError) -> Response:
        return respond(request, 422, format_validation_errors(list(error.errors())))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        message = f"{error.detail}."
        if error.status_code == 404:
            message = f"There is no page {request.url.path}."
        response = respond(request, error.status_code, message)
        if error.status_code == 405:
            response.headers["Allow"] = ", ".join(allowed_methods(app, request))
        return response

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> Response:
        message = (
            f"The server failed ({type(error).__name__}). This is a bug in ffmem; the server's"
            " terminal shows more."
        )
        return respond(request, 500, message)


def format_validation_errors(errors: list[dict[str, Any]]) -> str:
    """Return what FastAPI found wrong with a request as one sentence."""
    found = []
    for error in errors:
        name = ".".join(str(part) for part in error["loc"] if part not in ("query", "path", "body"))
        found.append(f"{name or 'the request'}: {error['msg']}")
    return f"Invalid request. {'; '.join(found)}."
