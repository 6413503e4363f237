"""The numbers of all memories of a layer, as a table to sort, filter and page through.

Agreement is stored in the index (`indexing/agreement.py`). Memories without static values (a lambda
layer's) have none of it, and asking for it is an error.
Sorting is stable both ways: equals keep the order of their numbers, memories without a number come
last.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, NamedTuple

import numpy as np
from fastapi import Depends, Query
from jaxtyping import Bool, Float64, Int8, Int32, Int64
from numpy import ndarray
from pydantic import BeforeValidator, Field

from ffmem.cells import BankRange
from ffmem.errors import FfmemError, NoStaticValues
from ffmem.indexing.agreement import read_agreement
from ffmem.indexing.memory import from_visible
from ffmem.indexing.store import Index
from ffmem.indexing.triggers import NO_SIGN
from ffmem.stats import spread
from ffmem.web.errors import NotFound
from ffmem.web.patterns import CHOICES, LayerPatterns, RowPattern, layer_patterns
from ffmem.web.state import check_length, none_if_empty

PAGE_SIZE = 50
"""Memories on a page."""

N_TOKENS = 5
"""Tokens of each end of a value that a row shows."""

MAX_TABLES = 32
"""Tables to keep in memory, of all indexes."""

AGREEMENT = {1: "agrees", 0: "disagrees", -1: "none"}
"""Whether a value predicts what follows its memory's top trigger; none: nothing follows."""


@dataclass(frozen=True, eq=False)
class LayerTable:
    """One number of each memory in each column.

    What follows from the values is read when it is first needed: a page shows the values of its own
    memories (`layer_rows`), and needs those of the whole layer only to sort by them.
    """

    index: Index
    layer: int
    active_share: Float64[ndarray, " memory"]
    active_routed: Float64[ndarray, " memory"]
    """The same of the prefixes that reach the memory's bank; NaN in layers without experts."""
    max: Float64[ndarray, " memory"]
    min: Float64[ndarray, " memory"]
    mean: Float64[ndarray, " memory"]
    sign: Int8[ndarray, " memory"]
    agreement: Int8[ndarray, " memory"]
    followed: Int32[ndarray, " memory"]
    followable: Int32[ndarray, " memory"]
    has_values: bool
    """Whether the values of the layer are there: an unfinished index may have none yet."""

    @cached_property
    def top(self) -> Int32[ndarray, "memory token"]:
        """The first token that each value promotes; no column if there are no values yet."""
        return self._first("top_ids")

    @cached_property
    def bottom(self) -> Int32[ndarray, "memory token"]:
        """The first that it suppresses: what it promotes where m < 0."""
        return self._first("bottom_ids")

    @cached_property
    def probability(self) -> Float64[ndarray, " memory"]:
        """Of top(v)."""
        column = self._first("top_probabilities")
        if not column.shape[1]:
            return np.full(len(column), np.nan)
        return column[:, 0].astype(np.float64)

    def _first(self, name: str) -> ndarray:
        """Return the first entry of each list in a column of the values, as a matrix."""
        if not self.has_values:
            return np.empty((len(self.sign), 0), np.int32)
        column = self.index.columns("values", self.layer, [name])[name]
        return column[:, :1].copy()  # a view would keep the whole column

    @property
    def largest(self) -> Float64[ndarray, " memory"]:
        """The largest |m| of each memory."""
        largest: ndarray = np.maximum(np.abs(self.max), np.abs(self.min))
        return largest


@dataclass(frozen=True)
class TokenMatch:
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
    """Of all prefixes."""
    active_routed: float | None
    """Of those routed to the memory's expert; None in layers without experts."""
    max: float | None
    min: float | None
    mean: float | None
    probability: float | None
    sign: int | None
    agreement: str | None
    """None, like the two counts, where memories have no static values."""
    followed: int | None
    followable: int | None
    match: TokenMatch | None
    pattern: RowPattern | None
    """The first that contains the text of the query, or else the first of all."""


class LayerPage(NamedTuple):
    """One page of a layer's memories."""

    rows: list[LayerRow]
    page: int
    pages: int
    n: int
    """Memories on all pages."""


Percent = Annotated[
    Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None,
    BeforeValidator(none_if_empty),
    Query(description="Bound of the active share, in percent."),
]


