"""Section 4 and Table 2: the most predictive values, and how often their triggers agree.

    precision = triggers whose next token is top(v) / triggers that have a next token

The paper looks at the 100 values of highest probability and their 50 triggers. For comparison, the
same is measured for as many random values of the upper layers.
"""

from collections import Counter

import numpy as np
from jaxtyping import Int, Int64
from numpy import ndarray

from ffmem.experiments import charts
from ffmem.experiments.base import (
    Evidence,
    Experiment,
    ExperimentResult,
    Panel,
    PaperMark,
    PaperValue,
    claim,
)
from ffmem.experiments.context import ExperimentContext
from ffmem.experiments.rows import NOTHING, Row, format_layers, rows_with, upper_layers
from ffmem.indexing.memory import visible_token
from ffmem.indexing.store import Index
from ffmem.indexing.triggers import NONE, trigger_table
from ffmem.stats import share, wilson
from ffmem.text import format_interval, format_number, format_share

UPPER = 11
"""The first of the paper's upper layers."""

MOST = 100
"""How many of the most probable values are looked at."""

UPPER_VALUES = PaperValue("of the 100 most predictive values, in layers 11–16", "97", "Sec. 4")
AGREEING = PaperValue("of them, with an agreeing trigger among 50", "46", "Sec. 4")
PRECISION = PaperValue("precision of six examples", "68, 16, 4, 92, 84, 4 %", "Table 2")


def measure(context: ExperimentContext) -> tuple[list[Row], Row]:
    """Measure the most probable values of all layers, and how often their triggers agree."""
    index, n_layers = context.index, context.index.n_layers
    sign, top, probability = (
        np.concatenate([getattr(values, name) for values in context.values])
        for name in ("sign", "top", "probability")
    )
    # Highest first, ties to the lower cell.
    numbers = np.argsort(-probability, kind="stable")[:MOST]
    n_triggers, agreeing = precision(index, numbers, sign, top)
    rows: list[Row] = []
    for place, number in enumerate(numbers.tolist()):
        cell = index.layout.at(number)
        rows.append(
            {
                "cell": str(cell),
                "layer": cell.layer,
                "memory": cell.memory,
                "sign": int(sign[number]),
                "token": index.token(int(top[number])),
                "token_id": int(top[number]),
                "probability": float(probability[number]),
                "precision": share(int(agreeing[place]), int(n_triggers[place])),
                "n_triggers": int(n_triggers[place]),
                "agreeing": int(agreeing[place]),
            }
        )
    # The same statistics of random values of the upper layers.
    upper_from = upper_layers(n_layers, UPPER)[0]
    first, past = index.layout.starts[upper_from], len(index)
    rng = np.random.default_rng(context.config.seed)
    drawn = rng.choice(past - first, min(len(numbers), past - first), replace=False)
    control = precision(index, np.sort(drawn) + first, sign, top)
    layers = [row["layer"] for row in rows]
    also = {
        "n": len(rows),
        "upper_from": upper_from,
        "upper_share": share(sum(layer >= upper_from for layer in layers), len(rows)),
        **_statistics(n_triggers, agreeing),
        "layer_histogram": np.bincount(layers, minlength=n_layers).tolist(),
        "random_control": {"n": len(drawn), **_statistics(*control)},
    }
    return rows, also


def precision(
    index: Index,
    numbers: Int64[ndarray, " value"],
    sign: Int[ndarray, " memory"],
    top: Int[ndarray, " memory"],
) -> tuple[Int64[ndarray, " value"], Int64[ndarray, " value"]]:
    """Return how many triggers of some values, of the sign that was read, could agree, and do."""
    starts = np.array(index.layout.starts)
    layers = np.searchsorted(starts, numbers, side="right") - 1
    places = numbers - starts[layers]
    n_triggers, agreeing = np.zeros(len(numbers), np.int64), np.zeros(len(numbers), np.int64)
    for layer in np.unique(layers).tolist():
        for side in (1, -1):
            own = np.flatnonzero((layers == layer) & (sign[numbers] == side))
            if len(own):
                following = trigger_table(index, layer, side).next[places[own]]
                n_triggers[own] = (following != NONE).sum(axis=1)
                agreeing[own] = (following == top[numbers[own]][:, None]).sum(axis=1)
    return n_triggers, agreeing


def _statistics(n_triggers: Int64[ndarray, " value"], agreeing: Int64[ndarray, " value"]) -> Row:
    """Return how many values have an agreeing trigger, and the mean precision of those with any."""
    some = n_triggers > 0
    mean = float((agreeing[some] / n_triggers[some]).mean()) if some.any() else None
    return {"with_agreeing_trigger": int((agreeing > 0).sum()), "mean_precision": mean}


