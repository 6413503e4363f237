"""Find the patterns of every memory of an index without a language model.

    corpus ─► features ─► tests of each layer ─► q-values over all tests ─► patterns

A pattern is looked for in the triggers of odd rank, and kept if those of even rank, which had no
part in the choice, show it too often for chance, and at least three of the first 25 show it. Over
all tests of all memories, the false-discovery rate is controlled (Benjamini and Hochberg 1995). The
same index and settings give the same bytes, whoever examines the layers.
"""

import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64
from numpy import ndarray

from ffmem.errors import FfmemError, StoreError
from ffmem.indexing.memory import visible, visible_token
from ffmem.indexing.store import Index
from ffmem.parallel import ExecutionConfig, Task, executor
from ffmem.patterns import features as corpus_features
from ffmem.patterns import shallow, topics
from ffmem.patterns.features import (
    GRAM,
    LAST_WORD,
    N_WORDS,
    SHAPES,
    TOKEN,
    CorpusFeatures,
    Vocabulary,
    extract_features,
    sentence_text,
)
from ffmem.patterns.shallow import (
    MIN_HELD,
    Candidates,
    TriggerLists,
    as_marks,
    find_shallow,
    is_content_word,
    n_ranks,
    read_lists,
    rule_of,
    select_shallow,
    shallow_holds,
)
from ffmem.patterns.store import KINDS, LEAST, TOP, Examined, Pattern, PatternWriter
from ffmem.patterns.topics import (
    EmbeddingSpace,
    LatentSpace,
    TopicSpace,
    UsualPrefixes,
    find_topics,
    name_topics,
)
from ffmem.progress import Progress
from ffmem.text import format_share

SPACES = ("lsa", "minilm")

N_CONTROLS = 4
"""Layers whose triggers are shuffled beside a detection, to see what chance alone finds."""

MAX_REMOVED_P = 0.01
"""p-value of shallow patterns whose words say nothing about a list's topic."""

LIST_WORDS = 8
"""Words of grams removed from all triggers of a list, at most."""


