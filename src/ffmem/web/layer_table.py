"""The numbers of all memories of a layer, as a table to sort, filter and page through.

    agrees ⇔ top(sign·v) is the next token of the memory's top trigger (experiments/top_triggers.py)
    followed = triggers whose next token is top(sign(m)·v),  followable = triggers that have one

Memories without static values (a lambda layer's) have none of this, and asking for it is an error.
Sorting is stable both ways: equals keep the order of their numbers, memories without a number come
last.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import numpy as np
from fastapi import Query
from jaxtyping import Bool, Float64, Int8, Int32, Int64
from numpy import ndarray
from pydantic import BeforeValidator, Field

from ffmem.errors import FfmemError, NoStaticValues
from ffmem.experiments.triggers import NO_SIGN, NONE, top_triggers, trigger_table
from ffmem.indexing.memory import from_visible
from ffmem.indexing.store import Index
from ffmem.indexing.tables import layer_file, read_columns
from ffmem.web.limits import NotHere, refuse_long
from ffmem.web.pattern_view import CHOICES, RowPattern, of_layer
from ffmem.web.state import none_if_empty

PAGE = 50
"""Memories on a page."""

SHOWN = 5
"""Tokens of each end of a value that a row shows."""

MOST_LAYERS = 32
"""Tables held at once, of all indexes."""

AGREEMENT = {1: "agrees", 0: "disagrees", -1: "none"}
"""Whether a value predicts what follows its memory's top trigger; none: there is none."""


class LayerTable(NamedTuple):
    """One number of each memory in each column."""

    layer: int
    top: Int32[ndarray, "memory token"]
    """The first tokens that the value promotes."""
    bottom: Int32[ndarray, "memory token"]
    """The first that it suppresses: what it promotes where m < 0."""
    active_share: Float64[ndarray, " memory"]
    max: Float64[ndarray, " memory"]
    min: Float64[ndarray, " memory"]
    mean: Float64[ndarray, " memory"]
    probability: Float64[ndarray, " memory"]
    """Of top(v)."""
    sign: Int8[ndarray, " memory"]
    agreement: Int8[ndarray, " memory"]
    followed: Int64[ndarray, " memory"]
    followable: Int64[ndarray, " memory"]

    @property
    def largest(self) -> Float64[ndarray, " memory"]:
        """The largest |m| of each memory."""
        largest: ndarray = np.maximum(np.abs(self.max), np.abs(self.min))
        return largest


@dataclass(frozen=True)
class Match:
    """The token for which a memory was found: its rank, from 1, at one end of the value."""

    token: str
    rank: int
    end: str


@dataclass(frozen=True)
class LayerRow:
    """One memory in the table of its layer."""

    cell: str
    memory: int
    place: dict[str, int] | None
    """Head and slot or distance, if a head owns it."""
    top: list[str]
    bottom: list[str]
    active_share: float | None
    max: float | None
    min: float | None
    mean: float | None
    probability: float | None
    sign: int | None
    agreement: str | None
    """None, like the two counts, where memories have no static values."""
    followed: int | None
    followable: int | None
    match: Match | None
    pattern: RowPattern | None
    """The first that contains the text asked for, or else the first of all."""


class Listing(NamedTuple):
    """One page of a table."""

    rows: list[LayerRow]
    page: int
    pages: int
    n: int
    """Memories on all pages."""


Share = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Percent = Annotated[
    Share | None,
    BeforeValidator(none_if_empty),
    Query(description="Bound of the active share, in percent."),
]


@dataclass(frozen=True)
class Wanted:
    """Which memories of a layer to list, and in which order: parameters of an address."""

    sort: Annotated[
        str, Query(description="A column to sort by; with - in front: largest first.")
    ] = "memory"
    has: Annotated[
        str, Query(description="A text in a token at an end of the value, or in a pattern.")
    ] = ""
    least: Percent = None
    most: Percent = None
    agreement: Annotated[str, Query(description="agrees, disagrees or none.")] = ""
    pattern: Annotated[
        str, Query(description="Only memories with patterns: shallow, semantic, any, none.")
    ] = ""

    def __post_init__(self) -> None:
        refuse_long(self.has)
        if self.column not in SORTS:
            raise FfmemError(
                f"A layer cannot be sorted by {self.sort!r}. Sort by {', '.join(SORTS)}; with a"
                " minus in front, from the largest down."
            )
        for name, choices in (("agreement", AGREEMENT.values()), ("pattern", CHOICES)):
            if (given := getattr(self, name)) and given not in choices:
                raise FfmemError(f"There is no {name} {given!r}. There are: {', '.join(choices)}.")

    @property
    def column(self) -> str:
        """What is sorted by."""
        return self.sort.removeprefix("-")

    @property
    def downwards(self) -> bool:
        """Whether the largest comes first."""
        return self.sort.startswith("-")

    @property
    def is_all(self) -> bool:
        """Whether no memory is left out."""
        named = self.has or self.agreement or self.pattern
        return not named and self.least is None and self.most is None

    def parameters(self) -> dict[str, object]:
        """Return its parameters in an address; None for the defaults."""
        plain = Wanted()
        return {
            name: None if value == getattr(plain, name) else value
            for name, value in vars(self).items()
        }