@dataclass(frozen=True)
class LayerQuery:
    """Which memories of a layer to list, and in which order: URL parameters."""

    sort: Annotated[
        str, Query(description="Column to sort by; with a leading -, largest first.")
    ] = "memory"
    has: Annotated[
        str, Query(description="Text in a top or bottom token of the value, or in a pattern.")
    ] = ""
    least: Percent = None
    most: Percent = None
    agreement: Annotated[str, Query(description="agrees, disagrees or none.")] = ""
    pattern: Annotated[
        str, Query(description="Only memories with patterns: shallow, semantic, any, none.")
    ] = ""
    bank: Annotated[str, Query(description="Only memories of one expert, like E12 or S.")] = ""

    def __post_init__(self) -> None:
        check_length(self.has)
        if self.column not in SORTS:
            raise FfmemError(
                f"A layer cannot be sorted by {self.sort!r}. Sort by {', '.join(SORTS)}; with a"
                " leading minus, largest first."
            )
        for name, choices in (("agreement", AGREEMENT.values()), ("pattern", CHOICES)):
            if (given := getattr(self, name)) and given not in choices:
                raise FfmemError(f"There is no {name} {given!r}. There are: {', '.join(choices)}.")

    @property
    def column(self) -> str:
        """The column to sort by."""
        return self.sort.removeprefix("-")

    @property
    def has_filter(self) -> bool:
        """Whether some memories may be left out."""
        named = self.has or self.agreement or self.pattern or self.bank
        return bool(named) or self.least is not None or self.most is not None

    def parameters(self) -> dict[str, object]:
        """Return its URL parameters; None for the defaults."""
        default = LayerQuery()
        return {
            name: None if value == getattr(default, name) else value
            for name, value in vars(self).items()
        }


LayerQueryParam = Annotated[LayerQuery, Depends(LayerQuery)]
"""The query, as the parameter of a route."""


@lru_cache(maxsize=MAX_TABLES)
def layer_table(index: Index, layer: int) -> LayerTable:
    """Return the table of a layer, cached."""
    check_layer(index, layer)
    names = ["active_share", "max", "min", "mean"]
    stats = layer_stats(index, layer)
    found = read_agreement(index, layer)
    nothing = np.zeros(len(found.sign), np.int32)
    return LayerTable(
        index=index,
        layer=layer,
        **{name: stats[name].to_numpy() for name in names},
        active_routed=_active_routed(index, layer, stats),
        sign=found.sign,
        agreement=np.full_like(found.sign, -1) if found.agreement is None else found.agreement,
        followed=nothing if found.followed is None else found.followed,
        followable=nothing if found.followable is None else found.followable,
        has_values=found.agreement is not None,
    )


@lru_cache(maxsize=2)
def layer_stats(index: Index, layer: int) -> Any:
    """Return what pages show of a layer's statistics, cached while one page is made."""
    names = ["active_share", "max", "min", "mean", "routed_share", "mean_weight"]
    return index.table("stats", layer=layer, columns=names)


def _active_routed(index: Index, layer: int, stats: Any) -> Float64[ndarray, " memory"]:
    """Return active / routed prefixes of each memory; NaN of none, and without experts."""
    nothing = np.full(index.layout.widths[layer], np.nan)
    if not any(bank.name for bank in index.layout.banks(layer)):
        return nothing
    active, routed = (stats[name].to_numpy() for name in ("active_share", "routed_share"))
    share: ndarray = np.divide(active, routed, out=nothing, where=routed > 0)
    return share


@dataclass(frozen=True)
class LayerSpread:
    """How the memories of one layer differ: quartiles over them."""

    layer: int
    active_share: dict[str, Any]
    largest: dict[str, Any]
    """Of each memory's largest |m|; `max` is the largest of all."""


@lru_cache(maxsize=8)
def layer_spreads(index: Index) -> list[LayerSpread]:
    """Return how active and how strong the memories of each layer are."""
    found = []
    for layer in index.layout.memory_layers:
        stats = index.table("stats", layer=layer, columns=["active_share", "max", "min"])
        largest = np.maximum(np.abs(stats["max"].to_numpy()), np.abs(stats["min"].to_numpy()))
        largest = largest[np.isfinite(largest)]
        most = {"max": float(largest.max()) if len(largest) else None}
        share = spread(stats["active_share"].to_numpy())
        found.append(LayerSpread(layer, share, spread(largest) | most))
    return found


def check_layer(index: Index, layer: int) -> None:
    """Raise unless the model has the layer."""
    if not 0 <= layer < index.n_layers:
        raise NotFound(f"No layer {layer}: the model has layers 0 to {index.n_layers - 1}.")


