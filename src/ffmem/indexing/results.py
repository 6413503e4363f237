"""What a pass finds in one layer: triggers and statistics. Parts merge, exactly, in any order.

    merge(result(A), result(B)) == result(A ∪ B)

So memory never grows with the corpus, a stopped pass resumes, an index can be extended, and a
cluster runs the same code as a laptop. A list of triggers ranks by |m|, ties to the earlier
prefix; its coefficients have one sign, so ungated models have one list and gated models two.
Counts are integers, extremes are extremes, and a chunk's float64 sum is rounded once, to an
integer multiple of 2⁻²⁰: integers add associatively.

Partials and the finished tables have the same Arrow columns, one row per memory of the layer:

    triggers/layer-000.parquet   memory, coefficient[t], prefix[t], gate[t], negative_*[t]
    stats/layer-000.parquet      memory, active, sum, mean, max, min
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Float64, Int8, Int64
from numpy import ndarray

from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.tables import fixed, layer_file, read_columns, write_table

UNIT = 2.0**-20
"""What one step of a sum is worth."""

STATS = ("active", "sum", "mean", "max", "min")


class Triggers(NamedTuple):
    """The top t of each memory of a layer, strongest first, empty slots last."""

    coefficients: Float32[ndarray, "memory top"]
    prefixes: Int64[ndarray, "memory top"]
    gates: Int8[ndarray, "memory top"]
    """Sign of the gate's pre-activation at the prefix; 0 in ungated models."""

    def shifted(self, n: int) -> "Triggers":
        """Return the same triggers in a corpus that has `n` more prefix numbers in front."""
        moved = np.where(self.prefixes == NO_PREFIX, NO_PREFIX, self.prefixes + n)
        return self._replace(prefixes=moved)

    def merge(self, other: "Triggers") -> "Triggers":
        """Return the triggers of two disjoint parts of a corpus taken together."""
        t = self.coefficients.shape[-1]
        both = [np.concatenate(pair, axis=-1) for pair in zip(self, other, strict=True)]
        order = _ranking(both[0], both[1])[:, :t]
        return Triggers(*(np.take_along_axis(column, order, axis=-1) for column in both))


def _ranking(
    coefficients: Float32[ndarray, "memory slot"], prefixes: Int64[ndarray, "memory slot"]
) -> Int64[ndarray, "memory slot"]:
    """Return the order of each row by (|m| descending, prefix ascending)."""
    weakness = -np.abs(coefficients)
    # Two ranked lists in a row are two runs, which a stable sort merges in linear time. Ties
    # between them are rare, so only rows that have one pay for the second key.
    order = np.argsort(weakness, axis=-1, kind="stable")
    ranked = np.take_along_axis(weakness, order, axis=-1)
    tied = ((ranked[:, 1:] == ranked[:, :-1]) & (ranked[:, 1:] != 0)).any(axis=-1).nonzero()[0]
    if len(tied):
        order[tied] = np.lexsort((prefixes[tied], weakness[tied]), axis=-1)
    return order


class LayerStats(NamedTuple):
    """Of each memory of a layer, over all prefixes."""

    active: Int64[ndarray, " memory"]
    """Prefixes with m > 0; in gated models, prefixes whose gate is open (pre-activation > 0)."""
    sums: Int64[ndarray, " memory"]
    maximum: Float32[ndarray, " memory"]
    minimum: Float32[ndarray, " memory"]

    @classmethod
    def empty(cls, n_memories: int) -> "LayerStats":
        """Return the statistics of an empty corpus."""
        return cls(
            np.zeros(n_memories, np.int64),
            np.zeros(n_memories, np.int64),
            np.full(n_memories, -np.inf, np.float32),
            np.full(n_memories, np.inf, np.float32),
        )

    def merge(self, other: "LayerStats") -> "LayerStats":
        """Return the statistics of two disjoint parts of a corpus taken together."""
        return LayerStats(
            self.active + other.active,
            self.sums + other.sums,
            np.maximum(self.maximum, other.maximum),
            np.minimum(self.minimum, other.minimum),
        )

    def mean(self, n_prefixes: int) -> Float64[ndarray, " memory"]:
        """Return each memory's mean coefficient."""
        return self.sums * (UNIT / max(n_prefixes, 1))


class LayerResult(NamedTuple):
    """Triggers and statistics of one layer over a part of a corpus."""

    positive: Triggers
    negative: Triggers | None
    """The most negative coefficients; gated models only."""
    stats: LayerStats

    @classmethod
    def empty(cls, n_memories: int, t: int, gated: bool) -> "LayerResult":
        """Return the result of an empty corpus."""
        shape = (n_memories, t)
        nothing = Triggers(
            np.zeros(shape, np.float32),
            np.full(shape, NO_PREFIX, np.int64),
            np.zeros(shape, np.int8),
        )
        return cls(nothing, nothing if gated else None, LayerStats.empty(n_memories))

    def merge(self, other: "LayerResult") -> "LayerResult":
        """Return the result of two disjoint parts of a corpus taken together."""
        negative = None
        if self.negative is not None and other.negative is not None:
            negative = self.negative.merge(other.negative)
        return LayerResult(
            self.positive.merge(other.positive), negative, self.stats.merge(other.stats)
        )

    def shifted(self, n: int) -> "LayerResult":
        """Return the same result in a corpus that has `n` more prefix numbers in front."""
        negative = None if self.negative is None else self.negative.shifted(n)
        return self._replace(positive=self.positive.shifted(n), negative=negative)

    def columns(self, n_prefixes: int) -> dict[str, pa.Array]:
        """Return the Arrow columns of both tables; the mean is taken over `n_prefixes`."""
        found = {"memory": pa.array(np.arange(len(self.stats.active), dtype=np.int32))}
        for sign, triggers in (("", self.positive), ("negative_", self.negative)):
            if triggers is not None:
                found[f"{sign}coefficient"] = fixed(triggers.coefficients)
                found[f"{sign}prefix"] = fixed(triggers.prefixes)
                found[f"{sign}gate"] = fixed(triggers.gates)
        stats = self.stats
        mean = stats.mean(n_prefixes)
        numbers = (stats.active, stats.sums, mean, stats.maximum, stats.minimum)
        found |= {name: pa.array(column) for name, column in zip(STATS, numbers, strict=True)}
        return found

    @classmethod
    def from_columns(cls, columns: dict[str, ndarray]) -> "LayerResult":
        """Return what the columns of both tables hold."""
        lists = [
            Triggers(*(columns[f"{sign}{name}"] for name in ("coefficient", "prefix", "gate")))
            for sign in ("", "negative_")
            if f"{sign}prefix" in columns
        ]
        stats = LayerStats(*(columns[name] for name in STATS if name != "mean"))
        return cls(lists[0], lists[1] if len(lists) > 1 else None, stats)


def write_layer(folder: Path, layer: int, result: LayerResult, n_prefixes: int) -> None:
    """Write a layer's finished tables; the same result gives the same bytes."""
    columns = result.columns(n_prefixes)
    stats = {name: columns[name] for name in ("memory", *STATS)}
    triggers = {name: column for name, column in columns.items() if name not in STATS}
    write_table(folder / layer_file("triggers", layer), pa.table(triggers))
    write_table(folder / layer_file("stats", layer), pa.table(stats))


def read_layer(folder: Path, layer: int) -> LayerResult:
    """Return what a layer's finished tables hold."""
    triggers = read_columns(folder / layer_file("triggers", layer))
    return LayerResult.from_columns(triggers | read_columns(folder / layer_file("stats", layer)))
