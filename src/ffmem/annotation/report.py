"""What a study found: its numbers, its report, and its patterns published into the index.

    summarize(judgments)            → JSON: Figure 2 of people, controls, agreement, composition
    write_report(study, index, OUT) → OUT/annotation.json, annotation.md, Figure 2 as SVG and PDF
    publish(study, index)           → DIR/patterns/human, which pages, search and Figure 2 show

In numbers an item counts by its adjudicated sheet, or else by the mean of its annotators. Published
is one sheet per memory: the adjudicated one, or else that of the annotator who agrees best with the
others. So a person wrote every published pattern; no program combines them.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ffmem.annotation.agreement import (
    Row,
    agreement,
    agreements,
    count_keys,
    counting_sheets,
    likeness,
    machine_judgments,
    pairs,
    pairs_between,
    related_confusion,
)
from ffmem.annotation.study import (
    ADJUDICATOR,
    ANNOTATOR,
    COMPOSITION,
    CONTROL,
    TRIGGERS,
    AnnotationStudy,
    Judgment,
)
from ffmem.cells import Cell
from ffmem.errors import StoreError
from ffmem.experiments.base import ExperimentResult, find, index_settings
from ffmem.experiments.charts import figure_svg, write_svg_and_pdf
from ffmem.experiments.examples import (
    Excerpt,
    KeyExample,
    KeyTable,
    LabeledKey,
    ShownPattern,
    excerpt,
    key_tables,
)
from ffmem.experiments.last_layer_composition import PAPER_VALUES
from ffmem.experiments.render import markdown_environment
from ffmem.files import write_text
from ffmem.indexing.store import Index
from ffmem.patterns.labels import difference, shares
from ffmem.patterns.store import ExaminedList, Pattern, Patterns, PatternWriter, fingerprint
from ffmem.stats import wilson
from ffmem.text import format_number, format_share, pluralize

PROTOCOL = (
    "The paper's protocol uses human annotators. Automatic and explained labels do not follow it;"
    " they are"
    " shown for comparison."
)

RULE = (
    "For each memory, the adjudicated sheet; if there is none, the sheet of the annotator who"
    " agrees best with the others."
)

QUESTIONS = {
    "coverage": "does a trigger show a pattern?",
    "type": "shallow, both, semantic or uncovered?",
    "marks": "trigger marks, patterns matched",
}


def summarize(
    judgments: Sequence[Judgment], machine: Sequence[Judgment] = (), seed: int = 0
) -> Row:
    """Return all numbers of a study: layers from 0, shares 0–1, None where there is no number."""
    people = [one for one in judgments if one.role == ANNOTATOR]
    adjudicated = [one for one in judgments if one.role == ADJUDICATOR]
    memories, controls = _of_kind(judgments, TRIGGERS), _of_kind(judgments, CONTROL)
    by_source = {
        source: [one for one in machine if one.annotator == source]
        for source in dict.fromkeys(one.annotator for one in machine)
    }
    found = {"people": agreements(pairs(_of_kind(people, TRIGGERS)), seed)}
    for whom, theirs in (("people", people), ("adjudicated", adjudicated)):
        real = _of_kind(theirs, TRIGGERS)
        for source, own in by_source.items() if real else ():
            found[f"{source}_{whom}"] = agreements(pairs_between(own, real), seed)
    of_memories, of_controls = count_keys(memories), count_keys(controls)
    false_patterns = shares(of_controls, seed)
    return {
        "counts": {
            "annotators": len({one.annotator for one in people}),
            "adjudicators": len({one.annotator for one in adjudicated}),
            "sheets": len(judgments),
            "adjudicated": len({one.item.key for one in adjudicated}),
            "keys": len({one.item.key for one in memories}),
            "controls": len({one.item.key for one in controls}),
            "compositions": len({one.item.key for one in _of_kind(judgments, COMPOSITION)}),
        },
        "voices": _whose_sheets(memories),
        "figure2": [
            row
            for source, own in {"human": memories, **by_source}.items()
            for row in _figure_2(own, source, seed)
        ],
        "control": {
            "real": shares(of_memories, seed),
            "control": false_patterns,
            "difference": difference(of_memories, of_controls, seed),
            "false_pattern_rate": false_patterns["with_pattern"],
        },
        "annotators": [
            _annotator(people, name) for name in sorted({one.annotator for one in people})
        ],
        "agreement": found,
        "composition": _composition(_of_kind(judgments, COMPOSITION), seed),
        "protocol": PROTOCOL,
        "seed": seed,
    }


def write_report(study: AnnotationStudy, index: Index, out: Path, seed: int = 0) -> Path:
    """Write the report of what was handed in so far and return its path."""
    judgments = _handed_in(study, index, "report")
    items = {one.item.key: one.item for one in judgments}
    machine = machine_judgments(index, items.values())
    of_study = {name: study.settings[name] for name in ("options", "counts", "plan")}
    made = index_settings(index, index.manifest.dtype, seed) | {"study": of_study}
    content = {"settings": made, **summarize(judgments, machine, seed)}
    taken = study.seconds_per_item()
    for row in content["annotators"]:
        row["seconds_per_item"] = taken.get(row["name"])
    rows = [row for row in content["figure2"] if row["layer"] is not None]
    figure_2 = ExperimentResult("patterns", "Fig. 2", made, rows)
    table, one_key = tables(judgments)

    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, ensure_ascii=False, indent=1, allow_nan=False)
    write_text(out / "annotation.json", text + "\n")
    if rows:
        write_svg_and_pdf("annotation", figure_svg(figure_2), out)
    filled = markdown_environment("ffmem.annotation")
    filled.filters |= {
        "number": format_number,
        "pluralize": pluralize,
        "percent": format_share,
        "share": _with_interval,
        "measure": lambda row, name: _with_interval(row, name, format_number),
    }
    page = filled.get_template("annotation.md").render(
        found=content,
        table=table,
        one_key=one_key,
        shows=find("patterns").summary(figure_2),
        questions=QUESTIONS,
        line_break=Markup("<br>"),
    )
    write_text(out / "annotation.md", page.rstrip() + "\n")
    return out / "annotation.md"


def publish(study: AnnotationStudy, index: Index) -> Patterns:
    """Write people's patterns into the index, with their controls and agreement."""
    judgments = _handed_in(study, index, "publish")
    sheets = published_sheets(judgments)
    if not sheets:
        raise _nothing(study, "publish")
    writing = PatternWriter(index, "human")
    for layer in range(index.n_layers):
        own = [one for one in sheets if _cell(one).layer == layer]
        examined = [ExaminedList(_cell(one), one.item.sign, len(one.item.texts)) for one in own]
        writing.layer(layer, examined, [pattern for one in own for pattern in patterns_of(one)])
    summary, options = summarize(judgments), study.settings["options"]
    names = ("per_layer", "top", "controls", "overlap", "seed")  # not people's names
    writing.commit(
        {
            "protocol": "people",
            "rule": RULE,
            "study": {name: options.get(name) for name in names},
            "counts": summary["counts"],
            "adjudicated": sum(one.role == ADJUDICATOR for one in sheets),
            "control": summary["control"],
            "agreement": summary["agreement"]["people"],
        }
    )
    return Patterns(index, "human")