@dataclass
class Detected:
    """How many lists were examined, and what was found in them."""

    shuffled: bool
    lists: int = 0
    """With at least one trigger."""
    too_short: int = 0
    """Of these, lists with too few fresh held-out triggers for a test."""
    memories: int = 0
    lists_with_pattern: int = 0
    memories_with_pattern: int = 0
    tested: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    """Patterns by rule."""
    lists_by_kind: Counter[str] = field(default_factory=Counter)
    p_limit: float = 0.0
    """Largest p-value that false-discovery control let pass; 0: none."""
    control: dict[str, int] | None = None
    """Of shuffled lists under the same limit: lists, lists_with_pattern."""

    @property
    def share(self) -> float | None:
        """The share of lists with a pattern."""
        return self.lists_with_pattern / self.lists if self.lists else None

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as JSON."""
        return {
            "source": "automatic",
            "shuffled": self.shuffled,
            "lists": self.lists,
            "lists_too_short_to_test": self.too_short,
            "lists_with_pattern": self.lists_with_pattern,
            "share_of_lists": self.share,
            "memories": self.memories,
            "memories_with_pattern": self.memories_with_pattern,
            "lists_by_kind": {kind: self.lists_by_kind[kind] for kind in KINDS},
            "tested": dict(sorted(self.tested.items())),
            "kept": dict(sorted(self.kept.items())),
            "p_limit": self.p_limit,
            "shuffled_control": self.control,
        }

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} in {self.lists_by_kind[kind]:,}" for kind in KINDS)
        lines = [
            f"source: automatic{', of SHUFFLED triggers (a control)' if self.shuffled else ''}",
            f"{self.lists_with_pattern:,} of {self.lists:,} lists of triggers have a pattern"
            f" ({format_share(self.share)}): {kinds}",
            f"{self.memories_with_pattern:,} of {self.memories:,} memories have one",
            f"{self.too_short:,} lists have too few different triggers to test a pattern; they"
            " have none",
        ]
        if self.lists and self.too_short == self.lists:
            lines.append(
                f"Nothing could be tested: a list needs {MIN_HELD} triggers of even rank, of"
                " different sentences. Index more sentences, or with a larger -t."
            )
            return "\n".join(lines)
        lines += [
            f"{rule:14} {self.kept[rule]:9,} kept of {tested:9,} tested"
            for rule, tested in sorted(self.tested.items())
        ]
        if self.control is not None and self.control["lists"]:
            found, n = self.control["lists_with_pattern"], self.control["lists"]
            share = format_share(found / n)
            lines.append(
                f"control: {found:,} of {n:,} lists of shuffled triggers have one ({share})"
            )
        return "\n".join(lines)


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
    """Find the patterns of all memories and store them in the index; return a summary.

    With `shuffled`, every layer's triggers are dealt to its lists at random, and nothing is stored:
    what is found then is what chance finds. With `workers`, processes of this machine share the
    layers, with `ray` actors there, which must see the folder of the index.
    """
    execution = ExecutionConfig(workers, ray)
    execution.check()
    _check_options(index, top, alpha, space)
    features, vocabulary = extract_features(index, seed, progress)
    topic_space: TopicSpace = (
        LatentSpace.fit(vocabulary) if space == "lsa" else EmbeddingSpace(index, vocabulary.words)
    )
    layers = index.layout.memory_layers
    tasks = [LayerTask(layer, seed if shuffled else None) for layer in layers]
    if not shuffled:
        n = min(N_CONTROLS, len(layers))
        tasks += [LayerTask(layers[place * len(layers) // n], seed) for place in range(n)]
    examiner = LayerExaminer(index, features, topic_space, top, seed)
    every = examine_layers(examiner, tasks, execution, progress)
    tests, controls = every[: len(layers)], every[len(layers) :]
    q_values = _q_values(tests)
    found = [
        choose(features, one, q.shallow <= alpha, q.semantic <= alpha)
        for one, q in zip(tests, q_values, strict=True)
    ]
    summary = _summarise(features, tests, found, q_values, alpha, shuffled)
    if shuffled:
        return summary
    summary.control = _count_controls(features, controls, summary.p_limit)
    namer = PatternNamer(index, features, vocabulary, tests, found)
    writer = PatternWriter(index, "automatic")
    for one, chosen, q in zip(tests, found, q_values, strict=True):
        writer.layer(one.layer, _examined(index, one), namer.patterns(one, chosen, q))
    settings = _settings(index, top, alpha, seed, topic_space)
    writer.commit(settings | {"found": summary.to_dict()})
    return summary


def _check_options(index: Index, top: int, alpha: float, space: str) -> None:
    if not LEAST <= top <= 32:
        raise FfmemError(f"top {top} is out of range; use {LEAST} to 32 triggers.")
    if n_ranks(index, top) < 2 * MIN_HELD:
        raise FfmemError(
            f"The index keeps {index.manifest.t} triggers of each memory. Patterns are looked for"
            f" in half of them and tested on the other half, of at least {MIN_HELD}: index with"
            f" -t {2 * top}."
        )
    if not 0 < alpha < 1:
        raise FfmemError(
            f"alpha {alpha} is out of range; the false discovery rate is between 0 and 1."
        )
    if space not in SPACES:
        raise FfmemError(f"Unknown topic space {space!r}: {', '.join(SPACES)}.")


def _settings(index: Index, top: int, alpha: float, seed: int, space: TopicSpace) -> dict[str, Any]:
    """Return everything that decides what is found."""
    constants = {
        module.__name__.rpartition(".")[2]: {
            name.lower(): value.tolist() if isinstance(value, ndarray | np.generic) else value
            for name, value in vars(module).items()
            if name.isupper() and isinstance(value, int | float | ndarray | np.generic)
        }
        for module in (corpus_features, shallow, topics)
    }
    return {
        "source": "automatic",
        "top": top,
        "split": "odd ranks against even",
        "held": n_ranks(index, top) // 2,
        "alpha": alpha,
        "seed": seed,
        "space": space.name,
        "constants": constants,
        "versions": {name: version(name) for name in ("ffmem", "numpy", "scikit-learn", "scipy")},
    }


# Examining a layer


class LayerTask(NamedTuple):
    """A layer to examine."""

    layer: int
    shuffle_seed: int | None = None
    """Shuffle the layer's triggers among its lists: what chance finds."""

    @property
    def file(self) -> str:
        """Where a worker leaves the tests."""
        return f"{'layer' if self.shuffle_seed is None else 'shuffled'}-{self.layer:03d}.npz"


