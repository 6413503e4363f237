"""Finding the patterns of every memory of an index without a language model.

    corpus, two passes ─► view ─► tests of each layer ─► q-values over all tests ─► patterns

A pattern is looked for in the first 25 triggers of a list and kept if the next 25, which had no
part in the choice, show it too often for chance. The same index and settings give the same bytes,
whatever the number of processes.
"""

import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np

from ffmem.errors import FfmemError
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
from ffmem.patterns.around import Around
from ffmem.patterns.chunk import SAME
from ffmem.patterns.corpus_view import CorpusView, look
from ffmem.patterns.detected import Detected
from ffmem.patterns.examining import TAKEN_OUT, LayerTests, examine
from ffmem.patterns.kept import Writing
from ffmem.patterns.lists import read_lists
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
    progress: Progress,
) -> Detected:
    """Return what was found in all memories; patterns are kept in the index unless shuffled.

    Shuffled, every layer's triggers are dealt to its lists at random, and nothing is kept: what is
    found then is what chance finds.
    """
    _refuse(index, top, alpha, space, workers)
    view, words = look(index, seed, progress)
    topic_space = _space(space, index, words)
    layers = [(layer, seed if shuffled else None) for layer in range(index.n_layers)]
    if not shuffled:
        n = min(CONTROLS, index.n_layers)
        layers += [(place * index.n_layers // n, seed) for place in range(n)]
    with _examining(index, view, topic_space, top, seed, workers) as run:
        tests: list[LayerTests] = []
        controls: list[LayerTests] = []
        with progress.bar("patterns", len(layers), "layers") as step:
            for place, found in enumerate(run(layers)):
                (tests if place < index.n_layers else controls).append(found)
                step(1)
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


def _refuse(index: Index, top: int, alpha: float, space: str, workers: int) -> None:
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
    if workers < 1:
        raise FfmemError(f"At least one process is needed; {workers} were asked for.")


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


@contextmanager
def _examining(
    index: Index, view: CorpusView, space: TopicSpace, top: int, seed: int, workers: int
) -> Iterator[Any]:
    """Give a function that examines (layer, shuffled seed) pairs in order, here or beside."""
    with tempfile.TemporaryDirectory() as name:
        view.save(Path(name))
        # Arrays are mapped from the disk by all; the space, which is small, goes along.
        arguments = (str(index.folder), name, space, top, seed)
        if workers == 1:
            _prepare(*arguments)
            yield lambda layers: map(_examine, layers)
            return
        with ProcessPoolExecutor(
            workers, get_context("spawn"), initializer=_begin, initargs=arguments
        ) as pool:
            yield lambda layers: pool.map(_examine, layers)


_here: dict[str, Any] = {}
"""What this process examines."""


def _begin(*arguments: Any) -> None:
    """Prepare a process that ends when the one that started it does, however that ends."""

    def end_with_parent() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    _prepare(*arguments)


def _prepare(folder: str, scratch: str, space: TopicSpace, top: int, seed: int) -> None:
    view = CorpusView.load(Path(scratch))
    _here.update(index=Index(folder), view=view, space=space, top=top, seed=seed)
    _here.update(around=Around.of(view, space, view.sample))


def _examine(asked: tuple[int, int | None]) -> LayerTests:
    from threadpoolctl import threadpool_limits

    layer, shuffled = asked
    view = _here["view"]
    lists = read_lists(_here["index"], view, layer, _here["top"], shuffled)
    with threadpool_limits(1):  # the same sums in the same order, on any machine
        return examine(view, lists, layer, _here["space"], _here["around"], _here["seed"] + layer)
