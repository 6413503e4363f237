"""What a comparison of two indexes found: numbers per memory, per layer, and what changed most.

OUT/compare.json      settings, rows (one per layer), overall, changed, changed_values
OUT/memories.parquet  one row per memory, all numbers
OUT/compare.svg, compare.pdf
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy import ndarray

from ffmem.cells import Layout
from ffmem.files import write_text
from ffmem.indexing.memory import NO_VALUES, visible_token
from ffmem.indexing.tables import write_table
from ffmem.stats import share, spread
from ffmem.text import pluralize

HALF = 0.5
LISTED = 10
"""Memories in the readable summary."""
_TOKENS = 4
_MISSING = "–"

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
    """Memories whose values changed most; none where the models were not read."""
    numbers: dict[str, ndarray]
    """One column per number, one row per memory; NaN where a number does not exist."""
    layout: Layout
    """How many memories each layer has."""

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
        """Commit compare.json and memories.parquet; the same comparison gives the same bytes."""
        write_table(folder / "memories.parquet", self.table())
        text = json.dumps(self.to_dict(), ensure_ascii=False, indent=1, allow_nan=False)
        write_text(folder / "compare.json", text + "\n")

    def table(self) -> pa.Table:
        """Return all numbers of all memories."""
        widths = self.layout.widths
        layers = np.repeat(np.arange(len(widths), dtype=np.int32), widths)
        memories = np.concatenate([np.arange(width, dtype=np.int32) for width in widths])
        columns = {
            name: pa.array(column, mask=np.isnan(column)) for name, column in self.numbers.items()
        }
        return pa.table({"layer": pa.array(layers), "memory": pa.array(memories), **columns})

    def __str__(self) -> str:
        return "\n".join([*_heading(self.settings), "", *_layers(self), "", *_changed(self)])


def summed_up(numbers: dict[str, ndarray]) -> Row:
    """Return how the numbers of some memories spread, those that do not exist left out."""
    known = {name: column[~np.isnan(column)] for name, column in numbers.items()}
    below = {
        name.replace("jaccard", "below_half"): share(int((column < HALF).sum()), len(column))
        for name, column in known.items()
        if name.endswith("jaccard")
    }
    return {name: spread(column) for name, column in known.items()} | below


def _heading(settings: Row) -> list[str]:
    corpus = settings["corpus"]
    lines = [
        f"{_shape(settings)}, over {pluralize(corpus['sentences'], 'sentences')},"
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
        lines.append("The models were not read: nothing is said about their values' directions.")
    return lines


def _shape(settings: Row) -> str:
    layers, memories = pluralize(settings["layers"], "layers"), settings["memories"]
    if isinstance(memories, list):
        return f"{layers} with {pluralize(sum(memories), 'memories')} in all"
    return f"{layers} × {pluralize(memories, 'memories')}"


def _shown_columns(comparison: Comparison) -> dict[str, tuple[str, str]]:
    """Return the columns of the readable table: title, and how a median is written."""
    gated = comparison.settings["gated"]
    columns = {"rbo": ("rbo", ".3f"), "jaccard": ("jaccard", ".3f")}
    if gated:
        columns |= {"negative_rbo": ("rbo m<0", ".3f"), "negative_jaccard": ("jacc. m<0", ".3f")}
    if comparison.settings["values"] == "static":
        columns["value_tokens"] = ("tokens", ".3f")
    if comparison.settings["models"]:
        columns |= {"value_cosine": ("cosine", ".4f"), "value_norm_ratio": ("norm", ".3f")}
    return columns | {"active_change": ("active", "+.2%"), "max_ratio": ("max", ".3f")}


def _layers(comparison: Comparison) -> list[str]:
    """Return the medians of every layer as a table."""
    columns = _shown_columns(comparison)
    titles = "".join(f"{title:>11}" for title, _ in columns.values())
    lines = ["Medians", f"{'layer':7}{titles}{'below half':>12}"]
    for name, row in [*((str(row["layer"]), row) for row in comparison.rows), ("all", None)]:
        shown = comparison.overall if row is None else row
        cells = "".join(
            f"{_number(shown[column]['median'], form):>11}" for column, (_, form) in columns.items()
        )
        lines.append(f"{name:7}{cells}{_number(shown['below_half'], '.1%'):>12}")
    return lines


def _changed(comparison: Comparison) -> list[str]:
    """Return the memories that changed most, with what triggers them on both sides."""
    if not comparison.changed:
        nor = ", nor its value" if comparison.settings["models"] else ""
        return [f"No memory's triggers changed{nor}."]
    ties = "; ties: cosine of the values" if comparison.settings["models"] else ""
    lines = [f"Most changed memories (1 − rbo{ties})"]
    for row in comparison.changed[:LISTED]:
        lines += _both_sides(row)
    if values := comparison.changed_values[:LISTED]:
        lines += ["", "Most changed values (‖v₂ − v₁‖ over the longer)"]
        lines += [
            f"{row['cell']:10} {row['value_change']:.3f}"
            f"  cosine {_number(row['value_cosine'], '.4f')}"
            f"  norm × {_number(row['value_norm_ratio'], '.3f')}"
            for row in values
        ]
    return lines


def _both_sides(row: Row) -> list[str]:
    lines = [
        f"{row['cell']:10} change {_number(row['change'], '.3f')}"
        f"  cosine {_number(row['value_cosine'], '.4f')}"
        f"  active {_number(row['active_change'], '+.2%')}"
        f"  max × {_number(row['max_ratio'], '.3f')}"
    ]
    for sign in ("", "negative_"):
        for which in ("first", "second"):
            side = row[which]
            if f"{sign}trigger" in side:
                tokens = "  ".join(map(visible_token, side[f"{sign}tokens"][:_TOKENS]))
                promoted = f"   ⇒ {tokens}" if tokens else ""
                lines.append(f"  {which:7}{_trigger(side[f'{sign}trigger'])}{promoted}")
    return lines


def _trigger(trigger: Row | None) -> str:
    if trigger is None:
        return "no trigger"
    following = visible_token(trigger["next_token"])
    return f"{_number(trigger['coefficient'], '9.3f')}  {trigger['prefix']} → {following}"


def _number(value: float | None, form: str) -> str:
    return _MISSING if value is None else f"{value:{form}}".replace("-", "−")
