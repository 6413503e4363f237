"""Example memories, picked from an index by deterministic rules.

Table 1: in each of five layers, evenly spread over those with patterns, one shallow and one
semantic pattern: the one that most triggers show; ties go to the memory with more patterns, then to
the lower memory. An index without patterns has no Table 1 or 3.

Table 2: of the most predictive values, first those with an agreeing trigger, then by their
probability; with the strongest trigger that the predicted token follows.

Table 3: all triggers of one memory of Table 1 with the numbers of the patterns that they show: the
memory with patterns of both kinds, if there is one, then of most patterns, then the lowest.

Texts are excerpts: at most the last ten words of a prefix.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ffmem.cells import Cell
from ffmem.experiments.base import ExperimentResult
from ffmem.experiments.rows import Row
from ffmem.indexing.memory import Trigger, visible, visible_token
from ffmem.indexing.store import Index
from ffmem.patterns.store import KINDS, TOP_TRIGGERS, Patterns, main_sign, open_patterns
from ffmem.text import shorten_prefix

LAYERS, EXCERPTS, VALUES, TOKENS = 5, 3, 6, 8


class Excerpt(NamedTuple):
    """The end of a prefix as it is shown, its last token apart, and the token that follows."""

    before: str
    last: str
    next: str


def excerpt(prefix: str, last_token: str | None, next_token: str | None) -> Excerpt:
    """Return the end of a prefix, its last token apart, and the token that follows."""
    last = last_token or ""
    marked = last if prefix.endswith(last) else ""
    end = shorten_prefix(prefix)
    if len(marked) > len(end.removeprefix("…")):
        marked = ""
    before = end.removesuffix(marked)
    return Excerpt(visible(before), visible(marked), visible_token(next_token))


def trigger_excerpt(trigger: Trigger) -> Excerpt:
    """Return the end of a trigger's prefix."""
    return excerpt(trigger.prefix, trigger.last_token, trigger.next_token)


def spread_layers(layers: Sequence[int]) -> list[int]:
    """Return five of some layers, evenly spread from the first to the last."""
    if not layers:
        return []
    places = {round(place * (len(layers) - 1) / (LAYERS - 1)) for place in range(LAYERS)}
    return [layers[place] for place in sorted(places)]


# Tables 1 and 3


class ShownPattern(NamedTuple):
    """A pattern as tables show it."""

    number: int
    kind: str
    description: str
    ranks: tuple[int, ...]


class LabeledKey(NamedTuple):
    """A list of triggers with the patterns that one source found in it."""

    cell: Cell
    sign: int
    source: str
    n: int
    patterns: tuple[ShownPattern, ...]


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


class KeyTable(NamedTuple):
    """All triggers of one key: Table 3."""

    cell: str
    layer: int
    sign: int
    source: str
    patterns: list[ShownPattern]
    lines: list["KeyLine"]


class KeyLine(NamedTuple):
    """A trigger with the numbers of the patterns that it shows: a row of Table 3."""

    rank: int
    excerpt: Excerpt
    numbers: list[int]


def pattern_tables(index: Index) -> tuple[list[KeyExample], KeyTable | None]:
    """Return Table 1 and Table 3 of the first source of patterns that an index keeps."""
    sources = open_patterns(index)
    if not sources:
        return [], None
    there = [layer for layer in range(index.n_layers) if sources[0].layer(layer)]
    keys = [key for layer in spread_layers(there) for key in labeled_keys(index, sources[0], layer)]

    def texts(key: LabeledKey) -> list[Excerpt]:
        triggers = index.memory(key.cell).triggers_of(key.sign)
        return [trigger_excerpt(one) for one in triggers[:TOP_TRIGGERS]]

    return key_tables(keys, texts)


def labeled_keys(index: Index, found: Patterns, layer: int) -> list[LabeledKey]:
    """Return the main lists of a layer in which a source saw patterns."""
    main = main_sign(index, layer)
    keys = []
    for one in found.lists(layer):
        own = [pattern for pattern in found.of(one.cell) if pattern.sign == one.sign]
        if own and one.sign == main[one.cell.memory]:
            shown = []
            for p in own:
                ranks = tuple(rank for rank in p.ranks if rank <= one.n)
                shown.append(ShownPattern(p.number, p.kind, p.description, ranks))
            keys.append(LabeledKey(one.cell, one.sign, found.source, one.n, tuple(shown)))
    return keys


