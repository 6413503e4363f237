"""Section 4 and Table 2: the most predictive values, and whether their triggers bear them out.

    precision = triggers whose next token is top(v) / triggers that have a next token

The paper looks at the 100 values of highest probability and their 50 triggers. Beside them stand
as many random values of the upper layers, without which neither number says much.
"""

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Int64
from numpy import ndarray

from ffmem.experiments.base import (
    ClaimCheck,
    Evidence,
    Experiment,
    ExperimentResult,
    Measurement,
    PaperValue,
)
from ffmem.experiments.charts import (
    BLUE,
    VERMILION,
    Chart,
    figure_rows,
    layer_axis,
    panels,
    plot,
    quantity,
)
from ffmem.experiments.rows import (
    NOTHING,
    count_layers,
    first_of,
    format_layers,
    known,
    layer_widths,
    upper_layers,
)
from ffmem.experiments.triggers import NONE, trigger_table
from ffmem.indexing.memory import visible_token
from ffmem.indexing.store import Index
from ffmem.stats import share, wilson
from ffmem.text import format_interval, format_number, format_share

if TYPE_CHECKING:
    from ffmem.experiments.context import ExperimentContext

UPPER = 11
"""The first of the paper's upper layers."""

MOST = 100
"""How many of the most probable values are looked at."""

PAPER_VALUES = (
    PaperValue("of the 100 most predictive values, in layers 11–16", "97", "Sec. 4"),
    PaperValue("of them, with an agreeing trigger among 50", "46", "Sec. 4"),
    PaperValue("precision of six examples", "68, 16, 4, 92, 84, 4 %", "Table 2"),
)


class Precision(NamedTuple):
    """Of some values: how many of their triggers could agree, and how many do."""

    n_triggers: Int64[ndarray, " value"]
    agreeing: Int64[ndarray, " value"]

    def mean(self) -> float | None:
        """Return the mean precision of the values that have one; None if none has."""
        some = self.n_triggers > 0
        return float((self.agreeing[some] / self.n_triggers[some]).mean()) if some.any() else None

    def n_agreeing(self) -> int:
        """Return how many values have an agreeing trigger."""
        return int((self.agreeing > 0).sum())


def measure(context: "ExperimentContext") -> Measurement:
    """Measure the most probable values of all layers, and how often their triggers agree."""
    index, n_layers = context.index, context.index.n_layers
    sign, top, probability = (
        np.concatenate([getattr(values, name) for values in context.values])
        for name in ("sign", "top", "probability")
    )
    cells = most_probable(probability, MOST)
    named = [index.layout.at(cell) for cell in cells.tolist()]
    layers = np.array([cell.layer for cell in named], np.int64)
    upper_from = first_of(n_layers, UPPER)
    found = precision(index, cells, sign, top)
    counts = map(ndarray.tolist, found)
    rows = [
        {
            "cell": str(cell),
            "layer": cell.layer,
            "memory": cell.memory,
            "sign": int(sign[number]),
            "token": index.token(int(top[number])),
            "token_id": int(top[number]),
            "probability": float(probability[number]),
            "precision": share(agreeing, n),
            "n_triggers": n,
            "agreeing": agreeing,
        }
        for cell, number, n, agreeing in zip(named, cells.tolist(), *counts, strict=True)
    ]
    # The same statistics of random values of the upper layers.
    first, past = index.layout.starts[upper_from], len(index)
    rng = np.random.default_rng(context.seed)
    drawn = rng.choice(past - first, min(len(cells), past - first), replace=False)
    control = precision(index, np.sort(drawn) + first, sign, top)
    also = {
        "n": len(cells),
        "upper_from": upper_from,
        "upper_share": share(int((layers >= upper_from).sum()), len(cells)),
        "with_agreeing_trigger": found.n_agreeing(),
        "mean_precision": found.mean(),
        "layer_histogram": np.bincount(layers, minlength=n_layers).tolist(),
        "random_control": {
            "n": len(drawn),
            "with_agreeing_trigger": control.n_agreeing(),
            "mean_precision": control.mean(),
        },
    }
    return Measurement(rows, also)


def most_probable(probability: Float[ndarray, " cell"], n: int) -> Int64[ndarray, " value"]:
    """Return the n cells of highest probability, highest first, ties to the lower cell."""
    return np.argsort(-probability, kind="stable")[:n]


def precision(
    index: Index,
    cells: Int64[ndarray, " value"],
    sign: Int[ndarray, " cell"],
    top: Int[ndarray, " cell"],
) -> Precision:
    """Return how many triggers of some values, of the sign that was read, agree with them."""
    starts = np.array(index.layout.starts)
    layers = np.searchsorted(starts, cells, side="right") - 1
    places = cells - starts[layers]
    found = Precision(np.zeros(len(cells), np.int64), np.zeros(len(cells), np.int64))
    for layer in np.unique(layers).tolist():
        for side in (1, -1):
            chosen = np.flatnonzero((layers == layer) & (sign[cells] == side))
            if len(chosen):
                following = trigger_table(index, layer, side).next[places[chosen]]
                agreeing = following == top[cells[chosen]][:, None]
                found.n_triggers[chosen] = (following != NONE).sum(axis=1)
                found.agreeing[chosen] = agreeing.sum(axis=1)
    return found


