"""How figures are drawn: one chart definition serves SVG, PDF and the page.

    chart(result) → Altair chart;    figure_svg(result) → SVG;    write_figure(result, folder)

A chart sets neither its width nor the colors of text, grid and boxes: both come from the config,
`config("light")` or `config("dark")`. Every mark has a tooltip; rows of a layer or a memory link to
its page (`url`). Data colors are Okabe and Ito's, which any color vision can tell apart.
Nothing is fetched and no browser runs; the same result gives the same SVG bytes.
"""

import json
import re
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert
from markupsafe import escape

from ffmem.errors import FfmemError
from ffmem.experiments.base import ExperimentResult, find
from ffmem.experiments.rows import Row, rows_with
from ffmem.files import committing
from ffmem.indexing.memory import visible

VEGA_LITE = "6.4"

ORANGE, SKY, GREEN = "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE, GRAY = "#0072B2", "#D55E00", "#CC79A7", "#8b939c"

GROUND = {
    "ink": ("#1c1e21", "#e8e6e1"),
    "soft": ("#5d636b", "#a4abb5"),
    "line": ("#e3e0da", "#31363f"),
    "box": ("#94c9ea", "#2a6f9e"),
}
"""Colors of text, grid and boxes on a light and on a dark page, by CSS variable."""

THEMES = ("light", "dark")

WIDTH, HEIGHT = 340, 180
"""Size of the plot in pixels: in a column of a paper, 11-pixel text gets 6 to 7 points."""

FONT = "Arial, Helvetica, Liberation Sans, sans-serif"
"""Fonts of one width: legends are laid out with the metrics of the first that is there."""

Chart = alt.Chart | alt.LayerChart | alt.VConcatChart


def config(theme: str = "light") -> Row:
    """Return the style of all figures: one palette, one font, one width."""
    if theme not in THEMES:
        raise FfmemError(f"There is no theme {theme!r}. There are: {', '.join(THEMES)}.")
    ink, soft, line, box = (pair[THEMES.index(theme)] for pair in GROUND.values())
    # One weight only: with two fonts in a figure the PDF's bytes would differ from run to run.
    text = {"labelFontWeight": "normal", "titleFontWeight": "normal"}
    return {
        "aria": False,
        "background": "transparent",
        "font": FONT,
        "padding": {"left": 4, "right": 6, "top": 4, "bottom": 4},
        "view": {
            "stroke": None,
            "continuousWidth": WIDTH,
            "discreteWidth": WIDTH,
            "continuousHeight": HEIGHT,
        },
        "axis": text
        | {
            "labelColor": soft,
            "titleColor": ink,
            "labelFontSize": 11,
            "titleFontSize": 12,
            "titlePadding": 6,
            "domainColor": soft,
            "tickColor": soft,
            "tickSize": 3,
            "gridColor": line,
            "gridWidth": 0.6,
        },
        "axisX": {"grid": False, "labelAngle": 0},
        # The same room for labels in every figure makes all of them equally wide.
        "axisY": {"domain": False, "ticks": False, "minExtent": 34, "maxExtent": 34},
        "legend": text
        | {
            "orient": "top",
            "title": None,
            "direction": "horizontal",
            "labelColor": ink,
            "labelFontSize": 11,
            "labelLimit": 0,
            "symbolSize": 60,
            "symbolStrokeWidth": 2,
            # A browser's font may be a seventh wider than the one that measured the labels.
            "columnPadding": 20,
            "rowPadding": 3,
            "padding": 0,
            "offset": 8,
        },
        "title": {
            "color": ink,
            "fontSize": 11,
            "fontWeight": "normal",
            "subtitleColor": soft,
            "subtitleFontSize": 10,
            "subtitleFontWeight": "normal",
            "anchor": "start",
            "frame": "group",
        },
        "line": {"strokeWidth": 1.8},
        "point": {"size": 18, "filled": True, "opacity": 1},
        "rule": {"color": ink, "strokeWidth": 0.9},
        "text": {"color": soft, "fontSize": 10},
        "concat": {"spacing": 14},
        "style": {
            "box": {"color": box},
            "ink": {"color": ink},
            "soft": {"color": soft},
        },
    }