@dataclass(frozen=True)
class LayerTests:
    """Everything that was tested in one layer."""

    layer: int
    lists: TriggerLists
    shallow: Candidates
    semantic: Candidates


@dataclass(frozen=True)
class LayerExaminer:
    """Examines layers of one index."""

    index: Index
    features: CorpusFeatures
    space: TopicSpace
    top: int
    seed: int

    @cached_property
    def usual(self) -> UsualPrefixes:
        """How close random prefixes are to each other in the topic space."""
        return UsualPrefixes.of(self.features, self.space, self.features.sample)

    def lists(self, task: LayerTask) -> TriggerLists:
        """Return the trigger lists of a layer."""
        return read_lists(self.index, self.features, task.layer, self.top, task.shuffle_seed)

    def examine(self, task: LayerTask) -> LayerTests:
        """Return the tests of a layer: shallow candidates first, then topics in what they leave.

        Which shallow patterns are removed before topics are looked for is decided here, at a fixed
        p-value: the false-discovery control comes after, over all tests of all layers together.
        """
        from threadpoolctl import threadpool_limits

        features, lists = self.features, self.lists(task)
        with threadpool_limits(1):  # the same sums in the same order, on any machine
            found = find_shallow(features, lists)
            holds = shallow_holds(features, found) & (found.p_value <= MAX_REMOVED_P)
            explained = found.where(select_shallow(features, lists, found, holds))
            removed = _removed_words(features, lists, explained)
            seed = self.seed + task.layer
            semantic = find_topics(features, lists, self.space, removed, self.usual, seed)
        return LayerTests(task.layer, lists, found, semantic)


def _removed_words(
    features: CorpusFeatures, lists: TriggerLists, found: Candidates
) -> Int32[ndarray, "list rank slot"]:
    """Return the words of each trigger that shallow patterns explain.

    What ends a prefix is removed from the triggers that show it, a gram from all triggers of the
    list. A content word by itself is removed only where at least half of the triggers contain it:
    else it is one of the words that may make a topic.
    """
    n_lists, n_ranks = lists.rows.shape
    removed = np.full((n_lists, n_ranks, N_WORDS + LIST_WORDS), -1, np.int32)
    used = np.zeros(n_lists, np.int64)
    minor = _is_minor(features, found)
    marked = shallow.as_ranks(found.marks, n_ranks)
    for place, (owner, entry) in enumerate(
        zip(found.owner.tolist(), found.entry.tolist(), strict=True)
    ):
        kind = int(features.kinds[entry]) if 0 <= entry < len(features.kinds) else LAST_WORD
        if kind >= GRAM:
            words = features.entry_words[entry]
            for word in words[words >= 0].tolist() if not minor[place] else ():
                if used[owner] < LIST_WORDS:
                    removed[owner, :, N_WORDS + used[owner]] = word
                    used[owner] += 1
        elif entry >= 0 or SHAPES[-1 - entry].about_word:
            n_words = kind if 1 <= kind <= N_WORDS else 1
            shown = marked[place]
            rows = lists.rows[owner, shown]
            removed[owner, shown, :n_words] = features.last_words[rows, :n_words]
    return removed


