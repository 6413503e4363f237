"""Find the patterns of every memory of an index without a language model.

    corpus ─► features ─► tests of each layer ─► q-values over all tests ─► patterns

A pattern is looked for in the triggers of odd rank, and kept if those of even rank, which had no
part in the choice, show it too often for chance, and at least three of the first 25 show it. Over
all tests of all memories, the false-discovery rate is controlled (Benjamini and Hochberg 1995). The
same index and settings give the same bytes, with any number of workers.
"""

import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool
from numpy import ndarray

from ffmem.errors import FfmemError, StoreError
from ffmem.indexing.memory import visible, visible_token
from ffmem.indexing.store import Index, as_index
from ffmem.parallel import ExecutionConfig, Task, executor
from ffmem.patterns import shallow, topics
from ffmem.patterns.features import (
    GRAM,
    LAST_WORD,
    SHAPE,
    SHAPES,
    SUFFIX,
    SUFFIXES,
    TOKEN,
    CorpusFeatures,
    Vocabulary,
    extract_features,
    find_units,
    sentence_text,
)
from ffmem.patterns.shallow import (
    MIN_HELD,
    RULES,
    TOPIC,
    WORD_GROUP,
    Candidates,
    TriggerLists,
    find_shallow,
    is_minor,
    n_ranks,
    read_lists,
    select_shallow,
)
from ffmem.patterns.store import (
    KINDS,
    MIN_TRIGGERS,
    TOP_TRIGGERS,
    ExaminedList,
    Pattern,
    PatternWriter,
)
from ffmem.patterns.topics import (
    PrefixPool,
    Space,
    explained_words,
    find_topics,
    fit_space,
    name_topics,
)
from ffmem.progress import Progress
from ffmem.signatures import check_arguments
from ffmem.text import format_share

N_CONTROLS = 4
"""Layers to repeat with shuffled triggers, as a control."""

MAX_EXPLAINED_P = 0.01
"""Shallow patterns up to this p-value explain their words, which then say nothing about a topic."""


