"""Patterns, and where an index keeps them, by source: `DIR/patterns/SOURCE/`.

The paper's rule (Section 3.1): a pattern is seen in at least three of a memory's first 25 triggers,
has a description, and is shallow (a recurring n-gram, say) or semantic (a recurring topic).

    manifest.json             written last: settings, hash of the index's manifest, of every file
    found/layer-000.parquet   one row per pattern, by memory, sign and number
    lists/layer-000.parquet   one row per list of triggers that was examined, found or not

The index's own files do not change. Patterns of another state of the index (it was extended since,
say) are refused, never shown.
"""

import csv
import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy import ndarray

from ffmem.cells import Cell
from ffmem.errors import FfmemError, StoreError
from ffmem.files import check_output_file, committing, csv_row, sha256, write_text
from ffmem.hub import HubFile
from ffmem.indexing.filters import PATTERN_KINDS
from ffmem.indexing.memory import visible
from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.store import Index, as_index
from ffmem.indexing.tables import (
    as_array,
    layer_file,
    open_table,
    read_columns,
    read_errors,
    write_table,
)
from ffmem.signatures import check_arguments

FORMAT = 2

SOURCES = ("human", "explained", "automatic")
"""People after adjudication; a language model; the detector. They are shown in this order."""

WHO = {"human": "people", "explained": "language model", "automatic": "detected"}
"""Sources in words."""

NOTES = {
    "explained": "Described by a language model; not the paper's protocol.",
    "automatic": "Found by a program; not the paper's protocol.",
}
"""A caveat about each source."""

_COMMANDS = {
    "human": "Write them with `ffmem annotate publish`.",
    "explained": "Create them with `ffmem patterns explain`.",
    "automatic": "Find them with `ffmem patterns detect`.",
}

KINDS = PATTERN_KINDS

MIN_TRIGGERS = 3
"""At least this many triggers show a pattern."""

TOP_TRIGGERS = 25
"""They are among this many first triggers of a memory."""

SEEN, HELD_OUT = slice(0, 2 * TOP_TRIGGERS, 2), slice(1, 2 * TOP_TRIGGERS, 2)
"""Triggers in which a pattern is looked for (odd ranks), and those on which it is tested (even).

The halves are alike: a word that only 20 sentences contain is in 10 of each, while ranks 1 to 25
would use up all 20."""

SCORES = ("precision", "recall", "base", "lift", "p_value", "q_value")
"""Optional scores of a pattern."""