def _is_minor(features: CorpusFeatures, found: Candidates) -> Bool[ndarray, " candidate"]:
    """Return which candidates are content words in fewer than half of the triggers."""
    minor: ndarray = is_content_word(features, found.entry) & (2 * found.k_seen < found.n_seen)
    return minor


# Workers. They read the index's own triggers, so they must see its folder. They get the features
# and the topic space through files in a scratch folder, and leave the tests of each layer there.


def examine_layers(
    examiner: LayerExaminer,
    tasks: Sequence[LayerTask],
    execution: ExecutionConfig,
    progress: Progress,
) -> list[LayerTests]:
    """Return the tests of some layers, in order."""
    with progress.bar("Patterns", len(tasks), "layers") as step:
        if execution.is_serial:
            found = []
            for task in tasks:
                found.append(examiner.examine(task))
                step(1)
            return found
        with _scratch_folder(examiner.index, execution) as folder:
            examiner.features.save(folder)
            np.save(folder / "space.npy", examiner.space.words, allow_pickle=False)
            make = partial(
                make_worker,
                folder=str(folder),
                index=str(examiner.index.folder.absolute()),
                space=examiner.space.name,
                top=examiner.top,
                seed=examiner.seed,
            )
            calls = [Task(f"the patterns of layer {one.layer}", "examine", one) for one in tasks]
            with executor(execution, make, progress) as pool:
                pool.run(calls, step)
            return [load_tests(folder, examiner, task) for task in tasks]


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


class LayerWorker:
    """Examines layers in a process of its own."""

    def __init__(self, examiner: LayerExaminer, folder: Path) -> None:
        self.examiner = examiner
        self.folder = folder

    def examine(self, layer: int, shuffle_seed: int | None) -> None:
        """Leave the tests of a layer in the scratch folder."""
        task = LayerTask(layer, shuffle_seed)
        tests = self.examiner.examine(task)
        arrays = {
            f"{kind}_{name}": column
            for kind, found in (("shallow", tests.shallow), ("semantic", tests.semantic))
            for name, column in found._asdict().items()
        }
        temporary = self.folder / f".{task.file}"
        np.savez(temporary, allow_pickle=False, **arrays)
        temporary.replace(self.folder / task.file)

    def flush(self) -> None:
        """Do nothing: every result is written at once."""


def load_tests(folder: Path, examiner: LayerExaminer, task: LayerTask) -> LayerTests:
    """Return the tests that a worker has left."""
    with np.load(folder / task.file, allow_pickle=False) as arrays:
        found = [
            Candidates(*(arrays[f"{kind}_{name}"] for name in Candidates._fields))
            for kind in ("shallow", "semantic")
        ]
    return LayerTests(task.layer, examiner.lists(task), *found)


def make_worker(folder: str, index: str, space: str, top: int, seed: int) -> LayerWorker:
    """Return a worker for the detection whose scratch folder this is."""
    scratch = Path(folder)
    if not Path(index).is_dir() or not scratch.is_dir():
        raise StoreError(
            f"There is no index at {index} here. Workers read the index itself: put it on a disk"
            " that all of them share."
        )
    opened, features = Index(index), CorpusFeatures.load(scratch)
    words = np.load(scratch / "space.npy", allow_pickle=False)
    topic_space: TopicSpace = (
        LatentSpace(words) if space == LatentSpace.name else EmbeddingSpace(opened, words.tolist())
    )
    return LayerWorker(LayerExaminer(opened, features, topic_space, top, seed), scratch)


# From tests to patterns


class LayerQValues(NamedTuple):
    """q-values of the tests of one layer."""

    shallow: Float64[ndarray, " candidate"]
    semantic: Float64[ndarray, " topic"]


class Chosen(NamedTuple):
    """Which tests of one layer become patterns."""

    shallow: Int64[ndarray, " chosen"]
    semantic: Int64[ndarray, " chosen"]