def styled(chart: Chart, theme: str = "light") -> Chart:
    """Return a chart in the colors of a theme."""
    found: Chart = chart.copy(deep=False)
    found.config = _config(theme)
    return found


@cache
def _config(theme: str) -> alt.Config:
    return alt.Config.from_dict(config(theme))  # validation takes as long as drawing


# Rows and axes


def figure_rows(
    rows: Sequence[Row], percent: Sequence[str], plain: Sequence[str] = ()
) -> list[Row]:
    """Return these fields of rows as figures show them: layers from 1, `percent` in %."""
    shown = []
    for row in rows:
        one = {"layer": row["layer"] + 1} if "layer" in row else {}
        one |= {name: None if row.get(name) is None else 100 * row[name] for name in percent}
        shown.append(one | {name: row.get(name) for name in plain})
    return shown


def series(rows: Sequence[Row], name: str) -> list[Row]:
    """Return rows that say which series of a figure they belong to."""
    return [row | {"series": name} for row in rows]


def layer_axis(n_layers: int, title: str | None = "layer") -> alt.X:
    """Return the x axis of all figures over layers, counted from 1 as the paper does."""
    step = 1 if n_layers <= 20 else 5 if n_layers <= 100 else 20
    labels = [layer for layer in range(1, n_layers + 1) if layer == 1 or layer % step == 0]
    domain = list(range(1, n_layers + 1))
    return alt.X(
        "layer:O",
        title=title,
        scale=alt.Scale(type="band", domain=domain, paddingInner=0.25, paddingOuter=0.2),
        axis=alt.Axis(values=labels, labels=title is not None, ticks=title is not None),
    )


def quantity(
    field: str,
    title: str | None,
    domain: tuple[float | int, float | int] | None = None,
    **axis: Any,
) -> alt.Y:
    """Return the y axis of a quantity."""
    scale = alt.Scale(domain=list(domain), clamp=True) if domain else alt.Scale(zero=True)
    return alt.Y(f"{field}:Q", title=title, scale=scale, axis=alt.Axis(**({"tickCount": 5} | axis)))


def same_axis(y: alt.Y, field: str) -> alt.Y:
    """Return another quantity on the axis `y`, titled alike: Vega joins titles that differ."""
    return alt.Y(f"{field}:Q", title=y["title"])


def series_color(colors: dict[str, str], field: str = "series") -> alt.Color:
    """Return the colors of a figure's series, with their legend."""
    wide = sum(len(name) for name in colors) > 40  # more would not fit beside each other
    legend = alt.Legend(symbolType="square", columns=2 if wide else len(colors))
    scale = alt.Scale(domain=list(colors), range=list(colors.values()))
    return alt.Color(f"{field}:N", scale=scale, legend=legend)


# Marks


def plot(rows: Sequence[Row], height: int = HEIGHT) -> alt.Chart:
    """Return an empty plot over these rows; its marks have tooltips and link to their page."""
    linked = [row | _link(row) for row in rows]
    chart = alt.Chart(alt.InlineData(values=linked), height=height)
    tips = _tooltips(rows)
    return chart.encode(tooltip=tips) if tips else chart


def _link(row: Row) -> Row:
    """Return the page of a row's memory or layer; pages count layers from 0."""
    if "cell" in row:
        return {"url": f"/m/{row['cell']}"}
    return {"url": f"/layer/{row['layer'] - 1}"} if "layer" in row else {}


def _tooltips(rows: Sequence[Row]) -> list[alt.Tooltip]:
    """Return the fields of a mark's tooltip: what its numbers are of, then the numbers."""
    subjects = ("layer", "cell", "token", "series", "part", "how")
    found = dict.fromkeys(name for row in rows for name in row if name not in ("order", "at"))
    return [
        _tooltip(name, [row.get(name) for row in rows])
        for name in sorted(found, key=lambda name: name not in subjects)
    ]


