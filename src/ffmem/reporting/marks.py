"""Marks that several figures share: bars, boxes and lines over layers, and intervals."""

from collections.abc import Sequence
from typing import Any

import altair as alt

from ffmem.reporting.numbers import Number, Row, known
from ffmem.reporting.style import BOX, HEIGHT, INK, WIDTH, Chart, coloured, inline, layer_axis

Scaled = tuple[Number, Number]


def shown(rows: Sequence[Row], percent: Sequence[str], plain: Sequence[str] = ()) -> list[Row]:
    """Return rows as figures show them: layers from 1, these shares in %, the rest left out."""
    kept = []
    for row in rows:
        numbers = {name: None if row.get(name) is None else 100 * row[name] for name in percent} | {
            name: row.get(name) for name in plain
        }
        kept.append(numbers | ({"layer": row["layer"] + 1} if "layer" in row else {}))
    return kept


def up(field: str, title: str, domain: Scaled | None = None, **axis: Any) -> alt.Y:
    """Return the y axis of a quantity."""
    scale = alt.Scale(domain=list(domain), clamp=True) if domain else alt.Scale(zero=True)
    return alt.Y(f"{field}:Q", title=title, scale=scale, axis=alt.Axis(**({"tickCount": 5} | axis)))


def same(y: alt.Y, field: str) -> alt.Y:
    """Return another quantity on the axis `y`, titled alike: Vega joins titles that differ."""
    return alt.Y(f"{field}:Q", title=y["title"])


def series(rows: Sequence[Row], name: str) -> list[Row]:
    """Return rows that say which series of a figure they belong to."""
    return [row | {"series": name} for row in rows]


def by_series(colours: dict[str, str]) -> alt.Color:
    """Return the colours of a figure's series, with their legend."""
    legend = alt.Legend(symbolType="square")
    return alt.Color("series:N", scale=coloured(colours), legend=legend)


def bars(rows: Sequence[Row], n_layers: int, y: alt.Y, colour: alt.Color) -> alt.Chart:
    """Return one bar per layer."""
    x = layer_axis(n_layers)
    chart: alt.Chart = plot(known(rows, _field(y))).mark_bar().encode(x=x, y=y, color=colour)
    return chart


def intervals(rows: Sequence[Row], n_layers: int, y: alt.Y, ends: tuple[str, str]) -> alt.Chart:
    """Return the 95 % intervals as thin lines."""
    low, high = ends
    base = plot(known(rows, low, high)).mark_rule()
    chart: alt.Chart = base.encode(x=layer_axis(n_layers), y=same(y, low), y2=f"{high}:Q")
    return chart


def ticks(rows: Sequence[Row], n_layers: int, y: alt.Y, colour: alt.Color) -> alt.Chart:
    """Return one short horizontal line per layer."""
    size = 0.8 * WIDTH / n_layers
    base = plot(known(rows, _field(y))).mark_tick(thickness=2, size=size, opacity=1)
    chart: alt.Chart = base.encode(x=layer_axis(n_layers), y=y, color=colour)
    return chart


def line(rows: Sequence[Row], n_layers: int, y: alt.Y, colour: alt.Color) -> alt.LayerChart:
    """Return a line with a point per layer; it breaks where a number is missing."""
    base = plot(rows).encode(x=layer_axis(n_layers), y=y, color=colour)
    return layered(base.mark_line(), base.mark_point())


def boxes(rows: Sequence[Row], n_layers: int, y: alt.Y, title: str | None = "layer") -> Chart:
    """Return a box from q1 to q3 with its median, per layer; `y` is the axis, over q1."""
    x = layer_axis(n_layers, title)
    base = plot(known(rows, "q1", "median", "q3"))
    box = base.mark_bar(color=BOX).encode(x=x, y=y, y2="q3:Q")
    size = 0.86 * WIDTH / n_layers
    median = base.mark_tick(color=INK, thickness=1.8, size=size, opacity=1)
    return layered(box, median.encode(x=x, y=same(y, "median")))


def stacked(
    rows: Sequence[Row], n_layers: int, parts: dict[str, tuple[str, str]], title: str
) -> alt.Chart:
    """Return bars stacked to 100 %; `parts` gives each field its name and colour."""
    pieces = [
        {"layer": row["layer"], "part": name, "share": row[field], "order": order}
        for row in rows
        for order, (field, (name, _)) in enumerate(parts.items())
        if row.get(field) is not None
    ]
    colours = dict(parts.values())
    y = alt.Y("share:Q", title=title, scale=alt.Scale(domain=[0, 100]), stack="zero")
    chart: alt.Chart = (
        plot(pieces)
        .mark_bar()
        .encode(
            x=layer_axis(n_layers),
            y=y,
            color=alt.Color("part:N", scale=coloured(colours)),
            order=alt.Order("order:Q", sort="ascending"),
        )
    )
    return chart


def layered(*charts: alt.Chart | alt.LayerChart) -> alt.LayerChart:
    """Return marks in one plot, the first below."""
    return alt.LayerChart(layer=list(charts))


def plot(rows: Sequence[Row], height: int = HEIGHT) -> alt.Chart:
    """Return an empty plot of the house's size over these rows."""
    return alt.Chart(inline(rows), width=WIDTH, height=height)


def nothing() -> alt.Chart:
    """Return a plot without a mark."""
    chart: alt.Chart = plot([]).mark_point()
    return chart


def panels(charts: Sequence[Chart]) -> alt.VConcatChart:
    """Return small plots below each other over one x axis."""
    return alt.vconcat(*charts, spacing=14)


def _field(channel: alt.Y) -> str:
    return str(channel.shorthand).removesuffix(":Q")
