"""Figure 9 (§5.2): how often does the residual already predict what the model will?

residual   top(r) = the model's prediction, top(o) of the last layer
output     top(o) = the model's prediction
decided    top(o) is the prediction here and in every later layer
"""

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ffmem.experiments.base import (
    LAMBDA,
    PERSISTENT,
    SECTION_5_SAMPLE,
    ClaimCheck,
    Evidence,
    Experiment,
    ExperimentResult,
    Measurement,
    PaperValue,
)
from ffmem.experiments.charts import (
    BLUE,
    SKY,
    VERMILION,
    Chart,
    bars,
    figure_rows,
    intervals,
    layered,
    line,
    quantity,
    same_axis,
    series,
    series_color,
)
from ffmem.experiments.predictions import Predictions
from ffmem.experiments.rows import (
    NOTHING,
    count_layers,
    format_halves,
    format_layers,
    known,
    lower_layers,
    mean,
    smallest_n,
    upper_layers,
)
from ffmem.stats import share, wilson
from ffmem.text import format_interval, format_share

if TYPE_CHECKING:
    from ffmem.experiments.context import ExperimentContext

STREAM_NOTES = {
    PERSISTENT: "Here y is what the slots add, and r holds what the same attention read from the"
    " tokens; there is no feed-forward layer.",
    LAMBDA: "Here y is what the static keys of the lambda layer add, and r holds all else, the"
    " feed-forward layer's output too.",
}
"""What r and y are where the memories are no feed-forward layer."""


def measure(context: "ExperimentContext") -> Measurement:
    """Measure the three shares in each layer."""
    found = context.measured(Predictions)
    final = found.final[:, None]
    residual, output = found.residual_top == final, found.output_top == final
    decided = np.logical_and.accumulate(output[:, ::-1], axis=1)[:, ::-1]
    rows = []
    for layer in range(context.memories.n_layers):
        n, part = len(residual), int(residual[:, layer].sum())
        low, high = wilson(part, n)
        rows.append(
            {
                "layer": layer,
                "residual_share": share(part, n),
                "low": low,
                "high": high,
                "output_share": share(int(output[:, layer].sum()), n),
                "decided_share": share(int(decided[:, layer].sum()), n),
                "n": n,
            }
        )
    return Measurement(rows)


def chart(result: ExperimentResult) -> Chart:
    """Draw the residual's share as bars, the other two as lines."""
    names = ["residual_share", "output_share", "decided_share", "low", "high"]
    rows, n_layers = figure_rows(result.rows, names), count_layers(result)
    color = series_color({"residual": SKY, "layer output": BLUE, "decided for good": VERMILION})
    y = quantity("residual_share", "% with the final prediction", (0, 100))
    return layered(
        bars(series(rows, "residual"), n_layers, y, color),
        intervals(rows, n_layers, y, "low", "high"),
        line(series(rows, "layer output"), n_layers, same_axis(y, "output_share"), color),
        line(series(rows, "decided for good"), n_layers, same_axis(y, "decided_share"), color),
    )


def summary(result: ExperimentResult) -> str:
    """Say how early the prediction is there."""
    rows = known(result.rows, "residual_share")
    if not rows:
        return NOTHING
    first, middle, last = rows[0], rows[(len(rows) - 1) // 2], rows[-1]
    shown = (
        f"The residual's top token is the model's prediction on"
        f" {format_share(first['residual_share'])} of the prefixes in layer {first['layer'] + 1},"
        f" {format_share(middle['residual_share'])} at mid-depth (layer {middle['layer'] + 1};"
        f" {format_interval(middle.get('low'), middle.get('high'))}) and"
        f" {format_share(last['residual_share'])} in layer {last['layer'] + 1}."
        f" By mid-depth, {format_share(middle.get('decided_share'))} are decided for good."
    )
    steps = [
        (after["residual_share"] - before["residual_share"], before["layer"])
        for before, after in pairwise(rows)
    ]
    if not steps:
        return shown
    size, layer = max(steps, key=lambda step: (step[0], -step[1]))
    return (
        f"{shown} The largest step, {_points(size)} points, is from layer {layer + 1} to the next."
    )


def _points(share: float) -> str:
    return f"{100 * share:+.1f}".replace("-", "−")


def check_early(result: ExperimentResult) -> Evidence | None:
    """Check: a third of the predictions are there in the bottom few layers."""
    n_layers = count_layers(result)
    bottom = lower_layers(n_layers, 4)
    rows = [row for row in known(result.rows, "residual_share") if row["layer"] in bottom]
    if not rows or n_layers == 1:
        return None
    best = max(row["residual_share"] for row in rows)
    shown = f"up to {format_share(best)} in {format_layers(bottom)}"
    return Evidence(shown, smallest_n(rows), "prefixes", best >= 0.25, best >= 0.125)


def check_growth(result: ExperimentResult) -> Evidence | None:
    """Check: the share grows fastest from the paper's layer 10 on."""
    rows = known(result.rows, "residual_share")
    upper = upper_layers(count_layers(result), 10)
    steps = [
        (after["layer"], after["residual_share"] - before["residual_share"])
        for before, after in pairwise(rows)
    ]
    below, above = (
        mean([step for layer, step in steps if (layer in upper) == late]) for late in (False, True)
    )
    if below is None or above is None:
        return None
    lower_span, upper_span = format_halves(result, 10)
    shown = f"{_points(below)} points per layer in {lower_span}, {_points(above)} in {upper_span}"
    good = above > 0 and above >= 1.5 * below, above > max(below, 0.0)
    return Evidence(shown, smallest_n(rows), "prefixes", *good)


EXPERIMENT = Experiment(
    name="residual-prediction",
    paper="Fig. 9",
    title="Predictions already in the residual",
    description="Share of prefixes on which the top token of a layer's residual r, or of its output"
    " o, is the model's prediction; decided for good: no later layer changes it.",
    finding="The paper found that about a third of the predictions are fixed in the bottom few"
    " layers, and that the share grows fast from layer 10 on.",
    measure=measure,
    chart=chart,
    summary=summary,
    metrics=(Predictions,),
    paper_values=(
        SECTION_5_SAMPLE,
        PaperValue(
            "predictions that stand in the residual of the bottom few layers",
            "about a third",
            "Fig. 9",
        ),
        PaperValue("fast growth", "from layer 10 on", "Fig. 9"),
    ),
    claims=(
        ClaimCheck(
            claim="A third of the predictions stand in the bottom few layers",
            rule="a quarter or more stand in some layer of the bottom quarter; in part if an"
            " eighth",
            check=check_early,
            values=(1,),
            over_depth=True,
        ),
        ClaimCheck(
            claim="From the paper's layer 10 on their number grows fast",
            rule="the mean step per layer from there on is at least 1.5 times that before; in part"
            " if it is larger and a growth",
            check=check_growth,
            values=(2,),
            over_depth=True,
        ),
    ),
    notes=STREAM_NOTES,
)
