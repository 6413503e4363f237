"""What summaries and claims ask of rows: means, trends, and layers at the paper's depth.

The paper's model has 16 layers. Its layers a–16 correspond to those layers ℓ of n (from 1) that are
as deep:  (ℓ − 1)/n ≥ (a − 1)/16.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ffmem.text import format_share

Row = dict[str, Any]

PAPER_LAYERS = 16

NOTHING = "No layer gave a number: there was nothing to measure."


def rows_with(rows: Sequence[Row], *fields: str, **values: Any) -> list[Row]:
    """Return the rows in which none of these fields is missing, and others have these values."""
    return [
        row
        for row in rows
        if all(row.get(field) is not None for field in fields)
        and all(row[field] == value for field, value in values.items())
    ]


# Layers


def upper_layers(n_layers: int, paper_layer: int) -> list[int]:
    """Return the layers (from 0) that correspond to the paper's `paper_layer` to 16."""
    first = min(-(-(paper_layer - 1) * n_layers // PAPER_LAYERS), n_layers - 1)
    return list(range(first, n_layers))


def lower_layers(n_layers: int, paper_layer: int) -> list[int]:
    """Return the layers (from 0) that correspond to the paper's 1 to `paper_layer`."""
    return list(range(upper_layers(n_layers, paper_layer + 1)[0]))


def format_layers(layers: Sequence[int]) -> str:
    """Return consecutive layers (from 0) as figures count them, from 1."""
    if not layers:
        return "no layer"
    if len(layers) == 1:
        return f"layer {layers[0] + 1}"
    return f"layers {layers[0] + 1}–{layers[-1] + 1}"


def layer_of(row: Row) -> str:
    """Return the layer of a row as figures count it."""
    return f"layer {row['layer'] + 1}"


class Halves(NamedTuple):
    """Means over the layers below the depth of a layer of the paper, and over the others."""

    below: float
    above: float
    lower: str
    """The layers below, as text."""
    upper: str


def halves(rows: Sequence[Row], field: str, n_layers: int, paper_layer: int) -> Halves | None:
    """Return the means of a field below `paper_layer` and from it on; None if one has no row."""
    lower, upper = lower_layers(n_layers, paper_layer - 1), upper_layers(n_layers, paper_layer)
    below, above = (
        mean([row[field] for row in rows if row["layer"] in layers]) for layers in (lower, upper)
    )
    if below is None or above is None:
        return None
    return Halves(below, above, format_layers(lower), format_layers(upper))


# Numbers


def mean(values: Sequence[float | int]) -> float | None:
    """Return the mean; None if empty."""
    return sum(values) / len(values) if values else None


def weighted_mean(rows: Sequence[Row], field: str, weight: str) -> float | None:
    """Return the mean of a field over rows that weigh differently; None if empty."""
    there = rows_with(rows, field, weight)
    total = sum(row[weight] for row in there)
    return sum(row[field] * row[weight] for row in there) / total if total else None


def smallest_n(rows: Sequence[Row]) -> int:
    """Return the smallest number of cases behind a row; 0 where rows do not say."""
    return min((int(row["n"]) for row in rows_with(rows, "n")), default=0)


def trend(values: Sequence[float | int]) -> float | None:
    """Return Spearman's correlation of some numbers with their order; None where it has none."""
    n = len(values)
    if n < 3 or len(set(values)) == 1:
        return None
    below = {value: sum(other < value for other in values) for value in set(values)}
    ranks = [below[value] + (values.count(value) - 1) / 2 for value in values]
    middle = (n - 1) / 2
    along = sum((i - middle) * (rank - middle) for i, rank in enumerate(ranks))
    spreads = sum((i - middle) ** 2 for i in range(n)), sum((r - middle) ** 2 for r in ranks)
    return float(along / (spreads[0] * spreads[1]) ** 0.5)


def format_range(rows: Sequence[Row], field: str, beside: str | None = None) -> str:
    """Return the smallest and the largest share with their layers; `beside` names a second one."""

    def one(row: Row) -> str:
        more = f"; {beside} {format_share(row.get(beside))}" if beside else ""
        return f"{format_share(row[field])} ({layer_of(row)}{more})"

    low, high = min(rows, key=lambda row: row[field]), max(rows, key=lambda row: row[field])
    return one(low) if low is high else f"{one(low)} to {one(high)}"
