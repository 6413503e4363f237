"""Finding the patterns of every memory of an index without a language model.

    corpus, two passes ─► view ─► tests of each layer ─► q-values over all tests ─► patterns

A pattern is looked for in the triggers of odd rank and kept if those of even rank, which had no
part in the choice, show it too often for chance, and at least three of the first 25 show it. The
same index and settings give the same bytes, whoever examines the layers.
"""

from importlib.metadata import version
from typing import Any

import numpy as np

from ffmem.errors import FfmemError
from ffmem.indexing.store import Index
from ffmem.parallel import ExecutionConfig
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
from ffmem.patterns.layer_worker import Examination, LayerExaminer, examine_layers
from ffmem.patterns.lists import n_ranks
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
    progress: Progress,
) -> Detected:
    """Return what was found in all memories; patterns are kept in the index unless shuffled.

    Shuffled, every layer's triggers are dealt to its lists at random, and nothing is kept: what is
    found then is what chance finds. With `workers`, processes of this machine share the layers,
    with `ray` actors there, which must see the folder of the index.
    """
    execution = ExecutionConfig(workers, ray)
    execution.check()
    _refuse(index, top, alpha, space)
    view, words = look(index, seed, progress)
    topic_space = _space(space, index, words)
    layers = index.layout.memory_layers
    asked = [Examination(layer, seed if shuffled else None) for layer in layers]
    if not shuffled:
        n = min(CONTROLS, len(layers))
        asked += [Examination(layers[place * len(layers) // n], seed) for place in range(n)]
    examiner = LayerExaminer(index, view, topic_space, top, seed)
    every = examine_layers(examiner, asked, execution, progress)
    tests, controls = every[: len(layers)], every[len(layers) :]
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
    if n_ranks(index, top) < 2 * shallow.LEAST_HELD:
        raise FfmemError(
            f"The index keeps {index.manifest.t} triggers of each memory. Patterns are looked for"
            f" in half of them and tested on the other half, of at least {shallow.LEAST_HELD}:"
            f" index with -t {2 * top}."
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
        "split": "odd ranks against even",
        "held": n_ranks(index, top) // 2,
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
