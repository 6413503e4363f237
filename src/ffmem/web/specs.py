"""The charts of the pages, in Vega-Lite's language: figures, layers, and the whole index.

A chart is as wide as its place, says its numbers where the mouse rests, and every mark that stands
for a layer or a memory names its page (`url`). Figures count layers from 1 as the paper does, pages
from 0: layer 6 of a figure opens /layer/5. A dark page exchanges the four colours of the ground.
"""

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool
from numpy import ndarray

from ffmem.errors import FfmemError
from ffmem.experiments.result import Result
from ffmem.indexing.memory import Kind, visible_token
from ffmem.indexing.store import Index
from ffmem.web.layer_spread import spreads
from ffmem.web.layer_table import AGREEMENT, LayerTable, finite
from ffmem.web.vega import Spec, bundle_version

if TYPE_CHECKING:
    from ffmem.reporting.style import Chart

THEMES = ("light", "dark")

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

_WHOSE = {"layer", "cell", "token", "series", "part", "how"}  # what the numbers are of
_HIDDEN = {"order", "at", "url"}  # they steer a mark and say nothing


def figure_spec(result: Result, theme: str = "light") -> Spec:
    """Return the figure of an experiment for a page."""
    from ffmem.reporting.charts import chart

    spec = chart(result).to_dict(validate=False)
    if result.experiment == "predictive-values":
        _name_memories(spec, result)
    return _for_page(spec, theme)


def home_spec(index: Index, theme: str = "light") -> Spec:
    """Return how active and how strong the memories of each layer are."""
    return _for_page(_overview(index).to_dict(validate=False), theme)


def layer_spec(
    index: Index, table: LayerTable, kept: Bool[ndarray, " memory"], theme: str = "light"
) -> Spec:
    """Return a layer as a cloud of its memories; those that are not kept are faint."""
    from ffmem.reporting.style import CONFIG, GREY, SKY, VERMILION

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
        "config": copy.deepcopy(CONFIG),
    }
    if not kind.has_values:  # and so nothing to agree with
        spec["encoding"] |= {"color": {"value": SKY}, "size": {"value": 22}}
    return _themed(_fitted(spec), theme)


def still(spec: Spec, width: int = STILL) -> Spec:
    """Return a chart of a width of its own, for where no script measures its place."""
    fixed = {name: part for name, part in spec.items() if name != "autosize"}
    if "vconcat" in fixed:
        fixed["vconcat"] = [panel | {"width": width} for panel in fixed["vconcat"]]
    else:
        fixed["width"] = width
    return fixed


def refuse_other_themes(theme: str) -> None:
    """Raise unless there is such a theme."""
    if theme not in THEMES:
        raise FfmemError(f"There is no theme {theme!r}. There are: {', '.join(THEMES)}.")


def _overview(index: Index) -> "Chart":
    import altair as alt

    from ffmem.reporting.marks import boxes, layered, panels, plot, same, up
    from ffmem.reporting.style import VERMILION, layer_axis, styled

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
    active = up("q1", f"{'gate open' if gated else 'active'} (%)", (0, 100), values=[0, 50, 100])
    # A logarithm has no 0: a layer may have memories that never were more.
    positive = all(row["q1"] for row in strong)
    log = alt.Scale(type="log" if positive else "symlog", nice=False, padding=6)
    few = alt.Axis(format="~g", tickCount=3)
    height = alt.Y("q1:Q", title="largest |m| (log)", scale=log, axis=few)
    inner = boxes(shares, index.n_layers, active, None).properties(height=100)
    dots = plot(strong).mark_point(color=VERMILION, size=16)
    most = dots.encode(x=layer_axis(index.n_layers), y=same(height, "max"))
    box = boxes(strong, index.n_layers, height)
    assert isinstance(box, alt.LayerChart)
    outer = layered(box, most).properties(height=130)
    # A weight of a softmax is always active: a row of boxes at 100 % would say nothing.
    return styled(panels([outer] if index.manifest.model.kind.is_weight else [inner, outer]))


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