def _q_values(tests: Sequence[LayerTests]) -> list[LayerQValues]:
    """Return the least false-discovery rate at which each test is accepted."""
    from scipy.stats import false_discovery_control

    parts = [part.p_value for one in tests for part in (one.shallow, one.semantic)]
    p_values = np.concatenate(parts)
    q_values = false_discovery_control(p_values) if len(p_values) else p_values
    split = np.split(q_values, np.cumsum([len(part) for part in parts])[:-1])
    return [LayerQValues(*pair) for pair in zip(split[::2], split[1::2], strict=True)]


def choose(
    features: CorpusFeatures,
    tests: LayerTests,
    shallow_passes: Bool[ndarray, " candidate"],
    semantic_passes: Bool[ndarray, " topic"],
) -> Chosen:
    """Return what becomes a pattern, of those that passed a test.

    A content word that fewer than half of the triggers contain, most of them about a topic that is
    a pattern, is one of the words of that topic.
    """
    lists, semantic, found = tests.lists, tests.semantic, tests.shallow
    often = np.bitwise_count(semantic.marks & as_marks(lists.first)[semantic.owner]) >= LEAST
    kept = (often & semantic_passes & semantic.holds(topics.MIN_LIFT)).nonzero()[0]
    about: dict[int, int] = {}
    for owner, marks in zip(
        semantic.owner[kept].tolist(), semantic.marks[kept].tolist(), strict=True
    ):
        about[owner] = about.get(owner, 0) | marks
    holds = shallow_passes & shallow_holds(features, found)
    for place in (holds & _is_minor(features, found)).nonzero()[0].tolist():
        marks = int(found.marks[place])
        inside = (marks & about.get(int(found.owner[place]), 0)).bit_count()
        if 2 * inside >= marks.bit_count():
            holds[place] = False
    return Chosen(select_shallow(features, lists, found, holds), kept)


def _examined(index: Index, tests: LayerTests) -> list[Examined]:
    """Return the lists of a layer that have a trigger."""
    lists = tests.lists
    n = (lists.rows[:, : lists.top] >= 0).sum(axis=1).tolist()
    pairs = zip(lists.memory.tolist(), lists.sign.tolist(), n, strict=True)
    cell = index.layout.cell
    return [Examined(cell(tests.layer, memory), sign, k) for memory, sign, k in pairs if k]


def _owners(tests: LayerTests, chosen: Chosen) -> dict[str, ndarray]:
    """Return the lists of the chosen patterns, by kind."""
    return {
        "shallow": tests.shallow.owner[chosen.shallow],
        "semantic": tests.semantic.owner[chosen.semantic],
    }


def _summarise(
    features: CorpusFeatures,
    tests: Sequence[LayerTests],
    found: Sequence[Chosen],
    q_values: Sequence[LayerQValues],
    alpha: float,
    shuffled: bool,
) -> Detected:
    """Return all of it in numbers."""
    summary = Detected(shuffled)
    for one, chosen, q in zip(tests, found, q_values, strict=True):
        lists = one.lists
        there = (lists.rows >= 0).any(axis=1)
        summary.lists += int(there.sum())
        summary.too_short += int((there & (lists.held.sum(axis=1) < MIN_HELD)).sum())
        summary.memories += len(np.unique(lists.memory[there]))
        owners = _owners(one, chosen)
        with_pattern = np.unique(np.concatenate(list(owners.values())))
        summary.lists_with_pattern += len(with_pattern)
        summary.memories_with_pattern += len(np.unique(lists.memory[with_pattern]))
        for kind in KINDS:
            summary.lists_by_kind[kind] += len(np.unique(owners[kind]))
        summary.tested["topic"] += len(one.semantic.owner)
        summary.kept["topic"] += len(chosen.semantic)
        kept = one.shallow.entry[chosen.shallow]
        for counter, entries in ((summary.tested, one.shallow.entry), (summary.kept, kept)):
            distinct, counts = np.unique(entries, return_counts=True)
            for entry, n in zip(distinct.tolist(), counts.tolist(), strict=True):
                counter[rule_of(features, entry)] += n
        for part, values in ((one.shallow, q.shallow), (one.semantic, q.semantic)):
            passed = part.p_value[values <= alpha]
            summary.p_limit = max(summary.p_limit, float(passed.max(initial=0.0)))
    summary.kept = +summary.kept
    return summary


