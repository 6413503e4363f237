"""The worker of an index: reads leases, merges segments, projects values.

    read     a lease of the corpus            → segment of level 0
    probe    a part of a lease that fails     → nothing; it can be read, or an error
    merge    the children of a node           → its segment; they are deleted
    values   a layer of the model             → its file of values

It is made once per process, with the model loaded, and does tasks in any order. What it filters
by rises with every segment that it has seen; what comes out of a merge of all does not depend on
that.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float32
from numpy import ndarray

from ffmem.cluster.shared import SharedFolder
from ffmem.cluster.task import Task
from ffmem.errors import ModelError, StoreError
from ffmem.indexing.found import Found
from ffmem.indexing.leases import Batch, Lease, batches
from ffmem.indexing.orders import IndexOrders
from ffmem.indexing.scan import Scan, reach
from ffmem.indexing.segments import Segments
from ffmem.indexing.sentences import Sentences, StoredSentence
from ffmem.indexing.tree import Node
from ffmem.indexing.values import write_values
from ffmem.models.memories import Memories
from ffmem.models.threads import threads
from ffmem.progress import Step


class IndexWorker:
    """Does the tasks of one run with one model."""

    def __init__(self, memories: Memories, shared: SharedFolder) -> None:
        orders = IndexOrders.read(shared)
        if memories.fingerprint() != orders.hash:
            raise ModelError(
                f"The run was started with weights of hash {orders.hash}; {memories.source} has"
                f" {memories.fingerprint()} here. Use the same model everywhere."
            )
        self.memories = memories
        self.shared = shared
        self.orders = orders
        self.segments = Segments(shared, orders.run, orders.t, orders.gated)
        where = reach(orders.start is not None, orders.empty_prefix)
        self.scan = Scan(memories, orders.t, orders.prefixes, where)
        self.sample = (
            np.array(orders.sample_hashes, np.uint64),
            np.array(orders.sample_prefixes, np.int64),
        )
        shape = (memories.n_layers, memories.n_memories)
        self._floors = [np.zeros(shape, np.float32) for _ in range(2 if orders.gated else 1)]
        self._seen: set[Node] = set()
        self._open = ExitStack()
        self._sentences: Sentences | None = None

    def do(self, task: Task, step: Step) -> dict[str, Any]:
        """Do a task with the run's number of threads."""
        doing = {
            "read": self._read,
            "probe": self._probe,
            "merge": self._merge,
            "values": self._values,
        }
        with threads(self.orders.threads):
            doing[task.kind](task.arguments, step)
        return {}

    def _read(self, asked: dict[str, Any], step: Step) -> None:
        node = Node(0, asked["lease"][0])
        for level, number in asked["floors"]:
            self._raise(Node(level, number))
        found = self._found(Lease(*asked["lease"]), set(asked["without"]), step)
        self.segments.commit(node, found.layers())
        self._lift([one.weakest() for one in found.lists()])

    def _probe(self, asked: dict[str, Any], step: Step) -> None:
        first, n = asked["first"], asked["n"]
        rows = list(self.sentences.rows(first, n))
        tokens = sum(len(row.ids) for row in rows)
        self._found(Lease(0, first, n, rows[0].offset, tokens), set(), step)

    def _merge(self, asked: dict[str, Any], step: Step) -> None:
        node, parts = Node(*asked["node"]), [Node(*part) for part in asked["parts"]]
        name = self.segments.name(node)
        try:
            if not self.shared.has(name):
                self.segments.commit(node, self.segments.merged(parts))
        except (StoreError, FileNotFoundError):
            if not self.shared.has(name):
                raise
            # Another one was faster, and has deleted the parts while they were read here.
        for part in parts:
            self.segments.delete(part)

    def _values(self, asked: dict[str, Any], step: Step) -> None:
        with self.shared.writing(asked["name"]) as path:
            write_values(path, self.memories, asked["layer"])

    def _found(self, lease: Lease, without: set[int], step: Step) -> Found:
        """Return what a lease holds, sentences that must be left out aside."""
        hashes, prefixes = self.sample
        kept: Bool[ndarray, " prefix"] = np.ones(len(prefixes), bool)
        rows = []
        for row in self.sentences.rows(lease.first_sentence, lease.n_sentences):
            if row.sentence in without:
                kept &= (prefixes < row.offset) | (prefixes > row.offset + len(row.ids))
            else:
                rows.append(row)
        if not rows:
            shape = (self.memories.n_layers, self.memories.n_memories, self.orders.t)
            return Found.nothing(*shape, self.orders.gated)
        sampled = (hashes[kept], prefixes[kept])
        for part in self.scan.lease(lease, self._batches(rows), self._floors, sampled):
            if isinstance(part, Found):
                return part
            step(part)
        raise AssertionError("a scan ends with what it found")

    def _batches(self, rows: list[StoredSentence]) -> Iterator[Batch]:
        offsets = ((row.offset, row.ids) for row in rows)
        return batches(offsets, self.orders.start, self.orders.batch_tokens)

    def _raise(self, node: Node) -> None:
        """Filter by what a committed segment holds, from now on."""
        if node in self._seen:
            return
        self._seen.add(node)
        try:
            self._lift(self.segments.floors(node))
        except FileNotFoundError:
            return  # merged into another since; only speed hangs on it

    def _lift(self, floors: list[Float32[ndarray, "layer memory"]]) -> None:
        self._floors = [np.maximum(*pair) for pair in zip(self._floors, floors, strict=True)]

    @property
    def sentences(self) -> Sentences:
        """The corpus, opened at the first look: a path that is seen here, or the shared one."""
        if self._sentences is None:
            path = Path(self.orders.sentences)
            if path.is_absolute():
                self._sentences = Sentences(path)
            else:
                file = self._open.enter_context(self.shared.reading(self.orders.sentences))
                self._sentences = Sentences(path, file)
        return self._sentences


def hired(shared: str) -> IndexWorker:
    """Return a worker for the run whose shared folder this is, with its model loaded."""
    from ffmem.models.load import load

    folder = SharedFolder.at(shared)
    orders = IndexOrders.read(folder)
    torch.set_num_threads(orders.threads)
    return IndexWorker(load(orders.model, dtype=orders.dtype, device=orders.device), folder)