class Pattern(NamedTuple):
    """One pattern of one list of triggers, and how well it holds in held-out triggers.

    Scores that were not measured, as for human patterns, are None.
    """

    cell: Cell
    sign: int
    """Sign of the coefficients: +1, or −1 for the negative triggers of a gated model."""
    number: int
    """Rank among the patterns of its list, from 1, best first."""
    kind: str
    description: str
    rule: str
    """What finds it: `last-token`, `topic`, …; `person` or `explained` where no program can say."""
    what: str
    """What the rule looks for: the token, the n-gram, the words of the topic."""
    ranks: tuple[int, ...]
    """Which triggers show it, from 1: of all examined ones, at least the first TOP_TRIGGERS."""
    held_ranks: tuple[int, ...] = ()
    """Which of the held-out triggers show it."""
    held: int = 0
    """Held-out triggers that count; recall = len(held_ranks) / held."""
    precision: float | None = None
    """recall / (recall + base): of as many random prefixes as triggers, the share that are such."""
    recall: float | None = None
    """Share of the held-out triggers that show it."""
    base: float | None = None
    """Share of random prefixes that show it."""
    lift: float | None = None
    """recall / base."""
    p_value: float | None = None
    """Probability of at least this many held-out triggers by chance."""
    q_value: float | None = None
    """The same after false-discovery control over everything that was tested."""
    of: int = 0
    """Triggers of its list, of the first TOP_TRIGGERS; set when it is stored."""
    source: str = ""
    """Who found it: one of SOURCES; set when it is read."""

    def with_scores(self, base: float, p_value: float, q_value: float | None = None) -> "Pattern":
        """Return the pattern with its scores; the lift over a base of 0 is None."""
        recall = len(self.held_ranks) / self.held
        return self._replace(
            precision=recall / (recall + base) if recall + base else None,
            recall=recall,
            base=base,
            lift=recall / base if base else None,
            p_value=p_value,
            q_value=q_value,
        )

    @property
    def n_shown(self) -> int:
        """How many of the first TOP_TRIGGERS show it."""
        return sum(rank <= TOP_TRIGGERS for rank in self.ranks)

    @property
    def text(self) -> str:
        """The description, and what the rule looks for unless the description says so."""
        said, what = self.description.casefold(), self.what.casefold().strip()
        if what in said or all(word in said for word in re.findall(r"\w+", what) or [what]):
            return self.description
        return f"{self.description} · {self.what}"

    @property
    def evidence(self) -> str:
        """A description of how many triggers show it, compared with chance."""
        said = f"shown by {self.n_shown} of the first {self.of} triggers"
        if self.held:
            said += f", {len(self.held_ranks)} of {self.held} held out"
        lift = self.lift
        if lift is None:
            return f"{said}; by no random prefix" if self.base == 0 and self.recall else said
        if lift < 1.05:
            return f"{said}; no more often than by chance"
        return f"{said}; {lift:,.{0 if lift >= 9.95 else 1}f} × more often than by chance"

    def to_dict(self) -> dict[str, Any]:
        """Return it as `show --json` prints it; numbers that were not measured are null."""
        fields = self._asdict()
        del fields["cell"]
        fields |= {name: list(fields[name]) for name in ("ranks", "held_ranks")}
        return {"source": fields.pop("source"), **fields}


class ExaminedList(NamedTuple):
    """A list of triggers that was searched for patterns, with or without success."""

    cell: Cell
    sign: int
    n: int
    """Triggers that were looked at, at most TOP_TRIGGERS."""


def format_patterns(patterns: Sequence[Pattern], gated: bool) -> list[str]:
    """Return the lines that `ffmem show` prints of a memory's patterns."""
    lines: list[str] = []
    for source in dict.fromkeys(one.source for one in patterns):
        note = f". {NOTES[source]}" if source in NOTES else ""
        lines += ["", f"Patterns, source: {source}{note}"]
        for one in (one for one in patterns if one.source == source):
            sign = f"m {'>' if one.sign > 0 else '<'} 0, " if gated else ""
            said = f"{visible(one.description)} ({sign}{one.kind}): {one.evidence}"
            lines.append(f"{one.number:4d}  {said}")
    return lines


# Reading

_FOUND = pa.schema(
    [
        ("memory", pa.int32()),
        ("sign", pa.int8()),
        ("number", pa.int32()),
        ("kind", pa.string()),
        ("description", pa.string()),
        ("rule", pa.string()),
        ("what", pa.string()),
        ("ranks", pa.list_(pa.int16())),
        ("held_ranks", pa.list_(pa.int16())),
        ("held", pa.int16()),
        *((name, pa.float64()) for name in SCORES),
        ("of", pa.int16()),
    ]
)
_LISTS = pa.schema([("memory", pa.int32()), ("sign", pa.int8()), ("n", pa.int16())])


