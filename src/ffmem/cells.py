"""Names and numbers of memories: layers have banks, banks have memories.

    L5N1234      memory 1234 of the dense feed-forward part of layer 5
    L5E12N345    memory 345 of expert 12
    L5SN7        memory 7 of the shared expert (L5S1N7 where there are several)
    L5E12, L5S   all memories of an expert

Everything counts from 0. Files and arrays number the memories of a layer through all its banks:
memory = the bank's offset + the number in the bank. Layers may differ in width, and a layer may
have no memories. Only this module parses and writes such names.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeVar

from ffmem.errors import FfmemError, UnknownCell
from ffmem.records import NotARecord, Record
from ffmem.signatures import check_arguments, is_kind

T = TypeVar("T")

_FORMS = re.compile(
    r"L(\d{1,18})(E\d{1,18}|S\d{0,18})?[ND](\d{1,18})|(\d{1,18})[.:/](\d{1,18})",
    re.IGNORECASE | re.ASCII,
)
_EXPERT = re.compile(r"L(\d{1,18})(E\d{1,18}|S\d{0,18})", re.IGNORECASE | re.ASCII)


class Cell(NamedTuple):
    """One memory of a model."""

    layer: int
    memory: int
    """Its number in the layer, across all banks; within the bank if `offset` is not known yet."""
    bank: str = ""
    """Empty for the dense part, else E12, S or S1."""
    offset: int = 0
    """The number of the bank's first memory in the layer."""

    @classmethod
    @check_arguments
    def parse(cls, text: str) -> "Cell":
        """Return the cell of a name, such as `L5N1234`, `L5E12N345`, `5.1234`, `5:1234`, `5/1234`.

        `Layout.resolve` then adds the offset of its bank.
        """
        match = _FORMS.fullmatch(text.strip())
        if match is None:
            given = text if len(text) <= 50 else f"{text[:50]}…"
            if _FORMS.fullmatch(re.sub(r"[0-9]+", "0", text.strip())):
                raise UnknownCell(f"There is no memory {given}: no model has that many.")
            raise UnknownCell(
                f"{given!r} is not the name of a memory."
                " Write layer and memory, counting from 0, like L5N1234 or 5.1234; in expert 12,"
                " L5E12N34."
            )
        layer, bank, memory, *plain = match.groups()
        if layer is None:
            return cls(int(plain[0]), int(plain[1]))
        return cls(int(layer), int(memory), _bank_name(bank) if bank else "")

    @classmethod
    def of(cls, cell: object) -> "Cell":
        """Return the cell of a name or of a pair (layer, memory)."""
        if isinstance(cell, str):
            return cls.parse(cell)
        if isinstance(cell, Cell):
            return cell
        match cell:
            case (int(layer), int(memory)) if layer >= 0 and memory >= 0:
                return cls(layer, memory)
        raise UnknownCell(
            f"{cell!r} is not a memory. Pass its name, like 'L5N1234', or (layer, memory)."
        )

    def __str__(self) -> str:
        return f"L{self.layer}{self.bank}N{self.memory - self.offset}"


class Expert(NamedTuple):
    """An expert of a model: a bank with a name of its own."""

    layer: int
    bank: str
    """E12, or of shared experts S or S1."""

    @classmethod
    def parse(cls, name: object) -> "Expert | None":
        """Return the expert of a name, such as `L5E12` or `L5S`; None if it is no such name."""
        match = _EXPERT.fullmatch(name.strip()) if isinstance(name, str) else None
        return None if match is None else cls(int(match[1]), _bank_name(match[2]))

    @property
    def is_shared(self) -> bool:
        """Whether every token reaches it."""
        return self.bank[0] == "S"

    def __str__(self) -> str:
        return f"L{self.layer}{self.bank}"


def _bank_name(text: str) -> str:
    """Return how a bank is written: e012 is E12."""
    return text[0].upper() + (str(int(text[1:])) if text[1:] else "")


@dataclass(frozen=True, kw_only=True)
class BankRecord(Record):
    """Banks of a layer that are alike: `count` of them, with `size` memories each."""

    size: int
    kind: str = "dense"
    """dense, expert or shared."""
    count: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or self.count < 1 or self.kind not in ("dense", "shared", "expert"):
            raise NotARecord(f"{self} is not a valid bank")

    def name(self, number: int) -> str:
        """Return how one of the banks is written in names of memories."""
        if self.kind == "dense":
            return ""
        if self.kind == "shared" and self.count == 1:
            return "S"
        return f"{'E' if self.kind == 'expert' else 'S'}{number}"

    @property
    def names(self) -> list[str]:
        """How the banks are written in names of memories."""
        return [self.name(number) for number in range(self.count)]


class BankRange(NamedTuple):
    """One bank of a layer, and where its memories are among those of the layer."""

    name: str
    """Empty for the dense part, else E12, S or S1."""
    kind: str
    """dense, expert or shared."""
    offset: int
    size: int

    @property
    def memories(self) -> slice:
        """The numbers of its memories in the layer."""
        return slice(self.offset, self.offset + self.size)

    @property
    def label(self) -> str:
        """Its name in a sentence."""
        kind = {"dense": "dense part", "shared": "shared expert", "expert": "expert"}[self.kind]
        return f"{kind} {self.name[1:]}".rstrip()


def check_layer(layer: int, n_layers: int) -> None:
    """Raise unless a model of so many layers has this one."""
    if not is_kind(layer, int):
        raise FfmemError(f"{layer!r} is not a layer. Give a whole number, such as 5.")
    if not 0 <= layer < n_layers:
        raise FfmemError(f"There is no layer {layer}: the model has layers 0 to {n_layers - 1}.")


