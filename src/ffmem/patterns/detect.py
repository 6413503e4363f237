"""Finding the patterns of every memory of an index without a language model.

    corpus, two passes ─► view ─► tests of each layer ─► q-values over all tests ─► patterns

A pattern is looked for in the first 25 triggers of a list and kept if the next 25, which had no
part in the choice, show it too often for chance. The same index and settings give the same bytes,
whoever examines the layers.
"""

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ffmem.cluster.crew import Crew, Recruit
from ffmem.cluster.here import Here
from ffmem.cluster.hiring import Hiring
from ffmem.cluster.leader import Leader
from ffmem.cluster.pieces import OUTCOME, Pieces, read_arrays
from ffmem.cluster.shared import SharedFolder
from ffmem.cluster.task import Task
from ffmem.errors import FfmemError, StoreError
from ffmem.indexing.store import Index
from ffmem.patterns import (
    alternatives,
    around,
    closeness,
    code_table,
    corpus_view,
    lsa,
    shallow,
    vocabulary,
)
from ffmem.patterns.chunk import SAME
from ffmem.patterns.corpus_view import look
from ffmem.patterns.detected import Detected
from ffmem.patterns.examining import TAKEN_OUT
from ffmem.patterns.kept import Writing
from ffmem.patterns.layer_worker import LayerOrders, LayerSight, LayerWorker, read_tests
from ffmem.patterns.lsa import LatentSpace
from ffmem.patterns.pattern import LEAST, TOP
from ffmem.patterns.significance import false_discovery
from ffmem.patterns.telling import Telling
from ffmem.patterns.topics import TopicSpace
from ffmem.patterns.vocabulary import Vocabulary
from ffmem.progress import Progress

SPACES = ("lsa", "minilm")

CONTROLS = 4
"""Layers whose triggers are shuffled beside a detection, to see what chance alone gives."""


