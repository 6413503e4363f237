"""The charts of the pages, in Vega-Lite's language: figures, layers, and the whole index.

A figure is the report's own chart in the colors of a theme, as wide as its place. Marks tell their
numbers, and open the page of their layer or memory (`url`). Figures count layers from 1 as the
paper does, pages from 0: layer 6 of a figure opens /layer/5.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool
from numpy import ndarray

from ffmem.experiments.base import ExperimentResult
from ffmem.indexing.memory import Kind, visible_token
from ffmem.indexing.store import Index
from ffmem.web.layer_spread import spreads
from ffmem.web.layer_table import AGREEMENT, LayerTable, finite
from ffmem.web.vega import Spec, bundle_version

if TYPE_CHECKING:
    from ffmem.experiments.charts import Chart

STILL = 460
"""Width of a plot that is drawn before, and without, a script."""

GUTTER = 64
"""What axis and margins take of the width: Vega fits a chart of one plot, but not of several."""

HEIGHT = 340
"""Of the picture of a layer."""

FAINT = 0.1
"""Opacity of the memories that the filters leave out."""

SAID = {"agrees": "agrees", "disagrees": "does not agree", "none": "no trigger with a next token"}
"""The kinds of agreement as the pages call them."""


def figure_spec(result: ExperimentResult, theme: str = "light") -> Spec:
    """Return the figure of an experiment for a page."""
    from ffmem.experiments.charts import figure_chart

    return _fitted(figure_chart(result, theme).to_dict(validate=False))


def home_spec(index: Index, theme: str = "light") -> Spec:
    """Return how active and how strong the memories of each layer are."""
    from ffmem.experiments.charts import styled

    return _fitted(styled(_overview(index), theme).to_dict(validate=False))


def layer_spec(
    index: Index, table: LayerTable, kept: Bool[ndarray, " memory"], theme: str = "light"
) -> Spec:
    """Return a layer as a cloud of its memories; those that are not kept are faint."""
    from ffmem.experiments.charts import GREY, SKY, VERMILION, config

    kind = index.manifest.model.kind
    rows = _points(index, table, kept)
    colours = {"agrees": VERMILION, "disagrees": SKY, "none": GREY}
    heights = [row["height"] for row in rows if row["height"] is not None]
    logarithm = "log" if heights and min(heights) > 0 else "symlog"
    scale: Spec = {"type": logarithm, "nice": False, "padding": 6}
    spec: Spec = {
        "height": HEIGHT,
        "data": {"values": rows},
        "mark": {"type": "point", "filled": True, "cursor": "pointer"},
        "encoding": {
            "x": _across(kind, rows),
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
                    "domain": [SAID[name] for name in colours],
                    "range": list(colours.values()),
                },
            },
            "size": {
                "condition": {"test": f"datum.agreement === '{SAID['agrees']}'", "value": 64},
                "value": 22,
            },
            "opacity": {
                "condition": {"test": "datum.kept", "value": 0.8},
                "value": FAINT,
            },
            "tooltip": _tips(kind),
        },
        "config": config(theme),
    }
    if not kind.has_values:  # and so nothing to agree with
        spec["encoding"] |= {"color": {"value": SKY}, "size": {"value": 22}}
    return _fitted(spec)


def still(spec: Spec, width: int = STILL) -> Spec:
    """Return a chart of a width of its own, for where no script measures its place."""
    fixed = {name: part for name, part in spec.items() if name != "autosize"}
    if "vconcat" in fixed:
        fixed["vconcat"] = [panel | {"width": width} for panel in fixed["vconcat"]]
    else:
        fixed["width"] = width
    return fixed


def _overview(index: Index) -> "Chart":
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

    found, quartiles = spreads(index), ("q1", "median", "q3")
    gated = index.manifest.model.gated
    shares = [
        {"layer": one["layer"] + 1}
        | {name: _percent(one["active_share"][name]) for name in quartiles}
        for one in found
    ]
    strong = [
        {"layer": one["layer"] + 1} | {name: one["largest"][name] for name in (*quartiles, "max")}
        for one in found
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


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _points(
    index: Index, table: LayerTable, kept: Bool[ndarray, " memory"]
) -> list[dict[str, Any]]:
    """Return a point for each memory, those that agree last, so that they lie on top."""
    kind = index.manifest.model.kind
    height = table.largest if kind.gated else table.max
    first = {"top": table.top[:, :1], "bottom": table.bottom[:, :1]}  # none without values
    ids = {id for end in first.values() for id in end.reshape(-1).tolist()}
    tokens = {id: visible_token(index.token(id)) for id in ids}
    drawn = {tip["field"] for tip in _tips(kind)} | {"height", "kept", "url"}
    rows = []
    for memory in np.argsort(table.agreement, kind="stable").tolist():
        cell = str(index.layout.cell(table.layer, memory))
        point = {
            "cell": cell,
            **{end: tokens[id] for end, ids in first.items() for id in ids[memory].tolist()},
            "place": str(kind.head_slot(memory)),
            "active": _short(100 * table.active_share[memory]),
            "mean": _short(table.mean[memory]),
            "height": _short(height[memory]),
            "max": _short(table.max[memory]),
            "min": _short(table.min[memory]),
            "agreement": SAID[AGREEMENT[int(table.agreement[memory])]],
            "followed": f"{table.followed[memory]} of {table.followable[memory]}",
            "kept": bool(kept[memory]),
            "url": f"/m/{cell}",
        }
        rows.append({name: part for name, part in point.items() if name in drawn})
    return rows


def _range(rows: list[dict[str, Any]]) -> list[float]:
    """Return where the axis of shares begins and ends: a little beyond the memories."""
    shares = [row["active"] for row in rows if row["active"] is not None] or [0.0, 100.0]
    room = 0.02 * (max(shares) - min(shares)) or 0.5
    return [min(shares) - room, max(shares) + room]


def _short(number: Any) -> float | None:
    """Return a number with the digits that a picture shows, which halves its size."""
    return None if finite(number) is None else float(f"{number:.4g}")


def _across(kind: Kind, rows: list[dict[str, Any]]) -> Spec:
    """Return the axis from left to right: how often active, or how large a weight is on average."""
    axis: Spec = {"field": "active", "type": "quantitative"}
    if not kind.is_weight:
        title = f"{'gate open' if kind.gated else 'active'} on % of prefixes"
        return axis | {"title": title, "scale": {"domain": _range(rows), "nice": False}}
    means = [row["mean"] for row in rows if row["mean"] is not None]
    logarithm = "log" if means and min(means) > 0 else "symlog"
    scale = {"type": logarithm, "nice": False, "padding": 6}
    few = {"tickCount": 4, "format": "~g"}
    return axis | {"field": "mean", "title": "mean coefficient", "scale": scale, "axis": few}


def _tips(kind: Kind) -> list[Spec]:
    """Return what a point of a layer's picture says."""
    gated = kind.gated
    active = "gate open (% of prefixes)" if gated else "active (% of prefixes)"
    named = {
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
    unknown = {"top", "bottom", "agreement", "followed"} if not kind.has_values else set()
    unknown |= {"place"} if kind.head_slot(0) is None else set()
    unknown |= {"active"} if kind.is_weight else {"mean"}
    numbers = {"active", "mean", "max", "min"}
    return [
        {"field": field, "title": title}
        | ({"type": "quantitative", "format": ".3~g"} if field in numbers else {"type": "nominal"})
        for field, title in named.items()
        if field not in unknown
    ]


def _fitted(spec: Spec) -> Spec:
    """Return a chart that takes the width of its place."""
    also: Spec = {"vega": bundle_version()}
    if "vconcat" in spec:
        also["gutter"] = GUTTER
    else:
        spec |= {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
    return spec | {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "usermeta": also,
    }
