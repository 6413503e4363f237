"""The figures of several models side by side: one chart per experiment, one color per model.

An experiment names in its own file which columns of its rows are compared (`Panel`). Here they are
drawn: over the relative depth (ℓ + ½)/n of layer ℓ (from 0) of n, so that models of different
depths share an axis, or as one bar per model where a number belongs to no layer. The paper's layers
a–b of 16 cover (a − 1)/16 to b/16.
"""

from collections.abc import Mapping, Sequence

import altair as alt

from ffmem.errors import FfmemError
from ffmem.experiments import charts
from ffmem.experiments.base import Experiment, ExperimentResult, Panel
from ffmem.experiments.rows import PAPER_LAYERS, Row, rows_with

COLORS = (
    *(charts.BLUE, charts.VERMILION, charts.GREEN),
    *(charts.ORANGE, charts.PURPLE, charts.SKY),
    *("#8C6D31", "#A0305F"),
)
"""Okabe and Ito's without gray, which is the paper's, and a brown and a wine red."""
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross")
MOST_MODELS = len(COLORS) * len(SHAPES)

CURVES, BARS = 110, 80
"""Heights of a panel in pixels; a single curve is half as high again."""


def panel_rows(panel: Panel, results: Mapping[str, ExperimentResult]) -> list[Row]:
    """Return what a panel draws, in the units of its axis; `results` is by model."""
    factor = 100 if panel.percent else 1
    rows = []
    for model, result in results.items():
        for point in panel.points(result):
            layer = point.pop("layer", None)
            depth = {} if layer is None else {"depth": (layer + 0.5) / result.n_layers}
            numbers = {
                name: None if number is None else factor * number for name, number in point.items()
            }
            counted = {} if layer is None else {"layer": layer + 1}
            rows.append({"model": model} | counted | depth | numbers)
    return rows


def comparison_chart(
    experiment: Experiment, results: Mapping[str, ExperimentResult], models: Sequence[str]
) -> charts.Chart | None:
    """Return an experiment's results on several models in one chart; None if nothing is compared.

    `models` are all models of the page, so that each has one color in all charts.
    """
    if len(models) > MOST_MODELS:
        raise FfmemError(
            f"{len(models)} models were given; a chart can tell {MOST_MODELS} apart. Compare fewer"
            " reports."
        )
    drawn = [(panel, rows) for panel in experiment.panels if (rows := panel_rows(panel, results))]
    parts = [
        _draw(panel, rows, models, len(drawn), number == len(drawn) - 1)
        for number, (panel, rows) in enumerate(drawn)
    ]
    return alt.vconcat(*parts, spacing=12) if parts else None


def _draw(
    panel: Panel, rows: list[Row], models: Sequence[str], n_panels: int, is_last: bool
) -> alt.LayerChart:
    over_depth = any("depth" in row for row in rows)
    marks = _curves(panel, rows, models, is_last) if over_depth else _bars(panel, rows, models)
    named = f"{panel.title}, %" if panel.percent else panel.title
    explained = _explained(panel, rows, over_depth)
    title = alt.Title(named, subtitle=explained) if explained else alt.Title(named)
    height = BARS if not over_depth else CURVES if n_panels > 1 else CURVES * 3 // 2
    return charts.layered(*marks).properties(title=title, height=height)


def _explained(panel: Panel, rows: list[Row], over_depth: bool) -> list[str]:
    """Return what the marks of a panel are that the legend does not name."""
    parts = []
    if panel.interval and rows_with(rows, "low", "high"):
        parts.append(f"{'band' if over_depth else 'thin line'}: 95 % interval")
    if panel.control and rows_with(rows, "control"):
        parts.append(f"{'dotted' if over_depth else 'thick line'}: {panel.control[1]}")
    paper = " and ".join(mark.value.value for mark in panel.paper)
    return [
        line for line in ("; ".join(parts), f"gray: the paper, {paper}" if paper else "") if line
    ]


