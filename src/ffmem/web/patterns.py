"""Patterns as the pages show them: of a memory, of a layer, of the whole index.

Patterns may be written while the server runs: what was read is cached until `patterns_version`
changes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool
from numpy import ndarray

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
"""By which patterns the memories of a layer can be filtered."""

UNREADABLE = (
    "The patterns of this index cannot be read; `ffmem verify` tells you which file is damaged."
)
"""Instead of an error that names a folder of the server."""

Version = tuple[tuple[int, int, int] | None, ...]
"""Inode, time and size of the manifests of the index and of its patterns."""


class StoredPatterns(NamedTuple):
    """The patterns that can be shown, by source, and why others cannot."""

    sources: list[Patterns]
    problems: list[str]
    """A sentence each; never with a path of the server."""


class PatternView(NamedTuple):
    """One pattern on the page of a memory."""

    label: int
    """Its number on the page."""
    pattern: Pattern

    @property
    def who(self) -> str:
        """Its source in words."""
        return WHO[self.pattern.source]

    @property
    def note(self) -> str:
        """A caveat about its source."""
        return NOTES.get(self.pattern.source, "")

    @property
    def first_rank(self) -> int:
        """The best rank among the triggers that show it."""
        return min((*self.pattern.ranks, *self.pattern.held_ranks), default=1)


class MemoryPatterns(NamedTuple):
    """The patterns of a memory, and which of its triggers show which."""

    views: list[PatternView]
    marks: dict[tuple[int, int], list[PatternView]]
    """By the sign and rank of a trigger."""
    problems: list[str]
    exist: bool
    """Whether the index has patterns at all."""


@dataclass(frozen=True)
class RowPattern:
    """The pattern that a row of a layer shows."""

    description: str
    kind: str
    source: str
    sign: int
    others: int
    """Further patterns of the memory."""


@dataclass(frozen=True)
class PatternCount:
    """How many patterns one source found in the index."""

    source: str
    lists: int
    """Lists of triggers that were examined."""
    memories: int
    """Memories with at least one pattern."""
    shallow: int
    semantic: int


def patterns_version(index: Index) -> Version:
    """Return what changes when patterns, or the index under them, change."""
    found: list[tuple[int, int, int] | None] = []
    for folder in (index.folder, *(patterns_folder(index, source) for source in SOURCES)):
        try:
            stat = (folder / "manifest.json").stat()
        except OSError:
            found.append(None)
        else:
            found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
    return tuple(found)


def stored_patterns(index: Index) -> StoredPatterns:
    """Return the patterns that can be shown now."""
    return _stored_patterns(index, patterns_version(index))


@lru_cache(maxsize=16)
def _stored_patterns(index: Index, version: Version) -> StoredPatterns:
    if index.live is not None:
        return StoredPatterns([], [])
    try:
        problems = [
            f"There are patterns (source: {source}) from before this index changed. They are not"
            " shown."
            for source in SOURCES
            if is_stale(index, source)
        ]
        return StoredPatterns(open_patterns(index), problems)
    except (StoreError, OSError):
        return StoredPatterns([], [UNREADABLE])


def memory_patterns(index: Index, memory: Memory) -> MemoryPatterns:
    """Return the patterns of one memory for its page."""
    sources, problems = stored_patterns(index)
    try:
        found = [one for source in sources for one in source.of(memory.cell)]
    except StoreError:
        return MemoryPatterns([], {}, [*problems, UNREADABLE], True)
    views = [PatternView(label, one) for label, one in enumerate(found, start=1)]
    marks: dict[tuple[int, int], list[PatternView]] = {}
    for view in views:
        for rank in {*view.pattern.ranks, *view.pattern.held_ranks}:
            marks.setdefault((view.pattern.sign, rank), []).append(view)
    return MemoryPatterns(views, marks, problems, bool(sources))


def patterns_json(index: Index, memory: Memory) -> list[dict[str, Any]]:
    """Return the patterns of one memory as JSON."""
    try:
        sources = stored_patterns(index).sources
        return [one.to_dict() for source in sources for one in source.of(memory.cell)]
    except StoreError:
        raise StoreError(UNREADABLE) from None


class LayerPatterns:
    """All patterns of a layer, by memory."""

    def __init__(self, sources: Sequence[Patterns], layer: int, n_memories: int) -> None:
        self.n_memories = n_memories
        self.rows: dict[int, list[Pattern]] = {}
        """Of the memories that have some."""
        self.problems: list[str] = []
        for source in sources:
            for memory, patterns in source.layer(layer).items():
                self.rows.setdefault(memory, []).extend(patterns)

    def has(self, choice: str) -> Bool[ndarray, " memory"]:
        """Return which memories have a pattern of one of the `CHOICES`."""
        if choice == "none":
            return ~self.has("any")
        return self._mask(
            memory
            for memory, row in self.rows.items()
            if any(choice in ("any", one.kind) for one in row)
        )

    def contains(self, text: str) -> Bool[ndarray, " memory"]:
        """Return which memories have a pattern whose description contains a text."""
        return self._mask(memory for memory in self.rows if self.first(memory, text) is not None)

    def _mask(self, memories: Iterable[int]) -> Bool[ndarray, " memory"]:
        mask = np.zeros(self.n_memories, bool)
        mask[list(memories)] = True
        return mask

    def first(self, memory: int, text: str = "") -> RowPattern | None:
        """Return the first pattern of a memory whose description contains a text."""
        row = self.rows.get(memory, [])
        for one in row:
            if text.casefold() in one.text.casefold():
                return RowPattern(one.text, one.kind, one.source, one.sign, len(row) - 1)
        return None


def layer_patterns(index: Index, layer: int) -> LayerPatterns:
    """Return the patterns of one layer, read once; none where there are none."""
    return _layer_patterns(index, layer, patterns_version(index))


@lru_cache(maxsize=32)
def _layer_patterns(index: Index, layer: int, version: Version) -> LayerPatterns:
    sources, problems = _stored_patterns(index, version)
    n_memories = index.layout.widths[layer]
    try:
        found = LayerPatterns(sources, layer, n_memories)
        found.problems += problems
    except StoreError:
        found = LayerPatterns([], layer, n_memories)
        found.problems += [UNREADABLE, *problems]
    return found


def count_memories(index: Index, layer: int) -> dict[str, int]:
    """Return how many memories of a layer have a shallow, a semantic, any pattern; {} without."""
    sources = stored_patterns(index).sources
    memories: dict[str, set[int]] = {"shallow": set(), "semantic": set(), "any": set()}
    try:
        for source in sources:
            table = source.layer_table(layer)
            pairs = zip(table["memory"].to_pylist(), table["kind"].to_pylist(), strict=True)
            for memory, kind in pairs:
                memories[kind].add(memory)
                memories["any"].add(memory)
    except StoreError:  # the page says that they cannot be read
        return {}
    return {name: len(found) for name, found in memories.items()} if sources else {}


def count_patterns(index: Index) -> list[PatternCount]:
    """Return how many patterns each source has; none where they cannot be read."""
    try:
        return _count_patterns(index, patterns_version(index))
    except StoreError:
        return []


@lru_cache(maxsize=8)
def _count_patterns(index: Index, version: Version) -> list[PatternCount]:
    counts = []
    for source in _stored_patterns(index, version).sources:
        n_lists = n_memories = 0
        kinds: list[str] = []
        for layer in range(index.n_layers):
            table = source.layer_table(layer)
            n_lists += source.n_lists(layer)
            n_memories += len(set(table["memory"].to_pylist()))
            kinds += table["kind"].to_pylist()
        shallow, semantic = kinds.count("shallow"), kinds.count("semantic")
        counts.append(PatternCount(source.source, n_lists, n_memories, shallow, semantic))
    return counts


def pattern_problems(index: Index) -> list[str]:
    """Return why some patterns of an index are not shown, a sentence each."""
    sources, problems = stored_patterns(index)
    return [*problems, UNREADABLE] if sources and not count_patterns(index) else problems