def published_sheets(judgments: Iterable[Judgment]) -> list[Judgment]:
    """Return the one sheet of each memory that is published."""
    found = counting_sheets(one for one in judgments if one.item.kind == TRIGGERS)
    return [
        max(sheets, key=lambda one: sum(likeness(one.sheet, other.sheet) for other in sheets))
        for sheets in found.values()
    ]


def patterns_of(judgment: Judgment) -> list[Pattern]:
    """Return a sheet's patterns as an index keeps them, the most marked first."""
    ordered = sorted(judgment.sheet.patterns, key=lambda one: -len(one.marks))
    return [
        Pattern(
            cell=_cell(judgment),
            sign=judgment.item.sign,
            number=number,
            kind=str(one.kind),
            description=one.description.strip(),
            rule="person",
            what="",
            ranks=tuple(sorted(one.marks)),
        )
        for number, one in enumerate(ordered, start=1)
    ]


def tables(judgments: Iterable[Judgment]) -> tuple[list[KeyExample], KeyTable | None]:
    """Return Table 1 and Table 3 of what people saw, over all layers of the study."""
    sheets = {(_cell(one), one.item.sign): one for one in published_sheets(judgments)}
    keys = []
    for (cell, sign), one in sheets.items():
        seen = tuple(
            ShownPattern(p.number, p.kind, p.description, p.ranks) for p in patterns_of(one)
        )
        keys.append(LabeledKey(cell, sign, "human", len(one.item.texts), seen))

    def texts(key: LabeledKey) -> list[Excerpt]:
        shown = sheets[key.cell, key.sign].item.texts
        return [excerpt(one.prefix, one.last_token, one.next_token) for one in shown]

    return key_tables(keys, texts)


