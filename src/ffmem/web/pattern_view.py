"""Patterns as the pages show them: of one memory, of a layer, of the whole index.

Patterns may be written while a site runs. What was read is kept as long as the files that say
which patterns there are stay the same.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool
from numpy import ndarray
from typing_extensions import TypedDict

from ffmem.errors import StoreError
from ffmem.indexing.memory import Memory
from ffmem.indexing.store import Index
from ffmem.patterns.store import (
    KINDS,
    NOTES,
    SOURCES,
    WHO,
    Pattern,
    Patterns,
    is_stale,
    open_patterns,
    patterns_folder,
)

CHOICES = (*KINDS, "any", "none")
"""Which memories of a layer can be asked for by their patterns."""

UNREAD = "The patterns of this index cannot be read: `ffmem verify` tells which file."
"""Instead of an error that names a folder of the server."""

State = tuple[tuple[int, int, int] | None, ...]
"""Which files there are that say what patterns there are: inode, time and size of each."""


class AtHand(NamedTuple):
    """The patterns that can be shown, and why others cannot."""

    patterns: list[Patterns]
    problems: list[str]
    """A sentence each; never with a path of the server."""


class SeenView(NamedTuple):
    """One pattern of a memory."""

    label: int
    """Its number on the page."""
    sign: int
    kind: str
    source: str
    who: str
    note: str
    description: str
    scores: str
    first: int | None
    """The best rank that shows it."""


class MemoryPatterns(NamedTuple):
    """The patterns of a memory, and which of its triggers show which."""

    seen: list[SeenView]
    marks: dict[tuple[int, int], list[SeenView]]
    """By the sign and rank of a trigger."""
    problems: list[str]
    looked: bool
    """Whether anybody looked for patterns in this index."""


class RowPattern(TypedDict):
    """The pattern that a row of a layer shows."""

    description: str
    kind: str
    source: str
    sign: int
    others: int
    """Further patterns of the memory."""


class PatternCount(TypedDict):
    """How many patterns one source saw in the index."""

    source: str
    lists: int
    """Lists of triggers that were looked at."""
    memories: int
    """Memories with at least one pattern."""
    shallow: int
    semantic: int


def at_hand(index: Index) -> AtHand:
    """Return the patterns that can be shown now."""
    return _at_hand(index, state(index))


def state(index: Index) -> State:
    """Return what changes when patterns, or the index under them, change."""
    paths = [index.folder, *(patterns_folder(index, source) for source in SOURCES)]
    found: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            stat = (path / "manifest.json").stat()
        except OSError:
            found.append(None)
        else:
            found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
    return tuple(found)


@lru_cache(maxsize=16)
def _at_hand(index: Index, state: State) -> AtHand:
    problems = []
    try:
        for source in SOURCES:
            if is_stale(index, source):
                problems.append(
                    f"There are patterns (source: {source}) of an earlier state of this index,"
                    " which was changed since. They are not shown."
                )
        return AtHand(open_patterns(index), problems)
    except (StoreError, OSError):  # whose message names a folder of the server
        return AtHand([], [UNREAD])


def of_memory(index: Index, memory: Memory) -> MemoryPatterns:
    """Return the patterns of one memory for its page."""
    hand = at_hand(index)
    try:
        found = [one for source in hand.patterns for one in source.of(memory.cell)]
    except StoreError:
        return MemoryPatterns([], {}, [*hand.problems, UNREAD], True)
    views: list[SeenView] = []
    marks: dict[tuple[int, int], list[SeenView]] = {}
    for label, one in enumerate(found, start=1):
        view = _view(label, one)
        views.append(view)
        for rank in {*one.ranks, *one.held_ranks}:
            marks.setdefault((one.sign, rank), []).append(view)
    return MemoryPatterns(views, marks, hand.problems, bool(hand.patterns))


def _view(label: int, pattern: Pattern) -> SeenView:
    return SeenView(
        label,
        pattern.sign,
        pattern.kind,
        pattern.source,
        WHO[pattern.source],
        NOTES.get(pattern.source, ""),
        pattern.text,
        pattern.evidence,
        min((*pattern.ranks, *pattern.held_ranks), default=None),
    )


class LayerPatterns:
    """All patterns of a layer, to filter memories by."""

    def __init__(self, patterns: Sequence[Patterns], layer: int, n_memories: int) -> None:
        self.rows: list[list[RowPattern]] = [[] for _ in range(n_memories)]
        self.problems: list[str] = []
        for source in patterns:
            for memory, several in source.layer(layer).items():
                self.rows[memory] += [
                    {
                        "description": one.text,
                        "kind": one.kind,
                        "source": source.source,
                        "sign": one.sign,
                        "others": 0,
                    }
                    for one in several
                ]
        for row in self.rows:
            for one in row:
                one["others"] = len(row) - 1

    def kept(self, choice: str) -> Bool[ndarray, " memory"]:
        """Return which memories have a pattern of some kind, any, or none."""
        if choice in KINDS:
            return np.array([any(one["kind"] == choice for one in row) for row in self.rows], bool)
        has = np.array([bool(row) for row in self.rows], bool)
        return has if choice == "any" else ~has

    def holding(self, text: str) -> Bool[ndarray, " memory"]:
        """Return which memories have a pattern that holds a text."""
        has = [self.shown(memory, text) is not None for memory in range(len(self.rows))]
        return np.array(has, bool)

    def shown(self, memory: int, text: str = "") -> RowPattern | None:
        """Return the first pattern of a memory that holds a text."""
        wanted = text.casefold()
        found = (one for one in self.rows[memory] if wanted in one["description"].casefold())
        return next(found, None)


def of_layer(index: Index, layer: int) -> LayerPatterns:
    """Return the patterns of one layer, read once; none where there are none."""
    return _of_layer(index, layer, state(index))


@lru_cache(maxsize=32)
def _of_layer(index: Index, layer: int, state: State) -> LayerPatterns:
    hand = _at_hand(index, state)
    try:
        found = LayerPatterns(hand.patterns, layer, index.layout.widths[layer])
    except StoreError:
        found = LayerPatterns([], layer, index.layout.widths[layer])
        found.problems.append(UNREAD)
    found.problems += hand.problems
    return found


def told(index: Index, memory: Memory) -> list[dict[str, Any]]:
    """Return the patterns of one memory for programs."""
    try:
        hand = at_hand(index)
        return [one.to_dict() for source in hand.patterns for one in source.of(memory.cell)]
    except StoreError:
        raise StoreError(UNREAD) from None


def counts(index: Index) -> list[PatternCount]:
    """Return how many patterns there are, by source; none where they cannot be read."""
    try:
        return _counts(index, state(index))
    except StoreError:
        return []


def problems(index: Index) -> list[str]:
    """Return why some patterns of an index are not shown, a sentence each."""
    hand = at_hand(index)
    return [*hand.problems, UNREAD] if hand.patterns and not counts(index) else hand.problems


@lru_cache(maxsize=8)
def _counts(index: Index, state: State) -> list[PatternCount]:
    found: list[PatternCount] = []
    for patterns in _at_hand(index, state).patterns:
        total: PatternCount = {
            "source": patterns.source,
            "lists": 0,
            "memories": 0,
            "shallow": 0,
            "semantic": 0,
        }
        for layer in range(index.n_layers):
            rows = patterns.layer_table(layer)
            kinds = rows["kind"].to_pylist()
            total["lists"] += patterns.n_lists(layer)
            total["memories"] += len(set(rows["memory"].to_pylist()))
            total["shallow"] += kinds.count("shallow")
            total["semantic"] += kinds.count("semantic")
        found.append(total)
    return found
