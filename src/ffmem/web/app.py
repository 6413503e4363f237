"""The explorer as one application: every room's routes, behind the guard."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from importlib.resources import files

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from ffmem.errors import FfmemError
from ffmem.web import (
    figures,
    home,
    interface,
    layers,
    memory_page,
    searching,
)
from ffmem.web.answers import REFUSALS, in_words, status_of
from ffmem.web.guard import Guard
from ffmem.web.library import Library
from ffmem.web.site import Site
from ffmem.web.state import State
from ffmem.web.studies import Studies
from ffmem.web.views import annotate, edits, trace
from ffmem.web.worker import Worker

ROOMS = (
    *(home, layers, memory_page, searching, trace, edits, figures),
    *(annotate, interface),
)
"""Each has a page, or several, and their twins below /api."""


def make_app(
    library: Library,
    worker: Worker | None = None,
    studies: Studies | None = None,
    *,
    token: str | None = None,
    hosts: Sequence[str] = (),
) -> FastAPI:
    """Return the application over some indexes; `token` is asked of everybody, if there is one."""
    site = Site(library, worker or Worker(), studies or Studies())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        site.worker.close()

    app = FastAPI(
        title="ffmem",
        version=version("ffmem"),
        description="The feed-forward layers of language models, read as key-value memories.",
        docs_url=None,  # those pages load scripts from elsewhere; /api is ours
        redoc_url=None,
        openapi_url="/api/openapi.json",
        lifespan=lifespan,
    )
    for room in ROOMS:
        app.include_router(room.router(site), responses=REFUSALS)
    app.mount("/static", StaticFiles(directory=str(files("ffmem.web") / "static")), name="static")
    _answer_errors(app, site)
    app.add_middleware(Guard, token=token, hosts=hosts)
    return app


def _answer_errors(app: FastAPI, site: Site) -> None:
    """Let every error end as a sentence: on a page, or as JSON below /api."""

    def answer(request: Request, status: int, message: str) -> Response:
        if request.url.path.startswith("/api"):
            return JSONResponse({"error": message}, status)
        name = request.query_params.get("index")
        state = State(name if name in site.library.shelves else None)
        return site.page(request, state, "error.html", status=status, code=status, message=message)

    @app.exception_handler(FfmemError)
    async def refused(request: Request, error: FfmemError) -> Response:
        return answer(request, status_of(error), str(error))

    @app.exception_handler(RequestValidationError)
    async def misunderstood(request: Request, error: RequestValidationError) -> Response:
        return answer(request, 422, in_words(list(error.errors())))

    @app.exception_handler(HTTPException)
    async def missing(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            message = f"There is no page {request.url.path} here."
        else:
            message = f"{error.detail}."
        return answer(request, error.status_code, message)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return answer(
            request,
            500,
            f"Something broke here ({type(error).__name__}). That is a fault of ffmem: what it"
            " wrote to the terminal tells more.",
        )