def find_bank(index: Index, layer: int, name: str) -> BankRange:
    """Return the expert of a layer by its name; raise if there is none."""
    check_layer(index, layer)
    banks = {bank.name: bank for bank in index.layout.banks(layer) if bank.name}
    if name.upper() not in banks:
        there = f"It has {', '.join(_shorten(list(banks)))}." if banks else "It has no experts."
        raise NotFound(f"Layer {layer} has no expert {name[:20]!r}. {there}")
    return banks[name.upper()]


def _shorten(names: list[str]) -> list[str]:
    return names if len(names) < 8 else [*names[:3], "…", names[-1]]


def sort_memories(index: Index, table: LayerTable, query: LayerQuery) -> Int64[ndarray, " listed"]:
    """Return the numbers of the memories that a query lists, in its order."""
    key = np.asarray(SORTS[query.column](index, table), np.float64)
    order = np.argsort(-key if query.sort.startswith("-") else key, kind="stable")  # NaN last
    listed: ndarray = order[filter_memories(index, table, query)[order]]
    return listed


def filter_memories(index: Index, table: LayerTable, query: LayerQuery) -> Bool[ndarray, " memory"]:
    """Return which memories pass the filters of a query."""
    if not index.manifest.model.has_values and (query.agreement or query.column in OF_VALUES):
        what = "filtered by agreement" if query.agreement else f"sorted by {query.column}"
        raise NoStaticValues(f"This layer cannot be {what}.")
    passes = np.ones(len(table.sign), bool)
    if query.bank:
        passes[:] = False
        passes[find_bank(index, table.layer, query.bank).memories] = True
    if query.least is not None:
        passes &= 100 * table.active_share >= query.least
    if query.most is not None:
        passes &= 100 * table.active_share <= query.most
    if query.agreement:
        code = next(code for code, name in AGREEMENT.items() if name == query.agreement)
        passes &= table.agreement == code
    if query.pattern:
        passes &= layer_patterns(index, table.layer).has(query.pattern)
    if query.has:
        in_tokens = _matching_tokens(index, table.layer, query.has).any(axis=1)
        passes &= in_tokens | layer_patterns(index, table.layer).contains(query.has)
    return passes


