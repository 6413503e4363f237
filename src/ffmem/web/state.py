"""The state of a visit, all of it in the URL: index, prompt, position and edits.

    ?index=demo&text=…&position=3&off=L1N2,L3N4&set=L5N6=2.5&scale=L7N8=-1

Every link of a page carries it, so edits follow you from page to page, and Back, Forward, reload
and a shared link show the same. The server stores nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Depends, Query

from ffmem.cells import Cell
from ffmem.errors import FfmemError
from ffmem.interventions.edits import Edit, Edits
from ffmem.web.errors import LimitExceeded

MAX_CHARACTERS = 4_000
"""Length of a prompt."""

MAX_EDITS = 64

PARAMETERS = frozenset({"index", "text", "chat", "position", "off", "set", "scale"})
"""URL parameters of the state; a page may have others of its own."""

Numbers = tuple[tuple[Cell, float], ...]


@dataclass(frozen=True)
class State:
    """What one visitor looks at."""

    index: str | None = None
    """Which index, by name; None: the first."""
    text: str = ""
    position: int | None = None
    """Where in the prompt; None: its end."""
    off: tuple[Cell, ...] = ()
    set: Numbers = ()
    scale: Numbers = ()
    chat: bool = False
    """Whether the prompt is a conversation."""

    def link(self, path: str, **extra: object) -> str:
        """Return a URL with the state; `extra` adds parameters, None removes them."""
        parameters: dict[str, object] = {**dict(self.fields()), **extra}
        query = "&".join(
            f"{quote_url(name)}={quote_url(str(value))}"
            for name, value in parameters.items()
            if value is not None
        )
        return f"{path}?{query}" if query else path

    def fields(self, *without: str) -> list[tuple[str, str]]:
        """Return the state as (name, value) pairs: the hidden fields of a form."""
        values = {
            "index": self.index,
            "text": self.text or None,
            "chat": "1" if self.chat else None,
            "position": None if self.position is None else str(self.position),
            "off": ",".join(map(str, self.off)) or None,
            "set": ",".join(_format_pair(*pair) for pair in self.set) or None,
            "scale": ",".join(_format_pair(*pair) for pair in self.scale) or None,
        }
        return [
            (name, value)
            for name, value in values.items()
            if value is not None and name not in without
        ]

    def without(self, cell: Cell | str) -> "State":
        """Return the state without an edit of one memory."""
        name = str(cell)  # URLs have names only
        return replace(
            self,
            off=tuple(one for one in self.off if str(one) != name),
            set=tuple(pair for pair in self.set if str(pair[0]) != name),
            scale=tuple(pair for pair in self.scale if str(pair[0]) != name),
        )

    def with_edit(self, cell: Cell, how: str, number: float | None = None) -> "State":
        """Return the state with one memory edited this way only."""
        plain = self.without(cell)
        if how not in ("off", "set", "scale"):
            raise FfmemError(f"{how!r} is not an edit. Use off, set or scale.")
        if how == "off":
            changed = replace(plain, off=(*plain.off, cell))
        elif number is None:
            raise FfmemError(f"{how} {cell} needs a number.")
        elif how == "set":
            changed = replace(plain, set=(*plain.set, (cell, number)))
        else:
            changed = replace(plain, scale=(*plain.scale, (cell, number)))
        changed.edits()
        return changed

    def edits(self) -> Edits:
        """Return the edits; raise if they contradict each other."""
        if self.n_edits > MAX_EDITS:
            raise LimitExceeded(
                f"{self.n_edits} memories are edited; the page takes {MAX_EDITS}. Remove some, or"
                " use `ffmem trace`, which has no limit."
            )
        for name, pairs in (("set", self.set), ("scale", self.scale)):
            cells = [cell for cell, _ in pairs]
            for cell in cells:
                if cells.count(cell) > 1:
                    raise FfmemError(f"{name} names {cell} twice. Keep one of the two.")
        return Edits.of(off=self.off, set=dict(self.set), scale=dict(self.scale))

    @property
    def n_edits(self) -> int:
        """How many edits there are."""
        return len(self.off) + len(self.set) + len(self.scale)

    @property
    def has_room(self) -> bool:
        """Whether one more memory may be edited."""
        return self.n_edits < MAX_EDITS

    def edit_of(self, cell: Cell) -> Edit | None:
        """Return the edit of one memory, if there is one."""
        return next((edit for edit in self.edits() if edit.cell == str(cell)), None)


_SAFE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~,=")
_ASCII = {code: f"%{code:02X}" for code in range(128) if chr(code) not in _SAFE}


def quote_url(text: str) -> str:
    """Return a text as a URL has it.

    Same as `urllib.parse.quote`, which takes thirty times as long: a page has a hundred links.
    """
    return text.translate(_ASCII) if text.isascii() else quote(text, safe=",=")


def none_if_empty(value: Any) -> Any:
    """Return the content of a form field; None for an empty one."""
    return None if value == "" else value


def check_length(text: str) -> str:
    """Return a prompt; raise if it is too long."""
    if len(text) > MAX_CHARACTERS:
        raise LimitExceeded(
            f"The prompt has {len(text):,} characters; the page takes {MAX_CHARACTERS:,}."
            " Shorten it, or use `ffmem trace`, which has no limit."
        )
    return text


def read_state(
    index: Annotated[
        str | None, Query(description="Name of the index. Default: the first.")
    ] = None,
    text: Annotated[str, Query(description="A prompt.")] = "",
    position: Annotated[
        int | None, Query(description="Position in the prompt's tokens, from 0; -1 is the last.")
    ] = None,
    off: Annotated[
        list[str] | None, Query(description="Memories to switch off: L1N2,L3N4.")
    ] = None,
    set: Annotated[list[str] | None, Query(description="Coefficients to set: L5N6=2.5.")] = None,
    scale: Annotated[list[str] | None, Query(description="Factors to scale by: L7N8=-1.")] = None,
    chat: Annotated[
        bool, Query(description="Whether the prompt is a user message or JSON messages.")
    ] = False,
) -> State:
    """Return the state in a URL."""
    state = State(
        index or None,
        check_length(text),
        position,
        tuple(dict.fromkeys(Cell.parse(name) for name in _split(off))),
        tuple(_parse_pair("set", part) for part in _split(set)),
        tuple(_parse_pair("scale", part) for part in _split(scale)),
        chat,
    )
    state.edits()
    return state


StateParam = Annotated[State, Depends(read_state)]
"""The state, as the parameter of a route."""


def _format_pair(cell: Cell, number: float) -> str:
    """Return a memory with its number, as short as it can be read back."""
    short = f"{number:g}"
    return f"{cell}={short if float(short) == number else repr(number)}"


def _split(lists: Iterable[str] | None) -> list[str]:
    """Return the entries of lists: separated by commas, or in a parameter given several times."""
    return [part.strip() for text in lists or () for part in text.split(",") if part.strip()]


def _parse_pair(name: str, part: str) -> tuple[Cell, float]:
    cell, sign, number = part.partition("=")
    try:
        return Cell.parse(cell), float(number)
    except ValueError:
        found = f"{sign}{number}" or "nothing"
        raise FfmemError(
            f"{name} takes a memory with a number, like L5N1234=2.5; {found!r} follows {cell!r}."
        ) from None
