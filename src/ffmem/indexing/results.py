"""What a pass gives: each layer's triggers and statistics, and a sample of prefixes.

    merge(result(A), result(B)) == result(A ∪ B)        exactly, in any order

So memory never grows with the corpus, a stopped pass resumes, an index can be extended, and a
cluster runs the same code as a laptop.

Triggers rank by |m|, ties to the earlier prefix. A list holds one sign, so gated models have two.
Statistics: counts are integers; a chunk's float64 sum is rounded once, to an integer multiple of
2⁻²⁰, because integers add associatively. The sample is the `SAMPLE_SIZE` prefixes of smallest
hash(hash of the source, place in the source); all their coefficients are kept.

Partials and the finished tables have the same Arrow columns, one row per memory of the layer:

    triggers/layer-000.parquet   memory, coefficient[t], prefix[t], gate[t], negative_*[t]
    stats/layer-000.parquet      memory, active, sum, mean, max, min; gated: positive,
                                 open_positive; with experts: routed, weight_sum
    samples/layer-000.parquet    memory, coefficient[prefix of the sample]
    samples/prefixes.parquet     prefix, hash
"""

from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float32, Float64, Int8, Int64, UInt64
from numpy import ndarray

from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.tables import (
    SAMPLED_PREFIXES,
    UNIT,
    fixed,
    layer_file,
    read_columns,
    write_table,
)

SAMPLE_SIZE = 512

STATS = ("active", "sum", "mean", "max", "min")
EXPERT_STATS = ("routed", "weight_sum")
"""More columns of models with experts."""
GATED_STATS = ("positive", "open_positive")
"""More columns of gated models."""
EVERY_STAT = (*STATS, *EXPERT_STATS, *GATED_STATS)