class ByLayer(list[T]):
    """Something of each layer; raises on a layer that the model does not have."""

    def __getitem__(self, layer: int) -> T:  # type: ignore[override]
        check_layer(layer, len(self))
        return super().__getitem__(layer)


class Layout:
    """The banks of each layer of a model, from which names and numbers of memories follow.

    `widths` are the memories per layer; `number` counts memories through all layers.
    """

    def __init__(self, layers: Sequence[Sequence[BankRecord]]) -> None:
        self.layers = [list(layer) for layer in layers]
        self.widths = [sum(bank.count * bank.size for bank in layer) for layer in self.layers]
        self.starts = [0, *accumulate(self.widths)]
        self.n_layers = len(self.layers)
        self.memory_layers = [layer for layer, width in enumerate(self.widths) if width]
        """The layers that have memories."""

    @classmethod
    def dense(cls, widths: Sequence[int]) -> "Layout":
        """Return the layout of a model with one dense bank per layer, or none."""
        return cls([[BankRecord(size=width)] if width else [] for width in widths])

    def __len__(self) -> int:
        return self.starts[-1]

    def __iter__(self) -> Iterator[Cell]:
        for layer, width in enumerate(self.widths):
            for memory in range(width):
                yield self.cell(layer, memory)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.layers == other.layers

    __hash__ = None  # type: ignore[assignment]

    @property
    def per_layer(self) -> int | list[int]:
        """Memories per layer, for JSON: one number if all layers have the same."""
        return self.widths[0] if len(set(self.widths)) == 1 else self.widths

    @property
    def shown(self) -> str:
        """The number of memories, for messages: `30 × 1,536 memories`."""
        if len(set(self.widths)) == 1:
            return f"{self.n_layers} × {self.widths[0]:,} memories"
        return f"{len(self):,} memories in {self.n_layers} layers"

    @property
    def n_experts(self) -> list[int]:
        """The number of routed experts of each layer."""
        return [sum(bank.count for bank in layer if bank.kind == "expert") for layer in self.layers]

    @property
    def has_experts(self) -> bool:
        """Whether some memories are in routed experts."""
        return any(self.n_experts)

    def check_layer(self, layer: int) -> None:
        """Raise unless there is such a layer."""
        check_layer(layer, self.n_layers)

    def cell(self, layer: int, memory: int) -> Cell:
        """Return the memory with a number in a layer, by its full name."""
        offset = 0
        for bank in self.layers[layer]:
            size = bank.count * bank.size
            if memory < offset + size:
                number = (memory - offset) // bank.size
                return Cell(layer, memory, bank.name(number), offset + number * bank.size)
            offset += size
        raise IndexError(f"layer {layer} has no memory {memory}")

    def banks(self, layer: int) -> list[BankRange]:
        """Return the banks of a layer in the order of their memories."""
        found: list[BankRange] = []
        offset = 0
        for bank in self.layers[layer]:
            for name in bank.names:
                found.append(BankRange(name, bank.kind, offset, bank.size))
                offset += bank.size
        return found

    def resolve(self, cell: object) -> Cell:
        """Return the memory of a name, a pair or a cell; raise if the model does not have it."""
        found = Cell.of(cell)
        if not 0 <= found.layer < self.n_layers:
            raise UnknownCell(
                f"There is no memory {found}: the model has layers 0 to {self.n_layers - 1}."
            )
        if not found.bank:
            if 0 <= found.memory < self.widths[found.layer]:
                return self.cell(found.layer, found.memory)
            raise UnknownCell(f"There is no memory {found}: {self._about(found.layer)}.")
        offset = 0
        for bank in self.layers[found.layer]:
            names = bank.names
            number = found.memory - found.offset
            if found.bank in names and 0 <= number < bank.size:
                first = offset + names.index(found.bank) * bank.size
                return Cell(found.layer, first + number, found.bank, first)
            offset += bank.count * bank.size
        raise UnknownCell(f"There is no memory {found}: {self._about(found.layer, found.bank)}.")

    def memories_of(self, expert: Expert) -> range:
        """Return the numbers in its layer of an expert's memories; raise if there is none."""
        if not 0 <= expert.layer < self.n_layers:
            raise UnknownCell(
                f"There is no expert {expert}: the model has layers 0 to {self.n_layers - 1}."
            )
        offset = 0
        for bank in self.layers[expert.layer]:
            if expert.bank in bank.names:
                first = offset + bank.names.index(expert.bank) * bank.size
                return range(first, first + bank.size)
            offset += bank.count * bank.size
        raise UnknownCell(f"There is no expert {expert}: {self._about(expert.layer, expert.bank)}.")

    def _about(self, layer: int, bank_name: str = "") -> str:
        """Return the banks of a layer, in words, for one who looks for a bank there."""
        parts = []
        for bank in self.layers[layer]:
            names = bank.names
            span = f"bank {names[0]}" if len(names) == 1 else f"banks {names[0]} to {names[-1]}"
            span = f"{span} with " if names[0] else ""
            parts.append(f"{span}memories 0 to {bank.size - 1}")
        about = f"layer {layer} has {', and '.join(parts) or 'no memories'}"
        has_experts = any(bank.kind != "dense" for bank in self.layers[layer])
        return f"{about}, and no experts" if parts and bank_name and not has_experts else about

    def number(self, cell: Cell) -> int:
        """Return a memory's number through all layers."""
        return self.starts[cell.layer] + cell.memory

    def at(self, number: int) -> Cell:
        """Return the memory with a number through all layers."""
        layer = bisect_right(self.starts, number) - 1
        return self.cell(layer, number - self.starts[layer])