def chart(result: ExperimentResult) -> charts.Chart:
    """Draw where the most predictive values are, and how precise they are on their triggers."""
    n_layers = result.n_layers
    counted = Counter(row["layer"] for row in result.rows)
    histogram = [{"layer": layer + 1, "n": n} for layer, n in sorted(counted.items())]
    rows = [
        row | {"token": visible_token(row["token"])}
        for row in charts.figure_rows(result.rows, ["precision"], ["cell", "token"])
    ]
    counts = charts.plot(histogram, 100).mark_bar(color=charts.BLUE)
    counts = counts.encode(
        x=charts.layer_axis(n_layers, None),
        y=charts.quantity("n", f"of the top {len(result.rows)}", tickCount=4, format="d"),
    )
    points = charts.plot(rows_with(rows, "precision"), 100).mark_point(
        color=charts.VERMILION, filled=False, size=22, strokeWidth=1.2
    )
    points = points.encode(
        x=charts.layer_axis(n_layers), y=charts.quantity("precision", "precision (%)", (0, 100))
    )
    return charts.panels([counts, points])


def _n_agreeing(result: ExperimentResult) -> int:
    return sum((row.get("agreeing") or 0) > 0 for row in result.rows)


def summary(result: ExperimentResult) -> str:
    """Say where the most predictive values are, and how often their triggers agree."""
    n = len(result.rows)
    if not n:
        return NOTHING
    upper = upper_layers(result.n_layers, UPPER)
    inside = sum(row["layer"] in upper for row in result.rows)
    control = result.also.get("random_control") or {}
    beside = (
        f", against {format_number(control['with_agreeing_trigger'])} of"
        f" {format_number(control['n'])} random values of these layers (mean precision"
        f" {format_share(result.also.get('mean_precision'))} against"
        f" {format_share(control.get('mean_precision'))})"
        if control.get("n")
        else ""
    )
    return (
        f"Of the {n} values with the largest probabilities, {inside} are in {format_layers(upper)}"
        f" and {_n_agreeing(result)} have a trigger whose next token they predict"
        f" ({format_interval(*wilson(_n_agreeing(result), n))}){beside}."
    )


def _layer_widths(result: ExperimentResult) -> list[int]:
    """Return how many memories each layer has; 0 where the settings do not say."""
    memories = result.settings.get("memories") or 0
    return memories if isinstance(memories, list) else [memories] * result.n_layers


@claim(
    "The most predictive values are in the upper layers",
    "the share in the upper layers is at most 10 points below the paper's; in part if its"
    " interval is above an even spread over layers",
    UPPER_VALUES,
    over_depth=True,
)
def _layers(result: ExperimentResult) -> Evidence | None:
    n, n_layers = len(result.rows), result.n_layers
    upper, widths = upper_layers(n_layers, UPPER), _layer_widths(result)
    if not n or len(upper) == n_layers:
        return None
    inside = sum(row["layer"] in upper for row in result.rows)
    even = len(upper) / n_layers
    if any(widths):
        even = sum(widths[layer] for layer in upper) / sum(widths)
    shown = f"{inside} of {n} in {format_layers(upper)} ({format_share(even)} if spread evenly)"
    low = wilson(inside, n)[0] or 0.0
    return Evidence(shown, n, "values", inside / n >= 0.87, low > even)


@claim(
    "Many of the most predictive values predict what follows one of their triggers",
    "the share is at most 10 points below the paper's, and its interval is above the share of"
    " random values; in part if only the latter",
    AGREEING,
)
def _triggers(result: ExperimentResult) -> Evidence | None:
    n, n_values, agreeing = len(result.rows), sum(_layer_widths(result)), _n_agreeing(result)
    if not n or (n_values and n >= n_values):  # all values are not the most predictive ones
        return None
    control = result.also.get("random_control") or {}
    beside, at_random = "", 0.0
    if control.get("n"):
        at_random = control["with_agreeing_trigger"] / control["n"]
        beside = f" ({format_share(at_random)} of random values)"
    more = (wilson(agreeing, n)[0] or 0.0) > at_random
    holds = more and agreeing / n >= 0.36
    return Evidence(f"{agreeing} of {n}{beside}", n, "values", holds, more)


def _beside_control(result: ExperimentResult) -> list[Row]:
    """Return the numbers of all values together, with that of the random ones."""
    control = result.also.get("random_control") or {}
    return [result.also | {"at_random": control.get("with_agreeing_trigger")}]


EXPERIMENT = Experiment(
    name="predictive-values",
    paper="Sec. 4, Table 2",
    title="The most predictive values",
    description="The 100 values with the largest probability of one token: their layers, and"
    " precision, the share of a memory's triggers that this token follows.",
    finding="The paper found the most predictive values almost only in the upper layers, and"
    " nearly half of them confirmed by a trigger.",
    measure=measure,
    chart=chart,
    summary=summary,
    needs_values=True,
    paper_values=(UPPER_VALUES, AGREEING, PRECISION),
    claims=(_layers, _triggers),
    panels=(
        Panel(
            title="most predictive values in the upper layers",
            value="upper_share",
            rows=_beside_control,
            paper=(PaperMark(UPPER_VALUES, 0.97),),
        ),
        Panel(
            title="of 100 values, those with an agreeing trigger",
            value="with_agreeing_trigger",
            percent=False,
            rows=_beside_control,
            control=("at_random", "random values"),
            paper=(PaperMark(AGREEING, 46),),
        ),
    ),
)
