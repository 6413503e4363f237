"""Examining the layers of an index: in this process, or by workers that share them.

Every worker finds the same in a layer. Workers read the index's own triggers: they must see its
folder. They get the corpus view and the topic space through files in a scratch folder, and leave
the tests of each layer there.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ffmem.errors import StoreError
from ffmem.indexing.store import Index
from ffmem.parallel import ExecutionConfig, Task, executor
from ffmem.patterns.around import Around
from ffmem.patterns.corpus_view import CorpusView
from ffmem.patterns.examining import LayerTests, examine
from ffmem.patterns.lists import Lists, read_lists
from ffmem.patterns.lsa import LatentSpace
from ffmem.patterns.shallow import Candidates
from ffmem.patterns.topics import Arrays, TopicSpace
from ffmem.progress import Progress

SPACE = "space.npz"


class Examination(NamedTuple):
    """Which layer to examine."""

    layer: int
    shuffled: int | None = None
    """Shuffle the layer's triggers among its lists, with this seed: what chance finds."""

    @property
    def file(self) -> str:
        """Where a worker leaves the tests."""
        return f"{'layer' if self.shuffled is None else 'shuffled'}-{self.layer:03d}.npz"


@dataclass(frozen=True)
class LayerExaminer:
    """Examines layers of one index."""

    index: Index
    view: CorpusView
    space: TopicSpace
    top: int
    seed: int

    @cached_property
    def around(self) -> Around:
        """How close random prefixes are to each other in the topic space."""
        return Around.of(self.view, self.space, self.view.sample)

    def examine(self, asked: Examination) -> LayerTests:
        """Return the tests of a layer."""
        from threadpoolctl import threadpool_limits

        lists = read_lists(self.index, self.view, asked.layer, self.top, asked.shuffled)
        with threadpool_limits(1):  # the same sums in the same order, on any machine
            return examine(
                self.view, lists, asked.layer, self.space, self.around, self.seed + asked.layer
            )


def examine_layers(
    examiner: LayerExaminer,
    asked: Sequence[Examination],
    execution: ExecutionConfig,
    progress: Progress,
) -> list[LayerTests]:
    """Return the tests of some layers, in order."""
    with progress.bar("Patterns", len(asked), "layers") as step:
        if execution.is_serial:
            found = []
            for one in asked:
                found.append(examiner.examine(one))
                step(1)
            return found
        with _scratch(examiner.index, execution) as folder:
            examiner.view.save(folder)
            np.savez(folder / SPACE, allow_pickle=False, **examiner.space.arrays())
            make = partial(
                make_worker,
                folder=str(folder),
                index=str(examiner.index.folder.absolute()),
                space=examiner.space.name,
                top=examiner.top,
                seed=examiner.seed,
            )
            tasks = [Task(f"the patterns of layer {one.layer}", "examine", one) for one in asked]
            with executor(execution, make, progress) as workers:
                workers.run(tasks, step)
            return [_tests(_read_arrays(folder / one.file)) for one in asked]


@contextmanager
def _scratch(index: Index, execution: ExecutionConfig) -> Iterator[Path]:
    """Give a temporary folder that all workers see: on a cluster, they see the index's parent."""
    beside = None if execution.ray in (None, "local") else index.folder.absolute().parent
    try:
        scratch = tempfile.TemporaryDirectory(prefix=".ffmem-detect-", dir=beside)
    except OSError as error:
        raise StoreError(
            f"Cannot create a folder in {beside or tempfile.gettempdir()}: {error.strerror}."
            " Workers need one that all of them see."
        ) from None
    with scratch as name:
        yield Path(name)


class LayerWorker:
    """Examines layers in a process of its own."""

    def __init__(self, examiner: LayerExaminer, folder: Path) -> None:
        self.examiner = examiner
        self.folder = folder

    def examine(self, layer: int, shuffled: int | None) -> None:
        """Leave the tests of a layer in the scratch folder."""
        asked = Examination(layer, shuffled)
        arrays = _arrays(self.examiner.examine(asked))
        temporary = self.folder / f".{asked.file}"
        np.savez(temporary, allow_pickle=False, **arrays)
        temporary.replace(self.folder / asked.file)

    def flush(self) -> None:
        """Do nothing: every result is written at once."""


def make_worker(folder: str, index: str, space: str, top: int, seed: int) -> LayerWorker:
    """Return a worker for the detection whose scratch folder this is."""
    if not Path(index).is_dir() or not Path(folder).is_dir():
        raise StoreError(
            f"There is no index at {index} here. Workers read the index itself: put it on a disk"
            " that all of them share."
        )
    opened, view = Index(index), CorpusView.load(Path(folder))
    words = _read_arrays(Path(folder) / SPACE)["words"]
    topics: TopicSpace
    if space == LatentSpace.name:
        topics = LatentSpace(words)
    else:
        from ffmem.patterns.embeddings import EmbeddingSpace

        topics = EmbeddingSpace(opened, words.tolist())
    return LayerWorker(LayerExaminer(opened, view, topics, top, seed), Path(folder))


def _read_arrays(path: Path) -> Arrays:
    with np.load(path, allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def _arrays(tests: LayerTests) -> Arrays:
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


def _tests(arrays: Arrays) -> LayerTests:
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
