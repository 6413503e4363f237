"""The house style of all figures: one palette, one font, one width.

Colours of data are Okabe and Ito's, which people see apart whatever their eyes; they stand on white
and on dark grounds. Ink, soft ink, grid and boxes are four colours of their own, because a dark
page exchanges them: `DARK` says for what.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import altair as alt

ORANGE, SKY, GREEN = "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#8b939c"

INK, SOFT, LINE, BOX = "#1c1e21", "#5d636b", "#e3e0da", "#94c9ea"
DARK = {INK: "#e8e6e1", SOFT: "#a4abb5", LINE: "#31363f", BOX: "#2a6f9e"}
"""What each colour of the ground becomes on a dark page."""
NAMES = {INK: "ink", SOFT: "soft", LINE: "line", BOX: "box"}
"""The same colours as a page's CSS variables call them."""

WIDTH, HEIGHT = 340, 180
"""Of the plot in pixels: with 11-pixel text, 6 to 7 points in a column of a paper."""

Chart = alt.Chart | alt.LayerChart | alt.VConcatChart

# One weight only: with two fonts in a figure the PDF's bytes would differ from run to run.
_TEXT: dict[str, Any] = {"labelFontWeight": "normal", "titleFontWeight": "normal"}

CONFIG: dict[str, Any] = {
    "aria": False,
    "background": "transparent",
    "font": "sans-serif",
    "padding": {"left": 4, "right": 6, "top": 4, "bottom": 4},
    "view": {"stroke": None, "continuousWidth": WIDTH, "continuousHeight": HEIGHT},
    "axis": _TEXT
    | {
        "labelColor": SOFT,
        "titleColor": INK,
        "labelFontSize": 11,
        "titleFontSize": 12,
        "titlePadding": 6,
        "domainColor": SOFT,
        "tickColor": SOFT,
        "tickSize": 3,
        "gridColor": LINE,
        "gridWidth": 0.6,
    },
    "axisX": {"grid": False, "labelAngle": 0},
    # The same room for labels in every figure makes all of them equally wide.
    "axisY": {"domain": False, "ticks": False, "minExtent": 34, "maxExtent": 34},
    "legend": _TEXT
    | {
        "orient": "top",
        "title": None,
        "direction": "horizontal",
        "labelColor": INK,
        "labelFontSize": 11,
        "labelLimit": 0,
        "symbolSize": 60,
        "symbolStrokeWidth": 2,
        "columnPadding": 10,
        "padding": 0,
        "offset": 8,
    },
    "title": {
        "color": INK,
        "fontSize": 11,
        "fontWeight": "normal",
        "anchor": "start",
        "frame": "group",
    },
    "line": {"strokeWidth": 1.8},
    "point": {"size": 18, "filled": True, "opacity": 1},
    "rule": {"color": INK, "strokeWidth": 0.9},
    "text": {"color": SOFT, "fontSize": 10},
    "concat": {"spacing": 14},
}


def styled(chart: Chart) -> Chart:
    """Return a figure in the house style."""
    return chart.properties(config=_config())


@cache
def _config() -> alt.Config:
    return alt.Config.from_dict(CONFIG)


def inline(rows: Sequence[dict[str, Any]]) -> alt.InlineData:
    """Return rows as the data of a mark."""
    return alt.InlineData(values=list(rows))


def coloured(colours: dict[str, str]) -> alt.Scale:
    """Return the scale that gives each series its colour, in this order."""
    return alt.Scale(domain=list(colours), range=list(colours.values()))


def layer_axis(n_layers: int, title: str | None = "layer") -> alt.X:
    """Return the x axis of all figures over layers, counted from 1 as the paper does."""
    step = 1 if n_layers <= 20 else 5 if n_layers <= 100 else 20
    labels = [layer for layer in range(1, n_layers + 1) if layer == 1 or layer % step == 0]
    return alt.X(
        "layer:O",
        title=title,
        scale=alt.Scale(domain=list(range(1, n_layers + 1)), paddingInner=0.25, paddingOuter=0.2),
        axis=alt.Axis(values=labels, labels=title is not None, ticks=title is not None),
    )
