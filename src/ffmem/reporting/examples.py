"""Memories worth a look, picked from an index by rules that anybody can repeat.

Table 1: in each of five layers, evenly spread from the first to the last, the memory whose 25
strongest triggers share most often one last token, or, in the upper half, one next token; the token
must have two letters or more, if any such is shared. Ties go to the token that fewest memories of
the layer share so, then to the lower memory, m > 0 first.

Table 2: of the most predictive values, first those that some trigger bears out, then by their
probability; with the strongest trigger that the predicted token follows.

Texts are excerpts: at most the last ten words of a prefix.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ffmem.cells import Cell
from ffmem.experiments.result import Result, Row
from ffmem.experiments.top_triggers import NONE, listed
from ffmem.indexing.memory import Memory, Trigger, ValueToken, visible, visible_token
from ffmem.indexing.store import Index

LAYERS, STRONGEST, EXCERPTS, VALUES, WORDS, TOKENS = 5, 25, 3, 6, 10, 8
CHARACTERS = 120
"""Of an excerpt: what ten words may be in a text without spaces."""


class Excerpt(NamedTuple):
    """The end of a prefix as it is shown, its last token apart, and the token that follows."""

    before: str
    last: str
    next: str


class Shared(NamedTuple):
    """A memory whose triggers share a token: a row of Table 1."""

    cell: str
    layer: int
    sign: int
    which: str
    """The token that is shared: last or next."""
    token: str
    n: int
    of: int
    excerpts: list[Excerpt]


class Predictive(NamedTuple):
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


class Side(NamedTuple):
    """What a memory does with coefficients of one sign."""

    sign: int
    tokens: list[str]
    excerpts: list[Excerpt]
    note: str | None = None
    """Why there are no tokens, where there is no static value."""


class Card(NamedTuple):
    """A memory that the report cites."""

    cell: str
    layer: int
    sides: list[Side]


def shared_tokens(index: Index) -> list[Shared]:
    """Return the rows of Table 1."""
    there = index.layout.memory_layers
    places = {round(place * (len(there) - 1) / (LAYERS - 1)) for place in range(LAYERS)}
    layers = [there[place] for place in sorted(places)]
    found = (_most_shared(index, layer) for layer in layers)
    return [row for row in found if row is not None]


def _most_shared(index: Index, layer: int) -> Shared | None:
    """Return the memory of a layer whose triggers share a token most often."""
    every = list(_modes(index, layer))
    words = {id for id in {one.id for one in every} if _is_word(index.token(id))}
    candidates = [one for one in every if one.id in words] or every
    if not candidates:
        return None
    alike = Counter((one.which, one.id) for one in candidates)
    best = min(
        candidates, key=lambda one: (-one.n, alike[one.which, one.id], one.memory, -one.sign)
    )
    cell, token = index.layout.cell(layer, best.memory), index.token(best.id)
    triggers = dict(_lists(index.memory(cell)))[best.sign][:STRONGEST]
    sharing = [one for one in triggers if getattr(one, f"{best.which}_token") == token]
    excerpts = [excerpt(one) for one in sharing[:EXCERPTS]]
    return Shared(str(cell), layer, best.sign, best.which, token, best.n, len(triggers), excerpts)


class _Mode(NamedTuple):
    """The token that most of a memory's strongest triggers share, and how many do."""

    n: int
    which: str
    id: int
    memory: int
    sign: int


def _modes(index: Index, layer: int) -> Iterator[_Mode]:
    """Return what the triggers of each memory of a layer share, by last and by next token."""
    kinds = ("next", "last") if 2 * layer >= index.n_layers else ("last",)
    # Columns of token ids: whole memories with all their texts would take seconds per layer.
    for sign in (1, -1) if index.manifest.model.gated else (1,):
        triggers = listed(index, layer, sign)
        for which in kinds:
            rows = getattr(triggers, which)[:, :STRONGEST].tolist()
            for memory, ids in enumerate(rows):
                counted = Counter(id for id in ids if id != NONE)
                if counted:
                    id, n = counted.most_common(1)[0]
                    yield _Mode(n, which, id, memory, sign)


def _is_word(token: str) -> bool:
    return sum(character.isalpha() for character in token) > 1


def predictive_examples(index: Index | None, result: Result) -> list[Predictive]:
    """Return the rows of Table 2; without an index, without their excerpts."""

    def order(row: Row) -> tuple[bool, float, Cell]:
        return not row.get("agreeing"), -(row["probability"] or 0.0), Cell.parse(row["cell"])

    return [_predictive(index, row) for row in sorted(result.rows, key=order)[:VALUES]]


def _predictive(index: Index | None, row: Row) -> Predictive:
    sign = int(row.get("sign") or 1)
    lists = dict(_lists(index[row["cell"]])) if index else {}
    followed = [one for one in lists.get(sign, []) if one.next_token is not None]
    agreeing = [one for one in followed if one.next_token == row["token"]]
    chosen = next(iter(agreeing or followed), None)
    return Predictive(
        row["cell"],
        row["layer"],
        sign,
        row["token"],
        row["probability"],
        row.get("precision"),
        row.get("n_triggers") or 0,
        bool(agreeing),
        excerpt(chosen) if chosen else None,
    )


def cards(index: Index, cited: Iterable[tuple[str, int]]) -> list[Card]:
    """Return a card of each cited memory, in the order of the model; `cited` gives cell, sign."""
    signs: dict[Cell, set[int]] = {}
    for cell, sign in cited:
        signs.setdefault(index.layout.resolve(cell), set()).add(sign)
    return [_card(index.memory(cell), signs[cell]) for cell in sorted(signs)]


def _card(memory: Memory, signs: set[int]) -> Card:
    lists = dict(_lists(memory))
    sides = [
        Side(
            sign,
            _tokens(memory, sign),
            [excerpt(one) for one in lists.get(sign, [])[:EXCERPTS]],
            memory.value.note,
        )
        for sign in sorted(signs, reverse=True)
    ]
    return Card(str(memory.cell), memory.cell.layer, sides)


def _tokens(memory: Memory, sign: int) -> list[str]:
    side: Sequence[ValueToken] = memory.value.top if sign > 0 else memory.value.bottom
    return [one.token for one in side[:TOKENS]]


def _lists(memory: Memory) -> list[tuple[int, list[Trigger]]]:
    """Return a memory's triggers by the sign of their coefficients."""
    lists = [(1, memory.triggers)]
    return [*lists, (-1, memory.negative_triggers)] if memory.gated else lists


def excerpt(trigger: Trigger) -> Excerpt:
    """Return the end of a trigger's prefix."""
    return ending(trigger.prefix, trigger.last_token, trigger.next_token)


def ending(whole: str, last_token: str | None, next_token: str | None) -> Excerpt:
    """Return the end of a prefix, its last token apart, and the token that follows."""
    last = last_token or ""
    marked = last if whole.endswith(last) else ""
    end = shortened(whole)
    if len(marked) > len(end.removeprefix("…")):
        marked = ""
    before = end.removesuffix(marked)
    return Excerpt(visible(before), visible(marked), visible_token(next_token))


def shortened(text: str) -> str:
    """Return at most the last ten words of a text, with … in front where something is missing."""
    words = text.split()
    kept = text
    if len(words) > WORDS:
        place = len(text)
        for word in reversed(words[-WORDS:]):
            place = text.rindex(word, 0, place)
        kept = text[place:]
    kept = kept[-CHARACTERS:]
    return kept if len(kept) == len(text) else f"…{kept}"
