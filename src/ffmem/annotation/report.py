"""The report of a study: annotation.json, annotation.md, and Figure 2 as SVG and PDF.

    write_report(study, index, OUT) → OUT/annotation.md

Markdown is the page: a study is read beside its data, in a repository. The same sheets give the
same bytes.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from ffmem.annotation.item import Judged
from ffmem.annotation.machine import machine_judged
from ffmem.annotation.publish import patterns_of, published, refuse_other_index
from ffmem.annotation.study import AnnotationStudy
from ffmem.annotation.summary import summarise
from ffmem.cells import Cell
from ffmem.errors import StoreError
from ffmem.experiments.base import ExperimentResult, find, index_settings
from ffmem.experiments.charts import figure_svg, write_svg_and_pdf
from ffmem.experiments.examples import (
    Excerpt,
    KeyExample,
    KeyTable,
    LabelledKey,
    ShownPattern,
    excerpt,
    key_tables,
)
from ffmem.experiments.render import markdown_environment
from ffmem.files import write_text
from ffmem.indexing.store import Index
from ffmem.text import format_number, format_share

Row = dict[str, Any]

QUESTIONS = {
    "coverage": "does a trigger show a pattern?",
    "type": "shallow, both, semantic or uncovered?",
    "marks": "trigger marks, patterns matched",
    "marks_of_kind": "the same, matched within a kind",
}


def write_report(study: AnnotationStudy, index: Index, out: Path, seed: int = 0) -> Path:
    """Write the report of what was handed in so far, and return the page's path."""
    refuse_other_index(study, index)
    judged = study.judged()
    if not judged:
        raise StoreError(
            f"Nobody has handed in anything of the study {study.name} yet: there is nothing to"
            " report. `ffmem annotate status` tells how far everybody is."
        )
    items = {one.item.key: one.item for one in judged}
    summary = summarise(judged, machine_judged(index, items.values()), seed)
    made = index_settings(index, index.manifest.dtype, seed)
    study_settings = {name: study.settings[name] for name in ("asked", "drawn", "plan")}
    content = {"settings": made | {"study": study_settings}, **summary}
    table, one_key = tables(judged)
    return _written(content, table, one_key, out)


def tables(judged: Sequence[Judged]) -> tuple[list[KeyExample], KeyTable | None]:
    """Return Table 1 and Table 3 of what people saw, in all layers of the study."""
    sheets = {(Cell.parse(str(one.item.cell)), one.item.sign): one for one in published(judged)}
    keys = [
        LabelledKey(
            cell,
            sign,
            "human",
            len(one.item.texts),
            tuple(ShownPattern(p.number, p.kind, p.description, p.ranks) for p in patterns_of(one)),
        )
        for (cell, sign), one in sheets.items()
    ]

    def texts(key: LabelledKey) -> list[Excerpt]:
        shown = sheets[key.cell, key.sign].item.texts
        return [excerpt(one.prefix, one.last_token, one.next_token) for one in shown]

    return key_tables(keys, texts)


def figure_2(content: Row) -> ExperimentResult:
    """Return the rows of Figure 2, people's and machines', as a result that can be drawn."""
    rows = [row for row in content["figure2"] if row["layer"] is not None]
    return ExperimentResult("patterns", "Fig. 2", content["settings"], rows)


def _written(content: Row, table: list[KeyExample], one_key: KeyTable | None, out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, ensure_ascii=False, indent=1, allow_nan=False)
    write_text(out / "annotation.json", text + "\n")
    drawn = figure_2(content)
    if drawn.rows:
        write_svg_and_pdf("annotation", figure_svg(drawn), out)
    path = out / "annotation.md"
    rendered = (
        _filled()
        .get_template("annotation.md")
        .render(
            found=content,
            table=table,
            one_key=one_key,
            shows=find("patterns").summary(drawn),
            questions=QUESTIONS,
            line_break=Markup("<br>"),
        )
    )
    write_text(path, rendered.rstrip() + "\n")
    return path


def _with_interval(row: Row, name: str, shown: Any = format_share) -> str:
    """Return a number with its interval in brackets, if it has one."""
    told = str(shown(row[name]))
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    return told if low is None or high is None else f"{told} ({shown(low)} to {shown(high)})"


def _filled() -> Environment:
    """Return what fills the report's template."""
    made = markdown_environment("ffmem.annotation")
    made.filters |= {
        "number": format_number,
        "share": _with_interval,
        "measure": lambda row, name: _with_interval(row, name, format_number),
    }
    return made