def chart(result: ExperimentResult) -> Chart:
    """Draw where the most predictive values are, and how precise they are on their triggers."""
    n_layers = count_layers(result)
    counted = Counter(row["layer"] for row in result.rows)
    histogram = [{"layer": layer + 1, "n": n} for layer, n in sorted(counted.items())]
    rows = [
        numbers | {"cell": row["cell"], "token": visible_token(row.get("token"))}
        for row, numbers in zip(result.rows, figure_rows(result.rows, ["precision"]), strict=True)
    ]
    title = f"of the top {len(result.rows)}"
    counts = plot(histogram, 100).mark_bar(color=BLUE)
    points = plot(known(rows, "precision"), 100).mark_point(
        color=VERMILION, filled=False, size=22, strokeWidth=1.2
    )
    return panels(
        [
            counts.encode(
                x=layer_axis(n_layers, None), y=quantity("n", title, tickCount=4, format="d")
            ),
            points.encode(
                x=layer_axis(n_layers), y=quantity("precision", "precision (%)", (0, 100))
            ),
        ]
    )


def summary(result: ExperimentResult) -> str:
    """Say where the most predictive values are, and whether their triggers bear them out."""
    n = len(result.rows)
    if not n:
        return NOTHING
    upper = upper_layers(count_layers(result), UPPER)
    inside = sum(row["layer"] in upper for row in result.rows)
    agreeing = sum((row.get("agreeing") or 0) > 0 for row in result.rows)
    control = result.also.get("random_control") or {}
    beside = (
        f", against {format_number(control['with_agreeing_trigger'])} of"
        f" {format_number(control['n'])} random values of these layers (mean precision"
        f" {format_share(result.also.get('mean_precision'))} against"
        f" {format_share(control.get('mean_precision'))})"
        if control.get("n") and control.get("with_agreeing_trigger") is not None
        else ""
    )
    return (
        f"Of the {n} values with the largest probabilities, {inside} lie in {format_layers(upper)}"
        f" and {agreeing} have a trigger whose next token they predict"
        f" ({format_interval(*wilson(agreeing, n))}){beside}."
    )


def check_layers(result: ExperimentResult) -> Evidence | None:
    """Check: the most predictive values are in the upper layers."""
    n, n_layers = len(result.rows), count_layers(result)
    upper, widths = upper_layers(n_layers, UPPER), layer_widths(result)
    if not n or len(upper) == n_layers:
        return None
    inside = sum(row["layer"] in upper for row in result.rows)
    even = len(upper) / n_layers
    if any(widths):
        even = sum(widths[layer] for layer in upper) / sum(widths)
    shown = f"{inside} of {n} in {format_layers(upper)} ({format_share(even)} if spread evenly)"
    low = wilson(inside, n)[0] or 0.0
    return Evidence(shown, n, "values", inside / n >= 0.87, low > even)


def check_triggers(result: ExperimentResult) -> Evidence | None:
    """Check: many of the most predictive values have a trigger that they predict."""
    n, n_values = len(result.rows), sum(layer_widths(result))
    if not n or (n_values and n >= n_values):  # all values are not the most predictive ones
        return None
    agreeing = sum((row.get("agreeing") or 0) > 0 for row in result.rows)
    control = result.also.get("random_control") or {}
    beside, at_random = "", 0.0
    if control.get("n") and control.get("with_agreeing_trigger") is not None:
        at_random = control["with_agreeing_trigger"] / control["n"]
        beside = f" ({format_share(at_random)} of random values)"
    more = (wilson(agreeing, n)[0] or 0.0) > at_random
    holds = more and agreeing / n >= 0.36
    return Evidence(f"{agreeing} of {n}{beside}", n, "values", holds, more)


EXPERIMENT = Experiment(
    name="predictive-values",
    paper="Sec. 4, Table 2",
    title="The most predictive values",
    description="The 100 values with the largest probability of one token: their layers, and"
    " precision, the share of a memory's triggers that this token follows.",
    finding="The paper found the most predictive values almost only in the upper layers, and"
    " nearly half of them borne out by a trigger.",
    measure=measure,
    chart=chart,
    summary=summary,
    needs_values=True,
    paper_values=PAPER_VALUES,
    claims=(
        ClaimCheck(
            claim="The most predictive values lie in the upper layers",
            rule="the share in the upper layers is at most 10 points below the paper's; in part if"
            " its interval lies above an even spread over layers",
            check=check_layers,
            values=(0,),
            over_depth=True,
        ),
        ClaimCheck(
            claim="Many of them have a trigger that they predict",
            rule="the share is at most 10 points below the paper's, and its interval lies above the"
            " share of random values; in part if only the latter",
            check=check_triggers,
            values=(1,),
        ),
    ),
)