def _count_controls(
    features: CorpusFeatures, tests: Sequence[LayerTests], limit: float
) -> dict[str, int]:
    """Return how many shuffled lists have a pattern under a limit of p-values."""
    lists = found = 0
    for one in tests:
        chosen = choose(features, one, one.shallow.p_value <= limit, one.semantic.p_value <= limit)
        lists += int((one.lists.rows >= 0).any(axis=1).sum())
        found += len(np.unique(np.concatenate(list(_owners(one, chosen).values()))))
    return {"lists": lists, "lists_with_pattern": found}


# Names

_SIGN_NAMES = {
    ",": "a comma",
    ".": "a full stop",
    "(": "an opening bracket",
    ")": "a closing bracket",
    '"': "a quotation mark",
    ":": "a colon",
    ";": "a semicolon",
    "-": "a hyphen",
    "–": "a dash",
    "'": "an apostrophe",
}


class Place(NamedTuple):
    """Where something is in the corpus: what a row ends with, or a gram."""

    kind: int
    """Of the entry."""
    at: int
    """Row; for a gram its entry."""


class PatternNamer:
    """Describes the chosen patterns of all layers by the text of the corpus."""

    def __init__(
        self,
        index: Index,
        features: CorpusFeatures,
        vocabulary: Vocabulary,
        tests: Sequence[LayerTests],
        found: Sequence[Chosen],
    ) -> None:
        self.index, self.features, self.vocabulary = index, features, vocabulary
        self.places = {
            one.layer: [self._places(one, place) for place in chosen.shallow.tolist()]
            for one, chosen in zip(tests, found, strict=True)
        }
        every = {place for layer in self.places.values() for each in layer for place in each}
        self.texts = self._read_texts(every)

    def patterns(self, tests: LayerTests, chosen: Chosen, q_values: LayerQValues) -> list[Pattern]:
        """Return the patterns of a layer, those of a list numbered from the best."""
        drafts: list[tuple[float, Pattern]] = []
        some = tests.shallow.where(chosen.shallow)
        said: dict[int, set[str]] = {}
        for draft, entry, owner, places in zip(
            self._scored(tests, some, q_values.shallow[chosen.shallow], "shallow"),
            some.entry.tolist(),
            some.owner.tolist(),
            self.places[tests.layer],
            strict=True,
        ):
            rule, what = rule_of(self.features, entry), self._what(entry, places)
            said.setdefault(owner, set()).update(re.findall(r"\w+", what.casefold()))
            description = self._description(rule, entry, what)
            pattern = draft[1]._replace(rule=rule, what=what, description=description)
            drafts.append((draft[0], pattern))
        some = tests.semantic.where(chosen.semantic)
        words_said = [said.get(owner, set()) for owner in some.owner.tolist()]
        for draft, words in zip(
            self._scored(tests, some, q_values.semantic[chosen.semantic], "semantic"),
            name_topics(self.features, self.vocabulary, tests.lists, some, words_said),
            strict=True,
        ):
            what = ", ".join(words)
            pattern = draft[1]._replace(rule="topic", what=what, description=f"about: {what}")
            drafts.append((draft[0], pattern))
        drafts.sort(key=lambda one: (one[1].cell, -one[1].sign, -one[0], one[1].what))
        n_of: Counter[tuple[Any, int]] = Counter()
        found = []
        for _, pattern in drafts:
            n_of[pattern.cell, pattern.sign] += 1
            found.append(pattern._replace(number=n_of[pattern.cell, pattern.sign]))
        return found

    def _scored(
        self,
        tests: LayerTests,
        found: Candidates,
        q_values: Float64[ndarray, " candidate"],
        kind: str,
    ) -> list[tuple[float, Pattern]]:
        """Return patterns without names, each with what it is ranked by."""
        lists = tests.lists
        held = as_marks(lists.held)[found.owner]
        drafts = []
        for place, owner in enumerate(found.owner.tolist()):
            recall = float(found.k_held[place] / found.n_held[place])
            base = float(found.base[place])
            pattern = Pattern(
                cell=self.index.layout.cell(tests.layer, int(lists.memory[owner])),
                sign=int(lists.sign[owner]),
                number=0,
                kind=kind,
                description="",
                rule="",
                what="",
                ranks=_ranks(int(found.marks[place])),
                held_ranks=_ranks(int(found.marks[place] & held[place])),
                held=int(found.n_held[place]),
                precision=recall / (recall + base),
                recall=recall,
                base=base,
                lift=recall / base,
                p_value=float(found.p_value[place]),
                q_value=float(q_values[place]),
            )
            drafts.append(pattern)
        return list(zip(found.surprise.tolist(), drafts, strict=True))

    def _places(self, tests: LayerTests, place: int) -> list[Place]:
        """Return where what a candidate looks for is: in the first trigger that shows it."""
        features = self.features
        entry = int(tests.shallow.entry[place])
        if entry < 0:
            return []
        if entry < len(features.kinds) and features.kinds[entry] >= GRAM:
            return [Place(int(features.kinds[entry]), entry)]
        column, entries = LAST_WORD, tests.shallow.words[place]
        if entry < len(features.kinds):
            column, entries = int(features.kinds[entry]), np.array([entry])
        rows = tests.lists.rows[int(tests.shallow.owner[place])]
        codes = np.where(rows >= 0, features.codes[np.maximum(rows, 0), column], -1)
        return [
            Place(column, int(rows[(codes == one).argmax()]))
            for one in entries.tolist()
            if one >= 0
        ]

    def _read_texts(self, places: set[Place]) -> dict[Place, str]:
        """Return what is in some places, as it is written there."""
        features, index = self.features, self.index
        found: dict[Place, str] = {}
        wanted: dict[int, list[tuple[Place, int, int]]] = {}
        for place in places:
            if place.kind == TOKEN:
                found[place] = index.token(int(features.begins[place.at, TOKEN]))
            elif place.kind < GRAM:
                begin, end = features.begins[place.at, place.kind], features.ends[place.at]
                sentence = int(features.sentence[place.at])
                wanted.setdefault(sentence, []).append((place, int(begin), int(end)))
            else:
                sentence, begin, end = features.examples[place.at].tolist()
                wanted.setdefault(sentence, []).append((place, begin, end))
        for row in index.sentences.rows(0, index.sentences.n_sentences if wanted else 0):
            for place, begin, end in wanted.get(row.sentence, ()):
                text = sentence_text(index, row)[0][begin:end].strip()
                found[place] = text.casefold() if N_WORDS < place.kind < GRAM else text
        return found

    def _what(self, entry: int, places: Sequence[Place]) -> str:
        """Return what the rule of a pattern looks for."""
        if entry < 0:
            return SHAPES[-1 - entry].name
        texts = sorted((self.texts[place] for place in places), key=str.casefold)
        if len(texts) == 1:
            return texts[0]
        return ", ".join(text if text[:1].isalnum() else f"“{text}”" for text in texts)

    def _description(self, rule: str, entry: int, what: str) -> str:
        """Return a pattern in words."""
        if entry < 0:
            return SHAPES[-1 - entry].description
        if rule == "last-token":
            return f"ends with the token “{visible_token(what)}”"
        what = visible(what)
        if rule == "last-words":
            return f"ends with one of: {what}"
        if rule == "suffix":
            return f"ends with a word in -{what}"
        if rule == "anywhere":
            return f"contains “{what}”"
        name = f" ({_SIGN_NAMES[what]})" if what in _SIGN_NAMES else ""
        return f"ends with “{what}”{name}"


def _ranks(marks: int) -> tuple[int, ...]:
    return tuple(rank + 1 for rank in range(64) if marks >> rank & 1)
