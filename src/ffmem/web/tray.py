"""The edits that follow a visitor from page to page, and the one door through which forms add one.

A form cannot write the comma-separated lists of an address by itself: it comes here with a memory
and a number, and is sent back to its page with the edit in the address. Nothing is kept here.
"""

import re
from typing import Annotated, Literal
from urllib.parse import parse_qsl, quote

from fastapi import APIRouter, Query
from fastapi.responses import RedirectResponse, Response

from ffmem.cells import Cell
from ffmem.errors import FfmemError
from ffmem.web.site import Site
from ffmem.web.state import PARAMETERS, Asked, State

ROOMS = ("", "figures", "layer", "m", "search", "trace")
"""Pages that a visitor may be sent back to."""

_PATH = re.compile(r"/(?:[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*)?")
_PLACE = re.compile(r"[A-Za-z0-9_-]*")

How = Literal["off", "set", "scale", "none"]


def router(site: Site) -> APIRouter:
    """Return the route of forms that edit a memory."""
    routes = APIRouter()

    @routes.get("/tray", include_in_schema=False)
    def tray(
        state: Asked,
        cell: str,
        how: How = "off",
        number: str = "",
        times: Annotated[float | None, Query()] = None,
        back: str = "/trace",
    ) -> Response:
        shelf = site.shelf(state)
        named = shelf.index.layout.resolve(cell)
        place = Back.of(back)
        if times is not None:  # a button, beside which the number field was left empty
            changed = state.with_edit(named, "scale", times)
        elif how == "none":
            changed = state.without(named)
        else:
            changed = state.with_edit(named, how, read_number(named, number))
        return RedirectResponse(place.link(changed), 303)

    return routes


def read_number(cell: Cell, text: str) -> float | None:
    """Return the number of a form's field; None if nothing was typed."""
    try:
        return float(text) if text.strip() else None
    except ValueError:
        raise FfmemError(
            f"{text[:40]!r} was given for {cell}, which is not a number. Give one like 2.5 or -1."
        ) from None


class Back:
    """A page of this site, and nothing else, whatever an address says."""

    def __init__(self, path: str, extra: list[tuple[str, str]], place: str) -> None:
        self.path = path
        self.extra = extra
        self.place = place

    @classmethod
    def of(cls, address: str) -> "Back":
        """Return the page that an address names; one that is not of this site is refused."""
        rest, _, place = address.partition("#")
        path, _, query = rest.partition("?")
        parts = path.split("/")
        known = _PATH.fullmatch(path) and parts[1] in ROOMS and not {".", ".."} & set(parts)
        if not (known and _PLACE.fullmatch(place) and query.isprintable()):
            raise FfmemError(
                f"{address[:80]!r} is no page of this explorer to go back to. Give a path like"
                " /m/L5N1234 or /trace."
            )
        pairs = parse_qsl(query, keep_blank_values=True)
        return cls(path, [(name, value) for name, value in pairs if name not in PARAMETERS], place)

    def link(self, state: State) -> str:
        """Return the page's address with another state, and all else as it was."""
        address = state.link(self.path)
        for name, value in self.extra:
            sign = "&" if "?" in address else "?"
            address += f"{sign}{quote(name, safe='')}={quote(value, safe=',=')}"
        return f"{address}#{self.place}" if self.place else address