class Triggers(NamedTuple):
    """The top t of each memory of a layer, strongest first, empty slots last."""

    coefficients: Float32[ndarray, "memory top"]
    prefixes: Int64[ndarray, "memory top"]
    gates: Int8[ndarray, "memory top"]
    """Sign of the gate's pre-activation at the prefix; 0 in ungated models."""

    def shift(self, n: int) -> "Triggers":
        """Return these triggers with `n` added to every prefix number."""
        moved = np.where(self.prefixes == NO_PREFIX, NO_PREFIX, self.prefixes + n)
        return self._replace(prefixes=moved)

    def merge(self, other: "Triggers") -> "Triggers":
        """Return the triggers of two disjoint parts of a corpus together."""
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
    """Statistics of each memory of a layer over all prefixes."""

    active: Int64[ndarray, " memory"]
    """Prefixes with m > 0; in gated models, prefixes whose gate is open (pre-activation > 0)."""
    sums: Int64[ndarray, " memory"]
    maximum: Float32[ndarray, " memory"]
    minimum: Float32[ndarray, " memory"]
    routed: Int64[ndarray, " memory"] | None = None
    """Models with experts: prefixes that reach the memory's bank; the others count with m = 0."""
    weight_sums: Int64[ndarray, " memory"] | None = None
    """The sum of their router weights, as `sums`."""
    positive: Int64[ndarray, " memory"] | None = None
    """Gated models: prefixes with m > 0, whatever the gate."""
    open_positive: Int64[ndarray, " memory"] | None = None
    """Gated models: prefixes with m > 0 whose gate is open."""

    @classmethod
    def empty(cls, n_memories: int, gated: bool = False, experts: bool = False) -> "LayerStats":
        """Return the statistics of an empty corpus."""

        def zeros() -> Int64[ndarray, " memory"]:
            return np.zeros(n_memories, np.int64)

        return cls(
            active=zeros(),
            sums=zeros(),
            maximum=np.full(n_memories, -np.inf, np.float32),
            minimum=np.full(n_memories, np.inf, np.float32),
            routed=zeros() if experts else None,
            weight_sums=zeros() if experts else None,
            positive=zeros() if gated else None,
            open_positive=zeros() if gated else None,
        )

    def merge(self, other: "LayerStats") -> "LayerStats":
        """Return the statistics of two disjoint parts of a corpus together."""
        return LayerStats(
            self.active + other.active,
            self.sums + other.sums,
            np.maximum(self.maximum, other.maximum),
            np.minimum(self.minimum, other.minimum),
            *(
                None if mine is None else mine + theirs
                for mine, theirs in zip(self[4:], other[4:], strict=True)
            ),
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
    def empty(cls, n_memories: int, t: int, gated: bool, experts: bool = False) -> "LayerResult":
        """Return the result of an empty corpus."""
        shape = (n_memories, t)
        nothing = Triggers(
            np.zeros(shape, np.float32),
            np.full(shape, NO_PREFIX, np.int64),
            np.zeros(shape, np.int8),
        )
        stats = LayerStats.empty(n_memories, gated, experts)
        return cls(nothing, nothing if gated else None, stats)

    def merge(self, other: "LayerResult") -> "LayerResult":
        """Return the result of two disjoint parts of a corpus together."""
        negative = None
        if self.negative is not None and other.negative is not None:
            negative = self.negative.merge(other.negative)
        return LayerResult(
            self.positive.merge(other.positive), negative, self.stats.merge(other.stats)
        )

    def shift(self, n: int) -> "LayerResult":
        """Return this result with `n` added to every prefix number."""
        negative = None if self.negative is None else self.negative.shift(n)
        return self._replace(positive=self.positive.shift(n), negative=negative)

    def columns(self, n_prefixes: int) -> dict[str, pa.Array]:
        """Return the Arrow columns of both tables; means are over `n_prefixes`."""
        columns = {"memory": pa.array(np.arange(len(self.stats.active), dtype=np.int32))}
        for sign, triggers in (("", self.positive), ("negative_", self.negative)):
            if triggers is not None:
                columns[f"{sign}coefficient"] = fixed(triggers.coefficients)
                columns[f"{sign}prefix"] = fixed(triggers.prefixes)
                columns[f"{sign}gate"] = fixed(triggers.gates)
        stats = self.stats
        mean = stats.mean(n_prefixes)
        numbers = (stats.active, stats.sums, mean, stats.maximum, stats.minimum)
        columns |= {name: pa.array(column) for name, column in zip(STATS, numbers, strict=True)}
        more = zip((*EXPERT_STATS, *GATED_STATS), stats[4:], strict=True)
        return columns | {name: pa.array(column) for name, column in more if column is not None}

    @classmethod
    def from_columns(cls, columns: dict[str, ndarray]) -> "LayerResult":
        """Return the result that the columns of both tables hold."""
        lists = [
            Triggers(*(columns[f"{sign}{name}"] for name in ("coefficient", "prefix", "gate")))
            for sign in ("", "negative_")
            if f"{sign}prefix" in columns
        ]
        required = (columns[name] for name in STATS if name != "mean")
        stats = LayerStats(*required, *map(columns.get, (*EXPERT_STATS, *GATED_STATS)))
        return cls(lists[0], lists[1] if len(lists) > 1 else None, stats)


def write_layer(folder: Path, layer: int, result: LayerResult, n_prefixes: int) -> None:
    """Write a layer's finished tables; the same result gives the same bytes."""
    columns = result.columns(n_prefixes)
    stats = {name: columns[name] for name in ("memory", *EVERY_STAT) if name in columns}
    triggers = {name: column for name, column in columns.items() if name not in EVERY_STAT}
    write_table(folder / layer_file("triggers", layer), pa.table(triggers))
    write_table(folder / layer_file("stats", layer), pa.table(stats))


def read_layer(folder: Path, layer: int) -> LayerResult:
    """Return the result that a layer's finished tables hold."""
    triggers = read_columns(folder / layer_file("triggers", layer))
    return LayerResult.from_columns(triggers | read_columns(folder / layer_file("stats", layer)))


class Sample(NamedTuple):
    """Some prefixes in ascending order, and their hashes."""

    hashes: UInt64[ndarray, " prefix"]
    prefixes: Int64[ndarray, " prefix"]

    def between(self, first: int, past: int) -> "Sample":
        """Return the part of the sample with `first` ≤ prefix < `past`."""
        return self.select((self.prefixes >= first) & (self.prefixes < past))

    def select(self, mask: Bool[ndarray, " prefix"]) -> "Sample":
        """Return the part of the sample where the mask is true."""
        return Sample(self.hashes[mask], self.prefixes[mask])

    def shift(self, n: int) -> "Sample":
        """Return this sample with `n` added to every prefix number."""
        return self._replace(prefixes=self.prefixes + n)


def draw_sample(
    source_hash: str,
    lengths: Iterable[Int64[ndarray, " _"]],
    empty_prefix: bool,
    contents: Iterable[ndarray | None] = repeat(None),
) -> Sample:
    """Return a source's sample, given its sentences' lengths in order.

    A sentence of n tokens owns n + 1 prefix numbers. Its prefixes have the lengths 1 … n, or
    0 … n − 1 where the empty prefix counts (`--compat ff-layers`). `contents` says of every token
    whether a prefix ends at it, as far as some do not.
    """
    hashes, places = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    base = 0
    for part, content in zip(lengths, contents, strict=False):
        ends = np.cumsum(part + 1)
        is_prefix: Bool[ndarray, " place"] = np.ones(int(ends[-1]) if len(ends) else 0, bool)
        is_prefix[ends - 1 if empty_prefix else ends - part - 1] = False
        if content is not None:
            is_prefix[is_prefix] = content
        here = is_prefix.nonzero()[0] + base
        base += len(is_prefix)
        hashes = np.concatenate([hashes, hash_places(source_hash, here)])
        places = np.concatenate([places, here])
        smallest = _smallest(hashes, places)
        hashes, places = hashes[smallest], places[smallest]
    return Sample(hashes, places)


def hash_places(source_hash: str, places: Int64[ndarray, " place"]) -> UInt64[ndarray, " place"]:
    """Return a well-mixed 64-bit number (splitmix64) for each place of a source."""
    seed = np.uint64(int(source_hash[:16], 16))
    with np.errstate(over="ignore"):  # arithmetic modulo 2⁶⁴ is the point
        z = seed + (places.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _smallest(
    hashes: UInt64[ndarray, " prefix"], prefixes: Int64[ndarray, " prefix"]
) -> Int64[ndarray, " smallest"]:
    """Return the places of the `SAMPLE_SIZE` smallest hashes, in ascending order of prefix."""
    smallest = np.lexsort((prefixes, hashes))[:SAMPLE_SIZE]
    return smallest[np.argsort(prefixes[smallest], kind="stable")]


def merge_samples(
    samples: Iterable[Sample], layers: Iterable[Iterable[Float32[ndarray, "_ _"]]]
) -> tuple[Sample, Iterator[Float32[ndarray, "_ _"]]]:
    """Return the sample of several parts of a corpus, and its coefficients layer by layer.

    `layers` yields, for every layer, the coefficients on each part's sample.
    """
    parts = list(samples)
    hashes = np.concatenate([part.hashes for part in parts])
    prefixes = np.concatenate([part.prefixes for part in parts])
    smallest = _smallest(hashes, prefixes)
    merged = (np.concatenate(list(layer), axis=1)[:, smallest] for layer in layers)
    return Sample(hashes[smallest], prefixes[smallest]), merged


def write_sample(folder: Path, sample: Sample, layers: Iterable[Float32[ndarray, "_ _"]]) -> None:
    """Write the finished tables of a sample."""
    for layer, coefficients in enumerate(layers):
        memory = pa.array(np.arange(len(coefficients), dtype=np.int32))
        table = pa.table({"memory": memory, "coefficient": fixed(coefficients)})
        write_table(folder / layer_file("samples", layer), table)
    write_table(
        folder / SAMPLED_PREFIXES, pa.table({"prefix": sample.prefixes, "hash": sample.hashes})
    )


def read_sample(folder: Path) -> Sample:
    """Return the sampled prefixes of an index."""
    columns = read_columns(folder / SAMPLED_PREFIXES)
    return Sample(columns["hash"], columns["prefix"])
