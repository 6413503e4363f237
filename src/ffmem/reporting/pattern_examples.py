"""Keys with the patterns of their triggers: the paper's Table 1, and Table 3 of its appendix.

Table 1: in each of five layers, evenly spread over those with patterns, one shallow and one
semantic pattern, where there are any: the one that most triggers show; ties go to the memory with
more patterns, then to the lower memory.

Table 3: all triggers of one memory of Table 1 with the numbers of the patterns that they show: the
memory with patterns of both kinds, if there is one, then of most patterns, then the lowest.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ffmem.cells import Cell
from ffmem.indexing.store import Index
from ffmem.patterns.store import KINDS, TOP, Pattern, Patterns, main_sign, open_patterns
from ffmem.reporting.examples import EXCERPTS, LAYERS, Excerpt, excerpt


class Seen(NamedTuple):
    """A pattern as tables show it."""

    number: int
    kind: str
    description: str
    ranks: tuple[int, ...]


class SeenKey(NamedTuple):
    """A list of triggers with everything that somebody saw in it."""

    cell: Cell
    sign: int
    source: str
    n: int
    patterns: tuple[Seen, ...]


class KeyExample(NamedTuple):
    """A pattern of a key: a row of Table 1."""

    cell: str
    layer: int
    sign: int
    source: str
    kind: str
    description: str
    marked: int
    of: int
    excerpts: list[Excerpt]


class Line(NamedTuple):
    """A trigger with the numbers of its patterns: a row of Table 3."""

    rank: int
    excerpt: Excerpt
    numbers: list[int]


class KeyTable(NamedTuple):
    """All triggers of one key: Table 3."""

    cell: str
    layer: int
    sign: int
    source: str
    patterns: list[Seen]
    lines: list[Line]


Texts = Callable[[SeenKey], Sequence[Excerpt]]
"""Where the texts of a key's triggers come from."""


def kept_examples(index: Index) -> tuple[list[KeyExample], KeyTable | None]:
    """Return Table 1 and Table 3 of the first source of patterns that an index keeps."""
    sources = open_patterns(index)
    if not sources:
        return [], None
    there = [layer for layer in range(index.n_layers) if sources[0].layer(layer)]
    last = len(there) - 1
    places = sorted({round(place * last / (LAYERS - 1)) for place in range(LAYERS)})
    layers = [there[place] for place in places if there]
    keys = [key for layer in layers for key in kept_keys(index, sources[0], layer)]

    def texts(key: SeenKey) -> list[Excerpt]:
        memory = index.memory(key.cell)
        listed = memory.triggers if key.sign > 0 else memory.negative_triggers
        return [excerpt(one) for one in listed[:TOP]]

    return examples(keys, texts)


def kept_keys(index: Index, found: Patterns, layer: int) -> list[SeenKey]:
    """Return the main lists of a layer in which a source saw patterns."""
    main = main_sign(index, layer)
    return [
        SeenKey(one.cell, one.sign, found.source, one.n, tuple(_seen(p, one.n) for p in own))
        for one in found.lists(layer)
        if one.sign == main[one.cell.memory]
        and (own := [pattern for pattern in found.of(one.cell) if pattern.sign == one.sign])
    ]


def examples(keys: Iterable[SeenKey], texts: Texts) -> tuple[list[KeyExample], KeyTable | None]:
    """Return Table 1 of some keys, and Table 3 of one of them."""
    by_layer: dict[int, list[SeenKey]] = {}
    for key in sorted(keys, key=lambda key: (key.cell, -key.sign)):
        by_layer.setdefault(key.cell.layer, []).append(key)
    chosen = [
        best
        for own in by_layer.values()
        for kind in KINDS
        if (best := _most_marked(own, kind)) is not None
    ]
    if not chosen:
        return [], None
    shown = min((key for key, _ in chosen), key=_telling)
    return [_example(key, pattern, texts(key)) for key, pattern in chosen], _table(
        shown, texts(shown)
    )


def _most_marked(keys: Sequence[SeenKey], kind: str) -> tuple[SeenKey, Seen] | None:
    """Return the pattern of a kind that most triggers show, with its key."""
    candidates = [(key, one) for key in keys for one in key.patterns if one.kind == kind]
    return min(
        candidates,
        key=lambda found: (-len(found[1].ranks), -len(found[0].patterns), found[0].cell),
        default=None,
    )


def _telling(key: SeenKey) -> tuple[int, int, Cell]:
    kinds = {one.kind for one in key.patterns}
    return -len(kinds), -len(key.patterns), key.cell


def _example(key: SeenKey, pattern: Seen, texts: Sequence[Excerpt]) -> KeyExample:
    shown = [texts[rank - 1] for rank in pattern.ranks[:EXCERPTS]]
    return KeyExample(
        str(key.cell),
        key.cell.layer,
        key.sign,
        key.source,
        pattern.kind,
        pattern.description,
        len(pattern.ranks),
        key.n,
        shown,
    )


def _table(key: SeenKey, texts: Sequence[Excerpt]) -> KeyTable:
    lines = [
        Line(rank, text, [one.number for one in key.patterns if rank in one.ranks])
        for rank, text in enumerate(texts[: key.n], start=1)
    ]
    return KeyTable(str(key.cell), key.cell.layer, key.sign, key.source, list(key.patterns), lines)


def _seen(pattern: Pattern, n: int) -> Seen:
    ranks = tuple(rank for rank in pattern.ranks if rank <= n)
    return Seen(pattern.number, pattern.kind, pattern.description, ranks)
