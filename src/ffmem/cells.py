"""The name of a memory: which layer, which memory of it.

Written `L5N1234`, both counted from 0. This is the only place that reads or writes such names.
"""

import re
from typing import NamedTuple

from ffmem.errors import FfmemError, UnknownCell

_FORMS = re.compile(
    r"(?:L(\d{1,18})[ND](\d{1,18})|(\d{1,18})[.:/](\d{1,18}))", re.IGNORECASE | re.ASCII
)


class Cell(NamedTuple):
    """One memory of a model."""

    layer: int
    memory: int

    @classmethod
    def parse(cls, text: str) -> "Cell":
        """Return the cell that `L5N1234`, `L5D1234`, `5.1234`, `5:1234` or `5/1234` names."""
        match = _FORMS.fullmatch(text.strip())
        if match is None:
            given = text if len(text) <= 50 else f"{text[:50]}…"
            raise UnknownCell(
                f"{given!r} is not the name of a memory."
                " Write layer and memory, counted from 0, like L5N1234 or 5.1234."
            )
        layer, memory = (int(number) for number in match.groups() if number is not None)
        return cls(layer, memory)

    @classmethod
    def of(cls, cell: object) -> "Cell":
        """Return the cell that a name or a pair (layer, memory) means."""
        if isinstance(cell, str):
            return cls.parse(cell)
        match cell:
            case (int(layer), int(memory)) if layer >= 0 and memory >= 0:
                return cls(layer, memory)
        raise UnknownCell(
            f"{cell!r} is not a memory. Write its name, like 'L5N1234', or (layer, memory)."
        )

    def within(self, n_layers: int, n_memories: int) -> "Cell":
        """Return the cell itself, if a model of this size has it."""
        if not (0 <= self.layer < n_layers and 0 <= self.memory < n_memories):
            raise UnknownCell(
                f"There is no memory {self}: the model has layers 0 to {n_layers - 1}"
                f" with memories 0 to {n_memories - 1} each."
            )
        return self

    def __str__(self) -> str:
        return f"L{self.layer}N{self.memory}"


def check_layer(layer: int, n_layers: int) -> None:
    """Raise unless a model of so many layers has this one."""
    if not 0 <= layer < n_layers:
        raise FfmemError(f"There is no layer {layer}: the model has layers 0 to {n_layers - 1}.")
