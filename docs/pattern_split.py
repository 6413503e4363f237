"""Measures how far the choice of test triggers changes Figure 2: docs/results/pattern-split.

    PYTHONPATH=. .venv/bin/python docs/pattern_split.py NAME INDEX

A pattern is looked for in one half of a memory's first 50 triggers and tested on the other. Detects
the patterns of an index twice, with the halves of the first edition (ranks 1–25 against 26–50; on a
copy) and with today's (odd ranks against even), and records both under NAME in results.json. The
index keeps the patterns of today's halves.
"""

import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np

import ffmem
from docs.result_pages import percent, table, write_sections
from ffmem.experiments.charts import (
    BLUE,
    VERMILION,
    chart_svg,
    panels,
    plot,
    quantity,
    series_color,
    styled,
    svg_file,
)
from ffmem.experiments.patterns import layer_row
from ffmem.files import write_text
from ffmem.indexing.store import Index
from ffmem.indexing.triggers import NONE, trigger_table
from ffmem.patterns import shallow
from ffmem.patterns.detect import DetectionResult
from ffmem.patterns.store import HELD_OUT, SEEN, TOP_TRIGGERS, Patterns
from ffmem.progress import Progress

OUT = Path(__file__).parent / "results" / "pattern-split"
SPLITS = {
    "first against last": (slice(0, TOP_TRIGGERS), slice(TOP_TRIGGERS, 2 * TOP_TRIGGERS)),
    "odd against even": (SEEN, HELD_OUT),
}
"""Where patterns are looked for, and where they are tested; today's halves last."""
OLD, NEW = SPLITS
OBVIOUS = 8
"""So many of the first 25 triggers end with the same token: a pattern that anyone would see."""
Row = dict[str, Any]


@contextmanager
def halves(seen: slice, held: slice) -> Iterator[None]:
    """Look for patterns in some ranks and test them on others."""
    before = shallow.SEEN, shallow.HELD_OUT
    try:
        shallow.SEEN, shallow.HELD_OUT = seen, held
        yield
    finally:
        shallow.SEEN, shallow.HELD_OUT = before


def count_obvious(index: Index, patterns: Patterns, layer: int) -> Row:
    """Count the lists in which one last token recurs, and those of them without a pattern."""
    with_pattern = {
        (pattern.cell.memory, pattern.sign)
        for some in patterns.layer(layer).values()
        for pattern in some
    }
    obvious = missed = 0
    for sign in (1, -1) if index.manifest.model.gated else (1,):
        for memory, last in enumerate(trigger_table(index, layer, sign).last[:, :TOP_TRIGGERS]):
            counts = np.bincount(last[last != NONE], minlength=1)
            if counts.max() >= OBVIOUS:
                obvious += 1
                missed += (memory, sign) not in with_pattern
    return {"obvious": obvious, "obvious_missed": missed}


def measure(index: Index, split: str) -> Row:
    """Detect the patterns with one choice of halves; return what Figure 2 shows of them."""
    with halves(*SPLITS[split]):
        detected: DetectionResult = ffmem.detect(index, progress=Progress())
    patterns = ffmem.patterns_of(index)
    names = ("shallow", "both", "semantic", "uncovered", "n", "keys", "with_pattern")
    layers = []
    for layer in index.layout.memory_layers:
        row = layer_row(index, patterns, layer, 0)
        obvious = count_obvious(index, patterns, layer)
        layers.append({"layer": layer} | {name: row[name] for name in names} | obvious)
    return {
        "lists": detected.lists,
        "lists_with_pattern": detected.lists_with_pattern,
        "too_short": detected.lists_too_short_to_test,
        "shuffled": detected.shuffled_control,
        "layers": layers,
    }


def sections(found: dict[str, dict[str, Row]]) -> dict[str, str]:
    """Return the tables of the page."""
    return {"lists": _lists(found), "thirds": _thirds(found)}


