"""Edits of memories and experts: what becomes of coefficients and routes.

    off  m → 0      set  m → c      scale  m → a · m      mean  m → the mean of m in the index

All four are m → a · m + c. An edit acts on the coefficient, so it means the same in every family.
It acts at every position, the start token included, unless positions are given; a memory of an
expert is edited where the expert runs. Of a whole expert:

    off      its output is 0; other experts keep their weights
    forbid   the router never chooses it; the next best takes its place
    force    the router always chooses it, in place of the last of its choices

Two edits replace weights of a memory, and name the token that its value then promotes:

    redirect   v → the nearest value that promotes the token (`redirect.py`)
    write      key and value → those that answer a prompt with the token (`write.py`)

An edited checkpoint has a file `edits.json`, from which the same base model is edited again. It has
the new weights themselves, so nothing is solved a second time.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from ffmem.cells import Cell, Expert, Layout
from ffmem.errors import FfmemError, StoreError, UnknownCell
from ffmem.indexing.store import Index
from ffmem.records import NotARecord, Record
from ffmem.signatures import to_number

EDITS_FILE = "edits.json"
FORMAT = "ffmem-edits-1"
ROUTES = ("forbid", "force")
REWRITES = ("redirect", "write")
HOW = ("off", "set", "scale", "mean", *ROUTES, *REWRITES)


@dataclass(frozen=True, kw_only=True)
class MemoryWeights(Record):
    """New weights of one memory, as its bank stores them. What is None stays as it is."""

    value: tuple[float, ...]
    key: tuple[float, ...] | None = None
    """In gated models, the gate's."""
    up: tuple[float, ...] | None = None
    """Gated models: the other key."""
    key_bias: float | None = None
    up_bias: float | None = None

    def __post_init__(self) -> None:
        numbers = [*self.value, *(self.key or ()), *(self.up or ())]
        numbers += [one for one in (self.key_bias, self.up_bias) if one is not None]
        if not all(map(math.isfinite, numbers)):
            raise NotARecord("weights have numbers that are not finite")


@dataclass(frozen=True)
class Edit(Record):
    """One memory, and what becomes of its coefficient: m → factor · m + constant; or one expert.

    Or one memory, and its new weights.
    """

    cell: str
    """The name of a memory; with off, forbid and force, also that of an expert."""
    how: str
    """off, set, scale, mean, forbid, force, redirect or write."""
    factor: float
    constant: float
    token: str | None = None
    """redirect and write: the token that the value promotes."""
    sign: int | None = None
    """redirect: 1 if v is to promote the token, −1 if −v is, as where coefficients are negative."""
    margin: float | None = None
    """redirect: the lead of the token, in standard deviations of the value's logits."""
    weights: MemoryWeights | None = None
    """redirect and write: the new weights. None: not solved yet."""

    def __post_init__(self) -> None:
        is_number = math.isfinite(self.factor) and math.isfinite(self.constant)
        is_rewrite = self.how in REWRITES
        if self.how not in HOW or not is_number or (self.token is not None) != is_rewrite:
            raise NotARecord(f"{self.how} {self.cell} with these numbers is not an edit")
        if self.how == "redirect" and self.sign not in (1, -1):
            raise NotARecord(f"redirect {self.cell} needs a sign, 1 or -1; it has {self.sign!r}")
        if self.how == "write" and self.weights is None:
            raise NotARecord(f"write {self.cell} has no weights")
        expert = Expert.parse(self.cell)
        if expert is None and self.how in ROUTES:
            raise FfmemError(f"Cannot {self.how} {self.cell}. Use an expert, like L5E12.")
        if expert is not None and expert.is_shared and self.how in ROUTES:
            raise FfmemError(
                f"Cannot {self.how} {expert}: every token reaches a shared expert. You can switch"
                " it off."
            )
        if expert is not None and self.how not in ("off", *ROUTES):
            raise FfmemError(
                f"Cannot {self.how} {expert}, which is an expert. Switch it off, forbid or force"
                f" its route, or {self.how} one of its memories, like {expert}N0."
            )

    @property
    def target(self) -> Cell | Expert:
        """The memory or the expert that is edited."""
        return Expert.parse(self.cell) or Cell.parse(self.cell)

    def __str__(self) -> str:
        if self.how in REWRITES:
            sign = "−" if self.sign == -1 else ""
            return f"{sign}{self.cell} → {self.token!r}"
        if self.how in ROUTES:
            return f"{self.cell} {'forbidden' if self.how == 'forbid' else 'forced'}"
        if self.how == "off":
            return f"{self.cell} off"
        if self.how == "scale":
            return f"{self.cell} × {self.factor:g}"
        return f"{self.cell} = {self.constant:g}{' (mean)' if self.how == 'mean' else ''}"


