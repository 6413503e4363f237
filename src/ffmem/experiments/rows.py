"""What summaries and claims ask of rows: means, trends, and the layers that stand for the paper's.

The paper's model has 16 layers. Its layers a–16 stand for the layers ℓ of n (from 1) that begin no
earlier than its layer a does:  (ℓ − 1)/n ≥ (a − 1)/16.
"""

from collections.abc import Sequence

from ffmem.experiments.base import ExperimentResult, Row
from ffmem.stats import wilson
from ffmem.text import format_share

PAPER_LAYERS = 16

NOTHING = "No layer gave a number: there was nothing to measure."


def first_of(n_layers: int, paper_layer: int) -> int:
    """Return the first layer (from 0) of those that stand for `paper_layer` to 16."""
    return min(-(-(paper_layer - 1) * n_layers // PAPER_LAYERS), n_layers - 1)


def upper_layers(n_layers: int, paper_layer: int) -> list[int]:
    """Return the layers (from 0) that stand for the paper's `paper_layer` to 16."""
    return list(range(first_of(n_layers, paper_layer), n_layers))


def lower_layers(n_layers: int, paper_layer: int) -> list[int]:
    """Return the layers (from 0) that stand for the paper's 1 to `paper_layer`."""
    above = set(upper_layers(n_layers, paper_layer + 1))
    return [layer for layer in range(n_layers) if layer not in above]


def format_layers(layers: Sequence[int]) -> str:
    """Return consecutive layers (from 0) as figures count them, from 1."""
    if not layers:
        return "no layer"
    if len(layers) == 1:
        return f"layer {layers[0] + 1}"
    return f"layers {layers[0] + 1}–{layers[-1] + 1}"


def count_layers(result: ExperimentResult) -> int:
    """Return how many layers the model has."""
    seen = [int(row["layer"]) + 1 for row in result.rows if row.get("layer") is not None]
    return max([int(result.settings.get("layers") or 1), *seen])


def layer_widths(result: ExperimentResult) -> list[int]:
    """Return how many memories each layer has; 0 where the settings do not say."""
    memories = result.settings.get("memories") or 0
    return memories if isinstance(memories, list) else [memories] * count_layers(result)


def known(rows: Sequence[Row], *fields: str) -> list[Row]:
    """Return the rows in which none of these is missing."""
    return [row for row in rows if all(row.get(field) is not None for field in fields)]


def mean(values: Sequence[float | int]) -> float | None:
    """Return the mean; None of nothing."""
    return sum(values) / len(values) if values else None


def weighted_mean(rows: Sequence[Row], field: str, weight: str) -> float | None:
    """Return the mean of a field over rows that weigh differently; None of nothing."""
    there = [row for row in known(rows, field, weight) if row[weight]]
    total = sum(row[weight] for row in there)
    return sum(row[field] * row[weight] for row in there) / total if total else None


def smallest_n(rows: Sequence[Row]) -> int:
    """Return the smallest number of cases behind a row; 0 where rows do not say."""
    return min((int(row["n"]) for row in known(rows, "n")), default=0)


def means_below_and_above(
    rows: Sequence[Row], field: str, result: ExperimentResult, paper_layer: int
) -> tuple[float | None, float | None]:
    """Return the mean of a field below, and from, the layer that stands for the paper's."""
    n_layers = count_layers(result)
    below, above = (
        mean([row[field] for row in rows if row["layer"] in layers])
        for layers in (
            lower_layers(n_layers, paper_layer - 1),
            upper_layers(n_layers, paper_layer),
        )
    )
    return below, above


def format_halves(result: ExperimentResult, paper_layer: int) -> tuple[str, str]:
    """Return which layers those are."""
    n_layers = count_layers(result)
    below, above = lower_layers(n_layers, paper_layer - 1), upper_layers(n_layers, paper_layer)
    return format_layers(below), format_layers(above)


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


def case_interval(
    result: ExperimentResult, row: Row, field: str
) -> tuple[float | None, float | None]:
    """Return the interval of a share over (prefix, layer) cases, as if each prefix were one case.

    The layers of one prefix are not independent draws: their number must not narrow the interval.
    """
    n = independent_cases(result, row)
    return wilson(round((row[field] or 0.0) * n), n)


def independent_cases(result: ExperimentResult, row: Row) -> int:
    """Return how many prefixes stand behind some (prefix, layer) cases, at most."""
    prefixes = (result.settings.get("sample") or {}).get("prefixes") or row["n"]
    return int(min(row["n"], prefixes))


def format_range(rows: Sequence[Row], field: str, beside: str | None = None) -> str:
    """Return the smallest and the largest share with their layers; `beside` names a second one."""

    def one(row: Row) -> str:
        more = f"; {beside} {format_share(row.get(beside))}" if beside else ""
        return f"{format_share(row[field])} (layer {row['layer'] + 1}{more})"

    low, high = min(rows, key=lambda row: row[field]), max(rows, key=lambda row: row[field])
    return one(low) if low is high else f"{one(low)} to {one(high)}"
