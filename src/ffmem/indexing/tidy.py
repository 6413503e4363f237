"""Tidy tables of an index, for pandas, polars and DuckDB: `index.table("triggers", layer=8)`.

    stats      one row per memory
    values     one row per memory, side (top, bottom) and rank
    keys       one row per memory and rank: the tokens that its key matches
    triggers   one row per trigger
    samples    one row per memory and sampled prefix
    patterns   one row per pattern

Each is an Arrow table, a chunk per layer. Only the columns that you ask for are computed: the text
of the prefixes takes most of the time.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy import ndarray

from ffmem.errors import FfmemError, NoStaticValues
from ffmem.indexing.memory import is_flat
from ffmem.indexing.results import EXPERT_STATS, GATED_STATS
from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.store import Index
from ffmem.indexing.tables import UNIT
from ffmem.indexing.weights import CLASSES, COSINES, weight_classes

_MEMORY = (
    ("cell", pa.string()),
    ("layer", pa.int32()),
    ("bank", pa.string()),  # dense, S or E12
    ("memory", pa.int32()),
)
_PLACE = (("sentence", pa.int64()), ("length", pa.int32()))
_TEXT = (("last_token", pa.string()), ("next_token", pa.string()), ("prefix", pa.string()))

CASES = ("open_positive", "open_negative", "closed_positive", "closed_negative")
"""Gate open or not, m > 0 or not."""

SCHEMAS: Mapping[str, pa.Schema] = {
    "stats": pa.schema(
        [
            *_MEMORY,
            ("active", pa.int64()),
            *((name, pa.float64()) for name in ("active_share", "mean", "max", "min")),
            # Share of prefixes that reach the memory's bank, and their mean router weight: null in
            # models without experts.
            *((name, pa.float64()) for name in ("routed_share", "mean_weight")),
            # Prefixes by sign case, of those that reach the bank; null in ungated models.
            *((name, pa.int64()) for name in CASES),
            # By what the memory reads and writes; null where it has no such vectors.
            *((name, pa.float32()) for name in COSINES),
            ("weight_class", pa.string()),
        ]
    ),
    "values": pa.schema(
        [
            *_MEMORY,
            ("side", pa.string()),
            ("rank", pa.int32()),
            ("token", pa.string()),
            ("id", pa.int32()),
            ("logit", pa.float32()),
            ("probability", pa.float32()),
        ]
    ),
    "keys": pa.schema(
        [
            *_MEMORY,
            ("rank", pa.int32()),
            ("token", pa.string()),
            ("id", pa.int32()),
            ("score", pa.float32()),
            ("up", pa.float32()),
        ]
    ),
    "triggers": pa.schema(
        [
            *_MEMORY,
            ("sign", pa.int8()),
            ("rank", pa.int32()),
            ("coefficient", pa.float32()),
            ("gate", pa.int8()),
            *_PLACE,
            *_TEXT,
        ]
    ),
    "samples": pa.schema([*_MEMORY, ("coefficient", pa.float32()), *_PLACE, *_TEXT]),
    "patterns": pa.schema(
        [
            *_MEMORY,
            ("sign", pa.int8()),
            ("number", pa.int32()),
            *((name, pa.string()) for name in ("kind", "description", "source", "rule", "what")),
            ("ranks", pa.list_(pa.int16())),
            ("held_ranks", pa.list_(pa.int16())),
            ("held", pa.int16()),
            ("of", pa.int16()),
            *((name, pa.float64()) for name in ("precision", "recall", "base", "lift")),
            *((name, pa.float64()) for name in ("p_value", "q_value")),
        ]
    ),
}
"""The columns of every table."""


def table(
    index: Index,
    name: str,
    *,
    layer: int | None = None,
    top: int | None = None,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Return one of the tables, of one layer or of all; see `Index.table`."""
    schema = _schema(name, columns)
    tables = [part for _, part in layer_tables(index, name, layer=layer, top=top, columns=columns)]
    return pa.concat_tables(tables) if tables else schema.empty_table()


def layer_tables(
    index: Index,
    name: str,
    *,
    layer: int | None = None,
    top: int | None = None,
    columns: Sequence[str] | None = None,
) -> Iterator[tuple[int, pa.Table]]:
    """Yield (layer, table), so that a large table need not be in memory at once."""
    schema = _schema(name, columns)
    if top is not None and (name not in ("values", "keys", "triggers") or top < 1):
        raise FfmemError(
            f"table({name!r}, top={top}): `top` is a number of tokens or triggers, at least 1, for"
            " the tables values, keys and triggers."
        )
    if layer is not None:
        index.layout.check_layer(layer)
    if name == "values" and not index.manifest.model.has_values:
        raise NoStaticValues("This index has no table of values.")
    if name == "patterns":
        from ffmem.patterns.store import require_patterns

        require_patterns(index)
    for number in range(index.n_layers) if layer is None else [layer]:
        arrays = _BUILDERS[name](index, number, top, schema.names)
        yield number, pa.table([arrays[column] for column in schema.names], schema=schema)