@dataclass(frozen=True)
class Edits:
    """Edits of different memories and experts, layer by layer."""

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
        redirect: Any = None,
        margin: float | None = None,
        forbid: Any = (),
        force: Any = (),
        index: Index | None = None,
        positions: Any = None,
    ) -> "Edits":
        """Return edits by the names of memories and experts; `mean` needs the index that knows it.

        Of a memory in an expert, the mean is that over the prefixes that reach the expert. A memory
        that is redirected may have a sign in front: of "-L5N12", −v is to promote the token.
        Without one, it is the sign of its largest coefficient in the index, or +.
        """
        found = [
            Edit(str(one), how, 0.0, 0.0)
            for how, names in (("off", off), ("forbid", forbid), ("force", force))
            for one in (_parse_names if how == "off" else _parse_experts)(how, names)
        ]
        found += [Edit(cell, "set", 0.0, number) for cell, number in _parse_numbers("set", set)]
        found += [Edit(cell, "scale", a, 0.0) for cell, a in _parse_numbers("scale", scale)]
        for cell in parse_cells("mean", mean):
            if index is None:
                raise FfmemError(
                    f"The mean of {cell} is stored in an index, but you passed a model."
                    " Pass the folder of an index instead of the model."
                )
            stats = index[cell].stats
            share = 1.0 if stats.expert is None else stats.expert.share
            found.append(Edit(str(cell), "mean", 0.0, stats.mean / share if share else 0.0))
        found += _parse_redirects(redirect, margin, index)
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

        Positions are resolved in a prompt of `n_tokens`, if that is given. Raises if an edited
        memory is in an expert that does not run, or no expert of a layer may run.
        """
        positions = self.positions
        _check_experts(self.edits, layout)
        if positions is not None and n_tokens is not None:
            positions = tuple(sorted({resolve_position(p, n_tokens) for p in positions}))
        return Edits(_unique(self.edits, layout), positions)

    def by_layer(self, layout: Layout) -> dict[int, list[tuple[int, Edit]]]:
        """Return the edits of every edited layer, each with the memory's number in the layer.

        An expert that is off has all its memories off. Forbidden and forced routes are not here.
        """
        found: dict[int, list[tuple[int, Edit]]] = {}
        for edit in self.edits:
            if isinstance(expert := edit.target, Expert):
                numbers = list(layout.memories_of(expert)) if edit.how == "off" else []
            else:
                numbers = [layout.resolve(edit.cell).memory]
            if numbers:
                of_layer = found.setdefault(edit.target.layer, [])
                of_layer += [(number, edit) for number in numbers]
        return found

    def experts(self) -> dict[int, list[tuple[Expert, Edit]]]:
        """Return the edits of whole experts, by layer."""
        found: dict[int, list[tuple[Expert, Edit]]] = {}
        for edit in self.edits:
            if isinstance(expert := edit.target, Expert):
                found.setdefault(expert.layer, []).append((expert, edit))
        return found


def parse_cells(name: str, cells: Any) -> list[Cell]:
    """Return the memories of a list of names; a single name is a list of one."""
    return [Cell.of(cell) for cell in _as_list(name, cells)]


def _parse_names(name: str, names: Any) -> list[Cell | Expert]:
    """Return the memories and experts of a list of names."""
    return [Expert.parse(one) or Cell.of(one) for one in _as_list(name, names)]


def _parse_experts(name: str, names: Any) -> list[Cell | Expert]:
    """Return the experts of a list of names; a memory's is refused once there is a model."""
    found: list[Cell | Expert] = []
    for one in _as_list(name, names):
        try:
            found += _parse_names(name, [one])
        except UnknownCell:
            raise UnknownCell(
                f"{one!r} is not the name of an expert. Write layer and expert, counting from 0,"
                " like L5E12."
            ) from None
    return found


def _as_list(name: str, cells: Any) -> list[Any]:
    if isinstance(cells, str | Cell):
        return [cells]
    if isinstance(cells, Mapping) or not isinstance(cells, Iterable):
        raise FfmemError(f"{name} takes a list of names without numbers.")
    return list(cells)


def resolve_position(position: int, n_tokens: int) -> int:
    """Return a position of a prompt counted from 0; −1 is the last."""
    if not -n_tokens <= position < n_tokens:
        raise FfmemError(
            f"Position {position} is not in the prompt, which has {n_tokens} tokens including any"
            f" start token. Use 0 to {n_tokens - 1}, or -1 for the last."
        )
    return int(position) % n_tokens


def _parse_numbers(name: str, numbers: Any) -> list[tuple[str, float]]:
    """Return the number of each cell."""
    if numbers is not None and not isinstance(numbers, Mapping):
        raise FfmemError(f"{name} takes memories with numbers, like {{'L5N1234': 2.5}}.")
    found = []
    for cell, number in (numbers or {}).items():
        number = to_number(number)
        if isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number):
            raise FfmemError(f"Cannot {name} {cell} to {number!r}. Use a finite number.")
        found.append((str(Cell.of(cell)), float(number)))
    return found