def _tooltip(field: str, values: list[Any]) -> alt.Tooltip:
    title = field.replace("_", " ")
    numbers = [value for value in values if value is not None]
    if field == "layer" or not all(isinstance(value, int | float) for value in numbers):
        return alt.Tooltip(f"{field}:N", title=title)
    whole = all(float(value).is_integer() for value in numbers)
    large = max((abs(value) for value in numbers), default=0)
    shown = ",d" if whole else ",.1~f" if large >= 1000 else ".3~g"
    return alt.Tooltip(f"{field}:Q", title=title, format=shown)


class LayerPlot:
    """Marks over the layers of a result, in one plot: each shows a field of the rows as a series.

    `percent` are the fields that the plot reads, shares all; `colors` gives each series its color.
    """

    def __init__(
        self, result: ExperimentResult, percent: Sequence[str], y: alt.Y, colors: dict[str, str]
    ) -> None:
        self.rows = figure_rows(result.rows, percent)
        self.x, self.y, self.color = layer_axis(result.n_layers), y, series_color(colors)

    def _encode(self, chart: alt.Chart, field: str) -> alt.Chart:
        own = str(self.y.shorthand) == f"{field}:Q"
        y = self.y if own else same_axis(self.y, field)
        encoded: alt.Chart = chart.encode(x=self.x, y=y, color=self.color)
        return encoded

    def bars(self, field: str, name: str) -> alt.Chart:
        """Return one bar per layer."""
        return self._encode(plot(series(rows_with(self.rows, field), name)).mark_bar(), field)

    def ticks(self, field: str, name: str) -> alt.Chart:
        """Return one short horizontal line per layer."""
        base = plot(series(rows_with(self.rows, field), name))
        return self._encode(base.mark_tick(thickness=2, width={"band": 1}, opacity=1), field)

    def points(self, field: str, name: str) -> alt.Chart:
        """Return one point per layer."""
        return self._encode(
            plot(series(rows_with(self.rows, field), name)).mark_point(size=22), field
        )

    def line(self, field: str, name: str) -> alt.LayerChart:
        """Return a line with a point per layer; it breaks where a number is missing."""
        base = self._encode(plot(series(self.rows, name)), field)
        return layered(base.mark_line(), base.mark_point())

    def intervals(self, low: str, high: str) -> alt.Chart:
        """Return the 95 % intervals as thin lines."""
        base = plot(rows_with(self.rows, low, high)).mark_rule()
        chart: alt.Chart = base.encode(x=self.x, y=same_axis(self.y, low), y2=f"{high}:Q")
        return chart


def boxes(
    rows: Sequence[Row], n_layers: int, y: alt.Y, title: str | None = "layer"
) -> alt.LayerChart:
    """Return a box from q1 to q3 with its median, per layer; `y` is the axis, over q1."""
    x = layer_axis(n_layers, title)
    base = plot(rows_with(rows, "q1", "median", "q3"))
    box = base.mark_bar(style="box").encode(x=x, y=y, y2="q3:Q")
    median = base.mark_tick(style="ink", thickness=1.8, width={"band": 1}, opacity=1)
    return layered(box, median.encode(x=x, y=same_axis(y, "median")))


def stacked_bars(
    rows: Sequence[Row], n_layers: int, parts: dict[str, tuple[str, str]], title: str
) -> alt.Chart:
    """Return bars stacked to 100 %; `parts` gives each field its name and color."""
    pieces = [
        {"layer": row["layer"], "part": name, "share": row[field], "order": order}
        for row in rows
        for order, (field, (name, _)) in enumerate(parts.items())
        if row.get(field) is not None
    ]
    y = alt.Y("share:Q", title=title, scale=alt.Scale(domain=[0, 100]), stack="zero")
    chart: alt.Chart = plot(pieces).mark_bar()
    return chart.encode(
        x=layer_axis(n_layers),
        y=y,
        color=series_color(dict(parts.values()), "part"),
        order=alt.Order("order:Q", sort="ascending"),
    )