def key_tables(
    keys: Iterable[LabeledKey], texts: Callable[[LabeledKey], Sequence[Excerpt]]
) -> tuple[list[KeyExample], KeyTable | None]:
    """Return Table 1 of some keys, and Table 3 of one; `texts` returns the triggers of a key."""
    by_layer: dict[int, list[LabeledKey]] = {}
    for key in sorted(keys, key=lambda key: (key.cell, -key.sign)):
        by_layer.setdefault(key.cell.layer, []).append(key)
    chosen = []
    for own in by_layer.values():
        for kind in KINDS:
            pairs = [(key, one) for key in own for one in key.patterns if one.kind == kind]
            # The pattern that most triggers show, of the memory with most patterns.
            chosen += sorted(pairs, key=lambda p: (-len(p[1].ranks), -len(p[0].patterns)))[:1]
    if not chosen:
        return [], None
    rows = []
    for key, pattern in chosen:
        all_texts = texts(key)
        shown = [all_texts[rank - 1] for rank in pattern.ranks[:EXCERPTS]]
        marked, place = len(pattern.ranks), (str(key.cell), key.cell.layer, key.sign, key.source)
        rows.append(KeyExample(*place, pattern.kind, pattern.description, marked, key.n, shown))
    key = min(
        (key for key, _ in chosen),
        key=lambda key: (-len({p.kind for p in key.patterns}), -len(key.patterns), key.cell),
    )
    lines = [
        KeyLine(rank, text, [one.number for one in key.patterns if rank in one.ranks])
        for rank, text in enumerate(texts(key)[: key.n], start=1)
    ]
    table = KeyTable(str(key.cell), key.cell.layer, key.sign, key.source, list(key.patterns), lines)
    return rows, table


# Table 2


class PredictiveExample(NamedTuple):
    """A value and a trigger it predicts: a row of Table 2."""

    cell: str
    layer: int
    sign: int
    token: str
    probability: float
    precision: float | None
    n_triggers: int
    agrees: bool
    """Whether the predicted token follows the excerpt."""
    excerpt: Excerpt | None


def predictive_examples(index: Index, result: ExperimentResult) -> list[PredictiveExample]:
    """Return the rows of Table 2."""

    def order(row: Row) -> tuple[bool, float, Cell]:
        return not row.get("agreeing"), -(row["probability"] or 0.0), Cell.parse(row["cell"])

    rows = []
    for row in sorted(result.rows, key=order)[:VALUES]:
        sign = int(row.get("sign") or 1)
        triggers = index[row["cell"]].triggers_of(sign)
        followed = [one for one in triggers if one.next_token is not None]
        agreeing = [one for one in followed if one.next_token == row["token"]]
        chosen = next(iter(agreeing or followed), None)
        rows.append(
            PredictiveExample(
                row["cell"],
                row["layer"],
                sign,
                row["token"],
                row["probability"],
                row.get("precision"),
                row.get("n_triggers") or 0,
                bool(agreeing),
                trigger_excerpt(chosen) if chosen else None,
            )
        )
    return rows


# Cards


class CardSide(NamedTuple):
    """What a memory does with coefficients of one sign."""

    sign: int
    tokens: list[str]
    excerpts: list[Excerpt]
    note: str | None
    """Why there are no tokens, where there is no static value."""


class MemoryCard(NamedTuple):
    """A memory that the report cites."""

    cell: str
    layer: int
    sides: list[CardSide]


def memory_cards(index: Index, cited: Iterable[tuple[str, int]]) -> list[MemoryCard]:
    """Return a card of each cited memory, in the order of the model; `cited` gives cell, sign."""
    signs: dict[Cell, set[int]] = {}
    for name, sign in cited:
        signs.setdefault(index.layout.resolve(name), set()).add(sign)
    found = []
    for cell in sorted(signs):
        memory = index.memory(cell)
        sides = []
        for sign in sorted(signs[cell], reverse=True):
            tokens = memory.value.top if sign > 0 else memory.value.bottom
            texts = memory.triggers_of(sign)[:EXCERPTS]
            sides.append(
                CardSide(
                    sign,
                    [one.token for one in tokens[:TOKENS]],
                    [trigger_excerpt(one) for one in texts],
                    memory.value.note,
                )
            )
        found.append(MemoryCard(str(cell), cell.layer, sides))
    return found