def _parse_redirects(redirect: Any, margin: float | None, index: Index | None) -> list[Edit]:
    """Return the redirected memories, whose new values are not solved yet."""
    if redirect is not None and not isinstance(redirect, Mapping):
        raise FfmemError("redirect takes memories with tokens, like {'L5N1234': ' Paris'}.")
    if margin is not None and not redirect:
        raise FfmemError("margin is the lead of a redirected memory's token. Pass redirect too.")
    if margin is not None and not (isinstance(margin, Real) and 0 < margin < math.inf):
        raise FfmemError(f"The margin must be a number above 0; got {margin!r}.")
    found = []
    for name, token in (redirect or {}).items():
        if not isinstance(token, str) or not token:
            raise FfmemError(f"Cannot redirect {name} to {token!r}. Pass one token as text.")
        sign, cell = None, name
        if isinstance(name, str) and (match := re.match(r"\s*([+−-])(.*)", name, re.DOTALL)):
            sign, cell = (1 if match[1] == "+" else -1), match[2]
        cell = Cell.of(cell)
        if sign is None:
            sign = 1
            if index is not None and index.manifest.model.gated:
                stats = index[cell].stats
                sign = -1 if -stats.min > stats.max else 1
        given = None if margin is None else float(margin)
        found.append(Edit(str(cell), "redirect", 1.0, 0.0, token=token, sign=sign, margin=given))
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


def _unique(edits: Iterable[Edit], layout: Layout | None = None) -> tuple[Edit, ...]:
    """Return the edits by cell, each once; raise if two edits of one memory differ."""
    found: dict[Cell | Expert, Edit] = {}
    for edit in edits:
        target = edit.target
        if layout is not None and isinstance(target, Cell):
            target = layout.resolve(target)
        named = replace(edit, cell=str(target))
        before = found.setdefault(target, named)
        if before != named:
            raise FfmemError(
                f"{target} is edited twice: {before} and {named}. Keep one of the two."
            )
    order = sorted(found, key=lambda one: (one.layer, isinstance(one, Expert), one))
    return tuple(found[target] for target in order)


def _check_experts(edits: Iterable[Edit], layout: Layout) -> None:
    """Raise if an edited expert does not exist, or if edits contradict each other."""
    stopped: dict[Expert, Edit] = {}
    forbidden: dict[int, int] = {}
    for edit in edits:
        if isinstance(expert := edit.target, Expert):
            layout.memories_of(expert)
            if edit.how != "force":
                stopped[expert] = edit
            if edit.how == "forbid":
                forbidden[expert.layer] = forbidden.get(expert.layer, 0) + 1
    for layer, n in forbidden.items():
        if n >= sum(bank.count for bank in layout.layers[layer] if bank.kind == "expert"):
            raise FfmemError(
                f"All {n} experts of layer {layer} are forbidden, but its router has to choose"
                " some. Forbid fewer, or switch experts off."
            )
    for edit in edits:
        if isinstance(target := edit.target, Cell):
            cell = layout.resolve(target)
            if (stop := stopped.get(Expert(cell.layer, cell.bank))) is not None:
                raise FfmemError(f"{edit} has no effect, because of {stop}. Keep one of the two.")


@dataclass(frozen=True, kw_only=True)
class EditsFile(Record):
    """The content of edits.json. Only `edits` is needed to apply them to a model."""

    edits: list[Edit]
    format: str = FORMAT
    model: str | None = None
    hash_before: str | None = None
    """SHA-256 of the weights of the base model; if given, no other model is edited."""
    hash_after: str | None = None
    """SHA-256 of the edited weights."""

    def to_json(self) -> str:
        """Return the content; fields of an edit that it does not use are left out."""
        content = asdict(self)
        for edit in content["edits"]:
            for part in (edit.get("weights") or {}, edit):
                for name in [name for name, value in part.items() if value is None]:
                    del part[name]
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        # A vector on one line.
        one_line = re.sub(
            r"\[\n([-+.\de,\s]+?)\n\s*\]", lambda found: f"[{' '.join(found[1].split())}]", text
        )
        return one_line + "\n"

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
            raise StoreError(f"No file {path}. Use the {EDITS_FILE} of an edited model.") from None
        except (OSError, ValueError, RecursionError, FfmemError) as error:
            reason = str(error).rstrip(".") or type(error).__name__
            raise StoreError(f"Cannot read the edits of {path}: {reason}.") from None
        return found

    def to_edits(self) -> Edits:
        """Return the edits."""
        return Edits(_unique(self.edits))
