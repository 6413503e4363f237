"""Numbers as sentences need them, and the paper's layers in a model of another depth.

The paper's model has 16 layers. Its layers a–16 stand for the layers ℓ of n (from 1) that begin
no earlier than its layer a does:  (ℓ − 1)/n ≥ (a − 1)/16.
"""

import math
from collections.abc import Sequence
from typing import Any

from ffmem.experiments.depth import first_of
from ffmem.experiments.result import Result
from ffmem.patterns.store import SOURCES
from ffmem.stats import wilson

Row = dict[str, Any]
Number = float | int
"""JSON has both, and a whole share may be read as either."""

MISSING = "–"


def percent(share: Number | None, signed: bool = False) -> str:
    """Return a share in %, with as many digits as it deserves."""
    if share is None:
        return MISSING
    value = 100 * share
    size = abs(value)
    digits = 1 if size >= 1 or size == 0 else 2 if size >= 0.1 else 3 if size >= 0.01 else 4
    text = f"{value:{'+' if signed else ''}.{digits}f}"
    if text.endswith(".0") and size in (0, 100):
        text = text[:-2]
    return text.replace("-", "−") + " %"


def number(value: Number | None) -> str:
    """Return a number with thousands apart, and three digits of a fraction."""
    if value is None:
        return MISSING
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}".replace("-", "−")
    return f"{value:.3g}".replace("-", "−")


def interval(low: Number | None, high: Number | None) -> str:
    """Return a 95 % interval of a share in words."""
    if low is None or high is None:
        return "no interval"
    return f"95 % interval {percent(low).removesuffix(' %')} to {percent(high)}"


def n_layers_of(result: Result) -> int:
    """Return how many layers the model has."""
    seen = [int(row["layer"]) + 1 for row in result.rows if row.get("layer") is not None]
    return max([int(result.settings.get("layers") or 1), *seen])


def sources_of(result: Result) -> list[str]:
    """Return who labelled the triggers of Figure 2: people first."""
    named = {str(row["source"]) for row in result.rows}
    return sorted(named, key=lambda source: (SOURCES.index(source), source))


def n_values_of(result: Result) -> int:
    """Return how many values the model has."""
    return sum(widths_of(result)) or 10**9


def widths_of(result: Result) -> list[int]:
    """Return how many memories each layer has; 0 where the settings do not say."""
    memories = result.settings.get("memories") or 0
    return memories if isinstance(memories, list) else [memories] * n_layers_of(result)


def most_entropy(result: Result) -> float | None:
    """Return the entropy of a softmax that is the same for all memories that it runs over."""
    widest = max(widths_of(result))
    found = result.also.get("max_entropy", math.log(widest) if widest else None)
    return None if found is None else float(found)


def interval_of_cases(result: Result, row: Row, field: str) -> tuple[float | None, float | None]:
    """Return the interval of a share over (prefix, layer) cases, as if each prefix were one case.

    The layers of one prefix are no independent draws: their number must not narrow the interval.
    """
    prefixes = (result.settings.get("sample") or {}).get("prefixes") or row["n"]
    n = min(row["n"], prefixes)
    return wilson(round((row[field] or 0.0) * n), n)


def deep(n_layers: int, paper_layer: int) -> list[int]:
    """Return the layers (from 0) that stand for the paper's `paper_layer` to 16."""
    return list(range(first_of(n_layers, paper_layer), n_layers))


def shallow(n_layers: int, paper_layer: int) -> list[int]:
    """Return the layers (from 0) that stand for the paper's 1 to `paper_layer`."""
    below = set(deep(n_layers, paper_layer + 1))
    return [layer for layer in range(n_layers) if layer not in below]


def span(layers: Sequence[int]) -> str:
    """Return consecutive layers (from 0) as figures count them."""
    if not layers:
        return "no layer"
    if len(layers) == 1:
        return f"layer {layers[0] + 1}"
    return f"layers {layers[0] + 1}–{layers[-1] + 1}"


def known(rows: Sequence[Row], *fields: str) -> list[Row]:
    """Return the rows in which none of these is missing."""
    return [row for row in rows if all(row.get(field) is not None for field in fields)]


def mean(values: Sequence[Number]) -> float | None:
    """Return the mean; None of nothing."""
    return sum(values) / len(values) if values else None


def weighted(rows: Sequence[Row], field: str, weight: str) -> float | None:
    """Return the mean of a field over rows that weigh differently; None of nothing."""
    there = [row for row in known(rows, field, weight) if row[weight]]
    total = sum(row[weight] for row in there)
    return sum(row[field] * row[weight] for row in there) / total if total else None


def trend(values: Sequence[Number]) -> float | None:
    """Return Spearman's correlation of some numbers with their order; None where it has none."""
    n = len(values)
    if n < 3 or len(set(values)) == 1:
        return None
    ranks = _ranks(values)
    middle = (n - 1) / 2
    along = sum((i - middle) * (rank - middle) for i, rank in enumerate(ranks))
    spreads = sum((i - middle) ** 2 for i in range(n)), sum((r - middle) ** 2 for r in ranks)
    return float(along / (spreads[0] * spreads[1]) ** 0.5)


def _ranks(values: Sequence[Number]) -> list[float]:
    """Return the rank of each number from 0, equal numbers sharing theirs."""
    below = {value: sum(other < value for other in values) for value in set(values)}
    return [below[value] + (values.count(value) - 1) / 2 for value in values]
