"""What a visitor looks at, all of it in the address: index, prompt, position and edits.

    ?index=demo&text=…&position=3&off=L1N2,L3N4&set=L5N6=2.5&scale=L7N8=-1

Every link of a page carries it, so that edits follow from page to page, and Back, Forward, reload
and a shared link show the same. The server remembers nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Depends, Query

from ffmem.cells import Cell
from ffmem.errors import FfmemError
from ffmem.interventions.edits import Edit, Edits
from ffmem.web.limits import MOST_EDITS, TooMuch, refuse_long

Numbered = tuple[tuple[Cell, float], ...]

PARAMETERS = frozenset({"index", "text", "position", "off", "set", "scale"})
"""Parameters of the state; a page may have others of its own."""


@dataclass(frozen=True)
class State:
    """What one visitor looks at."""

    index: str | None = None
    """Which index, by name; None: the first."""
    text: str = ""
    position: int | None = None
    """Where in the prompt; None: its end."""
    off: tuple[Cell, ...] = ()
    set: Numbered = ()
    scale: Numbered = ()

    def link(self, path: str, **extra: object) -> str:
        """Return an address with the state; `extra` adds parameters, None removes them."""
        parameters: dict[str, object] = {**dict(self.fields()), **extra}
        query = "&".join(
            f"{quoted(name)}={quoted(str(value))}"
            for name, value in parameters.items()
            if value is not None
        )
        return f"{path}?{query}" if query else path

    def fields(self, *without: str) -> list[tuple[str, str]]:
        """Return the state as hidden fields, which a form needs to keep it."""
        named = {
            "index": self.index,
            "text": self.text or None,
            "position": None if self.position is None else str(self.position),
            "off": ",".join(map(str, self.off)) or None,
            "set": _listed(self.set),
            "scale": _listed(self.scale),
        }
        return [
            (name, value)
            for name, value in named.items()
            if value is not None and name not in without
        ]

    def without(self, cell: Cell) -> "State":
        """Return the state without an edit of one memory."""
        name = str(cell)  # an address knows no more of a memory
        return replace(
            self,
            off=tuple(one for one in self.off if str(one) != name),
            set=tuple(pair for pair in self.set if str(pair[0]) != name),
            scale=tuple(pair for pair in self.scale if str(pair[0]) != name),
        )

    def with_edit(self, cell: Cell, how: str, number: float | None = None) -> "State":
        """Return the state with one memory edited this way only."""
        plain = self.without(cell)
        if how == "off":
            changed = replace(plain, off=(*plain.off, cell))
        elif how in ("set", "scale"):
            if number is None:
                raise FfmemError(f"{how} {cell} was asked for without a number. Give one.")
            pair = (cell, number)
            if how == "set":
                changed = replace(plain, set=(*plain.set, pair))
            else:
                changed = replace(plain, scale=(*plain.scale, pair))
        else:
            raise FfmemError(f"{how!r} is not an edit. Use off, set or scale.")
        changed.edits()
        return changed

    def edits(self) -> Edits:
        """Return the edits, if they make sense together."""
        count = len(self.off) + len(self.set) + len(self.scale)
        if count > MOST_EDITS:
            raise TooMuch(
                f"{count} memories are edited; the page takes {MOST_EDITS}. Remove some, or use"
                " `ffmem trace`, which has no limit."
            )
        for name, pairs in (("set", self.set), ("scale", self.scale)):
            cells = [cell for cell, _ in pairs]
            for cell in cells:
                if cells.count(cell) > 1:
                    raise FfmemError(f"{name} names {cell} twice. Keep one of the two.")
        return Edits.of(off=self.off, set=dict(self.set), scale=dict(self.scale))

    @property
    def has_room(self) -> bool:
        """Whether one more memory may be edited."""
        return len(self.off) + len(self.set) + len(self.scale) < MOST_EDITS

    def how(self, cell: Cell) -> Edit | None:
        """Return the edit of one memory, if there is one."""
        return next((edit for edit in self.edits() if str(edit.cell) == str(cell)), None)


_SAFE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~,=")
_ASCII = {code: f"%{code:02X}" for code in range(128) if chr(code) not in _SAFE}


def quoted(text: str) -> str:
    """Return a text as it stands in an address.

    The same as `urllib.parse.quote`, which takes thirty times as long: a page has a hundred links.
    """
    return text.translate(_ASCII) if text.isascii() else quote(text, safe=",=")


def none_if_empty(value: Any) -> Any:
    """Return what a field of a form holds; None for an empty one."""
    return None if value == "" else value


def asked(
    index: Annotated[str | None, Query(description="Which index; the first by default.")] = None,
    text: Annotated[str, Query(description="A prompt.")] = "",
    position: Annotated[
        int | None, Query(description="A place in the prompt's tokens, from 0; -1 is the last.")
    ] = None,
    off: Annotated[
        list[str] | None, Query(description="Memories to switch off: L1N2,L3N4.")
    ] = None,
    set: Annotated[list[str] | None, Query(description="Coefficients: L5N6=2.5.")] = None,
    scale: Annotated[list[str] | None, Query(description="Factors: L7N8=-1.")] = None,
) -> State:
    """Return the state that an address names."""
    state = State(
        index or None,
        refuse_long(text),
        position,
        tuple(dict.fromkeys(Cell.parse(name) for name in _parts(off))),
        tuple(_pair("set", part) for part in _parts(set)),
        tuple(_pair("scale", part) for part in _parts(scale)),
    )
    state.edits()
    return state


Asked = Annotated[State, Depends(asked)]
"""How a route takes the state."""


def _listed(pairs: Numbered) -> str | None:
    return ",".join(f"{cell}={_written(number)}" for cell, number in pairs) or None


def _written(number: float) -> str:
    """Return a number as short as it can be read back."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def _parts(given: Iterable[str] | None) -> list[str]:
    """Return the entries of lists written with commas, or by naming a parameter again."""
    return [part.strip() for text in given or () for part in text.split(",") if part.strip()]


def _pair(name: str, part: str) -> tuple[Cell, float]:
    cell, sign, number = part.partition("=")
    try:
        return Cell.parse(cell), float(number)
    except ValueError:
        said: Any = f"{sign}{number}" or "nothing"
        raise FfmemError(
            f"{name} takes a memory with a number, like L5N1234=2.5; {said!r} follows {cell!r}."
        ) from None
