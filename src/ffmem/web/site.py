"""What all pages share: the library, the worker, and how a page is made of a template.

A page whose content takes time is sent in parts: its head, a line per second that says what it
waits for and how long, then the rest. No script is needed for that.
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

from ffmem.errors import FfmemError
from ffmem.indexing.memory import visible, visible_token
from ffmem.text import format_number, format_share
from ffmem.web.library import Library, Shelf
from ffmem.web.limits import status_of
from ffmem.web.state import PARAMETERS, State, quoted
from ffmem.web.studies import Studies
from ffmem.web.worker import Worker

SOON = 0.2
"""Seconds after which a visitor is told that something is going on."""

TICK = 1.0
"""Seconds between two lines that say what a page waits for."""

REST = "<!-- rest -->"
"""Stands in base.html where the part begins that may come late."""


class Site:
    """The library on the web."""

    def __init__(self, library: Library, worker: Worker, studies: Studies) -> None:
        self.library = library
        self.worker = worker
        self.studies = studies
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
            "quoted": quoted,
        }

    def shelf(self, state: State) -> Shelf:
        """Return the index that a visitor looks at."""
        return self.library.shelf(state.index)

    def render(self, request: Request, state: State, template: str, **context: Any) -> str:
        """Return a page as text."""
        return self._templates.get_template(template).render(
            {
                "site": self,
                "library": self.library,
                "shelf": self.shelf(state),
                "kind": self.shelf(state).index.manifest.model.kind,
                "state": state,
                "link": state.link,
                "path": request.url.path,
                "room": request.url.path.split("/")[1],
                "extra": _others(request),
                "waiting": None,
                "late": False,
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

    async def page_when_ready(
        self,
        request: Request,
        state: State,
        template: str,
        coming: Coroutine[Any, Any, dict[str, Any]],
        *,
        waiting: str = "Computing",
        needs_model: bool = True,
        **context: Any,
    ) -> Response:
        """Return a page whose further context is `coming`; if that takes time, its head first.

        Then a line every second, until the rest is there, says what the page waits for.
        """
        began = time.monotonic()
        task = asyncio.ensure_future(coming)
        done, _ = await asyncio.wait({task}, timeout=SOON)
        if done:  # an error gets its own status
            return self.page(request, state, template, **context, **task.result())

        def status() -> str:
            blocked = self.worker.status() if needs_model else None
            return f"{blocked or waiting.removesuffix('…').strip()} …"

        head, _, _ = self.render(request, state, template, **context, waiting=status()).partition(
            REST
        )

        async def parts() -> AsyncIterator[str]:
            yield head
            while not (await asyncio.wait({task}, timeout=TICK))[0]:
                if await request.is_disconnected():
                    task.cancel()
                    return
                seconds = round(time.monotonic() - began)
                yield f'<p class="waiting">{escape(status())} {seconds} s</p>\n'
            try:
                whole = self.render(request, state, template, **context, **await task)
            except FfmemError as error:
                whole = self.render(request, state, "error.html", late=True, **said(error))
            yield whole.partition(REST)[2]

        return StreamingResponse(parts(), media_type="text/html")


def _others(request: Request) -> dict[str, str]:
    """Return the parameters of an address that are not the state: what a page alone understands."""
    # `path` and `self` are arguments of `State.link`, and of no page.
    return {
        name: value
        for name, value in request.query_params.items()
        if name not in PARAMETERS | {"path", "self"}
    }


def said(error: Exception) -> dict[str, Any]:
    """Return what the page of an error shows."""
    return {"code": status_of(error), "message": str(error)}
