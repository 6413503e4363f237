"""What a finished index holds, layer by layer, as files of its folder.

    triggers/layer-000.parquet   memory, coefficient[t], prefix[t], gate[t], negative_*[t]
    stats/layer-000.parquet      memory, active, sum, mean, max, min
    samples/prefixes.parquet     prefix, hash
    samples/layer-000.parquet    memory, coefficient[prefix of the sample]

The same contents give the same bytes.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy import ndarray

from ffmem.indexing.found import Found
from ffmem.indexing.sample import Sample
from ffmem.indexing.statistics import Statistics
from ffmem.indexing.tables import fixed, layer_file, read_columns, write_table
from ffmem.indexing.triggers import Triggers


def write_contents(folder: Path, found: Found) -> None:
    """Write everything that was found as the files of an index."""
    n_layers = len(found.positive.coefficients)
    for layer in range(n_layers):
        _write_triggers(folder / layer_file("triggers", layer), found, layer)
        _write_statistics(folder / layer_file("stats", layer), found.statistics, layer)
        kept = {"coefficient": fixed(found.sample.coefficients[layer])}
        write_table(folder / layer_file("samples", layer), _by_memory(kept))
    drawn = {"prefix": found.sample.prefixes, "hash": found.sample.hashes}
    write_table(folder / "samples/prefixes.parquet", pa.table(drawn))


def read_contents(folder: Path, n_layers: int, n_prefixes: int, gated: bool) -> Found:
    """Return everything that the files of an index hold."""
    triggers = [read_columns(folder / layer_file("triggers", i)) for i in range(n_layers)]
    stats = [read_columns(folder / layer_file("stats", i)) for i in range(n_layers)]
    drawn = read_columns(folder / "samples/prefixes.parquet")
    sampled = [
        read_columns(folder / layer_file("samples", i))["coefficient"] for i in range(n_layers)
    ]

    def stacked(layers: list[dict[str, ndarray]], name: str) -> ndarray:
        return np.stack([layer[name] for layer in layers])

    def listed(sign: str) -> Triggers:
        columns = (f"{sign}coefficient", f"{sign}prefix", f"{sign}gate")
        return Triggers(*(stacked(triggers, name) for name in columns))

    counts = (stacked(stats, name) for name in ("active", "sum", "max", "min"))
    return Found(
        listed(""),
        listed("negative_") if gated else None,
        Statistics(n_prefixes, *counts),
        Sample(drawn["hash"], drawn["prefix"], np.stack(sampled)),
    )


def _write_triggers(path: Path, found: Found, layer: int) -> None:
    columns: dict[str, pa.Array] = {}
    for sign, triggers in (("", found.positive), ("negative_", found.negative)):
        if triggers is not None:
            coefficients, prefixes, gates = triggers.layer(layer)
            columns[f"{sign}coefficient"] = fixed(coefficients)
            columns[f"{sign}prefix"] = fixed(prefixes)
            columns[f"{sign}gate"] = fixed(gates)
    write_table(path, _by_memory(columns))


def _write_statistics(path: Path, statistics: Statistics, layer: int) -> None:
    columns = {
        "active": statistics.active[layer],
        "sum": statistics.sums[layer],
        "mean": statistics.mean()[layer],
        "max": statistics.maximum[layer],
        "min": statistics.minimum[layer],
    }
    write_table(path, _by_memory({name: pa.array(column) for name, column in columns.items()}))


def _by_memory(columns: dict[str, pa.Array]) -> pa.Table:
    n_memories = len(next(iter(columns.values())))
    return pa.table({"memory": pa.array(range(n_memories), pa.int32()), **columns})