def _for_page(spec: Spec, theme: str) -> Spec:
    """Return a figure of the report as a page shows it."""
    for unit, rows in _units(spec, spec.get("datasets", {}), []):
        _explain(unit, rows)
    return _themed(_fitted(spec), theme)


def _fitted(spec: Spec) -> Spec:
    """Return a chart that takes the width of its place."""
    for unit, _ in _units(spec, {}, []):
        unit.pop("width", None)
        if unit["mark"].get("type") == "tick" and "size" in unit["mark"]:
            del unit["mark"]["size"]  # in pixels of the printed figure
            unit["mark"]["width"] = {"band": 1}
        x = unit.get("encoding", {}).get("x", {})
        if x.get("type") == "ordinal" and "scale" in x:
            x["scale"]["type"] = "band"  # else Vega takes points and complains of their padding
    also: Spec = {"vega": bundle_version()}
    if "vconcat" in spec:
        also["gutter"] = GUTTER
    else:
        spec |= {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
    return spec | {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "usermeta": also,
    }


def _units(part: Spec, datasets: dict[str, Any], rows: list[Any]) -> Iterator[tuple[Spec, Any]]:
    """Return every mark of a chart, with the rows that it draws."""
    data = part.get("data")
    if data:
        rows = data["values"] if "values" in data else datasets.get(data.get("name"), rows)
    for inner in (*part.get("layer", ()), *part.get("vconcat", ())):
        yield from _units(inner, datasets, rows)
    if "mark" in part:
        yield part, rows


def _explain(unit: Spec, rows: list[dict[str, Any]]) -> None:
    """Let a mark say its numbers, and open the page of its layer or memory."""
    found = dict.fromkeys(name for row in rows for name in row if name not in _HIDDEN)
    fields = sorted(found, key=lambda name: name not in _WHOSE)  # stable: the others as they are
    if not fields:
        return
    unit["encoding"]["tooltip"] = [
        _tip(field, [row.get(field) for row in rows]) for field in fields
    ]
    if "layer" not in fields and "cell" not in fields:
        return
    unit["mark"]["cursor"] = "pointer"
    for row in rows:
        row["url"] = f"/m/{row['cell']}" if "cell" in row else f"/layer/{row['layer'] - 1}"


def _tip(field: str, values: list[Any]) -> Spec:
    """Return one line of what a mark says."""
    tip: Spec = {"field": field, "title": field.replace("_", " "), "type": "nominal"}
    numbers = [value for value in values if value is not None]
    if field == "layer" or not all(isinstance(value, int | float) for value in numbers):
        return tip
    whole = all(float(value).is_integer() for value in numbers)
    large = max((abs(value) for value in numbers), default=0)
    return tip | {
        "type": "quantitative",
        "format": ",d" if whole else ",.1~f" if large >= 1000 else ".3~g",
    }


def _name_memories(spec: Spec, result: Result) -> None:
    """Let the points of the most predictive values know whose they are."""
    named = [row for row in result.rows if row.get("precision") is not None]
    for unit, rows in _units(spec, spec.get("datasets", {}), []):
        if unit["mark"]["type"] == "point" and len(rows) == len(named):
            for point, row in zip(rows, named, strict=True):
                point |= {"cell": row["cell"], "token": visible_token(row["token"])}


def _themed(spec: Spec, theme: str) -> Spec:
    """Return a chart in the colours of a theme; what it shows stays as it is."""
    refuse_other_themes(theme)
    if theme == "light":
        return spec
    from ffmem.reporting.style import DARK

    def exchanged(part: Any) -> Any:
        if isinstance(part, dict):
            return {
                name: inner if name in ("values", "datasets") else exchanged(inner)
                for name, inner in part.items()
            }
        if isinstance(part, list):
            return [exchanged(inner) for inner in part]
        return DARK.get(part, part) if isinstance(part, str) else part

    themed: Spec = exchanged(spec)
    return themed
