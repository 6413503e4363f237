"""The figure of a comparison, drawn from compare.json's content alone.

Per layer, from 1: how much triggers overlap, how far values turned, how activity changed. Boxes
reach from the lower to the upper quartile of a layer's memories, with the median.
"""

import math
from pathlib import Path
from typing import Any

import altair as alt

from ffmem.experiments.charts import (
    VERMILION,
    Chart,
    boxes,
    chart_svg,
    empty_plot,
    layer_axis,
    panels,
    plot,
    quantity,
    same_axis,
    series_color,
    styled,
    write_svg_and_pdf,
)
from ffmem.experiments.rows import known

NAME = "compare"
DESCRIPTION = (
    "By layer, median and quartiles over memories: rank-biased overlap of the triggers in both"
    " indexes with the median Jaccard overlap, cosine of the values of both models, change of the"
    " share of prefixes on which a memory is active."
)
HEIGHT = 84
_JACCARD = "Jaccard, median"
_ENDS = ("q1", "median", "q3")

Row = dict[str, Any]


def chart(content: Row) -> Chart:
    """Return the figure in the house style."""
    n_layers, rows = content["settings"]["layers"], content["rows"]
    gated = content["settings"]["gated"]
    drawn: list[tuple[str, Chart]] = []
    lists = [("", ", m > 0"), ("negative_", ", m < 0")] if gated else [("", "")]
    for sign, which in lists:
        if _exists(rows, f"{sign}rbo"):
            title = f"rank-biased overlap of triggers{which}"
            drawn.append((title, _triggers(rows, sign, n_layers)))
    if _exists(rows, "value_cosine"):
        spread = _spread(rows, "value_cosine")
        y = quantity("q1", "cosine", (_floor(spread), 1), tickCount=4)
        drawn.append(("cosine of the two values", boxes(spread, n_layers, y, None)))
    spread = _spread(rows, "active_change", 100)
    what = "share of prefixes with open gate" if gated else "share of prefixes that activate"
    y = quantity("q1", "points of %", tickCount=4)
    drawn.append((f"change of the {what}", boxes(spread, n_layers, y)))
    charts = [one.properties(height=HEIGHT, title=title) for title, one in drawn]
    return styled(panels(charts) if charts else empty_plot())


def _triggers(rows: list[Row], sign: str, n_layers: int) -> Chart:
    y = quantity("q1", "overlap", (0, 1), values=[0, 0.5, 1])
    box = boxes(_spread(rows, f"{sign}rbo"), n_layers, y, None)
    median = [
        {"layer": row["layer"] + 1, "jaccard": row[f"{sign}jaccard"]["median"], "series": _JACCARD}
        for row in rows
    ]
    points = plot(known(median, "jaccard")).mark_point(size=22)
    marks = points.encode(
        x=layer_axis(n_layers, None),
        y=same_axis(y, "jaccard"),
        color=series_color({_JACCARD: VERMILION}),
    )
    return alt.LayerChart(layer=[box, marks])


def _spread(rows: list[Row], name: str, times: int = 1) -> list[Row]:
    """Return a number's quartiles per layer, as figures show them."""
    return known(
        [
            {"layer": row["layer"] + 1}
            | {end: None if row[name][end] is None else times * row[name][end] for end in _ENDS}
            for row in rows
        ],
        *_ENDS,
    )


def _exists(rows: list[Row], name: str) -> bool:
    return any(row[name]["n"] for row in rows)


def _floor(rows: list[Row]) -> float:
    """Return where the axis of cosines begins: small changes are to be seen, and large ones fit."""
    lowest: float = min(row["q1"] for row in rows)
    if lowest >= 0.99:
        return 0.99
    return min(0.9, math.floor(10 * lowest) / 10)


def figure(content: Row) -> str:
    """Return the figure as SVG, to stand in a page."""
    return chart_svg(NAME, _heading(content), DESCRIPTION, chart(content))


def draw(content: Row, folder: Path) -> tuple[Path, Path]:
    """Write compare.svg and compare.pdf, and return where they are."""
    return write_svg_and_pdf(NAME, figure(content), folder)


def _heading(content: Row) -> str:
    sides = [content["settings"][which] for which in ("first", "second")]
    names = [f"{side['index']} ({side['model']})" for side in sides]
    return f"Memories of {names[1]} compared with {names[0]}"