def _handed_in(study: AnnotationStudy, index: Index, what: str) -> list[Judgment]:
    """Return what was handed in; raise if it is nothing, or of triggers of another index."""
    theirs, ours = study.settings["index"]["fingerprint"], fingerprint(index)
    if theirs != ours:
        raise StoreError(
            f"The study {study.path} was drawn from a different version of the index"
            f" ({theirs[:12]}) than"
            f" {index.folder} ({ours[:12]}), so its ranks refer to other triggers. Use the index"
            " that it was drawn from."
        )
    judgments = study.handed_in()
    if not judgments:
        raise _nothing(study, what)
    return judgments


def _nothing(study: AnnotationStudy, what: str) -> StoreError:
    return StoreError(
        f"No annotator has submitted a sheet of the study {study.path} yet, so there is nothing to"
        f" {what}."
        " `ffmem annotate status` shows everyone's progress."
    )


def _figure_2(judgments: Sequence[Judgment], source: str, seed: int) -> list[Row]:
    """Return a row per layer, and one of all layers (layer None)."""
    layers: list[int | None] = [*sorted({_cell(one).layer for one in judgments}), None]
    return [
        {"layer": layer, "source": source}
        | shares(count_keys(one for one in judgments if layer in (None, _cell(one).layer)), seed)
        for layer in layers
    ]


def _composition(judgments: Sequence[Judgment], seed: int) -> Row:
    """Return how many compositions go to a related word, with the paper's numbers."""
    cases = [
        sum(bool(one.sheet.related) for one in sheets) / len(sheets)
        for sheets in counting_sheets(judgments).values()
    ]
    related, n = sum(cases), len(cases)
    low, high = wilson(related, n)
    people = [one for one in judgments if one.role == ANNOTATOR]
    return {
        "related": related / n if n else None,
        "related_low": low,
        "related_high": high,
        "distant": 1 - related / n if n else None,
        "n": n,
        "voices": _whose_sheets(judgments),
        "agreement": agreement(pairs(people), related_confusion, seed),
        "quoted": [value._asdict() for value in PAPER_VALUES],
    }


def _annotator(people: Sequence[Judgment], name: str) -> Row:
    """Return what one person handed in, and how often that person saw a pattern in a control."""
    own = [one for one in people if one.annotator == name]
    real, control = (shares(count_keys(_of_kind(own, kind))) for kind in (TRIGGERS, CONTROL))
    return {
        "name": name,
        "keys": real["keys"],
        "covered": real["covered"],
        "patterns_per_key": real["patterns_per_key"],
        "controls": control["keys"],
        "false_pattern_rate": control["with_pattern"],
        "compositions": len(_of_kind(own, COMPOSITION)),
    }


def _whose_sheets(judgments: Sequence[Judgment]) -> str:
    """Return in words whose sheets the numbers are from."""
    found = counting_sheets(judgments).values()
    if not found:
        return "Nothing was handed in."
    adjudicated = sum(sheets[0].role == ADJUDICATOR for sheets in found)
    return (
        f"Counted by the adjudicated sheet: {adjudicated} of {pluralize(len(found), 'items')}; by"
        f" the mean of the annotators: {len(found) - adjudicated}."
    )


def _with_interval(row: Row, name: str, shown: Any = format_share) -> str:
    """Return a number with its interval in brackets, if it has one."""
    text, low, high = shown(row[name]), row.get(f"{name}_low"), row.get(f"{name}_high")
    return str(text) if low is None or high is None else f"{text} ({shown(low)} to {shown(high)})"


def _of_kind(judgments: Sequence[Judgment], kind: str) -> list[Judgment]:
    return [one for one in judgments if one.item.kind == kind]


def _cell(judgment: Judgment) -> Cell:
    return Cell.parse(str(judgment.item.cell))
