"""Partials: what each worker has found so far, and the chunks that it covers.

A worker keeps one cumulative result and commits it as one file under a name of its own; a
restarted worker takes a new name. **Coverage is the only state of a run**: resuming, status, live
reading and finishing all ask which chunks the partials cover.

    partials/partial-NAME.arrow      a record batch per layer, a row per memory; the covered
                                     chunks in the metadata
    partials/sample-000012.arrow     a record batch per layer: coefficients on the sampled prefixes
                                     of chunk 12, written before a partial covers that chunk

Every record batch has its own hash, and layers are read one by one: whatever the model, a merge
holds one layer of two partials.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import reduce
from itertools import groupby
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Float32
from numpy import ndarray

from ffmem.errors import StoreError
from ffmem.indexing.results import LayerResult
from ffmem.indexing.sample import Sample
from ffmem.indexing.tables import as_array, fixed
from ffmem.storage import Storage

_PARTIAL = "partials/partial-"


class Partial(NamedTuple):
    """A committed partial, by its metadata."""

    name: str
    chunks: frozenset[int]
    n_prefixes: int
    skipped: dict[int, str]
    """Sentences of these chunks that could not be read and were left out, and why."""


class DamagedPartialError(StoreError):
    """A partial or a sample file is truncated, changed or unreadable."""

    def __init__(self, storage: Storage, name: str, reason: str) -> None:
        super().__init__(
            f"{name} in {storage.shown} is damaged ({reason}). Rerun the command: what this file"
            " covered is read again."
        )


class Partials:
    """The partials of one run in its storage."""

    def __init__(self, storage: Storage, run: str) -> None:
        self.storage = storage
        self.run = run
        """The fingerprint of the run's configuration, which every file carries."""

    def commit(
        self,
        worker: str,
        chunks: Iterable[int],
        n_prefixes: int,
        skipped: dict[int, str],
        layers: Iterable[LayerResult],
    ) -> None:
        """Write a worker's cumulative result; it replaces the worker's last one."""
        metadata = {
            "chunks": _ranges(chunks),
            "n_prefixes": str(n_prefixes),
            "skipped": json.dumps(skipped),
        }
        columns = (layer.columns(n_prefixes) for layer in layers)
        self._write(f"{_PARTIAL}{worker}.arrow", metadata, columns)

    def commit_sample(
        self, chunk: int, sample: Sample, layers: Iterable[Float32[ndarray, "_ _"]]
    ) -> None:
        """Write the coefficients on a chunk's sampled prefixes."""
        metadata = {
            "prefixes": json.dumps(sample.prefixes.tolist()),
            "hashes": json.dumps(sample.hashes.tolist()),
        }
        # All of them may be of skipped sentences; but Arrow has no lists of size 0.
        filled = (layer if layer.shape[1] else np.zeros((len(layer), 1)) for layer in layers)
        columns = ({"coefficient": fixed(layer.astype(np.float32))} for layer in filled)
        self._write(_sample_name(chunk), metadata, columns)

    def _write(
        self, name: str, metadata: dict[str, str], layers: Iterable[dict[str, pa.Array]]
    ) -> None:
        with self.storage.writing(name) as path, ExitStack() as stack:
            writer: pa.RecordBatchFileWriter | None = None
            for columns in layers:
                batch = pa.record_batch(columns)
                if writer is None:
                    schema = batch.schema.with_metadata({"run": self.run, **metadata})
                    writer = stack.enter_context(pa.ipc.new_file(str(path), schema))
                writer.write_batch(batch, custom_metadata={"sha256": _digest(batch)})

    def committed(self) -> tuple[list[Partial], list[Partial]]:
        """Return the partials that count, and those that overlap with a larger one.

        Two partials overlap if a worker that was taken for dead went on. The larger one counts;
        the other's chunks become missing again.
        """
        found = []
        for name in self.storage.names("partials"):
            if name.startswith(_PARTIAL):
                metadata = self._metadata(name)
                skipped = json.loads(metadata["skipped"])
                found.append(
                    Partial(
                        name,
                        frozenset(_numbers(metadata["chunks"])),
                        int(metadata["n_prefixes"]),
                        {int(sentence): why for sentence, why in skipped.items()},
                    )
                )
        kept: list[Partial] = []
        overlapping: list[Partial] = []
        covered: set[int] = set()
        for partial in sorted(found, key=lambda one: (-len(one.chunks), one.name)):
            if covered.isdisjoint(partial.chunks):
                covered |= partial.chunks
                kept.append(partial)
            else:
                overlapping.append(partial)
        return kept, overlapping

    def delete_damaged(self, sampled_chunks: set[int], say: Callable[[str], None]) -> None:
        """Delete partials that are damaged, or whose sample files are damaged or missing."""
        for name in self.storage.names("partials"):
            if not name.startswith(_PARTIAL):
                continue
            try:
                chunks = set(_numbers(self._metadata(name)["chunks"]))
                for one in (name, *map(_sample_name, sorted(chunks & sampled_chunks))):
                    for _ in self._batches(one):
                        pass
            except (DamagedPartialError, FileNotFoundError) as error:
                say(f"Reading again what {name} covers: {error}")
                self.storage.delete(name)

    def layers(self, partials: Sequence[Partial]) -> Iterator[LayerResult]:
        """Return what several partials give together, layer by layer."""
        readers = [self._batches(partial.name) for partial in partials]
        for batches in zip(*readers, strict=True):
            yield reduce(LayerResult.merge, (LayerResult.from_columns(b) for b in batches))

    def layer(self, partials: Sequence[Partial], layer: int) -> LayerResult:
        """Return one layer of several partials together."""
        parts = [next(self._batches(partial.name, layer)) for partial in partials]
        return reduce(LayerResult.merge, (LayerResult.from_columns(part) for part in parts))

    def sample(self, chunk: int) -> Sample:
        """Return the sampled prefixes of a chunk that were read."""
        metadata = self._metadata(_sample_name(chunk))
        return Sample(
            np.array(json.loads(metadata["hashes"]), np.uint64),
            np.array(json.loads(metadata["prefixes"]), np.int64),
        )

    def sample_layers(
        self, chunks: Sequence[int], layer: int | None = None
    ) -> Iterator[list[Float32[ndarray, "_ _"]]]:
        """Return, for every layer or for one, the coefficients on the chunks' sampled prefixes."""
        readers = [self._batches(_sample_name(chunk), layer) for chunk in chunks]
        sizes = [len(self.sample(chunk).prefixes) for chunk in chunks]
        for batches in zip(*readers, strict=True):
            pairs = zip(batches, sizes, strict=True)
            yield [columns["coefficient"][:, :size] for columns, size in pairs]

    def delete(self, partial: Partial) -> None:
        """Remove a partial."""
        self.storage.delete(partial.name)

    def _metadata(self, name: str) -> dict[str, str]:
        try:
            with self.storage.reading(name) as file, pa.ipc.open_file(file) as reader:
                raw = reader.schema.metadata or {}
        except (pa.ArrowInvalid, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise DamagedPartialError(self.storage, name, " ".join(str(error).split())) from None
        metadata = {key.decode(): value.decode() for key, value in raw.items()}
        if metadata.get("run") != self.run:
            raise StoreError(
                f"{name} in {self.storage.shown} belongs to another run ({metadata.get('run')};"
                f" this is {self.run}). Delete that file and rerun the command."
            )
        return metadata

    def _batches(self, name: str, layer: int | None = None) -> Iterator[dict[str, ndarray]]:
        """Return the columns of every layer, or of one, if the file is whole and of this run."""
        self._metadata(name)
        try:
            with self.storage.reading(name) as file, pa.ipc.open_file(file) as reader:
                for number in range(reader.num_record_batches) if layer is None else [layer]:
                    batch, custom = reader.get_batch_with_custom_metadata(number)
                    if custom is None or custom[b"sha256"].decode() != _digest(batch):
                        raise pa.ArrowInvalid("its bytes do not match their hash")
                    yield {name: as_array(batch.column(name)) for name in batch.schema.names}
        except (pa.ArrowInvalid, KeyError, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise DamagedPartialError(self.storage, name, " ".join(str(error).split())) from None


def _sample_name(chunk: int) -> str:
    return f"partials/sample-{chunk:06d}.arrow"


def _digest(batch: pa.RecordBatch) -> str:
    """Return the SHA-256 of a record batch's numbers."""
    digest = hashlib.sha256()
    for column in batch.columns:
        digest.update(np.ascontiguousarray(as_array(column)).data)
    return digest.hexdigest()


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text, runs of them as one: `0-17,19`."""
    runs = []
    for _, group in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        runs.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
    return ",".join(runs)


def _numbers(ranges: str) -> Iterator[int]:
    """Return the numbers that such a text names."""
    for run in ranges.split(",") if ranges else ():
        first, _, last = run.partition("-")
        yield from range(int(first), int(last or first) + 1)