def detect(
    index: Index,
    *,
    top: int = TOP,
    alpha: float = 0.05,
    seed: int = 0,
    space: str = "lsa",
    shuffled: bool = False,
    workers: int = 1,
    ray: str | None = None,
    shared: str | None = None,
    progress: Progress,
) -> Detected:
    """Return what was found in all memories; patterns are kept in the index unless shuffled.

    Shuffled, every layer's triggers are dealt to its lists at random, and nothing is kept: what is
    found then is what chance finds. With `workers`, processes of this machine share the layers,
    with `ray` actors there; they meet in `shared`, or in a temporary folder.
    """
    hiring = Hiring(workers, ray)
    _refuse(index, top, alpha, space)
    view, words = look(index, seed, progress)
    topic_space = _space(space, index, words)
    orders = LayerOrders(
        index=str(index.folder.absolute()), space=topic_space.name, top=top, seed=seed
    )
    tasks = [_task(layer, seed if shuffled else None) for layer in range(index.n_layers)]
    if not shuffled:
        n = min(CONTROLS, index.n_layers)
        tasks += [_task(place * index.n_layers // n, seed) for place in range(n)]
    with (
        _meeting(index, hiring, shared) as (folder, logs),
        _crew(hiring, logs, LayerSight(index, view, topic_space), orders, folder) as crew,
    ):
        Leader(crew, progress).lead(Pieces(folder, "patterns", "layers", tasks))
        every = [read_tests(read_arrays(folder, task.arguments[OUTCOME])) for task in tasks]
    tests, controls = every[: index.n_layers], every[index.n_layers :]
    p_values = np.concatenate(
        [part.p_value for one in tests for part in (one.shallow, one.semantic)]
    )
    q_values = false_discovery(p_values)
    telling = Telling(index, view, words, alpha)
    told = telling.patterns(tests, q_values)
    summary = telling.summary(tests, told, p_values, q_values, shuffled)
    if not shuffled:
        summary.control = telling.control(controls, summary.p_limit)
        settings = _settings(index, top, alpha, seed, topic_space) | {"found": summary.to_dict()}
        writing = Writing(index, "automatic")
        for one in tests:
            writing.layer(one.layer, telling.examined(one), told[one.layer])
        writing.commit(settings)
    return summary


def _refuse(index: Index, top: int, alpha: float, space: str) -> None:
    if not LEAST <= top <= 32:
        raise FfmemError(
            f"Patterns are looked for in {LEAST} to 32 triggers of a list, not in {top}."
        )
    if index.manifest.t <= top:
        raise FfmemError(
            f"The index keeps {index.manifest.t} triggers of each memory. Patterns are looked for"
            f" in the first {top} and tested on those beyond: index with -t {2 * top}."
        )
    if not 0 < alpha < 1:
        raise FfmemError(f"The false-discovery rate lies between 0 and 1; {alpha} was asked for.")
    if space not in SPACES:
        raise FfmemError(f"Unknown topic space {space!r}: {', '.join(SPACES)}.")


def _space(name: str, index: Index, words: Vocabulary) -> TopicSpace:
    if name == "lsa":
        return LatentSpace.fit(words)
    from ffmem.patterns.embeddings import embedding_space

    found: TopicSpace = embedding_space(index, words)
    return found


def _settings(index: Index, top: int, alpha: float, seed: int, space: TopicSpace) -> dict[str, Any]:
    """Return everything that decides what is found."""
    return {
        "source": "automatic",
        "top": top,
        "held": min(2 * top, 64, index.manifest.t) - top,
        "alpha": alpha,
        "seed": seed,
        "space": space.name,
        "least_triggers": LEAST,
        "least_held": shallow.LEAST_HELD,
        "least_lift": shallow.LEAST_LIFT,
        "choice_p_value": shallow.CHOICE,
        "common_share": shallow.COMMON,
        "same_units": SAME,
        "length_bins": code_table.BINS.tolist(),
        "sample": corpus_view.SAMPLE,
        "alternatives": {
            "most": alternatives.MOST_WORDS,
            "least_lift": alternatives.LEAST_LIFT,
            "least_held_share": alternatives.LEAST_SHARE,
        },
        "topic_shares": list(around.SHARES),
        "topic_choice_p_value": closeness.CHOICE,
        "topic_least_lift": closeness.LEAST_LIFT,
        "topic_taken_out_p_value": TAKEN_OUT,
        "topic_axes": lsa.AXES,
        "topic_neighbours": lsa.NEIGHBOURS,
        "topic_words": {
            "most": vocabulary.MOST_WORDS,
            "least_sentences": vocabulary.LEAST_SENTENCES,
            "most_share": vocabulary.MOST_SHARE,
        },
        "versions": {name: version(name) for name in ("ffmem", "numpy", "scikit-learn", "scipy")},
    }


def _task(layer: int, shuffled: int | None) -> Task:
    """Return the task of a layer; with a seed, its triggers are shuffled."""
    what, name = ("patterns", "layer") if shuffled is None else ("control", "shuffled")
    arguments = {"layer": layer, "shuffled": shuffled, OUTCOME: f"{name}-{layer:03d}.npz"}
    return Task(f"{what} of layer {layer}", "examine", 1, arguments)


@contextmanager
def _meeting(
    index: Index, hiring: Hiring, shared: str | None
) -> Iterator[tuple[SharedFolder, Path]]:
    """Give a folder where workers meet and one for their logs, and remove both in the end."""
    # Workers of a cluster see the index: so they see what stands beside it.
    beside = None if shared or hiring.ray in (None, "local") else index.folder.parent
    try:
        scratch = tempfile.TemporaryDirectory(prefix=".ffmem-detection-", dir=beside)
    except OSError as error:
        raise StoreError(
            f"Cannot make a folder in {beside or tempfile.gettempdir()}: {error.strerror}."
            " Name one that all workers see with --shared."
        ) from None
    with scratch as name:
        if shared is None:
            yield SharedFolder(Path(name)), Path(name) / "logs"
            return
        far = SharedFolder.at(shared, f"ffmem-detection-{secrets.token_hex(8)}")
        try:
            yield far, Path(name) / "logs"
        finally:
            far.clear()


@contextmanager
def _crew(
    hiring: Hiring, logs: Path, sight: LayerSight, orders: LayerOrders, shared: SharedFolder
) -> Iterator[Crew]:
    """Give those who examine layers: this process, or others that are told what it sees."""
    if hiring.is_here:
        yield Here(LayerWorker(sight, orders, shared))
        return
    orders.lay_out(shared, sight)
    recruit = Recruit("ffmem.patterns.layer_worker:hired", {"shared": shared.place})
    with hiring.crew(recruit, 1, logs) as crew:
        yield crew