@lru_cache(maxsize=MOST_LAYERS)
def layer_table(index: Index, layer: int) -> LayerTable:
    """Return the table of a layer, kept for the next request."""
    refuse_other_layers(index, layer)
    names = ["active_share", "max", "min", "mean"]
    stats = index.table("stats", layer=layer, columns=names)
    n = index.layout.widths[layer]
    head = top_triggers(index, layer)
    found = LayerTable(
        layer=layer,
        top=np.empty((n, 0), np.int32),
        bottom=np.empty((n, 0), np.int32),
        **{name: stats[name].to_numpy() for name in names},
        probability=np.full(n, np.nan),
        sign=head.sign,
        agreement=np.full(n, -1, np.int8),
        followed=np.zeros(n, np.int64),
        followable=np.zeros(n, np.int64),
    )
    if not index.manifest.model.has_values:
        return found
    names = ["top_ids", "bottom_ids", "top_probabilities"]
    values = read_columns(index.folder / layer_file("values", layer), names)
    firsts = {1: values["top_ids"][:, 0], -1: values["bottom_ids"][:, 0]}
    for sign, first in firsts.items():
        following = trigger_table(index, layer, sign).next
        found.followed[:] += (following == first[:, None]).sum(axis=1)
        found.followable[:] += (following != NONE).sum(axis=1)
    predicted = np.where(head.sign < 0, firsts[-1], firsts[1])
    return found._replace(
        top=values["top_ids"][:, :SHOWN].copy(),  # a view would keep the whole column
        bottom=values["bottom_ids"][:, :SHOWN].copy(),
        probability=values["top_probabilities"][:, 0].astype(np.float64),
        agreement=np.where(head.exists, predicted == head.next_token, -1).astype(np.int8),
    )


def refuse_other_layers(index: Index, layer: int) -> None:
    """Raise unless the model has the layer."""
    if not 0 <= layer < index.n_layers:
        raise NotHere(f"There is no layer {layer}: the model has layers 0 to {index.n_layers - 1}.")


def chosen(index: Index, table: LayerTable, wanted: Wanted) -> Int64[ndarray, " chosen"]:
    """Return the numbers of the memories that are wanted, in the order that is wanted."""
    left = kept(index, table, wanted)
    order = np.argsort(_key(index, table, wanted), kind="stable")
    ordered: ndarray = order[left[order]]
    return ordered


def kept(index: Index, table: LayerTable, wanted: Wanted) -> Bool[ndarray, " memory"]:
    """Return which memories the filters leave."""
    if not index.manifest.model.has_values and (wanted.agreement or wanted.column in OF_VALUES):
        asked = "filtered by agreement" if wanted.agreement else f"sorted by {wanted.column}"
        raise NoStaticValues(f"A layer {asked} was asked for.")
    left = np.ones(len(table.sign), bool)
    if wanted.least is not None:
        left &= 100 * table.active_share >= wanted.least
    if wanted.most is not None:
        left &= 100 * table.active_share <= wanted.most
    if wanted.agreement:
        code = next(code for code, name in AGREEMENT.items() if name == wanted.agreement)
        left &= table.agreement == code
    if wanted.pattern:
        left &= of_layer(index, table.layer).kept(wanted.pattern)
    if wanted.has:
        in_tokens = _places(index, table.layer, wanted.has).any(axis=1)
        left &= in_tokens | of_layer(index, table.layer).holding(wanted.has)
    return left


