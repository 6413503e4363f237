"""What all pages share: indexes, model, studies, and how a template becomes a page.

A page whose content takes time is sent in parts: its head, a line per second that says what it
waits for and how long, then the rest. This needs no script.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from importlib.metadata import version
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse, Response, StreamingResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import escape

from ffmem.annotation import study
from ffmem.annotation.study import AnnotationStudy, study_path
from ffmem.errors import FfmemError
from ffmem.indexing.memory import visible, visible_token
from ffmem.text import format_number, format_share
from ffmem.web.catalog import Catalog, ServedIndex
from ffmem.web.errors import NoStudy, http_status
from ffmem.web.state import PARAMETERS, State, quote_url
from ffmem.web.worker import ModelWorker

STREAM_AFTER = 0.2
"""Seconds after which a page is sent in parts."""

TICK_SECONDS = 1.0
"""Time between two lines that say what a page waits for."""

SPLIT = "<!-- rest -->"
"""Marks in base.html where the part begins that may come late."""


class Site:
    """Everything that a view needs."""

    def __init__(self, catalog: Catalog, worker: ModelWorker, db: str | None = None) -> None:
        self.catalog = catalog
        self.worker = worker
        self.db = db
        """File of the annotation study; None: the one next to each index."""
        self.version = version("ffmem")
        self._templates = Environment(
            loader=PackageLoader("ffmem.web"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {
            "token": visible_token,
            "visible": visible,
            "number": format_number,
            "percent": format_share,
            "quoted": quote_url,
        }

    def served(self, state: State) -> ServedIndex:
        """Return the index that a visitor looks at, as it is now."""
        return self.catalog.get(state.index)

    def study(self, state: State) -> AnnotationStudy:
        """Open the study of an index: for each request, so a new or restored file is found."""
        served = self.served(state)
        try:
            return AnnotationStudy.open(self.db or study_path(served.index.folder))
        except study.NoStudy:  # its message names a folder of the server
            raise NoStudy(
                f"There is no study of {served.name} yet. Create one with"
                f" `ffmem annotate init {served.name}`."
            ) from None

    def render(self, request: Request, state: State, template: str, **context: Any) -> str:
        """Return a page as text."""
        served: ServedIndex = context.get("served") or self.served(state)
        return self._templates.get_template(template).render(
            {
                "site": self,
                "served": served,
                "kind": served.index.manifest.model.kind,
                "index_progress": served.progress,
                "state": state,
                "link": state.link,
                "path": request.url.path,
                "section": request.url.path.split("/")[1],
                "extra": _extra_parameters(request),
                "waiting": None,
                "is_late": False,
                **context,
            }
        )

    def page(
        self,
        request: Request,
        state: State,
        template: str,
        status: int = 200,
        **context: Any,
    ) -> HTMLResponse:
        """Return a page."""
        return HTMLResponse(self.render(request, state, template, **context), status)

    async def stream_page(
        self,
        request: Request,
        state: State,
        template: str,
        content: Coroutine[Any, Any, dict[str, Any]],
        *,
        waiting: str = "Computing",
        needs_model: bool = True,
        **context: Any,
    ) -> Response:
        """Return a page with further context from a coroutine; if that takes time, its head first.

        Then a line every second, until the rest is there, says what the page waits for.
        """
        began = time.monotonic()
        task = asyncio.ensure_future(content)
        if (await asyncio.wait({task}, timeout=STREAM_AFTER))[0]:  # an error has its own status
            return self.page(request, state, template, **context, **task.result())

        def status() -> str:
            return f"{(self.worker.status() if needs_model else None) or waiting} …"

        head = self.render(request, state, template, **context, waiting=status())

        async def parts() -> AsyncIterator[str]:
            yield head.partition(SPLIT)[0]
            while not (await asyncio.wait({task}, timeout=TICK_SECONDS))[0]:
                if await request.is_disconnected():
                    task.cancel()
                    return
                seconds = round(time.monotonic() - began)
                yield f'<p class="waiting">{escape(status())} {seconds} s</p>\n'
            try:
                whole = self.render(request, state, template, **context, **await task)
            except FfmemError as error:
                shown = error_context(error)
                whole = self.render(request, state, "error.html", is_late=True, **shown)
            yield whole.partition(SPLIT)[2]

        return StreamingResponse(parts(), media_type="text/html")


def _extra_parameters(request: Request) -> dict[str, str]:
    """Return the parameters of a URL that are not the state: those of one page."""
    # `path` and `self` are arguments of `State.link`, and of no page.
    return {
        name: value
        for name, value in request.query_params.items()
        if name not in PARAMETERS | {"path", "self"}
    }


def error_context(error: Exception) -> dict[str, Any]:
    """Return what the page of an error shows."""
    return {"code": http_status(error), "message": str(error)}
