"""What is to happen to the coefficients of some memories.

    off  m → 0      set  m → c      scale  m → a · m      mean  m → the mean of m in the index

All are one form, m → a · m + c. An edit acts on the coefficient itself, so it means the same in
every family; it acts at every position, the start token included, unless positions are named.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

from ffmem.cells import Cell, Layout
from ffmem.errors import FfmemError
from ffmem.indexing.store import Index


class Edit(NamedTuple):
    """One memory, and what becomes of its coefficient."""

    cell: Cell
    how: str
    """off, set, scale or mean."""
    factor: float
    """a"""
    constant: float
    """c"""

    def to_dict(self) -> dict[str, Any]:
        """Return the edit as JSON has it: m → factor · m + constant."""
        return {**self._asdict(), "cell": str(self.cell)}

    def __str__(self) -> str:
        if self.how == "off":
            return f"{self.cell} off"
        sign = "×" if self.how == "scale" else "="
        number = self.factor if self.how == "scale" else self.constant
        mean = " (mean)" if self.how == "mean" else ""
        return f"{self.cell} {sign} {number:g}{mean}"


@dataclass(frozen=True)
class Edits:
    """Edits of different memories, in the order of their cells."""

    edits: tuple[Edit, ...] = ()
    positions: tuple[int, ...] | None = None
    """Where they act: places in the prompt's tokens, from 0, or from −1 backwards; None: all."""

    @classmethod
    def of(
        cls,
        *,
        off: Any = (),
        set: Any = None,
        scale: Any = None,
        mean: Any = (),
        index: Index | None = None,
        positions: Any = None,
    ) -> "Edits":
        """Return edits by the names of memories; `mean` needs the index that knows it."""
        found = [Edit(Cell.of(cell), "off", 0.0, 0.0) for cell in _listed("off", off)]
        found += [
            Edit(Cell.of(cell), "set", 0.0, _number("set", cell, number))
            for cell, number in _numbered("set", set).items()
        ]
        found += [
            Edit(Cell.of(cell), "scale", _number("scale", cell, number), 0.0)
            for cell, number in _numbered("scale", scale).items()
        ]
        for cell in _listed("mean", mean):
            if index is None:
                raise FfmemError(
                    f"mean of {cell} was asked for, which an index knows and a model does not."
                    " Give the folder of an index instead of the model."
                )
            found.append(Edit(Cell.of(cell), "mean", 0.0, index[cell].stats.mean))
        return cls(_one_per_cell(found), _places(positions))

    def __bool__(self) -> bool:
        return bool(self.edits)

    def __iter__(self) -> Iterator[Edit]:
        return iter(self.edits)

    def __len__(self) -> int:
        return len(self.edits)

    def __str__(self) -> str:
        return ", ".join(map(str, self.edits)) or "no edit"

    def resolve(self, layout: Layout) -> "Edits":
        """Return the edits with their memories resolved, if the model has them all."""
        found = [edit._replace(cell=layout.resolve(edit.cell)) for edit in self.edits]
        return Edits(_one_per_cell(found), self.positions)

    def placed(self, n_tokens: int) -> "Edits":
        """Return the edits with their positions counted from 0 in a prompt of so many tokens."""
        if self.positions is None:
            return self
        return Edits(self.edits, tuple(sorted({place(p, n_tokens) for p in self.positions})))

    def by_layer(self) -> dict[int, list[Edit]]:
        """Return the edits of every edited layer."""
        found: dict[int, list[Edit]] = {}
        for edit in self.edits:
            found.setdefault(edit.cell.layer, []).append(edit)
        return found


def cells_of(name: str, cells: Any) -> list[Cell]:
    """Return the memories of a list of names; one name alone is a list of one."""
    return [Cell.of(cell) for cell in _listed(name, cells)]


def place(position: int, n_tokens: int) -> int:
    """Return a position of a prompt counted from 0; −1 is the last."""
    if not isinstance(position, int) or not -n_tokens <= position < n_tokens:
        raise FfmemError(
            f"Position {position} was asked for; the prompt has {n_tokens} tokens, a start token"
            f" included: 0 to {n_tokens - 1}, or -1 for the last."
        )
    return position % n_tokens


def _one_per_cell(edits: list[Edit]) -> tuple[Edit, ...]:
    """Return the edits by cell; the same one twice is one, two different ones are refused."""
    found: dict[Cell, Edit] = {}
    for edit in edits:
        before = found.setdefault(edit.cell, edit)
        if before != edit:
            raise FfmemError(
                f"{edit.cell} is edited twice: {before} and {edit}. Keep one of the two."
            )
    return tuple(found[cell] for cell in sorted(found))


def _listed(name: str, cells: Any) -> Sequence[Any]:
    """Return a list of cells; one name alone is a mistake that would be read letter by letter."""
    if isinstance(cells, str | Cell):
        return [cells]
    if isinstance(cells, Mapping) or not isinstance(cells, Iterable):
        raise FfmemError(f"{name} takes a list of memories, without numbers.")
    return list(cells)


def _numbered(name: str, numbers: Any) -> Mapping[Any, Any]:
    """Return the number of each cell."""
    if numbers is not None and not isinstance(numbers, Mapping):
        raise FfmemError(f"{name} takes memories with numbers, like {{'L5N1234': 2.5}}.")
    return numbers or {}


def _number(how: str, cell: object, number: object) -> float:
    if isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number):
        raise FfmemError(f"{how} {cell} to {number!r} was asked for. Give a finite number.")
    return float(number)


def _places(positions: Any) -> tuple[int, ...] | None:
    """Return where edits act; nowhere is a mistake."""
    if positions is None:
        return None
    found = tuple(positions) if isinstance(positions, Iterable) else (positions,)
    if not found or not all(isinstance(p, Integral) for p in found):
        raise FfmemError(
            f"Positions {positions!r} were asked for. Give a list of whole numbers, or None for"
            " every position."
        )
    return tuple(map(int, found))
