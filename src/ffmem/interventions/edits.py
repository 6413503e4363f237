"""Edits of memories: what becomes of their coefficients.

    off  m → 0      set  m → c      scale  m → a · m      mean  m → the mean of m in the index

All four are m → a · m + c. An edit acts on the coefficient, so it means the same in every family.
It acts at every position, the start token included, unless positions are given.

An edited checkpoint has a file `edits.json`, from which the same base model is edited again.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

from ffmem.cells import Cell, Layout
from ffmem.errors import FfmemError, StoreError
from ffmem.indexing.store import Index
from ffmem.records import NotARecord, Record

EDITS_FILE = "edits.json"
FORMAT = "ffmem-edits-1"
HOW = ("off", "set", "scale", "mean")


class Edit(NamedTuple):
    """One memory, and what becomes of its coefficient: m → factor · m + constant."""

    cell: Cell
    how: str
    """off, set, scale or mean."""
    factor: float
    constant: float

    def to_dict(self) -> dict[str, Any]:
        """Return the edit as JSON has it."""
        return {**self._asdict(), "cell": str(self.cell)}

    def __str__(self) -> str:
        if self.how == "off":
            return f"{self.cell} off"
        if self.how == "scale":
            return f"{self.cell} × {self.factor:g}"
        return f"{self.cell} = {self.constant:g}{' (mean)' if self.how == 'mean' else ''}"


@dataclass(frozen=True)
class Edits:
    """Edits of different memories, in the order of their cells."""

    edits: tuple[Edit, ...] = ()
    positions: tuple[int, ...] | None = None
    """Tokens of the prompt at which they act, from 0, or from −1 backward. None: all."""

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
        found = [Edit(cell, "off", 0.0, 0.0) for cell in parse_cells("off", off)]
        found += [Edit(cell, "set", 0.0, number) for cell, number in _parse_numbers("set", set)]
        found += [
            Edit(cell, "scale", number, 0.0) for cell, number in _parse_numbers("scale", scale)
        ]
        for cell in parse_cells("mean", mean):
            if index is None:
                raise FfmemError(
                    f"The mean of {cell} is stored in an index; only a model was given."
                    " Pass the folder of an index instead of the model."
                )
            found.append(Edit(cell, "mean", 0.0, index[cell].stats.mean))
        return cls(_unique(found), _parse_positions(positions))

    def __bool__(self) -> bool:
        return bool(self.edits)

    def __iter__(self) -> Iterator[Edit]:
        return iter(self.edits)

    def __len__(self) -> int:
        return len(self.edits)

    def __str__(self) -> str:
        return ", ".join(map(str, self.edits)) or "no edit"

    def resolve(self, layout: Layout, n_tokens: int | None = None) -> "Edits":
        """Return the edits with every memory found in the model, and positions counted from 0.

        Positions are resolved in a prompt of `n_tokens`, if that is given.
        """
        found = [edit._replace(cell=layout.resolve(edit.cell)) for edit in self.edits]
        positions = self.positions
        if positions is not None and n_tokens is not None:
            positions = tuple(sorted({resolve_position(p, n_tokens) for p in positions}))
        return Edits(_unique(found), positions)

    def by_layer(self) -> dict[int, list[Edit]]:
        """Return the edits of every edited layer."""
        found: dict[int, list[Edit]] = {}
        for edit in self.edits:
            found.setdefault(edit.cell.layer, []).append(edit)
        return found


def parse_cells(name: str, cells: Any) -> list[Cell]:
    """Return the memories of a list of names; a single name is a list of one."""
    if isinstance(cells, str | Cell):
        cells = [cells]
    if isinstance(cells, Mapping) or not isinstance(cells, Iterable):
        raise FfmemError(f"{name} takes a list of memories, without numbers.")
    return [Cell.of(cell) for cell in cells]


def resolve_position(position: int, n_tokens: int) -> int:
    """Return a position of a prompt counted from 0; −1 is the last."""
    if not isinstance(position, int) or not -n_tokens <= position < n_tokens:
        raise FfmemError(
            f"Position {position} is not in the prompt, which has {n_tokens} tokens including any"
            f" start token. Use 0 to {n_tokens - 1}, or -1 for the last."
        )
    return position % n_tokens


def _parse_numbers(name: str, numbers: Any) -> list[tuple[Cell, float]]:
    """Return the number of each cell."""
    if numbers is not None and not isinstance(numbers, Mapping):
        raise FfmemError(f"{name} takes memories with numbers, like {{'L5N1234': 2.5}}.")
    found = []
    for cell, number in (numbers or {}).items():
        if isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number):
            raise FfmemError(f"Cannot {name} {cell} to {number!r}. Give a finite number.")
        found.append((Cell.of(cell), float(number)))
    return found


def _parse_positions(positions: Any) -> tuple[int, ...] | None:
    if positions is None:
        return None
    found = tuple(positions) if isinstance(positions, Iterable) else (positions,)
    if not found or not all(isinstance(p, Integral) for p in found):
        raise FfmemError(
            f"Positions must be a list of whole numbers, or None for all; got {positions!r}."
        )
    return tuple(map(int, found))


def _unique(edits: Sequence[Edit]) -> tuple[Edit, ...]:
    """Return the edits by cell, each once; raise if two edits of one memory differ."""
    found: dict[Cell, Edit] = {}
    for edit in edits:
        before = found.setdefault(edit.cell, edit)
        if before != edit:
            raise FfmemError(
                f"{edit.cell} is edited twice: {before} and {edit}. Keep one of the two."
            )
    return tuple(found[cell] for cell in sorted(found))


# edits.json


@dataclass(frozen=True, kw_only=True)
class EditRecord(Record):
    """One edit in edits.json."""

    cell: str
    how: str
    factor: float
    constant: float

    def __post_init__(self) -> None:
        is_number = math.isfinite(self.factor) and math.isfinite(self.constant)
        if self.how not in HOW or not is_number:
            raise NotARecord(f"{self.how} {self.cell} with these numbers is not an edit")


@dataclass(frozen=True, kw_only=True)
class EditsFile(Record):
    """The content of edits.json. Only `edits` is needed to apply them to a model."""

    edits: list[EditRecord]
    format: str = FORMAT
    model: str | None = None
    hash_before: str | None = None
    """SHA-256 of the weights of the base model; if given, no other model is edited."""
    hash_after: str | None = None
    """SHA-256 of the edited weights."""

    @classmethod
    def of_edits(cls, edits: Edits, model: str, before: str, after: str) -> "EditsFile":
        """Return the content for some edits of a model."""
        records = [EditRecord(**edit.to_dict()) for edit in edits]
        return cls(edits=records, model=model, hash_before=before, hash_after=after)

    @classmethod
    def read(cls, path: Path) -> "EditsFile":
        """Read edits.json, given as a file or as the folder that it is in."""
        path = path / EDITS_FILE if path.is_dir() else path
        try:
            found = cls.of(json.loads(path.read_text(encoding="utf-8")))
            if found.format != FORMAT:
                raise NotARecord(f"its format is {found.format!r}; this version reads {FORMAT!r}")
            if not found.to_edits():
                raise NotARecord("it has no edits")
        except FileNotFoundError:
            raise StoreError(f"No file {path}. Give the {EDITS_FILE} of an edited model.") from None
        except (OSError, ValueError, RecursionError, FfmemError) as error:
            reason = str(error).rstrip(".") or type(error).__name__
            raise StoreError(f"Cannot read the edits of {path}: {reason}.") from None
        return found

    def to_edits(self) -> Edits:
        """Return the edits."""
        found = [Edit(Cell.parse(e.cell), e.how, e.factor, e.constant) for e in self.edits]
        return Edits(_unique(found))
