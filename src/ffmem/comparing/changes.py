"""What changed in every memory, from one index to another, as columns of numbers.

jaccard, rbo                 overlap of the triggers;  negative_*: of the second list, gated models
change                       1 − rbo, the mean over the lists that exist
value_tokens                 Jaccard overlap of the ten tokens that the value promotes most;
                             negative_value_tokens: of −v, gated models
value_cosine, value_norm_ratio, value_change    of the values themselves, where models were read
active_change                active share, second − first
max_ratio, min_ratio         largest coefficient, second / first; smallest, gated models

What does not exist is NaN here and null in files: of a lambda layer's memories, all about values.
"""

import numpy as np
from jaxtyping import Float32, Float64, Int32
from numpy import ndarray

from ffmem.comparing.overlap import overlap
from ffmem.comparing.value_change import ValueChange
from ffmem.indexing.store import Index
from ffmem.indexing.tables import layer_file, read_columns

TOKENS = 10
"""Of a value, whose overlap is measured."""

Columns = dict[str, ndarray]


def layer_changes(
    first: Index, second: Index, layer: int, values: ValueChange | None
) -> dict[str, Float64[ndarray, " memory"]]:
    """Return what changed in the memories of a layer."""
    gated = first.manifest.model.gated
    found = _triggers(first, second, layer, ["", "negative_"] if gated else [""])
    found |= _value_tokens(first, second, layer, gated)
    missing = np.full(first.layout.widths[layer], np.nan)
    found |= {
        "value_cosine": missing if values is None else values.cosine,
        "value_norm_ratio": missing if values is None else values.norm_ratio,
        "value_change": missing if values is None else values.change,
    }
    return found | _behaviour(first, second, layer, gated)


def _triggers(first: Index, second: Index, layer: int, signs: list[str]) -> Columns:
    names = [f"{sign}prefix" for sign in signs]
    one, other = (_read(index, "triggers", layer, names) for index in (first, second))
    found: Columns = {}
    changes = []
    for sign, name in zip(signs, names, strict=True):
        both = overlap(one[name], other[name])
        found |= {f"{sign}jaccard": both.jaccard, f"{sign}rbo": both.rbo}
        changes.append(1 - both.rbo)
    return found | {"change": _mean_of_known(np.stack(changes))}


def _mean_of_known(rows: Float64[ndarray, "list memory"]) -> Float64[ndarray, " memory"]:
    """Return the mean over the lists that exist; NaN where none does."""
    known = ~np.isnan(rows)
    n = known.sum(axis=0)
    total = np.where(known, rows, 0.0).sum(axis=0)
    mean: ndarray = np.where(n > 0, total / np.maximum(n, 1), np.nan)
    return mean


def _value_tokens(first: Index, second: Index, layer: int, gated: bool) -> Columns:
    names = {"value_tokens": "top_ids"}
    if gated:
        names["negative_value_tokens"] = "bottom_ids"
    if not first.manifest.model.has_values:
        return {name: np.full(first.layout.widths[layer], np.nan) for name in names}
    one, other = (_read(index, "values", layer, list(names.values())) for index in (first, second))

    def outermost(ids: Int32[ndarray, "memory token"]) -> ndarray:
        return ids[:, :TOKENS]

    return {
        name: overlap(outermost(one[ids]), outermost(other[ids])).jaccard
        for name, ids in names.items()
    }


def _behaviour(first: Index, second: Index, layer: int, gated: bool) -> Columns:
    names = ["active", "max", "min"]
    one, other = (_read(index, "stats", layer, names) for index in (first, second))
    tokens = max(first.manifest.corpus.prefixes, 1)
    found: Columns = {
        "active_change": (other["active"] - one["active"]) / tokens,
        "max_ratio": _ratio(one["max"], other["max"]),
    }
    if gated:
        found["min_ratio"] = _ratio(-one["min"], -other["min"])
    return found


def _ratio(
    first: Float32[ndarray, " memory"], second: Float32[ndarray, " memory"]
) -> Float64[ndarray, " memory"]:
    """Return second / first where both are positive: elsewhere it says nothing."""
    there = (first > 0) & (second > 0)
    below = np.where(there, first, 1.0).astype(np.float64)
    ratio: ndarray = np.where(there, second / below, np.nan)
    return ratio


def _read(index: Index, kind: str, layer: int, names: list[str]) -> Columns:
    return read_columns(index.folder / layer_file(kind, layer), names)
