"""What a worker of an index must know before its first task, in the shared folder.

orders.json        settings that decide the bytes, where the sentences are, the drawn sample
leases.parquet     the leases, in order; a task names one
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from ffmem.cluster.orders import Orders
from ffmem.cluster.shared import SharedFolder
from ffmem.indexing.leases import Lease

LEASES = "leases.parquet"

_TOGETHER = 4096  # leases in a row group: what reading them holds


@dataclass(frozen=True, kw_only=True)
class IndexOrders(Orders):
    """What all workers of a run do alike."""

    run: str
    model: str
    hash: str
    """Of the model's weights: a worker with others is refused."""
    dtype: str
    device: str
    gated: bool
    threads: int
    t: int
    prefixes: str
    empty_prefix: bool
    """Whether p = 0 counts, as in the authors' code."""
    start: int | None
    batch_tokens: int
    sentences: str
    """A path that all workers see, or a name in the shared folder."""
    sample_hashes: list[int]
    sample_prefixes: list[int]


def write_leases(shared: SharedFolder, leases: Iterable[Lease]) -> None:
    """Lay the leases out, a few thousand in memory at a time."""
    fields = Lease._fields[1:]
    schema = pa.schema([(name, pa.int64()) for name in fields])
    with shared.writing(LEASES) as path, pq.ParquetWriter(path, schema) as writer:
        group: list[Lease] = []
        for lease in leases:
            group.append(lease)
            if len(group) == _TOGETHER:
                writer.write_table(_table(group, schema))
                group = []
        if group:
            writer.write_table(_table(group, schema))


def _table(group: list[Lease], schema: pa.Schema) -> pa.Table:
    return pa.table({name: [getattr(one, name) for one in group] for name in schema.names}, schema)


class Leases:
    """The leases of a run, read in order."""

    def __init__(self, shared: SharedFolder) -> None:
        self.shared = shared
        with shared.reading(LEASES) as file:
            self.n: int = pq.ParquetFile(file).metadata.num_rows

    def __iter__(self) -> Iterator[Lease]:
        number = 0
        with self.shared.reading(LEASES) as file:
            for batch in pq.ParquetFile(file).iter_batches(_TOGETHER):
                columns = (batch.column(name).to_pylist() for name in Lease._fields[1:])
                for row in zip(*columns, strict=True):
                    yield Lease(number, *row)
                    number += 1