def _schema(name: str, columns: Sequence[str] | None) -> pa.Schema:
    """Return the schema of a table, or of some of its columns in the given order."""
    if name not in SCHEMAS:
        raise FfmemError(f"There is no table {name!r}. There are: {', '.join(SCHEMAS)}.")
    schema = SCHEMAS[name]
    if columns is None:
        return schema
    if not columns:
        raise FfmemError("columns is empty. Pass a list of names, like ['cell', 'layer'].")
    for column in columns:
        if column not in schema.names:
            raise FfmemError(
                f"The table {name!r} has no column {column!r}. It has: {', '.join(schema.names)}."
            )
    return pa.schema([schema.field(column) for column in columns])


def _stats(index: Index, layer: int, top: int | None, names: list[str]) -> dict[str, Any]:
    stats = index.columns("stats", layer, _stored_stats(index, names))
    width = index.layout.widths[layer]
    columns = _memory_columns(index, layer, np.arange(width), names)
    n_prefixes = np.maximum(stats.get("n_prefixes", index.n_prefixes), 1)
    columns |= {name: stats[name].astype(np.float64) for name in ("mean", "max", "min")}
    columns |= dict.fromkeys(("routed_share", "mean_weight"), pa.nulls(width, pa.float64()))
    if "routed" in stats:
        columns["routed_share"] = stats["routed"] / n_prefixes
        columns["mean_weight"] = stats["weight_sum"] * UNIT / np.maximum(stats["routed"], 1)
    columns |= dict.fromkeys(CASES, pa.nulls(width, pa.int64()))
    if "positive" in stats:
        reached = stats.get("routed", n_prefixes)
        active, positive, both = stats["active"], stats["positive"], stats["open_positive"]
        counts = (both, active - both, positive - both, reached - active - positive + both)
        columns |= dict(zip(CASES, counts, strict=True))
    if {*COSINES, "weight_class"} & set(names):
        columns |= _weight_columns(index, layer)
    return columns | {"active": stats["active"], "active_share": stats["active"] / n_prefixes}


def _stored_stats(index: Index, names: Iterable[str]) -> list[str]:
    """Return the stored columns that some columns of the table follow from."""
    stored = ["active", "mean", "max", "min"]
    if index.layout.has_experts and {"routed_share", "mean_weight", *CASES} & set(names):
        stored += EXPERT_STATS
    if index.manifest.model.gated and set(CASES) & set(names):
        stored += GATED_STATS
    return stored if index.live is None else [*stored, "n_prefixes"]


def _weight_columns(index: Index, layer: int) -> dict[str, Any]:
    """Return the cosines of a layer's memories and their classes."""
    width, keys = index.layout.widths[layer], index.columns("keys", layer)
    columns: dict[str, Any] = {
        name: keys[name] if name in keys else pa.nulls(width, pa.float32()) for name in COSINES
    }
    numbers = weight_classes(keys)
    columns["weight_class"] = pa.nulls(width, pa.string())
    if numbers is not None:
        columns["weight_class"] = pa.array(CLASSES).take(pa.array(numbers))
    return columns


def _values(index: Index, layer: int, top: int | None, names: list[str]) -> dict[str, Any]:
    values = index.columns("values", layer)
    shown = (~is_flat(values["top_logits"], values["bottom_logits"])).nonzero()[0]
    n = min(top or values["top_ids"].shape[1], values["top_ids"].shape[1])

    def both(name: str) -> ndarray:
        """Return what both sides hold, by memory, side and rank."""
        sides = [values[f"{side}_{name}"][shown, :n] for side in ("top", "bottom")]
        return np.stack(sides, axis=1).reshape(-1)

    columns = _memory_columns(index, layer, np.repeat(shown, 2 * n), names)
    ids = both("ids")
    sides = np.tile(np.repeat(np.asarray([0, 1], np.int8), n), len(shown))
    columns |= {
        "side": pa.array(["top", "bottom"]).take(pa.array(sides)),
        "rank": np.tile(np.arange(1, n + 1, dtype=np.int32), 2 * len(shown)),
        "id": ids,
        "logit": both("logits"),
        "probability": both("probabilities"),
    }
    if "token" in names:
        columns["token"] = _tokens(index, ids)
    return columns


def _keys(index: Index, layer: int, top: int | None, names: list[str]) -> dict[str, Any]:
    keys = index.columns("keys", layer)
    if "ids" not in keys:  # not computed yet, or no input embedding that ffmem can read
        return {field.name: pa.nulls(0, field.type) for field in SCHEMAS["keys"]}
    shown = (keys["scores"][:, 0] != keys["scores"][:, -1]).nonzero()[0]
    n = min(top or keys["ids"].shape[1], keys["ids"].shape[1])
    columns = _memory_columns(index, layer, np.repeat(shown, n), names)
    ids = keys["ids"][shown, :n].reshape(-1)
    columns |= {
        "rank": np.tile(np.arange(1, n + 1, dtype=np.int32), len(shown)),
        "id": ids,
        "score": keys["scores"][shown, :n].reshape(-1),
        "up": pa.nulls(len(ids), pa.float32()),
    }
    if "up_scores" in keys:
        columns["up"] = keys["up_scores"][shown, :n].reshape(-1)
    if "token" in names:
        columns["token"] = _tokens(index, ids)
    return columns