def listing(index: Index, layer: int, wanted: Wanted, page: int = 1) -> Listing:
    """Return one page of a layer's memories."""
    table = layer_table(index, layer)
    memories = chosen(index, table, wanted)
    pages = max(1, -(-len(memories) // PAGE))
    if not 1 <= page <= pages:
        raise NotHere(f"There is no page {page} of these memories: there are pages 1 to {pages}.")
    here = memories[(page - 1) * PAGE : page * PAGE]
    rows = [row(index, table, memory, wanted.has) for memory in here.tolist()]
    if wanted.has:
        places = _places(index, layer, wanted.has)[here]
        rows = [
            replace(one, match=_match(index, layer, one.memory, place)) if place.any() else one
            for one, place in zip(rows, places, strict=True)
        ]
    return Listing(rows, page, pages, len(memories))


def row(index: Index, table: LayerTable, memory: int, has: str = "") -> LayerRow:
    """Return one memory of a table; numbers that are none as None."""
    sign = int(table.sign[memory])
    patterns = of_layer(index, table.layer)
    kind = index.manifest.model.kind
    slot = kind.head_slot(memory)
    return LayerRow(
        cell=str(index.layout.cell(table.layer, memory)),
        memory=memory,
        place=None if slot is None else slot.to_dict(),
        top=[index.token(id) for id in table.top[memory].tolist()],
        bottom=[index.token(id) for id in table.bottom[memory].tolist()],
        active_share=finite(table.active_share[memory]),
        max=finite(table.max[memory]),
        min=finite(table.min[memory]),
        mean=finite(table.mean[memory]),
        probability=finite(table.probability[memory]),
        sign=sign if sign != NO_SIGN else None,
        agreement=AGREEMENT[int(table.agreement[memory])] if kind.has_values else None,
        followed=int(table.followed[memory]) if kind.has_values else None,
        followable=int(table.followable[memory]) if kind.has_values else None,
        match=None,
        pattern=patterns.shown(memory, has) or patterns.shown(memory),
    )


def finite(number: Any) -> float | None:
    """Return a number that JSON has; None for those that it has not."""
    return float(number) if np.isfinite(number) else None


def _tokens(index: Index, table: LayerTable, end: str) -> Float64[ndarray, " memory"]:
    """Return where the first token of each value stands in the alphabet of all of them."""
    first = getattr(table, end)[:, 0]
    shown = {id: index.token(id) for id in set(first.tolist())}
    ordered = sorted(set(shown.values()), key=lambda token: (token.strip().casefold(), token))
    place = {token: float(number) for number, token in enumerate(ordered)}
    return np.array([place[shown[id]] for id in first.tolist()], np.float64)


def _share(table: LayerTable) -> Float64[ndarray, " memory"]:
    """Return followed / followable, NaN of nothing."""
    none = np.full(len(table.sign), np.nan)
    some = table.followable > 0
    share: ndarray = np.divide(table.followed, table.followable, out=none, where=some)
    return share


SORTS: dict[str, Callable[[Index, LayerTable], Float64[ndarray, " memory"]]] = {
    "memory": lambda _, table: np.arange(len(table.sign), dtype=np.float64),
    "top": lambda index, table: _tokens(index, table, "top"),
    "bottom": lambda index, table: _tokens(index, table, "bottom"),
    "active_share": lambda _, table: table.active_share,
    "max": lambda _, table: table.max,
    "min": lambda _, table: table.min,
    "mean": lambda _, table: table.mean,
    "largest": lambda _, table: table.largest,
    "probability": lambda _, table: table.probability,
    "sign": lambda _, table: np.where(table.sign == NO_SIGN, np.nan, table.sign),
    "agreement": lambda _, table: np.where(table.agreement < 0, np.nan, table.agreement),
    "followed": lambda _, table: _share(table),
}
"""What a layer can be sorted by; NaN stands for memories that have no such number."""

OF_VALUES = {"top", "bottom", "probability", "agreement", "followed"}
"""What needs static values."""


def _key(index: Index, table: LayerTable, wanted: Wanted) -> Float64[ndarray, " memory"]:
    """Return what a stable ascending sort puts in the wanted order; it puts NaN last."""
    key = np.asarray(SORTS[wanted.column](index, table), np.float64)
    return -key if wanted.downwards else key


def _places(index: Index, layer: int, has: str) -> Bool[ndarray, "memory token"]:
    """Return which tokens at the ends of a layer's values hold a text: the top's, the bottom's."""
    import pyarrow.compute as pc

    if not index.manifest.model.has_values:
        return np.zeros((index.layout.widths[layer], 0), bool)
    found = pc.match_substring(index.tokens.column, pattern=from_visible(has), ignore_case=True)
    holds = np.asarray(found.to_numpy(zero_copy_only=False), bool)
    ids = _ends(index, layer)
    return np.concatenate([holds[ids["top_ids"]], holds[ids["bottom_ids"]]], axis=1)


def _match(index: Index, layer: int, memory: int, places: Bool[ndarray, " token"]) -> Match:
    """Return the match that stands nearest to one end of a value, the top's first."""
    ends = places.reshape(2, -1)
    ranks = np.where(ends.any(axis=1), ends.argmax(axis=1), ends.shape[1])
    end = int(ranks.argmin())
    name = ("top", "bottom")[end]
    id = int(_ends(index, layer)[f"{name}_ids"][memory, ranks[end]])
    return Match(index.token(id), int(ranks[end]) + 1, name)


@lru_cache(maxsize=2)
def _ends(index: Index, layer: int) -> dict[str, ndarray]:
    """Return all tokens that the index keeps of a layer's values."""
    return read_columns(index.folder / layer_file("values", layer), ["top_ids", "bottom_ids"])
