"""The charts of the pages, as Vega-Lite specs: figures, layers, and the whole index.

A figure is the report's own chart in the colors of a theme, as wide as its container. Marks show
their numbers, and open the page of their layer or memory (`url`). Figures count layers from 1 as
the paper does, pages from 0: layer 6 of a figure opens /layer/5.

Vega comes from the package vl-convert, so nothing is fetched. The page gets one script with
Vega-Lite, Vega and the interpreter of its expressions, so that no text is ever turned into code.
The server draws the same charts as SVG for pages without scripts.
"""

import hashlib
import threading
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool
from numpy import ndarray

from ffmem.cells import BankRange
from ffmem.errors import FfmemError
from ffmem.experiments.base import ExperimentResult
from ffmem.files import write_text
from ffmem.indexing.memory import Kind, visible_token
from ffmem.indexing.store import Index
from ffmem.registry import cache_folder
from ffmem.web.layer_table import AGREEMENT, LayerTable, finite, layer_spreads

if TYPE_CHECKING:
    from ffmem.experiments.charts import Chart

Spec = dict[str, Any]
"""A chart in Vega-Lite's language, or a part of one."""

STATIC_WIDTH = 460
"""Width of a plot that the server draws."""

GUTTER = 64
"""What axis and margins take of the width: Vega fits a chart of one plot, but not of several."""

LAYER_HEIGHT = 340
"""Height of the chart of a layer."""

FAINT = 0.1
"""Opacity of the memories that the filters leave out."""

AGREEMENT_LABELS = {
    "agrees": "agrees",
    "disagrees": "does not agree",
    "none": "no trigger with a next token",
}
"""The kinds of agreement as the pages call them."""


def figure_spec(result: ExperimentResult, theme: str = "light") -> Spec:
    """Return the figure of an experiment for a page."""
    from ffmem.experiments.charts import figure_chart

    return _responsive(figure_chart(result, theme).to_dict(validate=False))


def home_spec(index: Index, theme: str = "light") -> Spec:
    """Return how active and how strong the memories of each layer are."""
    from ffmem.experiments.charts import styled

    return _responsive(styled(_overview_chart(index), theme).to_dict(validate=False))


def layer_spec(
    index: Index,
    table: LayerTable,
    passes: Bool[ndarray, " memory"],
    theme: str = "light",
    bank: BankRange | None = None,
) -> Spec:
    """Return a scatter plot of a layer's memories; those that fail the filters are faint.

    With a `bank`, only its memories are drawn.
    """
    from ffmem.experiments.charts import GRAY, SKY, VERMILION, config

    kind = index.manifest.model.kind
    rows = _points(index, table, passes, slice(None) if bank is None else bank.memories)
    colors = {"agrees": VERMILION, "disagrees": SKY, "none": GRAY}
    heights = [row["height"] for row in rows if row["height"] is not None]
    logarithm = "log" if heights and min(heights) > 0 else "symlog"
    scale: Spec = {"type": logarithm, "nice": False, "padding": 6}
    spec: Spec = {
        "height": LAYER_HEIGHT,
        "data": {"values": rows},
        "mark": {"type": "point", "filled": True, "cursor": "pointer"},
        "encoding": {
            "x": _x_axis(kind, rows),
            "y": {
                "field": "height",
                "type": "quantitative",
                "title": "largest |coefficient|" if kind.gated else "largest coefficient",
                "scale": scale,
                "axis": {"tickCount": 4, "format": "~g"},
            },
            "color": {
                "field": "agreement",
                "type": "nominal",
                "scale": {
                    "domain": [AGREEMENT_LABELS[name] for name in colors],
                    "range": list(colors.values()),
                },
            },
            "size": {
                "condition": {
                    "test": f"datum.agreement === '{AGREEMENT_LABELS['agrees']}'",
                    "value": 64,
                },
                "value": 22,
            },
            "opacity": {
                "condition": {"test": "datum.passes", "value": 0.8},
                "value": FAINT,
            },
            "tooltip": _tooltips(kind),
        },
        "config": config(theme),
    }
    if not kind.has_values:  # and so nothing to agree with
        spec["encoding"] |= {"color": {"value": SKY}, "size": {"value": 22}}
    return _responsive(spec)


def fixed_width(spec: Spec, width: int = STATIC_WIDTH) -> Spec:
    """Return a chart with a fixed width, for where no script measures its container."""
    fixed = {name: part for name, part in spec.items() if name != "autosize"}
    if "vconcat" in fixed:
        fixed["vconcat"] = [panel | {"width": width} for panel in fixed["vconcat"]]
    else:
        fixed["width"] = width
    return fixed


def _overview_chart(index: Index) -> "Chart":
    import altair as alt

    from ffmem.experiments.charts import (
        VERMILION,
        boxes,
        layer_axis,
        layered,
        panels,
        plot,
        quantity,
        same_axis,
    )

    spreads, quartiles = layer_spreads(index), ("q1", "median", "q3")
    gated = index.manifest.model.gated
    shares = [
        {"layer": one.layer + 1}
        | {name: 100 * one.active_share[name] for name in quartiles if one.active_share["n"]}
        for one in spreads
    ]
    strong = [
        {"layer": one.layer + 1} | {name: one.largest[name] for name in (*quartiles, "max")}
        for one in spreads
    ]
    active = quantity(
        "q1", f"{'gate open' if gated else 'active'} (%)", (0, 100), values=[0, 50, 100]
    )
    # A logarithm has no 0: a layer may have memories that never were more.
    positive = all(row["q1"] for row in strong)
    log = alt.Scale(type="log" if positive else "symlog", nice=False, padding=6)
    few = alt.Axis(format="~g", tickCount=3)
    height = alt.Y("q1:Q", title="largest |m| (log)", scale=log, axis=few)
    inner = boxes(shares, index.n_layers, active, None).properties(height=100)
    dots = plot(strong).mark_point(color=VERMILION, size=16)
    most = dots.encode(x=layer_axis(index.n_layers), y=same_axis(height, "max"))
    outer = layered(boxes(strong, index.n_layers, height), most).properties(height=130)
    # A weight of a softmax is always active: a row of boxes at 100 % would say nothing.
    return panels([outer] if index.manifest.model.kind.is_weight else [inner, outer])


