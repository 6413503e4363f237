"""The worker of a detection: examines layers of an index, each as one task.

    orders, corpus view, topic space, in the shared folder ─► worker ─► tests of a layer

Whoever examines a layer finds the same. Workers read the index's own triggers: they must see its
folder. Arrays of the view are mapped from the disk, so that many processes share their memory.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ffmem.cluster.orders import Orders
from ffmem.cluster.pieces import OUTCOME, Arrays, read_arrays, write_arrays
from ffmem.cluster.shared import SharedFolder
from ffmem.cluster.task import Task
from ffmem.errors import StoreError
from ffmem.indexing.store import Index
from ffmem.patterns.around import Around
from ffmem.patterns.corpus_view import CorpusView
from ffmem.patterns.examining import LayerTests, examine
from ffmem.patterns.lists import Lists, read_lists
from ffmem.patterns.lsa import LatentSpace
from ffmem.patterns.shallow import Candidates
from ffmem.patterns.topics import TopicSpace
from ffmem.progress import Step

SPACE = "space.npz"


@dataclass(frozen=True)
class LayerSight:
    """What a worker looks at."""

    index: Index
    view: CorpusView
    space: TopicSpace


@dataclass(frozen=True, kw_only=True)
class LayerOrders(Orders):
    """What all workers of a detection do alike."""

    index: str
    space: str
    top: int
    seed: int

    def lay_out(self, shared: SharedFolder, sight: LayerSight) -> None:
        """Put what workers need into the shared folder."""
        sight.view.save(shared)
        write_arrays(shared, SPACE, sight.space.arrays())
        self.write(shared)


class LayerWorker:
    """Examines layers of one index."""

    def __init__(self, sight: LayerSight, orders: LayerOrders, shared: SharedFolder) -> None:
        self.sight = sight
        self.orders = orders
        self.shared = shared
        self.around = Around.of(sight.view, sight.space, sight.view.sample)

    def do(self, task: Task, step: Step) -> dict[str, Any]:
        """Examine a layer; with a seed, its triggers are shuffled."""
        from threadpoolctl import threadpool_limits

        layer, shuffled = task.arguments["layer"], task.arguments["shuffled"]
        view, space = self.sight.view, self.sight.space
        lists = read_lists(self.sight.index, view, layer, self.orders.top, shuffled)
        with threadpool_limits(1):  # the same sums in the same order, on any machine
            found = examine(view, lists, layer, space, self.around, self.orders.seed + layer)
        write_arrays(self.shared, task.arguments[OUTCOME], arrays_of(found))
        return {}


def hired(shared: str) -> LayerWorker:
    """Return a worker for the detection whose shared folder this is."""
    folder = SharedFolder.at(shared)
    orders = LayerOrders.read(folder)
    if not Path(orders.index).is_dir():
        raise StoreError(
            f"There is no index at {orders.index} here. Workers of a detection read the index"
            " itself: put it on a disk that all of them share."
        )
    index = Index(orders.index)
    view = CorpusView.load(folder)
    return LayerWorker(LayerSight(index, view, _space(index, orders, folder)), orders, folder)


def _space(index: Index, orders: LayerOrders, shared: SharedFolder) -> TopicSpace:
    words = read_arrays(shared, SPACE)["words"]
    if orders.space == LatentSpace.name:
        return LatentSpace(words)
    from ffmem.patterns.embeddings import EmbeddingSpace

    return EmbeddingSpace(index, words.tolist())


def arrays_of(tests: LayerTests) -> Arrays:
    """Return the tests of a layer as arrays."""
    parts: dict[str, NamedTuple] = {
        "lists": tests.lists,
        "shallow": tests.shallow,
        "semantic": tests.semantic,
    }
    return {
        "layer": np.array(tests.layer),
        "n_enough": np.array(tests.n_enough),
        "words": np.array([word for words in tests.words for word in words], np.int64),
        "words bounds": np.cumsum([0, *map(len, tests.words)]),
        **{
            f"{name} {column}": np.asarray(found)
            for name, part in parts.items()
            for column, found in part._asdict().items()
        },
    }


def read_tests(arrays: Arrays) -> LayerTests:
    """Return the tests of a layer that some arrays hold."""
    words = arrays["words"].tolist()
    shallow, semantic = (
        Candidates(*(arrays[f"{name} {column}"] for column in Candidates._fields))
        for name in ("shallow", "semantic")
    )
    memory, sign, rows, fresh, top = (arrays[f"lists {column}"] for column in Lists._fields)
    return LayerTests(
        int(arrays["layer"]),
        Lists(memory, sign, rows, fresh, int(top)),
        shallow,
        [tuple(words[begin:end]) for begin, end in pairwise(arrays["words bounds"].tolist())],
        semantic,
        int(arrays["n_enough"]),
    )