class Patterns:
    """All patterns of an index from one source: `patterns.of("L5N1234")`."""

    def __init__(self, index: Index, source: str) -> None:
        self.source = source
        self.folder = patterns_folder(index, source)
        self.layout = index.layout
        self._index = index
        self.manifest = _manifest(index, source)
        if self.manifest["index"] != fingerprint(index):
            raise StoreError(
                f"The patterns in {self.folder} belong to an earlier version of the index, which"
                f" has changed since. {_COMMANDS[source]}"
            )
        self._found = lru_cache(64)(lambda layer: self._read("found", layer))

    @property
    def settings(self) -> dict[str, Any]:
        """How they were found."""
        settings: dict[str, Any] = self.manifest["settings"]
        return settings

    def of(self, cell: str | tuple[int, int] | Cell) -> list[Pattern]:
        """Return the patterns of one memory, the positive list's first."""
        place = self.layout.resolve(cell)
        if self._index.remote is None:
            table = self._found(place.layer)
        else:  # the layer's other patterns would have to be fetched
            table = self._read("found", place.layer, place.memory)
        memories = as_array(table["memory"])  # ascending: one memory is decoded, not the layer
        first, past = np.searchsorted(memories, [place.memory, place.memory + 1]).tolist()
        return self._patterns(place.layer, table[first:past])

    def layer(self, layer: int) -> dict[int, list[Pattern]]:
        """Return the patterns of a layer by memory."""
        found: dict[int, list[Pattern]] = {}
        for one in self._patterns(layer, self.layer_table(layer)):
            found.setdefault(one.cell.memory, []).append(one)
        return found

    def layer_table(self, layer: int) -> pa.Table:
        """Return the patterns of a layer as they are stored."""
        self.layout.check_layer(layer)
        return self._found(layer)

    def lists(self, layer: int) -> list[ExaminedList]:
        """Return which lists of a layer were examined."""
        self.layout.check_layer(layer)
        rows = self._read("lists", layer).to_pylist()
        return [
            ExaminedList(self.layout.cell(layer, row["memory"]), row["sign"], row["n"])
            for row in rows
        ]

    def n_lists(self, layer: int) -> int:
        """Return how many lists of a layer were examined."""
        return self._read("lists", layer).num_rows  # type: ignore[no-any-return]

    def _patterns(self, layer: int, table: pa.Table) -> list[Pattern]:
        found = []
        for row in table.to_pylist():
            row |= {name: tuple(row[name]) for name in ("ranks", "held_ranks")}
            cell = self.layout.cell(layer, row.pop("memory"))
            found.append(Pattern(cell=cell, source=self.source, **row))
        return found

    def _read(self, kind: str, layer: int, memory: int | None = None) -> pa.Table:
        """Return a table of a layer, or the row groups of it that have a memory."""
        name = layer_file(kind, layer)
        path = self._index.file(f"patterns/{self.source}/{name}", self.manifest["files"].get(name))
        if isinstance(path, HubFile):
            groups = None if memory is None else _groups_with(open_table(path, []), memory)
            table = open_table(path, groups)
            every = range(table.num_row_groups) if groups is None else groups
            with read_errors(path):
                return table.read_row_groups(list(every), use_threads=False)
        try:
            return pq.ParquetFile(path).read(use_threads=False)
        except (OSError, pa.ArrowInvalid) as error:
            raise StoreError(f"Cannot read {path} ({error}). {_COMMANDS[self.source]}") from None


def _groups_with(table: pq.ParquetFile, memory: int) -> list[int]:
    """Return the row groups of a table, sorted by memory, that may have a memory."""
    column = table.schema_arrow.get_field_index("memory")
    found = []
    for group in range(table.num_row_groups):
        known = table.metadata.row_group(group).column(column).statistics
        if known is None or known.min <= memory <= known.max:
            found.append(group)
    return found


def patterns_folder(index: Index, source: str) -> Path:
    """Return where the patterns of a source are."""
    if source not in SOURCES:
        raise StoreError(f"Unknown source of patterns {source!r}: {', '.join(SOURCES)}.")
    return index.folder / "patterns" / source


def open_patterns(index: Index) -> list[Patterns]:
    """Return the patterns of every source that has some for this state of the index."""
    found = []
    for source in SOURCES:
        if index.has_file(f"patterns/{source}/manifest.json") and not is_stale(index, source):
            found.append(Patterns(index, source))
    return found


def is_stale(index: Index, source: str) -> bool:
    """Return whether there are patterns, but of another state of the index."""
    if not index.has_file(f"patterns/{source}/manifest.json"):
        return False
    return bool(_manifest(index, source)["index"] != fingerprint(index))


