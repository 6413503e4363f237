"""What a finished index holds, layer by layer, as files of its folder.

    triggers/layer-000.parquet   memory, coefficient[t], prefix[t], gate[t], negative_*[t]
    stats/layer-000.parquet      memory, active, sum, mean, max, min
    samples/prefixes.parquet     prefix, hash
    samples/layer-000.parquet    memory, coefficient[prefix of the sample]

The same contents give the same bytes. One layer is in memory at a time.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa

from ffmem.indexing.found import Found
from ffmem.indexing.sample import Sample
from ffmem.indexing.statistics import Statistics
from ffmem.indexing.tables import fixed, layer_file, read_columns, write_table
from ffmem.indexing.triggers import Triggers


def write_contents(folder: Path, layers: Iterable[Found]) -> None:
    """Write everything that was found, layer by layer, as the files of an index."""
    sample: Sample | None = None
    for layer, found in enumerate(layers):
        _write_triggers(folder / layer_file("triggers", layer), found)
        _write_statistics(folder / layer_file("stats", layer), found.statistics)
        sample = found.sample
        kept = {"coefficient": fixed(sample.coefficients[0])}
        write_table(folder / layer_file("samples", layer), _by_memory(kept))
    assert sample is not None
    drawn = {"prefix": sample.prefixes, "hash": sample.hashes}
    write_table(folder / "samples/prefixes.parquet", pa.table(drawn))


def read_contents(folder: Path, n_layers: int, n_prefixes: int, gated: bool) -> Iterator[Found]:
    """Return everything that the files of an index hold, layer by layer."""
    drawn = read_columns(folder / "samples/prefixes.parquet")
    for layer in range(n_layers):
        triggers = read_columns(folder / layer_file("triggers", layer))
        stats = read_columns(folder / layer_file("stats", layer))
        sampled = read_columns(folder / layer_file("samples", layer))["coefficient"]
        lists = [
            Triggers(
                *(triggers[f"{sign}{name}"][None] for name in ("coefficient", "prefix", "gate"))
            )
            for sign in (["", "negative_"] if gated else [""])
        ]
        counts = (stats[name][None] for name in ("active", "sum", "max", "min"))
        yield Found(
            lists[0],
            lists[1] if gated else None,
            Statistics(n_prefixes, *counts),
            Sample(drawn["hash"], drawn["prefix"], sampled[None]),
        )


def _write_triggers(path: Path, found: Found) -> None:
    columns: dict[str, pa.Array] = {}
    for sign, triggers in (("", found.positive), ("negative_", found.negative)):
        if triggers is not None:
            coefficients, prefixes, gates = triggers.layer(0)
            columns[f"{sign}coefficient"] = fixed(coefficients)
            columns[f"{sign}prefix"] = fixed(prefixes)
            columns[f"{sign}gate"] = fixed(gates)
    write_table(path, _by_memory(columns))


def _write_statistics(path: Path, statistics: Statistics) -> None:
    columns = {
        "active": statistics.active,
        "sum": statistics.sums,
        "mean": statistics.mean(),
        "max": statistics.maximum,
        "min": statistics.minimum,
    }
    write_table(path, _by_memory({name: pa.array(column[0]) for name, column in columns.items()}))


def _by_memory(columns: dict[str, pa.Array]) -> pa.Table:
    n_memories = len(next(iter(columns.values())))
    return pa.table({"memory": pa.array(range(n_memories), pa.int32()), **columns})
