"""The figure of a run, `curve.svg`: loss of the steps and validation, over tokens read."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt

from ffmem.counted import counted
from ffmem.files import write_text
from ffmem.reporting.drawing import dark_style, framed
from ffmem.reporting.marks import by_series, layered, plot, series
from ffmem.reporting.style import BLUE, VERMILION, Chart, styled
from ffmem.training.record import Trained

NAME = "curve"
_TRAINING, _VALIDATION = "training", "validation"
_COLOURS = {_TRAINING: BLUE, _VALIDATION: VERMILION}
MOST_POINTS = 500
"""Rows of a long run are averaged, so that the file stays small."""

Row = dict[str, Any]


def chart(rows: Sequence[Row]) -> Chart:
    """Return the figure in the house style."""
    training = _thinned([row for row in rows if "loss" in row])
    validation = [
        {"tokens": row["tokens"], "nats": math.log(row["valid_perplexity"])}
        for row in rows
        if "valid_perplexity" in row
    ]
    lowest = min(point["nats"] for point in training + validation)
    highest = max(point["nats"] for point in training + validation)
    x = alt.X("tokens:Q", title="tokens read", axis=alt.Axis(format="~s", tickCount=6))
    scale = alt.Scale(domain=[math.floor(lowest), math.ceil(highest)])
    y = alt.Y("nats:Q", title="−log p per token", scale=scale, axis=alt.Axis(tickCount=5))
    colour = by_series(_COLOURS)
    steps = plot(series(training, _TRAINING)).mark_line(strokeWidth=1.2)
    evaluations = plot(series(validation, _VALIDATION))
    return styled(
        layered(
            steps.encode(x=x, y=y, color=colour),
            evaluations.mark_line().encode(x=x, y=y, color=colour),
            evaluations.mark_point().encode(x=x, y=y, color=colour),
        )
    )


def _thinned(rows: list[Row]) -> list[Row]:
    """Return the loss over tokens, as means of neighbours where there are many."""
    size = -(-len(rows) // MOST_POINTS)
    points = []
    for first in range(0, len(rows), max(1, size)):
        part = rows[first : first + size]
        mean = math.fsum(row["loss"] for row in part) / len(part)
        points.append({"tokens": part[-1]["tokens"], "nats": mean})
    return points


def draw(rows: Sequence[Row], folder: Path, trained: Trained) -> None:
    """Write curve.svg."""
    settings = trained.asked.settings
    title = (
        f"Training of {counted(settings.layers, 'layers')} of width {settings.width} with"
        f" {settings.memory}"
        f" memories on {trained.asked.corpus['source']}"
    )
    description = (
        "Mean negative log-probability per token, over the tokens read: of training, as the mean"
        " of some steps, and of the whole validation stream."
    )
    inline = framed(NAME, title, description, chart(rows))
    styles = inline.replace("<title", f"<style>{dark_style()}</style><title", 1)
    write_text(folder / f"{NAME}.svg", styles + "\n")
