"""Patterns as an index keeps them: `DIR/patterns/SOURCE/`, by who saw them.

    manifest.json             written last: settings, hash of the index's manifest, of every file
    found/layer-000.parquet   one row per pattern, by memory, sign and number
    lists/layer-000.parquet   one row per list of triggers that was examined, found or not

The index itself is not touched: its manifest knows nothing of patterns. Patterns of another state
of the index (it was extended since, say) are refused, never shown.
"""

import json
import shutil
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ffmem.cells import Cell, Layout
from ffmem.errors import StoreError
from ffmem.files import sha256, write_text
from ffmem.indexing.store import Index
from ffmem.indexing.tables import layer_file, write_table
from ffmem.patterns.pattern import SCORES, Examined, Pattern

FORMAT = 1

SOURCES = ("human", "explained", "automatic")
"""People after adjudication; a language model; the detector. They are shown in this order."""

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
    ]
)
_LISTS = pa.schema([("memory", pa.int32()), ("sign", pa.int8()), ("n", pa.int16())])


class Patterns:
    """All patterns that one source saw in an index: `patterns.of("L5N1234")`."""

    def __init__(self, index: Index, source: str) -> None:
        self.source = source
        self.folder = folder(index, source)
        self.layout = index.layout
        self.manifest = _manifest(self.folder)
        if self.manifest["index"] != fingerprint(index):
            raise StoreError(
                f"The patterns in {self.folder} are of another state of the index, which was"
                f" changed since. {_again(source)}"
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
        table = self._found(place.layer)
        memories = table["memory"].to_numpy()  # ascending: one memory is decoded, not the layer
        first, past = np.searchsorted(memories, [place.memory, place.memory + 1]).tolist()
        return _patterns(self.layout, place.layer, table[first:past])

    def layer(self, layer: int) -> dict[int, list[Pattern]]:
        """Return the patterns of a layer by memory."""
        self.layout.check_layer(layer)
        found: dict[int, list[Pattern]] = {}
        for one in _patterns(self.layout, layer, self._found(layer)):
            found.setdefault(one.cell.memory, []).append(one)
        return found

    def lists(self, layer: int) -> list[Examined]:
        """Return which lists of a layer were examined."""
        self.layout.check_layer(layer)
        rows = self._read("lists", layer).to_pylist()
        return [
            Examined(self.layout.cell(layer, row["memory"]), row["sign"], row["n"]) for row in rows
        ]

    def _read(self, kind: str, layer: int) -> pa.Table:
        path = self.folder / layer_file(kind, layer)
        try:
            return pq.ParquetFile(path).read(use_threads=False)
        except (OSError, pa.ArrowInvalid) as error:
            raise StoreError(f"Cannot read {path} ({error}). {_again(self.source)}") from None


def folder(index: Index, source: str) -> Path:
    """Return where the patterns of a source are kept."""
    if source not in SOURCES:
        raise StoreError(f"Unknown source of patterns {source!r}: {', '.join(SOURCES)}.")
    return index.folder / "patterns" / source


def kept(index: Index) -> list[Patterns]:
    """Return the patterns of every source that has some for this state of the index."""
    found = []
    for source in SOURCES:
        where = folder(index, source)
        if (where / "manifest.json").exists() and not is_stale(index, source):
            found.append(Patterns(index, source))
    return found


def is_stale(index: Index, source: str) -> bool:
    """Return whether there are patterns, but of another state of the index."""
    where = folder(index, source)
    return (where / "manifest.json").exists() and (_manifest(where)["index"] != fingerprint(index))


def fingerprint(index: Index) -> str:
    """Return what tells one state of an index from another."""
    return sha256(index.folder / "manifest.json")


class Writing:
    """Patterns of a source while they are written, a layer at a time; `commit` makes them count."""

    def __init__(self, index: Index, source: str) -> None:
        self._index = index
        self._final = folder(index, source)
        self._folder = self._final.with_name(f".{source}.writing")
        shutil.rmtree(self._folder, ignore_errors=True)

    def layer(self, layer: int, examined: Iterable[Examined], patterns: Iterable[Pattern]) -> None:
        """Write what was found in a layer; the same findings give the same bytes."""
        resolve = self._index.layout.resolve  # people's sheets have names alone
        lists = [one._replace(cell=resolve(one.cell)) for one in examined]
        found = [one._replace(cell=resolve(one.cell)) for one in patterns]
        lists.sort(key=lambda one: (one.cell, -one.sign))
        found.sort(key=lambda one: (one.cell, -one.sign, one.number))
        rows = [
            {"memory": one.cell.memory, **{k: v for k, v in one._asdict().items() if k != "cell"}}
            for one in found
        ]
        write_table(self._folder / layer_file("found", layer), _table(rows, _FOUND))
        rows = [{"memory": one.cell.memory, "sign": one.sign, "n": one.n} for one in lists]
        write_table(self._folder / layer_file("lists", layer), _table(rows, _LISTS))

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
        # The old ones make room last: killed in between, there are none, never half of them.
        shutil.rmtree(self._final, ignore_errors=True)
        self._folder.rename(self._final)


def damaged(index: Index) -> list[str]:
    """Return which files of kept patterns are not those that were written, a sentence each."""
    wrong = []
    for source in SOURCES:
        where = folder(index, source)
        if not where.exists():
            continue
        if not (where / "manifest.json").exists():
            wrong.append(f"patterns/{source}/manifest.json is missing. {_again(source)}")
            continue
        try:
            files = _manifest(where)["files"]
        except StoreError as error:
            wrong.append(str(error))
            continue
        needed = {
            layer_file(kind, layer)
            for kind in ("found", "lists")
            for layer in range(index.n_layers)
        }
        for name in sorted(needed - files.keys()):
            wrong.append(f"patterns/{source}/{name} is not in its manifest. {_again(source)}")
        for name, expected in files.items():
            path = where / name
            if not path.is_file():
                wrong.append(f"patterns/{source}/{name} is missing. {_again(source)}")
            elif sha256(path) != expected:
                wrong.append(f"patterns/{source}/{name} was changed or damaged. {_again(source)}")
    return wrong


def _patterns(layout: Layout, layer: int, table: pa.Table) -> list[Pattern]:
    """Return the rows of a layer's table as patterns."""
    found = []
    for row in table.to_pylist():
        row |= {name: tuple(row[name]) for name in ("ranks", "held_ranks")}
        found.append(Pattern(cell=layout.cell(layer, row.pop("memory")), **row))
    return found


def _table(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema)


def _manifest(where: Path) -> dict[str, Any]:
    path = where / "manifest.json"
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, not {FORMAT}")
        for name, kind in (("index", str), ("settings", dict), ("files", dict)):
            if not isinstance(content[name], kind):
                raise ValueError(f"{name} is {content[name]!r}")
    except FileNotFoundError:
        raise StoreError(f"There are no patterns in {where}. {_again(where.name)}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path} is not a readable list of patterns ({error}). {_again(where.name)}"
        ) from None
    return content


def _again(source: str) -> str:
    commands = {
        "human": "Write them with `ffmem annotate publish`.",
        "explained": "Make them with `ffmem patterns explain`.",
        "automatic": "Find them with `ffmem patterns detect`.",
    }
    return commands[source]