def layer_page(index: Index, layer: int, query: LayerQuery, page: int = 1) -> LayerPage:
    """Return one page of a layer's memories."""
    table = layer_table(index, layer)
    memories = sort_memories(index, table, query)
    pages = max(1, -(-len(memories) // PAGE_SIZE))
    if not 1 <= page <= pages:
        raise NotFound(f"There is no page {page} of these memories: there are pages 1 to {pages}.")
    listed = memories[(page - 1) * PAGE_SIZE : page * PAGE_SIZE].tolist()
    rows = layer_rows(index, table, listed, query.has)
    return LayerPage(rows, page, pages, len(memories))


def layer_rows(
    index: Index, table: LayerTable, memories: Sequence[int], has: str = ""
) -> list[LayerRow]:
    """Return some memories of a table; numbers that are not finite as None."""
    patterns = layer_patterns(index, table.layer)
    values = _first_values(table, memories)
    return [
        _layer_row(index, table, memory, value, patterns, has)
        for memory, value in zip(memories, values, strict=True)
    ]


class _FirstValues(NamedTuple):
    """What a row shows of a value."""

    top: list[int]
    bottom: list[int]
    probability: float
    """Of the first top token."""


def _first_values(table: LayerTable, memories: Sequence[int]) -> list[_FirstValues]:
    """Return the first tokens of some memories' values; none where there are no values yet."""
    if not table.has_values or not memories:
        return [_FirstValues([], [], np.nan)] * len(memories)
    names = ["top_ids", "bottom_ids", "top_probabilities"]
    columns = table.index.columns_at("values", table.layer, names, memories)
    top, bottom, probabilities = (columns[name] for name in names)
    first = (top[:, :N_TOKENS], bottom[:, :N_TOKENS], probabilities[:, 0])
    return [_FirstValues(*row) for row in zip(*(one.tolist() for one in first), strict=True)]


def _layer_row(
    index: Index,
    table: LayerTable,
    memory: int,
    value: _FirstValues,
    patterns: LayerPatterns,
    has: str,
) -> LayerRow:
    sign = int(table.sign[memory])
    kind = index.manifest.model.kind
    slot = kind.head_slot(memory)
    return LayerRow(
        cell=str(index.layout.cell(table.layer, memory)),
        memory=memory,
        place=None if slot is None else slot.to_dict(),
        top=[index.token(id) for id in value.top],
        bottom=[index.token(id) for id in value.bottom],
        active_share=finite(table.active_share[memory]),
        active_routed=finite(table.active_routed[memory]),
        max=finite(table.max[memory]),
        min=finite(table.min[memory]),
        mean=finite(table.mean[memory]),
        probability=finite(value.probability),
        sign=sign if sign != NO_SIGN else None,
        agreement=AGREEMENT[int(table.agreement[memory])] if kind.has_values else None,
        followed=int(table.followed[memory]) if kind.has_values else None,
        followable=int(table.followable[memory]) if kind.has_values else None,
        match=_best_match(index, table.layer, memory, has) if has else None,
        pattern=patterns.first(memory, has) or patterns.first(memory),
    )


def finite(number: Any) -> float | None:
    """Return a number that JSON has; None for NaN and infinity."""
    return float(number) if np.isfinite(number) else None


def _alphabetic_rank(index: Index, ids: Int32[ndarray, "memory token"]) -> ndarray:
    """Return the alphabetic rank of each memory's first token; NaN without tokens."""
    if not ids.shape[1]:
        return np.full(len(ids), np.nan)
    tokens = [index.token(id) for id in ids[:, 0].tolist()]
    ordered = sorted(set(tokens), key=lambda token: (token.strip().casefold(), token))
    rank = {token: float(number) for number, token in enumerate(ordered)}
    return np.array([rank[token] for token in tokens], np.float64)


def _followed_share(table: LayerTable) -> Float64[ndarray, " memory"]:
    """Return followed / followable; NaN of nothing."""
    nothing = np.full(len(table.sign), np.nan)
    share: ndarray = np.divide(
        table.followed, table.followable, out=nothing, where=table.followable > 0
    )
    return share


SORTS: dict[str, Callable[[Index, LayerTable], Float64[ndarray, " memory"]]] = {
    "memory": lambda _, table: np.arange(len(table.sign), dtype=np.float64),
    "top": lambda index, table: _alphabetic_rank(index, table.top),
    "bottom": lambda index, table: _alphabetic_rank(index, table.bottom),
    "active_share": lambda _, table: table.active_share,
    "active_routed": lambda _, table: table.active_routed,
    "max": lambda _, table: table.max,
    "min": lambda _, table: table.min,
    "mean": lambda _, table: table.mean,
    "largest": lambda _, table: table.largest,
    "probability": lambda _, table: table.probability,
    "sign": lambda _, table: np.where(table.sign == NO_SIGN, np.nan, table.sign),
    "agreement": lambda _, table: np.where(table.agreement < 0, np.nan, table.agreement),
    "followed": lambda _, table: _followed_share(table),
}
"""What a layer can be sorted by; NaN stands for memories that have no such number."""

OF_VALUES = {"top", "bottom", "probability", "agreement", "followed"}
"""What needs static values."""


@lru_cache(maxsize=2)
def _value_ids(index: Index, layer: int) -> Int32[ndarray, "memory token"]:
    """Return all tokens that the index keeps of a layer's values: the top's, then the bottom's."""
    if not index.manifest.model.has_values:
        return np.zeros((index.layout.widths[layer], 0), np.int32)
    ids = index.columns("values", layer, ["top_ids", "bottom_ids"])
    return np.concatenate([ids["top_ids"], ids["bottom_ids"]], axis=1)


@lru_cache(maxsize=2)
def _matching_tokens(index: Index, layer: int, text: str) -> Bool[ndarray, "memory token"]:
    """Return which tokens at the ends of a layer's values contain a text."""
    import pyarrow.compute as pc

    found = pc.match_substring(index.tokens.column, pattern=from_visible(text), ignore_case=True)
    contains = np.asarray(found.to_numpy(zero_copy_only=False), bool)
    matches: ndarray = contains[_value_ids(index, layer)]
    return matches


def _best_match(index: Index, layer: int, memory: int, text: str) -> TokenMatch | None:
    """Return the match nearest to one end of a value, the top's first."""
    ends = _matching_tokens(index, layer, text)[memory].reshape(2, -1)
    if not ends.any():
        return None
    ranks = np.where(ends.any(axis=1), ends.argmax(axis=1), ends.shape[1])
    end = int(ranks.argmin())
    id = int(_value_ids(index, layer)[memory].reshape(2, -1)[end, ranks[end]])
    return TokenMatch(index.token(id), int(ranks[end]) + 1, ("top", "bottom")[end])
