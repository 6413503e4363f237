"""Segments: what each finished lease found, one file each, until the index is whole.

A segment is written atomically under its place in the merge tree, so a lease is either committed
or not, and doing it twice changes nothing. It keeps only triggers that its floor let through, so
that the segments of a long run stay small. The merge of all segments is the index.

A file is Arrow IPC: a record batch per layer, a row per memory, each batch with its own hash.
Layers are read and written one by one: whatever the model, a merge holds one layer of each part.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import reduce

import numpy as np
import pyarrow as pa
from jaxtyping import Float32
from numpy import ndarray

from ffmem.cluster.shared import SharedFolder
from ffmem.errors import StoreError
from ffmem.indexing.found import Found
from ffmem.indexing.sample import Sample
from ffmem.indexing.sentences import VACANT
from ffmem.indexing.statistics import Statistics
from ffmem.indexing.tree import Node
from ffmem.indexing.triggers import Triggers

_TRIGGER = pa.struct([("coefficient", pa.float32()), ("prefix", pa.int64()), ("gate", pa.int8())])

SCHEMA = pa.schema(
    [
        ("positive", pa.list_(_TRIGGER)),
        ("negative", pa.list_(_TRIGGER)),
        ("active", pa.int64()),
        ("sum", pa.int64()),
        ("max", pa.float32()),
        ("min", pa.float32()),
        ("sample", pa.list_(pa.float32())),
    ]
)


class Segments:
    """The committed segments of one run, in its shared folder."""

    def __init__(self, shared: SharedFolder, run: str, t: int, gated: bool) -> None:
        self.shared = shared
        self.run = run
        """The fingerprint of the run's settings."""
        self.t = t
        self.gated = gated

    @staticmethod
    def name(node: Node) -> str:
        """Return the name of a segment's file."""
        return f"segment-{node.level}-{node.number:06d}.arrow"

    def nodes(self) -> list[Node]:
        """Return the segments that are there."""
        found = []
        for name in self.shared.names():
            if name.startswith("segment-") and name.endswith(".arrow"):
                level, number = name.removesuffix(".arrow").split("-")[1:]
                found.append(Node(int(level), int(number)))
        return found

    def commit(self, node: Node, layers: Iterable[Found]) -> None:
        """Write what was found, layer by layer."""
        # Whole before it has its name, so that a merge never meets half a file.
        with self.shared.writing(self.name(node)) as path, ExitStack() as closing:
            writer: pa.RecordBatchFileWriter | None = None
            for found in layers:
                if writer is None:
                    schema = SCHEMA.with_metadata(self._metadata(node, found))
                    writer = closing.enter_context(pa.ipc.new_file(str(path), schema))
                batch = _batch(found, schema)
                writer.write_batch(batch, custom_metadata={"sha256": _digest(batch)})

    def _metadata(self, node: Node, found: Found) -> dict[str, str]:
        return {
            "run": self.run,
            "node": f"{node.level}-{node.number}",
            "n_prefixes": str(found.statistics.n_prefixes),
            "sample_hashes": json.dumps(found.sample.hashes.tolist()),
            "sample_prefixes": json.dumps(found.sample.prefixes.tolist()),
        }

    def layers(self, node: Node) -> Iterator[Found]:
        """Return what was found, layer by layer, if the file is whole and of this run."""
        name = self.name(node)
        try:
            with self.shared.reading(name) as file, pa.ipc.open_file(file) as reader:
                known = {k.decode(): v.decode() for k, v in (reader.schema.metadata or {}).items()}
                self._refuse_foreign(node, known)
                for layer in range(reader.num_record_batches):
                    batch, custom = reader.get_batch_with_custom_metadata(layer)
                    if custom is None or custom[b"sha256"].decode() != _digest(batch):
                        raise pa.ArrowInvalid("its bytes do not match their hash")
                    yield self._found(batch, known)
        except (pa.ArrowInvalid, KeyError, ValueError, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            reason = " ".join(str(error).split())
            what = "only its lease is" if node.level == 0 else "the leases it was merged of are"
            raise StoreError(
                f"The segment {name} in {self.shared.shown} is damaged ({reason})."
                f" Delete that file and run the same command again: {what} repeated."
            ) from None

    def _refuse_foreign(self, node: Node, known: dict[str, str]) -> None:
        expected = {"run": self.run, "node": f"{node.level}-{node.number}"}
        found = {field: known.get(field) for field in expected}
        if found != expected:
            raise StoreError(
                f"The segment {self.name(node)} in {self.shared.shown} belongs to another run or"
                f" place ({found}; expected {expected})."
                " Delete that file and run the same command again."
            )

    def merged(self, nodes: Sequence[Node]) -> Iterator[Found]:
        """Return what several segments give together, holding one layer of two of them."""
        for parts in zip(*(self.layers(node) for node in nodes), strict=True):
            yield reduce(Found.merge, parts)

    def floors(self, node: Node) -> list[Float32[ndarray, "layer memory"]]:
        """Return the t-th |m| of every memory and sign: what later prefixes must reach."""
        layers = [[one.weakest() for one in found.lists()] for found in self.layers(node)]
        return [np.concatenate(sign) for sign in zip(*layers, strict=True)]

    def delete(self, node: Node) -> None:
        """Remove a segment that has been merged into another."""
        self.shared.delete(self.name(node))

    def _found(self, batch: pa.RecordBatch, known: dict[str, str]) -> Found:
        def column(name: str) -> ndarray:
            numbers: ndarray = batch.column(name).to_numpy(zero_copy_only=False)
            return numbers[None]

        hashes = np.array(json.loads(known["sample_hashes"]), np.uint64)
        prefixes = np.array(json.loads(known["sample_prefixes"]), np.int64)
        sampled = batch.column("sample").values.to_numpy(zero_copy_only=False)
        counted = (column(name) for name in ("active", "sum", "max", "min"))
        return Found(
            _dense(batch.column("positive"), self.t),
            _dense(batch.column("negative"), self.t) if self.gated else None,
            Statistics(int(known["n_prefixes"]), *counted),
            Sample(hashes, prefixes, sampled.reshape(1, batch.num_rows, len(hashes))),
        )


def _batch(found: Found, schema: pa.Schema) -> pa.RecordBatch:
    """Return one layer as a record batch."""
    statistics, sampled = found.statistics, found.sample.coefficients[0]
    n_memories, n_sampled = sampled.shape
    offsets = np.arange(n_memories + 1, dtype=np.int32) * n_sampled
    flat = pa.array(np.ascontiguousarray(sampled).reshape(-1))
    arrays = [
        _sparse(found.positive),
        _sparse(found.negative) if found.negative is not None else _none(n_memories),
        pa.array(statistics.active[0]),
        pa.array(statistics.sums[0]),
        pa.array(statistics.maximum[0]),
        pa.array(statistics.minimum[0]),
        pa.ListArray.from_arrays(pa.array(offsets), flat),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _none(n_memories: int) -> pa.Array:
    return pa.array([[]] * n_memories, pa.list_(_TRIGGER))


def _sparse(triggers: Triggers) -> pa.Array:
    """Return the filled slots of a layer's list, a row per memory."""
    filled = triggers.prefixes[0] != VACANT
    offsets = np.concatenate([[0], np.cumsum(filled.sum(1))]).astype(np.int32)
    columns = [pa.array(column[filled]) for column in triggers.layer(0)]
    rows = pa.StructArray.from_arrays(columns, fields=list(_TRIGGER))
    return pa.ListArray.from_arrays(pa.array(offsets), rows)


def _dense(column: pa.Array, t: int) -> Triggers:
    """Return a layer's list with all its slots."""
    offsets = column.offsets.to_numpy()
    counts = np.diff(offsets)
    triggers = Triggers.empty(1, len(counts), t)
    filled = np.arange(t) < counts[:, None]
    for into, field in zip(triggers.layer(0), column.values.flatten(), strict=True):
        into[filled] = field.to_numpy(zero_copy_only=False)
    return triggers


def _digest(batch: pa.RecordBatch) -> str:
    """Return the SHA-256 of what a batch holds."""
    digest = hashlib.sha256()
    for array in batch.columns:
        parts = [array]
        if pa.types.is_list(array.type):
            digest.update(array.offsets.to_numpy())
            inside = array.values
            parts = inside.flatten() if pa.types.is_struct(inside.type) else [inside]
        for part in parts:
            digest.update(part.to_numpy(zero_copy_only=False))
    return digest.hexdigest()