def _points(
    index: Index, table: LayerTable, passes: Bool[ndarray, " memory"], drawn_memories: slice
) -> list[dict[str, Any]]:
    """Return a point for each memory, those that agree last, so that they are drawn on top."""
    kind = index.manifest.model.kind
    height = table.largest if kind.gated else table.max
    first = {"top": table.top, "bottom": table.bottom}  # none without values
    ids = {id for end in first.values() for id in end.reshape(-1).tolist()}
    tokens = {id: visible_token(index.token(id)) for id in ids}
    drawn = {tip["field"] for tip in _tooltips(kind)} | {"height", "passes", "url"}
    rows = []
    memories = np.arange(len(passes))[drawn_memories]
    for memory in memories[np.argsort(table.agreement[memories], kind="stable")].tolist():
        cell = str(index.layout.cell(table.layer, memory))
        point = {
            "cell": cell,
            **{end: tokens[id] for end, ids in first.items() for id in ids[memory].tolist()},
            "place": str(kind.head_slot(memory)),
            "active": _round(100 * table.active_share[memory]),
            "mean": _round(table.mean[memory]),
            "height": _round(height[memory]),
            "max": _round(table.max[memory]),
            "min": _round(table.min[memory]),
            "agreement": AGREEMENT_LABELS[AGREEMENT[int(table.agreement[memory])]],
            "followed": f"{table.followed[memory]} of {table.followable[memory]}",
            "passes": bool(passes[memory]),
            "url": f"/m/{cell}",
        }
        rows.append({name: part for name, part in point.items() if name in drawn})
    return rows


def _round(number: Any) -> float | None:
    """Return a number with the digits that a chart shows, which halves its size."""
    return None if finite(number) is None else float(f"{number:.4g}")


def _x_axis(kind: Kind, rows: list[dict[str, Any]]) -> Spec:
    """Return the x axis: how often a memory is active, or how large a weight is on average."""
    axis: Spec = {"field": "active", "type": "quantitative"}
    if not kind.is_weight:
        title = f"{'gate open' if kind.gated else 'active'} on % of prefixes"
        shares = [row["active"] for row in rows if row["active"] is not None] or [0.0, 100.0]
        margin = 0.02 * (max(shares) - min(shares)) or 0.5
        domain = [min(shares) - margin, max(shares) + margin]
        return axis | {"title": title, "scale": {"domain": domain, "nice": False}}
    means = [row["mean"] for row in rows if row["mean"] is not None]
    logarithm = "log" if means and min(means) > 0 else "symlog"
    scale = {"type": logarithm, "nice": False, "padding": 6}
    few = {"tickCount": 4, "format": "~g"}
    return axis | {"field": "mean", "title": "mean coefficient", "scale": scale, "axis": few}


def _tooltips(kind: Kind) -> list[Spec]:
    """Return what a point of a layer's chart says."""
    gated = kind.gated
    active = "gate open (% of prefixes)" if gated else "active (% of prefixes)"
    titles = {
        "cell": "memory",
        "top": "m > 0 promotes" if gated else "promotes",
        "bottom": "m < 0 promotes" if gated else "suppresses",
        "place": "place",
        "active": active,
        "mean": "mean m",
        "max": "largest m",
        "min": "smallest m",
        "agreement": "agreement",
        "followed": "triggers it predicts",
    }
    hidden = {"top", "bottom", "agreement", "followed"} if not kind.has_values else set()
    hidden |= {"place"} if kind.head_slot(0) is None else set()
    hidden |= {"active"} if kind.is_weight else {"mean"}
    numbers = {"active", "mean", "max", "min"}
    return [
        {"field": field, "title": title}
        | ({"type": "quantitative", "format": ".3~g"} if field in numbers else {"type": "nominal"})
        for field, title in titles.items()
        if field not in hidden
    ]


def _responsive(spec: Spec) -> Spec:
    """Return a chart as wide as its container."""
    metadata: Spec = {"vega": bundle_version()}
    if "vconcat" in spec:
        metadata["gutter"] = GUTTER
    else:
        spec |= {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
    return spec | {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "usermeta": metadata,
    }


class Bundle(NamedTuple):
    """The script of the page."""

    script: bytes
    etag: str


_bundle_lock = threading.Lock()


def bundle_version() -> str:
    """Return what decides the bytes of the script."""
    return version("vl-convert-python")


def bundle() -> Bundle:
    """Return the script, made once and kept in the cache folder."""
    with _bundle_lock:
        return _bundle()


@cache
def _bundle() -> Bundle:
    from ffmem.experiments.charts import VEGA_LITE

    path = cache_folder() / "web" / f"vega-{bundle_version()}-{VEGA_LITE}.js"
    script = ""
    with suppress(OSError, UnicodeDecodeError):
        script = path.read_text(encoding="utf-8")
    if not script:
        import vl_convert

        script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE)
        with suppress(FfmemError):  # it saves a second next time, no more
            write_text(path, script)
    content = script.encode()
    return Bundle(content, f'"{hashlib.sha256(content).hexdigest()[:16]}"')