def _lists(found: dict[str, dict[str, Row]]) -> str:
    rows = [
        ["model", "halves", "lists with a pattern", "shuffled lists with one", "obvious, missed"]
    ]
    for name, splits in found.items():
        for split, one in splits.items():
            control = one["shuffled"]
            obvious, missed = (
                sum(row[key] for row in one["layers"]) for key in ("obvious", "obvious_missed")
            )
            share = one["lists_with_pattern"] / one["lists"]
            chance = control["lists_with_pattern"] / control["lists"]
            rows.append(
                [
                    name,
                    split,
                    f"{percent(share, 1)} of {one['lists']:,}",
                    f"{percent(chance, 2)} of {control['lists']:,}",
                    f"{missed:,} of {obvious:,}",
                ]
            )
    return table(rows)


def _mean(rows: list[Row], *names: str) -> float:
    """Return the share of triggers that has any of some labels."""
    examined = [row for row in rows if row["n"]]
    n = sum(row["n"] for row in examined)
    shown = sum(row[name] * row["n"] for row in examined for name in names)
    return shown / n if n else float("nan")


def _thirds(found: dict[str, dict[str, Row]]) -> str:
    """Return what the lower, middle and upper layers gain by today's halves, in points."""
    head = ["model", "layers", "any pattern", "gain", "shallow", "gain", "semantic", "gain"]
    rows = [head]
    for name, splits in found.items():
        n = len(splits[NEW]["layers"])
        cuts = [0, round(n / 3), round(2 * n / 3), n]
        for begin, end in itertools.pairwise(cuts):
            cells = [name, f"{begin + 1}–{end}"]
            for labels in (
                ("shallow", "both", "semantic"),
                ("shallow", "both"),
                ("both", "semantic"),
            ):
                old, new = (
                    _mean(splits[split]["layers"][begin:end], *labels) for split in (OLD, NEW)
                )
                gain = f"{100 * (new - old):+.1f}".replace("-", "−")
                cells += [percent(new, 1), gain]
            rows.append(cells)
    return table(rows)


def draw(found: dict[str, dict[str, Row]]) -> None:
    """Draw the share of triggers with a pattern by layer, with either choice of halves."""
    colors = {OLD: VERMILION, NEW: BLUE}
    charts = []
    for name, splits in found.items():
        points = [
            {"layer": row["layer"] + 1, "share": 1 - row["uncovered"], "series": split}
            for split, one in splits.items()
            for row in one["layers"]
            if row["n"]
        ]
        x = alt.X("layer:Q", title="layer", axis=alt.Axis(format="d", tickMinStep=1))
        y = quantity("share", "triggers with a pattern", domain=(0, 1), format="%")
        lines = plot(points).mark_line(point=True).encode(x=x, y=y, color=series_color(colors))
        charts.append(lines.properties(title=alt.Title(name)))
    title = "Triggers that show a pattern, by the triggers that test it"
    text = "A panel for each model, a line for each choice of halves."
    chart = styled(panels(charts) if len(charts) > 1 else charts[0])
    write_text(OUT / "coverage.svg", svg_file(chart_svg("pattern-split", title, text, chart)))


def write_page(found: dict[str, dict[str, Row]]) -> None:
    """Write the results, the tables of the page, and its chart."""
    write_text(OUT / "results.json", json.dumps(found, indent=1) + "\n")
    write_sections(OUT / "README.md", sections(found))
    draw(found)


def main() -> None:
    """Measure an index with both choices of halves, and record it."""
    name, index = sys.argv[1], ffmem.open(sys.argv[2])
    path = OUT / "results.json"
    found = json.loads(path.read_text("utf-8")) if path.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "index"
        shutil.copytree(index.folder, copy, ignore=shutil.ignore_patterns("patterns", "*.sqlite"))
        before = measure(ffmem.open(copy), OLD)
    found[name] = {OLD: before, NEW: measure(index, NEW)}
    write_page(found)


if __name__ == "__main__":
    main()