def _triggers(index: Index, layer: int, top: int | None, names: list[str]) -> dict[str, Any]:
    triggers = index.columns("triggers", layer)
    gated = index.manifest.model.gated
    signs = [(1, ""), (-1, "negative_")] if gated else [(1, "")]

    def all_signs(name: str) -> ndarray:
        """Return what all lists hold, by memory, sign and rank."""
        lists = [triggers[f"{sign}{name}"][:, :top] for _, sign in signs]
        return np.stack(lists, axis=1)

    prefixes = all_signs("prefix")
    memory, list_number, rank = (prefixes != NO_PREFIX).nonzero()
    filled = (memory, list_number, rank)
    columns = _memory_columns(index, layer, memory, names)
    columns |= {
        "sign": np.asarray([sign for sign, _ in signs], np.int8)[list_number],
        "rank": (rank + 1).astype(np.int32),
        "coefficient": all_signs("coefficient")[filled],
        "gate": all_signs("gate")[filled] if gated else pa.nulls(len(memory), pa.int8()),
    }
    return columns | _prefix_columns(index, prefixes[filled], names)


def _samples(index: Index, layer: int, top: int | None, names: list[str]) -> dict[str, Any]:
    coefficients = index.columns("samples", layer)["coefficient"]
    width, n = coefficients.shape
    columns = _memory_columns(index, layer, np.repeat(np.arange(width), n), names)
    columns["coefficient"] = coefficients.reshape(-1)
    return columns | _prefix_columns(index, np.tile(index.sampled_prefixes, width), names)


def _patterns(index: Index, layer: int, top: int | None, names: list[str]) -> dict[str, Any]:
    from ffmem.patterns.store import layer_columns

    found = layer_columns(index, layer)
    columns = {name: found[name] for name in found.column_names}
    return columns | _memory_columns(index, layer, found["memory"].to_numpy(), names)


_BUILDERS = {
    "stats": _stats,
    "values": _values,
    "keys": _keys,
    "triggers": _triggers,
    "samples": _samples,
    "patterns": _patterns,
}


def _memory_columns(
    index: Index, layer: int, memories: ndarray, names: Iterable[str]
) -> dict[str, Any]:
    """Return the columns that say which memory each row is about."""
    columns: dict[str, Any] = {
        "layer": np.full(len(memories), layer, np.int32),
        "memory": memories.astype(np.int32),
    }
    if "cell" in names:
        width = index.layout.widths[layer]
        cells = pa.array([str(index.layout.cell(layer, m)) for m in range(width)], pa.string())
        columns["cell"] = cells.take(pa.array(memories))
    if "bank" in names:
        banks = index.layout.banks(layer)
        number = np.searchsorted([bank.offset for bank in banks], memories, side="right") - 1
        shown = pa.array([bank.name or "dense" for bank in banks], pa.string())
        columns["bank"] = shown.take(pa.array(number))
    return columns


def _prefix_columns(index: Index, prefixes: ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Return where each row's prefix is, and its text. Equal prefixes are decoded once."""
    needed = {"sentence", "length", "last_token", "next_token", "prefix"} & set(names)
    if not needed:
        return {}
    different, place = np.unique(prefixes, return_inverse=True)
    offsets, ids = index.sentences.tokens()
    sentence = np.searchsorted(offsets, different, side="right") - 1
    length = different - offsets[sentence]
    # Sentence s owns n + 1 integers for its n tokens, so its tokens begin at offset − s.
    after = different - sentence
    last = np.where(length > 0, ids[np.maximum(after - 1, 0)] if len(ids) else 0, -1)
    ends = np.append(offsets[1:] - np.arange(1, len(offsets)), len(ids))
    has_next = after < ends[sentence]
    following = np.where(has_next, ids[np.minimum(after, len(ids) - 1)] if len(ids) else 0, -1)
    columns: dict[str, Any] = {"sentence": sentence, "length": length.astype(np.int32)}
    if "last_token" in needed:
        columns["last_token"] = _tokens(index, last)
    if "next_token" in needed:
        columns["next_token"] = _tokens(index, following)
    if "prefix" in needed:
        owners = index.sentences.at(different.tolist())
        texts = [
            index.prefix_text(owners[prefix], n).prefix
            for prefix, n in zip(different.tolist(), length.tolist(), strict=True)
        ]
        columns["prefix"] = pa.array(texts, pa.string())
    rows = pa.array(place.reshape(-1))
    return {name: pa.array(columns[name]).take(rows) for name in needed}


def _tokens(index: Index, ids: ndarray) -> pa.Array | pa.ChunkedArray:
    """Return the displayed form of tokens; null for ids below 0."""
    return index.tokens.column.take(pc.if_else(pa.array(ids >= 0), pa.array(ids), None))
