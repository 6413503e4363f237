"""Figure 9 (§5.2): how often does the residual already predict what the model will?

residual   top(r) = the model's prediction, top(o) of the last layer
output     top(o) = the model's prediction
decided    top(o) is the prediction here and in every later layer
"""

from itertools import pairwise

import numpy as np

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
from ffmem.experiments.metrics import SECTION_5_SAMPLE, STREAM_NOTES, Predictions
from ffmem.experiments.rows import (
    NOTHING,
    Row,
    format_layers,
    halves,
    layer_of,
    lower_layers,
    smallest_n,
)
from ffmem.stats import share, share_row
from ffmem.text import format_interval, format_share

EARLY = PaperValue(
    "predictions that stand in the residual of the bottom few layers", "about a third", "Fig. 9"
)
GROWTH = PaperValue("fast growth", "from layer 10 on", "Fig. 9")


def measure(context: ExperimentContext) -> tuple[list[Row], Row]:
    """Measure the three shares in each layer."""
    found = context.measured(Predictions)
    final = found.final[:, None]
    residual, output = found.residual_top == final, found.output_top == final
    decided = np.logical_and.accumulate(output[:, ::-1], axis=1)[:, ::-1]
    rows = []
    for layer in range(context.memories.n_layers):
        rows.append(
            {
                "layer": layer,
                **share_row("residual_share", residual[:, layer]),
                "output_share": share(int(output[:, layer].sum()), len(output)),
                "decided_share": share(int(decided[:, layer].sum()), len(decided)),
            }
        )
    return rows, {}


def chart(result: ExperimentResult) -> charts.Chart:
    """Draw the residual's share as bars, the other two as lines."""
    names = ["residual_share", "output_share", "decided_share", "low", "high"]
    y = charts.quantity("residual_share", "% with the final prediction", (0, 100))
    colors = {
        "residual": charts.SKY,
        "layer output": charts.BLUE,
        "decided for good": charts.VERMILION,
    }
    plot = charts.LayerPlot(result, names, y, colors)
    return charts.layered(
        plot.bars("residual_share", "residual"),
        plot.intervals("low", "high"),
        plot.line("output_share", "layer output"),
        plot.line("decided_share", "decided for good"),
    )


def _steps(rows: list[Row]) -> list[Row]:
    """Return how much the residual's share grows from each layer to the next."""
    return [
        {"layer": after["layer"], "step": after["residual_share"] - before["residual_share"]}
        for before, after in pairwise(rows)
    ]


def _points(share: float) -> str:
    return f"{100 * share:+.1f}".replace("-", "−")


def summary(result: ExperimentResult) -> str:
    """Say how early the prediction is there."""
    rows = result.rows_with("residual_share")
    if not rows:
        return NOTHING
    first, middle, last = rows[0], rows[(len(rows) - 1) // 2], rows[-1]
    shown = (
        f"The residual's top token is the model's prediction on"
        f" {format_share(first['residual_share'])} of the prefixes in {layer_of(first)},"
        f" {format_share(middle['residual_share'])} at mid-depth ({layer_of(middle)};"
        f" {format_interval(middle.get('low'), middle.get('high'))}) and"
        f" {format_share(last['residual_share'])} in {layer_of(last)}."
        f" By mid-depth, {format_share(middle.get('decided_share'))} are final."
    )
    if len(rows) == 1:
        return shown
    largest = max(_steps(rows), key=lambda row: (row["step"], -row["layer"]))
    return (
        f"{shown} The largest step, {_points(largest['step'])} points, is from layer"
        f" {largest['layer']} to the next."
    )


@claim(
    "A third of the predictions are already in the bottom few layers",
    "a quarter or more are already in one layer of the bottom quarter; in part if an eighth are",
    EARLY,
    over_depth=True,
)
def _early(result: ExperimentResult) -> Evidence | None:
    bottom = lower_layers(result.n_layers, 4)
    rows = [row for row in result.rows_with("residual_share") if row["layer"] in bottom]
    if not rows:
        return None
    best = max(row["residual_share"] for row in rows)
    shown = f"up to {format_share(best)} in {format_layers(bottom)}"
    return Evidence(shown, smallest_n(rows), "prefixes", best >= 0.25, best >= 0.125)


@claim(
    "From the paper's layer 10 on, the residual holds many more final predictions",
    "the mean step per layer from there on is at least 1.5 times the one before; in part if it is"
    " larger and positive",
    GROWTH,
    over_depth=True,
)
def _growth(result: ExperimentResult) -> Evidence | None:
    rows = result.rows_with("residual_share")
    parts = halves(_steps(rows), "step", result.n_layers, 10)
    if parts is None:
        return None
    below, above = parts.below, parts.above
    shown = f"{_points(below)} points per layer in {parts.lower}, {_points(above)} in {parts.upper}"
    good = above > 0 and above >= 1.5 * below, above > max(below, 0.0)
    return Evidence(shown, smallest_n(rows), "prefixes", *good)


EXPERIMENT = Experiment(
    name="residual-prediction",
    paper="Fig. 9",
    title="Predictions already in the residual",
    description="Share of prefixes on which the top token of a layer's residual r, or of its output"
    " o, is the model's prediction; decided: no later layer changes it.",
    finding="The paper found that about a third of the predictions are fixed in the bottom few"
    " layers, and that the share grows fast from layer 10 on.",
    measure=measure,
    chart=chart,
    summary=summary,
    metrics=(Predictions,),
    paper_values=(SECTION_5_SAMPLE, EARLY, GROWTH),
    claims=(_early, _growth),
    panels=(
        Panel(
            title="prefixes whose residual has the final prediction",
            value="residual_share",
            interval=("low", "high"),
            paper=(PaperMark(EARLY, 1 / 3, layers=(1, 4)),),
        ),
        Panel(title="predictions decided for good", value="decided_share"),
    ),
    notes=STREAM_NOTES,
)