def _axis(panel: Panel) -> alt.Y:
    if panel.log:  # symmetric, so that 0, the best rank, has a place
        return alt.Y(
            "value:Q",
            title=None,
            scale=alt.Scale(type="symlog", constant=1),
            axis=alt.Axis(
                values=[0, *(10**power for power in range(7))],
                labelExpr="datum.value < 1000 ? datum.value : datum.value / 1000 + 'k'",
            ),
        )
    return charts.quantity("value", None, tickCount=4)


def _color(models: Sequence[str]) -> alt.Color:
    # Two columns fit into the plot if no name is longer.
    columns = 2 if max(map(len, models)) <= 27 else 1
    colors = [COLORS[number % len(COLORS)] for number in range(len(models))]
    scale = alt.Scale(domain=list(models), range=colors)
    legend = alt.Legend(columns=columns, symbolOpacity=1)
    return alt.Color("model:N", scale=scale, legend=legend)


def _plot(rows: Sequence[Row]) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=list(rows)))


def _curves(panel: Panel, rows: list[Row], models: Sequence[str], is_last: bool) -> list[alt.Chart]:
    """Return the marks of a panel over relative depth, the lowest first."""
    factor = 100 if panel.percent else 1
    title = "relative depth of the layer" if is_last else None
    y, color = _axis(panel), _color(models)
    x = alt.X(
        "depth:Q",
        title=title,
        scale=alt.Scale(domain=[0, 1], nice=False),
        axis=alt.Axis(values=[0, 0.25, 0.5, 0.75, 1], format=".2~f", labels=is_last, ticks=is_last),
    )
    shapes = [SHAPES[number % len(SHAPES)] for number in range(len(models))]
    shape = alt.Shape("model:N", scale=alt.Scale(domain=list(models), range=shapes))
    marks = []
    for mark in panel.paper:
        first, last = mark.layers
        at = {"depth": (first - 1) / PAPER_LAYERS, "to": last / PAPER_LAYERS}
        at |= {"value": factor * mark.low}
        place = {"x": x, "x2": "to:Q", "y": y}
        if mark.high is None:
            chart = _plot([at]).mark_rule(color=charts.GRAY, strokeWidth=2.5, opacity=0.7)
            marks.append(chart.encode(**place))
        else:
            chart = _plot([at | {"high": factor * mark.high}])
            marks.append(
                chart.mark_rect(color=charts.GRAY, opacity=0.2).encode(**place, y2="high:Q")
            )
    if band := rows_with(rows, "low", "high"):
        area = _plot(band).mark_area(opacity=0.16 if len(models) <= 4 else 0.08)
        marks.append(area.encode(x=x, y=charts.same_axis(y, "low"), y2="high:Q", color=color))
    if controls := rows_with(rows, "control"):
        dotted = _plot(controls).mark_line(strokeWidth=1.2, strokeDash=[2, 3])
        marks.append(dotted.encode(x=x, y=charts.same_axis(y, "control"), color=color))
    base = _plot(rows).encode(x=x, y=y, color=color)
    return [*marks, base.mark_line(strokeWidth=1.5), base.mark_point(size=16).encode(shape=shape)]


def _bars(panel: Panel, rows: list[Row], models: Sequence[str]) -> list[alt.Chart]:
    """Return the marks of a panel with one bar per model, the lowest first."""
    factor = 100 if panel.percent else 1
    y = _axis(panel)
    scale = alt.Scale(domain=list(models), paddingInner=0.4, paddingOuter=0.3)
    x = alt.X("model:N", title=None, axis=None, scale=scale)
    marks = [_plot(rows).mark_bar().encode(x=x, y=y, color=_color(models))]
    for mark in panel.paper:
        ends = [mark.low] if mark.high is None else [mark.low, mark.high]
        chart = _plot([{"value": factor * end} for end in ends])
        marks.append(chart.mark_rule(color=charts.GRAY, strokeWidth=2.5).encode(y=y))
    if controls := rows_with(rows, "control"):
        tick = _plot(controls).mark_tick(style="ink", thickness=2, width={"band": 1}, opacity=1)
        marks.append(tick.encode(x=x, y=charts.same_axis(y, "control")))
    if whiskers := rows_with(rows, "low", "high"):
        rule = _plot(whiskers).mark_rule(style="ink")
        marks.append(rule.encode(x=x, y=charts.same_axis(y, "low"), y2="high:Q"))
    return marks
