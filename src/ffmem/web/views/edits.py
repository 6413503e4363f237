"""The active edits, which follow a visitor from page to page in the URL.

A form cannot write the lists in a URL by itself: it sends a memory and a number to /edit, which
redirects to its page with the edit in the URL. The server stores nothing.
"""

import re
from typing import Literal
from urllib.parse import parse_qsl, quote

from fastapi import APIRouter
from fastapi.responses import RedirectResponse, Response

from ffmem.cells import Cell
from ffmem.errors import FfmemError
from ffmem.web.site import Site
from ffmem.web.state import PARAMETERS, State, StateParam

PAGES = ("", "figures", "layers", "layer", "m", "search", "trace")
"""Pages to which a form may lead back."""

_PATH = re.compile(r"/(?:[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*)?")
_FRAGMENT = re.compile(r"[A-Za-z0-9_-]*")


def router(site: Site) -> APIRouter:
    """Return the route of forms that edit a memory."""
    routes = APIRouter()

    @routes.get("/edit", include_in_schema=False)
    def edit(
        state: StateParam,
        cell: str,
        how: Literal["off", "set", "scale", "none"] = "off",
        number: str = "",
        times: float | None = None,
        back: str = "/trace",
    ) -> Response:
        named = site.served(state).index.layout.resolve(cell)
        if times is not None:  # a button beside an empty number field
            changed = state.with_edit(named, "scale", times)
        elif how == "none":
            changed = state.without(named)
        else:
            changed = state.with_edit(named, how, parse_number(named, number))
        return RedirectResponse(link_back(back, changed), 303)

    return routes


def parse_number(cell: Cell, text: str) -> float | None:
    """Return the number of a form's field; None if it is empty."""
    try:
        return float(text) if text.strip() else None
    except ValueError:
        raise FfmemError(
            f"{text[:40]!r} is not a number. Use one for {cell}, like 2.5 or -1."
        ) from None


def link_back(url: str, state: State) -> str:
    """Return the URL of a page with another state, and everything else as it was.

    Raise unless it is a page of this site.
    """
    rest, _, fragment = url.partition("#")
    path, _, query = rest.partition("?")
    parts = path.split("/")
    is_page = _PATH.fullmatch(path) and parts[1] in PAGES and not {".", ".."} & {*parts}
    if not (is_page and _FRAGMENT.fullmatch(fragment) and query.isprintable()):
        raise FfmemError(
            f"{url[:80]!r} is not a page of this explorer. Use a path like /m/L5N1234 or /trace."
        )
    link = state.link(path)
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in PARAMETERS:
            sign = "&" if "?" in link else "?"
            link += f"{sign}{quote(name, safe='')}={quote(value, safe=',=')}"
    return f"{link}#{fragment}" if fragment else link
