"""A fixed sample of prefixes whose coefficients are all kept.

The sample is the `SIZE` prefixes of smallest hash(hash of the source, place in the source). It
depends on nothing else, so that the samples of parts merge to the sample of the whole:

    sample(A ∪ B) == the SIZE smallest of sample(A) ∪ sample(B)

Finished: samples/prefixes.parquet (prefix, hash), samples/layer-000.parquet (memory,
coefficient[prefix of the sample]).
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float32, Int64, UInt64
from numpy import ndarray

from ffmem.indexing.tables import fixed, layer_file, read_columns, write_table

SIZE = 512

PREFIXES = "samples/prefixes.parquet"


class Sample(NamedTuple):
    """Some prefixes in ascending order, and the hash by which each was drawn."""

    hashes: UInt64[ndarray, " prefix"]
    prefixes: Int64[ndarray, " prefix"]

    def between(self, first: int, past: int) -> "Sample":
        """Return the prefixes with numbers from `first` to `past`, which is left out."""
        inside = (self.prefixes >= first) & (self.prefixes < past)
        return Sample(self.hashes[inside], self.prefixes[inside])


def draw(source_hash: str, lengths: Iterable[Int64[ndarray, " _"]], empty_prefix: bool) -> Sample:
    """Return a source's sample, from its sentences' lengths in order.

    A sentence of n tokens owns n + 1 prefix numbers. Its prefixes have the lengths 1 … n, or
    0 … n − 1 where the empty prefix counts (`--compat ff-layers`).
    """
    hashes, places = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    base = 0
    for part in lengths:
        ends = np.cumsum(part + 1)
        is_prefix: Bool[ndarray, " place"] = np.ones(int(ends[-1]) if len(ends) else 0, bool)
        is_prefix[ends - 1 if empty_prefix else ends - part - 1] = False
        here = is_prefix.nonzero()[0] + base
        base += len(is_prefix)
        hashes = np.concatenate([hashes, hash_places(source_hash, here)])
        places = np.concatenate([places, here])
        kept = _smallest(hashes, places)
        hashes, places = hashes[kept], places[kept]
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
) -> Int64[ndarray, " kept"]:
    """Return where the `SIZE` smallest hashes are, in ascending order of prefix."""
    kept = np.lexsort((prefixes, hashes))[:SIZE]
    return kept[np.argsort(prefixes[kept], kind="stable")]


def merge_samples(
    samples: Iterable[Sample], layers: Iterable[Iterable[Float32[ndarray, "_ _"]]]
) -> tuple[Sample, Iterator[Float32[ndarray, "_ _"]]]:
    """Return the sample of several parts of a corpus, and its coefficients layer by layer.

    `layers` gives, for every layer, the coefficients of each part's sample.
    """
    parts = list(samples)
    hashes = np.concatenate([part.hashes for part in parts])
    prefixes = np.concatenate([part.prefixes for part in parts])
    kept = _smallest(hashes, prefixes)
    merged = (np.concatenate(list(layer), axis=1)[:, kept] for layer in layers)
    return Sample(hashes[kept], prefixes[kept]), merged


def write_sample(folder: Path, sample: Sample, layers: Iterable[Float32[ndarray, "_ _"]]) -> None:
    """Write the finished tables of a sample."""
    for layer, coefficients in enumerate(layers):
        memory = pa.array(np.arange(len(coefficients), dtype=np.int32))
        table = pa.table({"memory": memory, "coefficient": fixed(coefficients)})
        write_table(folder / layer_file("samples", layer), table)
    write_table(folder / PREFIXES, pa.table({"prefix": sample.prefixes, "hash": sample.hashes}))


def read_sample(folder: Path) -> Sample:
    """Return which prefixes an index has sampled."""
    columns = read_columns(folder / PREFIXES)
    return Sample(columns["hash"], columns["prefix"])