def fingerprint(index: Index) -> str:
    """Return the hash that identifies a state of an index."""
    return hashlib.sha256(index.read_bytes("manifest.json")).hexdigest()


class NoPatterns(StoreError):
    """Nobody has looked for patterns in this state of the index."""


def require_patterns(index: Index) -> list[Patterns]:
    """Return the patterns of every source; raise if there is none."""
    if found := open_patterns(index):
        return found
    detect = f"with `ffmem patterns detect {index.folder}`"
    if any(is_stale(index, source) for source in SOURCES):
        raise NoPatterns(
            f"The index has changed since its patterns were found. Find them again {detect}."
        )
    raise NoPatterns(f"This index has no patterns yet. Find them {detect}.")


def _manifest(index: Index, source: str) -> dict[str, Any]:
    folder, command = patterns_folder(index, source), _COMMANDS[source]
    path = folder / "manifest.json"
    try:
        content: dict[str, Any] = json.loads(index.read_bytes(f"patterns/{source}/manifest.json"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, not {FORMAT}")
        for name, kind in (("index", str), ("settings", dict), ("files", dict)):
            if not isinstance(content[name], kind):
                raise ValueError(f"{name} is {content[name]!r}")
    except FileNotFoundError:
        raise StoreError(f"There are no patterns in {folder}. {command}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"Cannot read the patterns in {path} ({error}). {command}") from None
    return content


# Writing


class PatternWriter:
    """Writes the patterns of a source, a layer at a time; `commit` makes them count."""

    def __init__(self, index: Index, source: str) -> None:
        self._index = index
        self._final = patterns_folder(index, source)
        self._folder = self._final.with_name(f".{source}.writing")
        shutil.rmtree(self._folder, ignore_errors=True)

    def layer(
        self, layer: int, examined: Iterable[ExaminedList], patterns: Iterable[Pattern]
    ) -> None:
        """Write what was found in a layer; the same findings give the same bytes."""
        resolve = self._index.layout.resolve  # people's sheets have names alone
        lists = sorted(
            (one._replace(cell=resolve(one.cell)) for one in examined),
            key=lambda one: (one.cell, -one.sign),
        )
        sizes = {(one.cell, one.sign): one.n for one in lists}
        found = sorted(
            (one._replace(cell=resolve(one.cell)) for one in patterns),
            key=lambda one: (one.cell, -one.sign, one.number),
        )
        rows = [
            one._asdict()
            | {"memory": one.cell.memory, "of": sizes.get((one.cell, one.sign), TOP_TRIGGERS)}
            for one in found
        ]
        self._write("found", layer, rows, _FOUND)
        rows = [{"memory": one.cell.memory, "sign": one.sign, "n": one.n} for one in lists]
        self._write("lists", layer, rows, _LISTS)

    def commit(self, settings: dict[str, Any]) -> None:
        """Put the patterns in their place; layers that were not written have none."""
        for layer in range(self._index.n_layers):
            if not (self._folder / layer_file("found", layer)).exists():
                self.layer(layer, [], [])
        files = sorted(self._folder.rglob("*.parquet"))
        content = {
            "format": FORMAT,
            "index": fingerprint(self._index),
            "settings": settings,
            "files": {str(path.relative_to(self._folder)): sha256(path) for path in files},
        }
        text = json.dumps(content, ensure_ascii=False, indent=1, allow_nan=False)
        write_text(self._folder / "manifest.json", text + "\n")
        # Remove the old ones last: if killed in between, there are none, never half of them.
        shutil.rmtree(self._final, ignore_errors=True)
        self._folder.rename(self._final)

    def _write(self, kind: str, layer: int, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
        write_table(self._folder / layer_file(kind, layer), pa.Table.from_pylist(rows, schema))


def damaged_files(index: Index) -> list[str]:
    """Return which files of patterns are not those that were written, a sentence each."""
    wrong = []
    for source in SOURCES:
        folder, command = patterns_folder(index, source), _COMMANDS[source]
        if not folder.exists():
            continue
        if not (folder / "manifest.json").exists():
            wrong.append(f"patterns/{source}/manifest.json is missing. {command}")
            continue
        try:
            files = _manifest(index, source)["files"]
        except StoreError as error:
            wrong.append(str(error))
            continue
        layers = range(index.n_layers)
        needed = {layer_file(kind, layer) for kind in ("found", "lists") for layer in layers}
        for name in sorted(needed - files.keys()):
            wrong.append(f"patterns/{source}/{name} is not in its manifest. {command}")
        for name, expected in files.items():
            if not (folder / name).is_file():
                wrong.append(f"patterns/{source}/{name} is missing. {command}")
            elif sha256(folder / name) != expected:
                wrong.append(f"patterns/{source}/{name} was changed or damaged. {command}")
    return wrong


# Tables

FORMATS = (".parquet", ".jsonl", ".csv")


def layer_columns(index: Index, layer: int) -> pa.Table:
    """Return the patterns of a layer of all sources, for `index.table("patterns")`."""
    parts = [_FOUND.append(pa.field("source", pa.string())).empty_table()]
    for patterns in open_patterns(index):
        found = patterns.layer_table(layer)
        parts.append(found.append_column("source", pa.array([patterns.source] * len(found))))
    return pa.concat_tables(parts, promote_options="default")


@check_arguments
def patterns_of(folder: str | Path | Index, source: str = "automatic") -> Patterns:
    """Return the stored patterns of one source: "automatic", "explained" or "human"."""
    return Patterns(as_index(folder), source)


@check_arguments
def export_patterns(folder: str | Path | Index, out: str | Path) -> int:
    """Write the patterns of all sources as a table (.parquet, .jsonl, .csv); return how many."""
    index, out = as_index(folder), Path(out)
    if out.suffix not in FORMATS:
        endings = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise FfmemError(f"Cannot write patterns to {out}: its name must end in {endings}.")
    check_output_file(out)
    table = index.table("patterns")
    with committing(out) as temporary:
        if out.suffix == ".parquet":
            pq.write_table(table, temporary, compression="zstd")
            return len(table)
        # newline="": the CSV writer ends its own lines.
        with temporary.open("w", encoding="utf-8", newline="") as file:
            sheet = csv.DictWriter(file, table.column_names)
            if out.suffix == ".csv":
                sheet.writeheader()
            for row in (row for batch in table.to_batches(10_000) for row in batch.to_pylist()):
                if out.suffix == ".jsonl":
                    file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
                    continue
                row |= {name: " ".join(map(str, row[name])) for name in ("ranks", "held_ranks")}
                sheet.writerow(csv_row(row))
    return len(table)


# The main list of a memory

NO_SIGN = 0
"""The sign of a memory without triggers."""


def main_sign(index: Index, layer: int) -> ndarray:
    """Return the sign (int8) of each memory's main list: the paper's key.

    It is the sign of the larger |m| of the two first triggers, + of equals, NO_SIGN without
    triggers. Gated models keep a list for each sign of the coefficient; others have one.
    """
    signs = {1: "", -1: "negative_"} if index.manifest.model.gated else {1: ""}
    names = [f"{side}{name}" for side in signs.values() for name in ("coefficient", "prefix")]
    columns = read_columns(index.folder / layer_file("triggers", layer), names)
    first = {
        sign: np.where(
            columns[f"{side}prefix"][:, 0] == NO_PREFIX,
            np.float32(-1),
            np.abs(columns[f"{side}coefficient"][:, 0]),
        )
        for sign, side in signs.items()
    }
    up, down = first[1], first.get(-1, np.full_like(first[1], -1))
    found = np.where(up >= down, 1, -1)
    found[np.maximum(up, down) < 0] = NO_SIGN
    return found.astype(np.int8)