@dataclass
class DetectionResult:
    """How many lists were examined, and what was found in them."""

    shuffled: bool
    lists: int = 0
    """With at least one trigger."""
    lists_too_short_to_test: int = 0
    """Lists with too few fresh held-out triggers for a test."""
    lists_with_pattern: int = 0
    memories: int = 0
    memories_with_pattern: int = 0
    lists_by_kind: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    tested: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    """Patterns by rule."""
    p_limit: float = 0.0
    """Largest p-value that false-discovery control let pass; 0: none."""
    shuffled_control: dict[str, int] | None = None
    """The same counts of shuffled lists: lists, lists_with_pattern."""

    @property
    def share_of_lists(self) -> float | None:
        """The share of lists with a pattern."""
        return self.lists_with_pattern / self.lists if self.lists else None

    def add(self, tests: "LayerTests", kept: Candidates) -> None:
        """Count what was tested and kept in a layer."""
        lists = tests.lists
        there = (lists.rows >= 0).any(axis=1)
        self.lists += int(there.sum())
        self.lists_too_short_to_test += int((there & (lists.held.sum(axis=1) < MIN_HELD)).sum())
        self.memories += len(np.unique(lists.memory[there]))
        owners = np.unique(kept.owner)
        self.lists_with_pattern += len(owners)
        self.memories_with_pattern += len(np.unique(lists.memory[owners]))
        for kind, which in zip(KINDS, (kept.kind < TOPIC, kept.kind >= TOPIC), strict=True):
            self.lists_by_kind[kind] += len(np.unique(kept.owner[which]))
        self.tested.update(RULES[kind] for kind in tests.candidates.kind.tolist())
        self.kept.update(RULES[kind] for kind in kept.kind.tolist())

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as JSON."""
        counts = {name: dict(sorted(getattr(self, name).items())) for name in ("tested", "kept")}
        return {
            "source": "automatic",
            **vars(self),
            "share_of_lists": self.share_of_lists,
            **counts,
        }

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} in {n:,}" for kind, n in self.lists_by_kind.items())
        lines = [
            f"source: automatic{', of SHUFFLED triggers (a control)' if self.shuffled else ''}",
            f"{self.lists_with_pattern:,} of {self.lists:,} lists of triggers have a pattern"
            f" ({format_share(self.share_of_lists)}): {kinds}",
            f"{self.memories_with_pattern:,} of {self.memories:,} memories have one",
            f"{self.lists_too_short_to_test:,} lists have too few different triggers to test a"
            " pattern",
        ]
        if self.lists and self.lists_too_short_to_test == self.lists:
            lines.append(
                f"Nothing could be tested: a list needs {MIN_HELD} triggers of even rank, from"
                " different sentences. Index more sentences, or use a larger -t."
            )
            return "\n".join(lines)
        lines += [
            f"{rule:14} {self.kept[rule]:9,} kept of {tested:9,} tested"
            for rule, tested in sorted(self.tested.items())
        ]
        if self.shuffled_control is not None and self.shuffled_control["lists"]:
            found, n = self.shuffled_control["lists_with_pattern"], self.shuffled_control["lists"]
            share = format_share(found / n)
            lines.append(
                f"control: {found:,} of {n:,} lists of shuffled triggers have one ({share})"
            )
        return "\n".join(lines)


@check_arguments
def detect(
    folder: str | Path | Index,
    *,
    alpha: float = 0.05,
    seed: int = 0,
    shuffled: bool = False,
    workers: int = 1,
    ray: str | None = None,
    progress: Progress | None = None,
) -> DetectionResult:
    """Find the patterns of every memory without a language model; return a summary.

    The patterns are stored in the index.

    Args:
        folder: The index.
        alpha: False discovery rate over all memories and tests.
        seed: Random seed.
        shuffled: A control: shuffle triggers among memories, and store nothing.
        workers: Number of worker processes; with `ray`, of actors.
        ray: "local" starts Ray here, "auto" finds a running cluster; or a cluster's address.
        progress: Progress reporter. Default: none.
    """
    index, progress = as_index(folder), progress or Progress(quiet=True)
    from scipy.stats import false_discovery_control

    execution = ExecutionConfig(workers, ray)
    execution.check()
    if n_ranks(index) < 2 * MIN_HELD:
        raise FfmemError(
            f"The index keeps {index.manifest.t} triggers of each memory. Detection searches one"
            f" half of them and tests on the other half, which needs at least {MIN_HELD}: index"
            " with"
            f" -t {2 * TOP_TRIGGERS}."
        )
    if not 0 < alpha < 1:
        raise FfmemError(
            f"alpha {alpha} is out of range; the false discovery rate is between 0 and 1."
        )
    features, vocabulary = extract_features(index, seed, progress)
    layers = index.layout.memory_layers
    tasks = [(layer, shuffled) for layer in layers]
    if not shuffled:
        n = min(N_CONTROLS, len(layers))
        tasks += [(layers[place * len(layers) // n], True) for place in range(n)]
    space = fit_space(vocabulary)
    every = examine_layers(index, features, space, tasks, seed, execution, progress)
    tests, controls = every[: len(layers)], every[len(layers) :]
    p_values = np.concatenate([one.candidates.p_value for one in tests])
    q_values = false_discovery_control(p_values) if len(p_values) else p_values
    ends = np.cumsum([len(one.candidates.p_value) for one in tests])[:-1]
    summary = DetectionResult(shuffled, p_limit=float(p_values[q_values <= alpha].max(initial=0.0)))
    kept = []
    for one, q_value in zip(tests, np.split(q_values, ends), strict=True):
        tested = one._replace(candidates=one.candidates._replace(q_value=q_value))
        kept.append(tested._replace(candidates=choose(features, tested, q_value <= alpha)))
        summary.add(tested, kept[-1].candidates)
    if shuffled:
        return summary
    control = DetectionResult(shuffled=True)
    for one in controls:
        control.add(one, choose(features, one, one.candidates.p_value <= summary.p_limit))
    summary.shuffled_control = {
        "lists": control.lists,
        "lists_with_pattern": control.lists_with_pattern,
    }
    namer = PatternNamer(index, features, vocabulary, kept)
    writer = PatternWriter(index, "automatic")
    for one in kept:
        writer.layer(one.layer, _examined(index, one), namer.patterns(one))
    writer.commit(
        {
            "source": "automatic",
            "top": TOP_TRIGGERS,
            "split": "odd ranks against even",
            "alpha": alpha,
            "seed": seed,
            "versions": {
                name: version(name) for name in ("ffmem", "numpy", "scikit-learn", "scipy")
            },
            "found": summary.to_dict(),
        }
    )
    return summary


# Examining a layer


class LayerTests(NamedTuple):
    """The lists of one layer, and what was tested in them; or what was kept of it."""

    layer: int
    lists: TriggerLists
    candidates: Candidates
    """Shallow ones, then topics."""


def examine_layer(
    index: Index, features: CorpusFeatures, space: Space, layer: int, shuffled: bool, seed: int
) -> LayerTests:
    """Return the tests of a layer: shallow candidates first, then topics in what they leave.

    With `shuffled`, the layer's triggers are shuffled among its lists first.

    Which shallow patterns explain a trigger's words is decided here, at a fixed p-value: the
    false-discovery control comes after, over all tests of all layers together.
    """
    from threadpoolctl import threadpool_limits

    lists = read_lists(index, features, layer, seed if shuffled else None)
    with threadpool_limits(1):  # the same sums in the same order, on any machine
        found = find_shallow(features, lists)
        holds = found.holds(shallow.MIN_LIFT) & (found.p_value <= MAX_EXPLAINED_P)
        patterns = found.where(select_shallow(lists, found, holds))
        explained = explained_words(features, lists, patterns, len(space))
        sample = PrefixPool.of(features, space, features.sample)
        semantic = find_topics(features, lists, space, explained, sample, seed + layer)
    return LayerTests(layer, lists, Candidates.join([found, semantic]))


def examine_layers(
    index: Index,
    features: CorpusFeatures,
    space: Space,
    tasks: Sequence[tuple[int, bool]],
    seed: int,
    execution: ExecutionConfig,
    progress: Progress,
) -> list[LayerTests]:
    """Return the tests of some layers, given as (layer, shuffled), in order."""
    with progress.bar("Patterns", len(tasks), "layers") as step:
        if execution.is_serial:
            tests = []
            for layer, shuffled in tasks:
                tests.append(examine_layer(index, features, space, layer, shuffled, seed))
                step(1)
            return tests
        with _scratch_folder(index, execution) as folder:
            features.save(folder)
            np.save(folder / "space.npy", space, allow_pickle=False)
            make = partial(LayerWorker, str(folder), str(index.folder.absolute()), seed)
            calls = [
                Task(
                    f"the patterns of layer {layer}{' in shuffled triggers' if shuffled else ''}",
                    "examine",
                    (layer, shuffled),
                )
                for layer, shuffled in tasks
            ]
            with executor(execution, make, progress) as pool:
                pool.run(calls, step)
            return [
                LayerTests(
                    layer,
                    read_lists(index, features, layer, seed if shuffled else None),
                    load_candidates(folder, layer, shuffled),
                )
                for layer, shuffled in tasks
            ]


class LayerWorker:
    """Examines layers in a process of its own.

    It reads the triggers of the index itself, gets the features and the topic space from files in
    the scratch folder, and leaves the candidates of each layer there.
    """

    def __init__(self, folder: str, index: str, seed: int) -> None:
        self.folder, self.seed = Path(folder), seed
        if not Path(index).is_dir() or not self.folder.is_dir():
            raise StoreError(
                f"There is no index at {index} here. Workers read the index itself: put it on a"
                " disk that all of them share."
            )
        self.index = Index(index)
        self.features = CorpusFeatures.load(self.folder)
        self.space = np.load(self.folder / "space.npy", allow_pickle=False)

    def examine(self, layer: int, shuffled: bool) -> None:
        """Leave the candidates of a layer in the scratch folder."""
        tests = examine_layer(self.index, self.features, self.space, layer, shuffled, self.seed)
        path = _candidates_file(self.folder, layer, shuffled)
        temporary = path.with_name(f".{path.name}")
        np.savez(temporary, allow_pickle=False, **tests.candidates._asdict())
        temporary.replace(path)

    def flush(self) -> None:
        """Do nothing: every result is written at once."""


def load_candidates(folder: Path, layer: int, shuffled: bool) -> Candidates:
    """Return the candidates that a worker has left."""
    with np.load(_candidates_file(folder, layer, shuffled), allow_pickle=False) as arrays:
        return Candidates(**arrays)


def _candidates_file(folder: Path, layer: int, shuffled: bool) -> Path:
    return folder / f"{'shuffled' if shuffled else 'layer'}-{layer:03d}.npz"


@contextmanager
def _scratch_folder(index: Index, execution: ExecutionConfig) -> Iterator[Path]:
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


# From tests to patterns


def choose(
    features: CorpusFeatures, tests: LayerTests, passes: Bool[ndarray, " candidate"]
) -> Candidates:
    """Return what becomes a pattern, of the candidates that passed a test.

    A content word that fewer than half of the triggers contain, most of them about a topic that is
    a pattern, is one of the words of that topic.
    """
    lists, found = tests.lists, tests.candidates
    is_topic = found.kind >= TOPIC
    often = (found.shown & lists.first[found.owner]).sum(axis=1) >= MIN_TRIGGERS
    kept = (is_topic & often & passes & found.holds(topics.MIN_LIFT)).nonzero()[0]
    about = np.zeros(lists.rows.shape, bool)
    np.logical_or.at(about, found.owner[kept], found.shown[kept])
    n_inside = (found.shown & about[found.owner]).sum(axis=1)
    of_topic = is_minor(features, found) & (2 * n_inside >= found.shown.sum(axis=1))
    holds = ~is_topic & passes & found.holds(shallow.MIN_LIFT) & ~of_topic
    return found.where(np.concatenate([select_shallow(lists, found, holds), kept]))


def _examined(index: Index, tests: LayerTests) -> list[ExaminedList]:
    """Return the lists of a layer that have a trigger."""
    lists = tests.lists
    n = (lists.rows[:, :TOP_TRIGGERS] >= 0).sum(axis=1).tolist()
    pairs = zip(lists.memory.tolist(), lists.sign.tolist(), n, strict=True)
    cell = index.layout.cell
    return [ExaminedList(cell(tests.layer, memory), sign, k) for memory, sign, k in pairs if k]


# Names

_SIGN_NAMES = {
    ",": "a comma",
    ".": "a period",
    "(": "an opening bracket",
    ")": "a closing bracket",
    '"': "a quotation mark",
    ":": "a colon",
    ";": "a semicolon",
    "-": "a hyphen",
    "–": "a dash",
    "'": "an apostrophe",
}


Occurrence = tuple[int, int]
"""Where a feature occurs in the corpus: its kind, and the row that ends with it; for a gram the
feature."""


class PatternNamer:
    """Describes the chosen patterns of all layers by the text of the corpus."""

    def __init__(
        self,
        index: Index,
        features: CorpusFeatures,
        vocabulary: Vocabulary,
        kept: Sequence[LayerTests],
    ) -> None:
        self.index, self.features, self.vocabulary = index, features, vocabulary
        self.places = {
            one.layer: [self._places(one, place) for place in range(len(one.candidates.owner))]
            for one in kept
        }
        every = {place for layer in self.places.values() for each in layer for place in each}
        self.texts = self._read_texts(every)

    def patterns(self, kept: LayerTests) -> list[Pattern]:
        """Return the patterns of a layer, those of a list numbered from the best."""
        lists, some = kept.lists, kept.candidates
        n_shallow = int((some.kind < TOPIC).sum())
        what = list(map(self._what, some.kind.tolist(), self.places[kept.layer]))
        said: dict[int, set[str]] = {}
        for owner, text in zip(some.owner.tolist(), what[:n_shallow], strict=False):
            said.setdefault(owner, set()).update(re.findall(r"\w+", text.casefold()))
        semantic = some.where(np.arange(n_shallow, len(what)))
        words_said = [said.get(owner, set()) for owner in semantic.owner.tolist()]
        named = name_topics(self.features, self.vocabulary, lists, semantic, words_said)
        what[n_shallow:] = [", ".join(words) for words in named]
        held = some.shown & lists.held[some.owner]
        surprises, found = some.surprise, []
        order = np.lexsort(
            (np.array(what), -surprises, -lists.sign[some.owner], lists.memory[some.owner])
        )
        n_of: Counter[int] = Counter()
        for place in order.tolist():
            owner, kind = int(some.owner[place]), int(some.kind[place])
            n_of[owner] += 1
            found.append(
                Pattern(
                    cell=self.index.layout.cell(kept.layer, int(lists.memory[owner])),
                    sign=int(lists.sign[owner]),
                    number=n_of[owner],
                    kind=KINDS[kind >= TOPIC],
                    description=_describe(kind, what[place]),
                    rule=RULES[kind],
                    what=what[place],
                    ranks=_ranks(some.shown[place]),
                    held_ranks=_ranks(held[place]),
                    held=int(some.n_held[place]),
                ).with_scores(
                    float(some.base[place]),
                    float(some.p_value[place]),
                    float(some.q_value[place]),
                )
            )
        return found

    def _places(self, kept: LayerTests, place: int) -> list[Occurrence]:
        """Return where the features of a candidate are: in the first trigger that shows each."""
        some = kept.candidates
        kind, feature = int(some.kind[place]), int(some.feature[place])
        if GRAM <= kind < SHAPE:
            return [(kind, feature)]
        if kind == WORD_GROUP:
            kind, wanted = LAST_WORD, some.words[place].tolist()
        elif kind < GRAM:
            wanted = [feature]
        else:
            return []
        rows = kept.lists.rows[some.owner[place]]
        shown = np.where(rows >= 0, self.features.endings[np.maximum(rows, 0), kind], -1)
        return [(kind, int(rows[(shown == one).argmax()])) for one in wanted if one >= 0]

    def _read_texts(self, places: set[Occurrence]) -> dict[Occurrence, str]:
        """Return what is in some places, as it is written there."""
        features, index = self.features, self.index
        by_sentence: dict[int, list[Occurrence]] = {}
        for kind, at in places:
            owner = features.examples[at, 0] if kind >= GRAM else features.sentence[at]
            by_sentence.setdefault(int(owner), []).append((kind, at))
        found = {}
        for row in index.sentences.rows(0, index.sentences.n_sentences if places else 0):
            text, ends = sentence_text(index, row) if row.sentence in by_sentence else ("", [])
            for kind, at in by_sentence.get(row.sentence, ()):
                length = int(features.length[at]) if kind < GRAM else 0
                shown = text[: ends[length - 1]] if length else ""
                if kind >= GRAM:
                    _, begin, end = features.examples[at].tolist()
                    found[kind, at] = text[begin:end]
                elif kind >= SUFFIX:
                    found[kind, at] = shown.rstrip().casefold()[-SUFFIXES[kind - SUFFIX] :]
                elif kind >= LAST_WORD:
                    found[kind, at] = shown[find_units(shown)[-kind][0] :].strip()
                else:
                    found[kind, at] = index.token(row.ids[length - 1])
        return found

    def _what(self, kind: int, places: Sequence[Occurrence]) -> str:
        """Return what the rule of a shallow pattern looks for."""
        if SHAPE <= kind < WORD_GROUP:
            return SHAPES[kind - SHAPE].name
        texts = sorted((self.texts[place] for place in places), key=str.casefold)
        if kind != WORD_GROUP:
            return texts[0] if texts else ""
        return ", ".join(text if text[:1].isalnum() else f"“{text}”" for text in texts)


def _describe(kind: int, what: str) -> str:
    """Return a pattern in words."""
    if SHAPE <= kind < WORD_GROUP:
        return SHAPES[kind - SHAPE].description
    if kind == TOKEN:
        return f"ends with the token “{visible_token(what)}”"
    if kind >= TOPIC:
        return f"about: {what}"
    what = visible(what)
    if kind == WORD_GROUP:
        return f"ends with one of: {what}"
    if kind >= GRAM:
        return f"contains “{what}”"
    if kind >= SUFFIX:
        return f"ends with a word in -{what}"
    name = f" ({_SIGN_NAMES[what]})" if what in _SIGN_NAMES else ""
    return f"ends with “{what}”{name}"


def _ranks(shown: Bool[ndarray, " rank"]) -> tuple[int, ...]:
    return tuple((np.flatnonzero(shown) + 1).tolist())
