"""Patterns as one flat table, a row each, for other programs: Parquet, JSON lines or CSV."""

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ffmem.errors import FfmemError
from ffmem.files import check_output_file, committing, csv_row
from ffmem.patterns.kept import Patterns
from ffmem.patterns.pattern import SCORES, Pattern
from ffmem.patterns.shown import finite

FORMS = (".parquet", ".jsonl", ".csv")

Rows = list[dict[str, Any]]

COLUMNS = ("source", "cell", "layer", "memory", *Pattern._fields[1:])


def export(several: Sequence[Patterns], out: Path) -> int:
    """Write all patterns of some sources to a file, by its ending; return how many."""
    if out.suffix not in FORMS:
        raise FfmemError(f"Cannot write patterns to {out}: its name must end in {_listed()}.")
    write = {".parquet": _parquet, ".jsonl": _lines, ".csv": _csv}[out.suffix]
    check_output_file(out)
    with committing(out) as temporary:
        return write(by_layer(several), temporary)


def by_layer(several: Sequence[Patterns]) -> Iterator[Rows]:
    """Return the patterns as flat rows, a source and a layer at a time."""
    for patterns in several:
        for layer in range(patterns.layout.n_layers):
            found = patterns.layer(layer)
            yield [_row(patterns.source, one) for memory in sorted(found) for one in found[memory]]


def _row(source: str, pattern: Pattern) -> dict[str, Any]:
    fields = pattern._asdict()
    fields |= {name: list(fields[name]) for name in ("ranks", "held_ranks")}
    fields |= {name: finite(fields[name]) for name in SCORES}
    cell = fields.pop("cell")
    place = {"cell": str(cell), "layer": cell.layer, "memory": cell.memory}
    return {"source": source, **place, **fields}


def _parquet(parts: Iterator[Rows], path: Path) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    ints = dict.fromkeys(("layer", "memory", "sign", "number", "held"), pa.int32())
    lists = dict.fromkeys(("ranks", "held_ranks"), pa.list_(pa.int16()))
    types = ints | lists | dict.fromkeys(SCORES, pa.float64())
    schema = pa.schema([(name, types.get(name, pa.string())) for name in COLUMNS])
    n = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for found in parts:
            writer.write_table(pa.Table.from_pylist(found, schema))
            n += len(found)
    return n


def _lines(parts: Iterator[Rows], path: Path) -> int:
    n = 0
    with path.open("w", encoding="utf-8") as file:
        for found in parts:
            for row in found:
                file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
                n += 1
    return n


def _csv(parts: Iterator[Rows], path: Path) -> int:
    n = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for found in parts:
            for row in found:
                for name in ("ranks", "held_ranks"):
                    row[name] = " ".join(map(str, row[name]))
                writer.writerow(csv_row(row))
                n += 1
    return n


def _listed() -> str:
    return f"{', '.join(FORMS[:-1])} or {FORMS[-1]}"
