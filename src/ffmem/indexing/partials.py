"""Partials: each worker's results so far, and the chunks they cover.

A worker keeps one cumulative result and commits it as one file under its own name; a restarted
worker takes a new name. **Coverage is the only state of a run**: resuming, status, live reading
and finishing all ask which chunks the partials cover.

    partials/partial-NAME.arrow      a record batch per layer, a row per memory; the covered
                                     chunks in the metadata
    partials/sample-000012.arrow     a record batch per layer: coefficients on the sampled prefixes
                                     of chunk 12, written before a partial covers that chunk

Every record batch has its own hash. Layers are read one by one, so a merge holds one layer of two
partials, whatever the model.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import reduce
from itertools import groupby
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Float32
from numpy import ndarray

from ffmem.errors import StoreError
from ffmem.indexing.results import LayerResult, Sample
from ffmem.indexing.tables import as_array, fixed
from ffmem.storage import Storage

_PARTIAL, _SAMPLE = "partials/partial-", "partials/sample-"


class Partial(NamedTuple):
    """The metadata of a committed partial."""

    name: str
    chunks: frozenset[int]
    n_prefixes: int
    skipped: dict[int, str]
    """Sentences of these chunks that the model could not read, and why."""


class DamagedPartialError(StoreError):
    """A partial or a sample file is truncated, changed or unreadable."""

    def __init__(self, storage: Storage, name: str, reason: str) -> None:
        super().__init__(
            f"{name} in {storage.shown} is damaged ({reason}). Rerun the command to read the"
            " chunks of this file again."
        )


class Partials:
    """The partials of one run in its storage."""

    def __init__(self, storage: Storage, run_id: str) -> None:
        self.storage = storage
        self.run_id = run_id
        """Fingerprint of the run's configuration, which every file records."""

    def commit(
        self,
        worker: str,
        chunks: Iterable[int],
        n_prefixes: int,
        skipped: dict[int, str],
        layers: Iterable[LayerResult],
    ) -> None:
        """Write a worker's cumulative result, replacing its last one."""
        metadata = {
            "chunks": _format_ranges(chunks),
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
        # Arrow has no lists of size 0, which a sample of skipped sentences alone would need.
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
                    schema = batch.schema.with_metadata({"run": self.run_id, **metadata})
                    writer = stack.enter_context(pa.ipc.new_file(str(path), schema))
                writer.write_batch(batch, custom_metadata={"sha256": _digest(batch)})

    def disjoint(self) -> list[Partial]:
        """Return the partials that count: no two of them cover the same chunk.

        Two partials overlap if a worker that was presumed dead went on. The larger one counts, and
        the other's chunks are missing again.
        """
        return self._split()[0]

    def overlapping(self) -> list[Partial]:
        """Return the partials that overlap with a larger one."""
        return self._split()[1]

    def covered_chunks(self) -> set[int]:
        """Return the numbers of the chunks that are done."""
        return {number for partial in self.disjoint() for number in partial.chunks}

    def is_empty(self) -> bool:
        """Return whether no worker has committed anything."""
        return not self._names()

    def _split(self) -> tuple[list[Partial], list[Partial]]:
        partials = []
        for name in self._names():
            with suppress(FileNotFoundError):  # deleted since it was listed
                partials.append(self._partial(name))
        disjoint: list[Partial] = []
        overlapping: list[Partial] = []
        covered: set[int] = set()
        for partial in sorted(partials, key=lambda one: (-len(one.chunks), one.name)):
            if covered.isdisjoint(partial.chunks):
                covered |= partial.chunks
                disjoint.append(partial)
            else:
                overlapping.append(partial)
        return disjoint, overlapping

    def _names(self) -> list[str]:
        return [name for name in self.storage.names("partials") if name.startswith(_PARTIAL)]

    def _partial(self, name: str) -> Partial:
        with self._open(name) as reader:
            return _read_partial(name, reader)

    def delete_damaged(self, sampled_chunks: set[int], say: Callable[[str], None]) -> None:
        """Delete partials that are damaged, or whose sample files are damaged or missing."""
        for name in self._names():
            try:
                chunks = self._partial(name).chunks
                for file in (name, *map(_sample_name, sorted(chunks & sampled_chunks))):
                    for _ in self._batches(file):
                        pass
            except (DamagedPartialError, FileNotFoundError) as error:
                say(f"Reading the chunks of {name} again: {error}")
                self.storage.delete(name)

    def layers(self, partials: Sequence[Partial]) -> Iterator[LayerResult]:
        """Return the merged result of several partials, layer by layer.

        Raise if a worker has replaced one of them since: its chunks may be in another one too.
        """
        readers = [self._unchanged_layers(partial) for partial in partials]
        for layers in zip(*readers, strict=True):
            yield reduce(LayerResult.merge, layers)

    def _unchanged_layers(self, partial: Partial) -> Iterator[LayerResult]:
        changed = StoreError(
            f"{partial.name} in {self.storage.shown} changed during the merge: a worker of this run"
            " is still running. Wait until it ends, then rerun the command."
        )
        try:
            with self._open(partial.name) as reader:
                if _read_partial(partial.name, reader) != partial:
                    raise changed
                for number in range(reader.num_record_batches):
                    yield LayerResult.from_columns(_read_batch(reader, number))
        except FileNotFoundError:
            raise changed from None

    def layer(
        self, partials: Sequence[Partial], layer: int, empty: LayerResult
    ) -> tuple[LayerResult, int]:
        """Return what several partials hold now in one layer, and of how many prefixes.

        Workers may have replaced them, so the number is read together with the result.
        """
        result, n_prefixes, covered = empty, 0, frozenset[int]()
        for partial in partials:
            with self._open(partial.name) as reader:
                now = _read_partial(partial.name, reader)
                if covered.isdisjoint(now.chunks):
                    covered |= now.chunks
                    n_prefixes += now.n_prefixes
                    columns = _read_batch(reader, layer)
                    result = result.merge(LayerResult.from_columns(columns))
        return result, n_prefixes

    def sampled_chunks(self) -> list[int]:
        """Return the chunks that have a sample file."""
        names = [name for name in self.storage.names("partials") if name.startswith(_SAMPLE)]
        return [int(name.removeprefix(_SAMPLE).removesuffix(".arrow")) for name in names]

    def sample(self, chunk: int) -> Sample:
        """Return a chunk's sampled prefixes, without those of skipped sentences."""
        metadata = self._metadata(_sample_name(chunk))
        return Sample(
            np.array(json.loads(metadata["hashes"]), np.uint64),
            np.array(json.loads(metadata["prefixes"]), np.int64),
        )

    def sample_layers(
        self, chunks: Sequence[int], layer: int | None = None
    ) -> Iterator[list[Float32[ndarray, "_ _"]]]:
        """Return the coefficients on each chunk's sampled prefixes, for every layer or for one."""
        readers = [self._batches(_sample_name(chunk), layer) for chunk in chunks]
        sizes = [len(self.sample(chunk).prefixes) for chunk in chunks]
        for batches in zip(*readers, strict=True):
            pairs = zip(batches, sizes, strict=True)
            yield [columns["coefficient"][:, :size] for columns, size in pairs]

    def _metadata(self, name: str) -> dict[str, str]:
        with self._open(name) as reader:
            return _decode_metadata(reader)

    def _batches(self, name: str, layer: int | None = None) -> Iterator[dict[str, ndarray]]:
        """Return the columns of every layer, or of one; raise if their hash is wrong."""
        with self._open(name) as reader:
            for number in range(reader.num_record_batches) if layer is None else [layer]:
                yield _read_batch(reader, number)

    @contextmanager
    def _open(self, name: str) -> Iterator[pa.RecordBatchFileReader]:
        """Open a file of this run; raise if it is damaged or of another run."""
        try:
            with self.storage.reading(name) as file, pa.ipc.open_file(file) as reader:
                run = _decode_metadata(reader).get("run")
                if run != self.run_id:
                    raise StoreError(
                        f"{name} in {self.storage.shown} belongs to another run ({run}; this is"
                        f" {self.run_id}). Delete that file and rerun the command."
                    )
                yield reader
        except FileNotFoundError:
            raise
        except (pa.ArrowInvalid, KeyError, OSError) as error:
            raise DamagedPartialError(self.storage, name, " ".join(str(error).split())) from None


def _decode_metadata(reader: pa.RecordBatchFileReader) -> dict[str, str]:
    raw = reader.schema.metadata or {}
    return {key.decode(): value.decode() for key, value in raw.items()}


def _read_partial(name: str, reader: pa.RecordBatchFileReader) -> Partial:
    """Return the metadata of a partial."""
    metadata = _decode_metadata(reader)
    skipped = json.loads(metadata["skipped"])
    return Partial(
        name,
        frozenset(_parse_ranges(metadata["chunks"])),
        int(metadata["n_prefixes"]),
        {int(sentence): reason for sentence, reason in skipped.items()},
    )


def _read_batch(reader: pa.RecordBatchFileReader, layer: int) -> dict[str, ndarray]:
    """Return the columns of a layer; raise if their hash is wrong."""
    batch, custom = reader.get_batch_with_custom_metadata(layer)
    if custom is None or custom[b"sha256"].decode() != _digest(batch):
        raise pa.ArrowInvalid("its hash does not match")
    return {column: as_array(batch.column(column)) for column in batch.schema.names}


def _sample_name(chunk: int) -> str:
    return f"{_SAMPLE}{chunk:06d}.arrow"


def _digest(batch: pa.RecordBatch) -> str:
    """Return the SHA-256 of a record batch's numbers."""
    digest = hashlib.sha256()
    for column in batch.columns:
        digest.update(np.ascontiguousarray(as_array(column)).data)
    return digest.hexdigest()


def _format_ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text, with runs shortened: `0-17,19`."""
    runs = []
    for _, group in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        runs.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
    return ",".join(runs)


def _parse_ranges(ranges: str) -> Iterator[int]:
    """Return the numbers in a text of ranges."""
    for run in ranges.split(",") if ranges else ():
        first, _, last = run.partition("-")
        yield from range(int(first), int(last or first) + 1)
