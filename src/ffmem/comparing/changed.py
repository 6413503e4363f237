"""The memories that changed most, by rules that anybody can repeat.

`changed`: by change = 1 − rbo, the mean over the lists that exist; ties go to the smaller cosine
of the values, then to the lower cell. A memory that has no triggers on both sides counts as 0;
where one of its two values is all zeros, the cosine counts as smaller than any.

`changed_values`: by value_change = ‖v₂ − v₁‖ / max(‖v₁‖, ‖v₂‖), ties to the lower cell.

Neither holds a memory in which nothing changed.
"""

from typing import Any

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from ffmem.cells import Cell
from ffmem.comparing.changes import TOKENS
from ffmem.indexing.memory import Trigger, visible
from ffmem.indexing.store import Index
from ffmem.text import shorten_prefix

RULES = {
    "changed": "1 - rbo, mean over the lists that exist; ties: smaller value_cosine, lower cell",
    "changed_values": "value_change; ties: lower cell",
}

_NO_DIRECTION = -2.0  # of one value only: further apart than opposite ones


def most_changed(numbers: dict[str, ndarray], top: int) -> Int64[ndarray, " place"]:
    """Return the places of the memories whose triggers changed most, most changed first."""
    change = np.nan_to_num(numbers["change"], nan=0.0)
    moved = np.nan_to_num(numbers["value_change"], nan=0.0)
    lost = np.where(moved > 0, _NO_DIRECTION, 1.0)
    cosine = numbers["value_cosine"]
    closeness = np.where(np.isnan(cosine), lost, cosine)
    order = np.lexsort((closeness, -change))  # stable: the lower cell first
    found: ndarray = order[((change > 0) | (moved > 0))[order]][:top]
    return found


def most_changed_values(numbers: dict[str, ndarray], top: int) -> Int64[ndarray, " place"]:
    """Return the places of the memories whose values changed most, most changed first."""
    moved = np.nan_to_num(numbers["value_change"], nan=0.0)
    order = np.argsort(-moved, kind="stable")
    found: ndarray = order[(moved > 0)[order]][:top]
    return found


def described(
    first: Index, second: Index, numbers: dict[str, ndarray], place: int
) -> dict[str, Any]:
    """Return a memory with its numbers, its best triggers and its value's tokens on both sides."""
    cell = first.layout.at(place)
    return {
        "cell": str(cell),
        "layer": cell.layer,
        "memory": cell.memory,
        **{name: known(column[place]) for name, column in numbers.items()},
        "first": _side(first, cell),
        "second": _side(second, cell),
    }


def known(number: float) -> float | None:
    """Return a number; None where it does not exist."""
    return None if np.isnan(number) else float(number)


def _side(index: Index, cell: Cell) -> dict[str, Any]:
    memory = index.memory(cell)
    found = {
        "trigger": _best(memory.triggers),
        "tokens": [token.token for token in memory.value.top[:TOKENS]],
        "active_share": memory.stats.active_share,
        "max": memory.stats.max,
    }
    if memory.gated:
        found |= {
            "negative_trigger": _best(memory.negative_triggers),
            "negative_tokens": [token.token for token in memory.value.bottom[:TOKENS]],
            "min": memory.stats.min,
        }
    return found


def _best(triggers: list[Trigger]) -> dict[str, Any] | None:
    """Return the end of the strongest trigger; None where there is none."""
    if not triggers:
        return None
    best = triggers[0]
    return {
        "coefficient": best.coefficient,
        "prefix": visible(shorten_prefix(best.prefix)),
        "next_token": best.next_token,
    }