def layered(*charts: alt.Chart | alt.LayerChart) -> alt.LayerChart:
    """Return marks in one plot, the first below."""
    return alt.LayerChart(layer=list(charts))


def panels(charts: Sequence[Chart]) -> Chart:
    """Return small plots below each other over one x axis; an empty plot of none."""
    return alt.vconcat(*charts, spacing=14) if charts else empty_plot()


def empty_plot() -> alt.Chart:
    """Return a plot without a mark."""
    chart: alt.Chart = plot([]).mark_point()
    return chart


# Files

_OPENING = re.compile(r"<svg\b[^>]*>")
_SIZE = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')
_MACHINERY = re.compile(r' (?:aria-[a-z]+|role|pointer-events|class)="[^"]*"')


def figure_chart(result: ExperimentResult, theme: str = "light") -> Chart:
    """Return the figure of an experiment, drawn from its result alone."""
    return styled(find(result.experiment).chart(result), theme)


def figure_svg(result: ExperimentResult) -> str:
    """Return the figure of an experiment as SVG, for a page that sets its colors."""
    experiment, model = find(result.experiment), result.settings.get("model")
    title = f"{experiment.title} ({result.paper})" + (f", {model}" if model else "")
    return chart_svg(result.experiment, title, experiment.describe(result), figure_chart(result))


def chart_svg(name: str, title: str, description: str, chart: Chart) -> str:
    """Return a chart as SVG, with a title and a description for screen readers."""
    # Charts are checked against the schema in tests; it takes longer than drawing them.
    drawn = _MACHINERY.sub("", draw(json.dumps(chart.to_dict(validate=False))))
    size, opening = _SIZE.search(drawn), _OPENING.match(drawn)
    assert size is not None, "Vega gives every figure a viewBox"
    assert opening is not None, "Vega's figures begin with <svg"
    width, height = size[1], size[2]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="figure" role="img"'
        f' aria-labelledby="{name}-title {name}-desc" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}">'
        f'<title id="{name}-title">{escape(visible(title))}</title>'
        f'<desc id="{name}-desc">{escape(visible(description))}</desc>'
    ) + drawn[opening.end() :]


@lru_cache(maxsize=64)
def draw(spec: str) -> str:
    """Return a chart's JSON as SVG; pages and reports show a figure again and again."""
    svg: str = vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE, allowed_base_urls=[])
    return svg


def svg_file(svg: str) -> str:
    """Return an SVG as a standalone file, which follows a dark page even in an <img>."""
    return svg.replace("<title", f"<style>{dark_style()}</style><title", 1) + "\n"


def svg_and_pdf(svg: str) -> tuple[bytes, bytes]:
    """Return the content of a figure's two files."""
    return svg_file(svg).encode(), vl_convert.svg_to_pdf(svg)


def write_svg_and_pdf(name: str, svg: str, folder: Path) -> tuple[Path, Path]:
    """Write a figure as NAME.svg and NAME.pdf, and return where they are."""
    paths = folder / f"{name}.svg", folder / f"{name}.pdf"
    for path, content in zip(paths, svg_and_pdf(svg), strict=True):
        with committing(path) as temporary:
            temporary.write_bytes(content)
    return paths


def write_figure(result: ExperimentResult, folder: Path) -> tuple[Path, Path]:
    """Write NAME.svg and NAME.pdf of an experiment, and return where they are."""
    return write_svg_and_pdf(result.experiment, figure_svg(result), folder)


def dark_style() -> str:
    """Return the CSS that replaces the light colors on a dark page."""
    rules = "".join(
        f'[fill="{light}"]{{fill:{dark}}}[stroke="{light}"]{{stroke:{dark}}}'
        for light, dark in GROUND.values()
    )
    return f"@media (prefers-color-scheme:dark){{{rules}}}"
