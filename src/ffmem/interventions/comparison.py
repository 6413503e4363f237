"""The result of a comparison: as files, as text, and as a figure.

OUT/compare.json      settings, rows (one per layer), overall, changed, changed_values
OUT/memories.parquet  one row per memory, all numbers
OUT/compare.svg, compare.pdf
"""

import html
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pyarrow as pa
from numpy import ndarray

from ffmem.cells import Layout
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
from ffmem.files import write_text
from ffmem.indexing.memory import NO_VALUES, visible_token
from ffmem.indexing.tables import write_table
from ffmem.text import format_number, format_share, pluralize

LISTED = 10
"""Memories in the readable summary."""

PANEL_HEIGHT = 84
JACCARD = "Jaccard, median"
DESCRIPTION = (
    "By layer, median and quartiles over memories: rank-biased overlap of the triggers in both"
    " indexes with the median Jaccard overlap, cosine of the values of both models, change of the"
    " share of prefixes on which a memory is active."
)

Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two indexes of one architecture over one corpus, memory by memory."""

    settings: Row
    """Both indexes with their models, what they have in common, and how they were compared."""
    rows: list[Row]
    """Per layer: mean, q1, median, q3 and n of every number; below_half of the Jaccard overlaps."""
    overall: Row
    """The same over all memories."""
    changed: list[Row]
    """Memories whose triggers changed most, most changed first."""
    changed_values: list[Row]
    """Memories whose values changed most; none if the models were not read."""
    numbers: dict[str, ndarray]
    """One column per number, one row per memory; NaN where a number does not exist."""
    layout: Layout

    def to_dict(self) -> Row:
        """Return the content of compare.json."""
        return {
            "settings": self.settings,
            "rows": self.rows,
            "overall": self.overall,
            "changed": self.changed,
            "changed_values": self.changed_values,
        }

    def write(self, folder: Path) -> None:
        """Write all files; the same comparison gives the same bytes."""
        write_table(folder / "memories.parquet", self.table())
        text = json.dumps(self.to_dict(), ensure_ascii=False, indent=1, allow_nan=False)
        write_text(folder / "compare.json", text + "\n")
        write_svg_and_pdf("compare", self.to_svg(), folder)

    def table(self) -> pa.Table:
        """Return all numbers of all memories."""
        widths = self.layout.widths
        layers = np.repeat(np.arange(len(widths), dtype=np.int32), widths)
        memories = np.concatenate([np.arange(width, dtype=np.int32) for width in widths])
        columns = {
            name: pa.array(column, mask=np.isnan(column)) for name, column in self.numbers.items()
        }
        return pa.table({"layer": pa.array(layers), "memory": pa.array(memories), **columns})

    def to_svg(self) -> str:
        """Return the figure."""
        sides = [self.settings[which] for which in ("second", "first")]
        names = [f"{side['index']} ({side['model']})" for side in sides]
        heading = f"Memories of {names[0]} compared with {names[1]}"
        return chart_svg("compare", heading, DESCRIPTION, draw_chart(self.settings, self.rows))

    def __str__(self) -> str:
        lines = [*_heading(self.settings), "", *_medians(self), "", *_most_changed(self)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


# Text


def _heading(settings: Row) -> list[str]:
    corpus, memories = settings["corpus"], settings["memories"]
    layers = pluralize(settings["layers"], "layers")
    if isinstance(memories, list):
        shape = f"{layers} with {pluralize(sum(memories), 'memories')} in all"
    else:
        shape = f"{layers} × {pluralize(memories, 'memories')}"
    lines = [
        f"{shape}, over {pluralize(corpus['sentences'], 'sentences')},"
        f" {pluralize(corpus['tokens'], 'tokens')}"
    ]
    for which in ("first", "second"):
        side = settings[which]
        lines.append(
            f"{which:8}{side['index']}: {side['model']}, weights {side['model_hash'][:12]},"
            f" {side['dtype']}"
        )
    if settings["values"] == "input":
        lines.append(NO_VALUES)
    elif not settings["models"]:
        lines.append("The models were not read, so the directions of values are not compared.")
    return lines


def _medians(comparison: Comparison) -> list[str]:
    """Return the medians of every layer as a table."""
    settings = comparison.settings
    columns = {"rbo": "rbo", "jaccard": "jaccard"}
    if settings["gated"]:
        columns |= {"negative_rbo": "rbo m<0", "negative_jaccard": "jacc. m<0"}
    if settings["values"] == "static":
        columns["value_tokens"] = "tokens"
    if settings["models"]:
        columns |= {"value_cosine": "cosine", "value_norm_ratio": "norm"}
    columns |= {"active_change": "active", "max_ratio": "max"}
    titles = "".join(f"{title:>11}" for title in columns.values())
    lines = ["Medians", f"{'layer':7}{titles}{'below half':>12}"]
    rows = [(str(row["layer"]), row) for row in comparison.rows]
    for name, row in [*rows, ("all", comparison.overall)]:
        cells = ""
        for column in columns:
            median = row[column]["median"]
            is_share = column == "active_change"
            shown = format_share(median, signed=True) if is_share else format_number(median)
            cells += f"{shown:>11}"
        lines.append(f"{name:7}{cells}{format_share(row['below_half']):>12}")
    return lines


def _most_changed(comparison: Comparison) -> list[str]:
    """Return the memories that changed most, with what triggers them on both sides."""
    models = comparison.settings["models"]
    if not comparison.changed:
        return [f"No memory's triggers changed{', nor its value' if models else ''}."]
    lines = [f"Most changed memories (1 − rbo{'; ties: cosine of the values' if models else ''})"]
    for row in comparison.changed[:LISTED]:
        lines.append(
            f"{row['cell']:10} change {format_number(row['change'])}"
            f"  cosine {format_number(row['value_cosine'], 4)}"
            f"  active {format_share(row['active_change'], signed=True)}"
            f"  max × {format_number(row['max_ratio'])}"
        )
        lines += [
            _format_side(which, row[which], sign)
            for sign in ("", "negative_")
            for which in ("first", "second")
            if f"{sign}trigger" in row[which]
        ]
    if values := comparison.changed_values[:LISTED]:
        lines += ["", "Most changed values (‖v₂ − v₁‖ over the longer)"]
        lines += [
            f"{row['cell']:10} {format_number(row['value_change'])}"
            f"  cosine {format_number(row['value_cosine'], 4)}"
            f"  norm × {format_number(row['value_norm_ratio'])}"
            for row in values
        ]
    return lines


def _format_side(which: str, side: Row, sign: str) -> str:
    trigger, shown = side[f"{sign}trigger"], "no trigger"
    if trigger is not None:
        number = f"{format_number(trigger['coefficient']):>9}"
        shown = f"{number}  {trigger['prefix']} → {visible_token(trigger['next_token'])}"
    tokens = "  ".join(map(visible_token, side[f"{sign}tokens"][:4]))
    return f"  {which:7}{shown}{f'   ⇒ {tokens}' if tokens else ''}"


# Figure


def draw_chart(settings: Row, rows: list[Row]) -> Chart:
    """Return the figure: per layer, overlap of triggers, cosine of values, change of activity.

    Boxes reach from the lower to the upper quartile of a layer's memories, with the median.
    """
    n_layers, gated = settings["layers"], settings["gated"]
    drawn: list[tuple[str, Chart]] = []
    for sign, which in [("", ", m > 0"), ("negative_", ", m < 0")] if gated else [("", "")]:
        if any(row[f"{sign}rbo"]["n"] for row in rows):
            chart = _trigger_panel(rows, sign, n_layers)
            drawn.append((f"rank-biased overlap of triggers{which}", chart))
    if any(row["value_cosine"]["n"] for row in rows):
        spread = _quartiles(rows, "value_cosine")
        lowest = min(row["q1"] for row in spread)
        # Small changes are visible, and large ones fit.
        floor = 0.99 if lowest >= 0.99 else min(0.9, math.floor(10 * lowest) / 10)
        y = quantity("q1", "cosine", (floor, 1), tickCount=4)
        drawn.append(("cosine of the two values", boxes(spread, n_layers, y, None)))
    what = "share of prefixes with open gate" if gated else "share of prefixes that activate"
    spread = _quartiles(rows, "active_change", 100)
    drawn.append(
        (
            f"change of the {what}",
            boxes(spread, n_layers, quantity("q1", "points of %", tickCount=4)),
        )
    )
    charts = [one.properties(height=PANEL_HEIGHT, title=title) for title, one in drawn]
    return styled(panels(charts) if charts else empty_plot())


def _trigger_panel(rows: list[Row], sign: str, n_layers: int) -> Chart:
    y = quantity("q1", "overlap", (0, 1), values=[0, 0.5, 1])
    box = boxes(_quartiles(rows, f"{sign}rbo"), n_layers, y, None)
    medians = [
        {"layer": row["layer"] + 1, "jaccard": row[f"{sign}jaccard"]["median"], "series": JACCARD}
        for row in rows
    ]
    points = plot(known(medians, "jaccard")).mark_point(size=22)
    marks = points.encode(
        x=layer_axis(n_layers, None),
        y=same_axis(y, "jaccard"),
        color=series_color({JACCARD: VERMILION}),
    )
    return alt.LayerChart(layer=[box, marks])


def _quartiles(rows: list[Row], name: str, times: int = 1) -> list[Row]:
    """Return a number's quartiles per layer, counted from 1."""
    ends = ("q1", "median", "q3")
    found = [
        {"layer": row["layer"] + 1}
        | {end: None if row[name][end] is None else times * row[name][end] for end in ends}
        for row in rows
    ]
    return known(found, *ends)
