"""Figure 2 (§3.2): what share of each layer's triggers shows shallow and semantic patterns?

    share of a label = a layer's triggers with it / a layer's triggers

One row per layer and source of the patterns that the index keeps: people (human), a language model
(explained), the detector (automatic). Only people's labels follow the paper's protocol. A memory
stands with its main list of triggers. Labels and intervals: `patterns/labels.py`. No model is
needed.
"""

from collections.abc import Sequence

import altair as alt

from ffmem.experiments import charts
from ffmem.experiments.base import (
    Evidence,
    Experiment,
    ExperimentResult,
    Panel,
    PaperMark,
    PaperValue,
    claim,
)
from ffmem.experiments.context import ExperimentContext
from ffmem.experiments.rows import NOTHING, Row, halves, rows_with, trend, weighted_mean
from ffmem.indexing.store import Index
from ffmem.patterns.labels import LABELS, KeyCounts, labels, shares
from ffmem.patterns.store import (
    SOURCES,
    Patterns,
    main_sign,
    require_patterns,
)
from ffmem.text import format_number, format_share

PROTOCOL = (
    "human: the paper's protocol. explained (a language model) and automatic (the detector) are"
    " not: no person looked at the triggers."
)

KEYS = PaperValue(
    "keys analyzed by people",
    "160 (10 per layer), top 25 prefixes, a pattern occurs in 3 or more, one annotator",
    "Sec. 3.1",
)
PER_KEY = PaperValue("patterns per key", "3.6", "Sec. 3.2")
COVERED = PaperValue("prefixes covered by a pattern", "65–80 %", "Fig. 2")
DEPTHS = PaperValue("layers of shallow and of semantic patterns", "1–9 and 10–16", "Sec. 3.2")


def measure(context: ExperimentContext) -> tuple[list[Row], Row]:
    """Measure the shares of labels by layer and source."""
    index, sources = context.index, require_patterns(context.index)
    rows = [
        {"layer": layer, "source": found.source}
        | layer_row(index, found, layer, context.config.seed)
        for found in sources
        for layer in index.layout.memory_layers
    ]
    also = {"sources": {found.source: found.settings for found in sources}, "protocol": PROTOCOL}
    return rows, also


def layer_row(index: Index, found: Patterns, layer: int, seed: int) -> Row:
    """Return what one source found in a layer; numbers are None without a list."""
    main = main_sign(index, layer)
    keys = []
    for one in found.lists(layer):
        if one.n and one.sign == main[one.cell.memory]:
            own = [pattern for pattern in found.of(one.cell) if pattern.sign == one.sign]
            seen = labels(one.n, [(pattern.kind, pattern.ranks) for pattern in own])
            keys.append([(seen, len(own))])
    row = shares(KeyCounts.of(keys), seed)
    names = (*LABELS, "patterns_per_key", "n", "keys", "with_pattern", "covered")
    return {
        **{name: row[name] for name in names},
        "low": row["covered_low"],
        "high": row["covered_high"],
        "patterns_min": row["patterns_min"],
        "patterns_max": row["patterns_max"],
    }


def sources_of(result: ExperimentResult) -> list[str]:
    """Return who labeled the triggers: people first."""
    named = {str(row["source"]) for row in result.rows}
    return sorted(named, key=lambda source: (SOURCES.index(source), source))


def chart(result: ExperimentResult) -> charts.Chart:
    """Draw shallow and semantic triggers by layer, one panel per source of labels."""
    parts = {
        "shallow": ("shallow", charts.SKY),
        "both": ("shallow + semantic", charts.BLUE),
        "semantic": ("semantic", charts.ORANGE),
        "uncovered": ("not covered", charts.GRAY),
    }
    panels: list[charts.Chart] = []
    for source in sources_of(result):
        rows = charts.figure_rows(result.rows_with(source=source), list(parts))
        bars = charts.stacked_bars(rows, result.n_layers, parts, "% trigger examples")
        panels.append(bars.properties(title=alt.Title(f"source: {source}")))
    return panels[0] if len(panels) == 1 else charts.panels(panels)


def summary(result: ExperimentResult) -> str:
    """Say where shallow and semantic patterns prevail, source by source."""
    parts = [
        _source_summary(source, rows)
        for source in sources_of(result)
        if (rows := result.rows_with("shallow", "semantic", "uncovered", source=source))
    ]
    return " ".join(parts) or NOTHING


def _source_summary(source: str, rows: list[Row]) -> str:
    covered = 1 - (weighted_mean(rows, "uncovered", "n") or 0.0)
    per_key = weighted_mean(rows, "patterns_per_key", "keys")
    having = weighted_mean(rows, "with_pattern", "keys")
    n_keys = format_number(sum(row["keys"] for row in rows_with(rows, "keys")))
    semantic = [row["layer"] for row in rows if row["semantic"] > row["shallow"]]
    first = f", first in layer {min(semantic) + 1}" if semantic else ""
    shown = (
        f"Source {source}: {format_share(covered)} of the triggers show a pattern,"
        f" {format_number(per_key)} patterns per memory, and {format_share(having)} of {n_keys}"
        f" memories have one; semantic triggers outnumber shallow ones in {len(semantic)} of"
        f" {len(rows)} layers{first}"
    )
    shallow_trend, semantic_trend = (
        trend([row[name] for row in rows]) for name in ("shallow", "semantic")
    )
    if shallow_trend is not None and semantic_trend is not None:
        shown += (
            f". With depth the shallow share correlates at {format_number(shallow_trend)}, the"
            f" semantic share at {format_number(semantic_trend)} (Spearman)"
        )
    return f"{shown}."


# Claims: judged on people's labels only; those of programs are shown.


def _labeled(result: ExperimentResult) -> list[Row]:
    """Return the rows of one source of labels: people's where they looked."""
    sources = [one for one in sources_of(result) if result.rows_with("shallow", source=one)]
    return result.rows_with(source=sources[0]) if sources else []


def _evidence(shown: str, rows: Sequence[Row], holds: bool, partly: bool) -> Evidence:
    source = rows[0]["source"]
    why = None if source == "human" else "the paper's labels are human, these are automatic"
    n = sum(int(row.get("keys") or 0) for row in rows)
    return Evidence(f"{shown} (source: {source})", n, "memories", holds, partly, why)


@claim(
    "Lower layers capture shallow patterns, upper layers semantic ones",
    "semantic patterns outnumber shallow ones in at most 20 % of the lower layers and at least 80"
    " % of the upper (the paper's 10–16); in part if in a larger share of the upper than of the"
    " lower (human labels only)",
    DEPTHS,
    over_depth=True,
)
def _halves(result: ExperimentResult) -> Evidence | None:
    rows = [
        row | {"semantic_more": float(row["semantic"] > row["shallow"])}
        for row in rows_with(_labeled(result), "shallow", "semantic")
    ]
    parts = halves(rows, "semantic_more", result.n_layers, 10)
    if parts is None:
        return None
    shown = (
        f"semantic patterns dominate in {format_share(parts.below)} of {parts.lower} and"
        f" {format_share(parts.above)} of {parts.upper}"
    )
    # With patterns of only one kind, half of the rule would hold everywhere.
    holds = parts.below <= 0.2 and parts.above >= 0.8
    return _evidence(shown, rows, holds, parts.above > parts.below)


@claim(
    "The share of semantic triggers grows with depth",
    "Spearman's correlation of layer and semantic share is 0.5 or higher; in part if positive"
    " (human labels only)",
    over_depth=True,
)
def _semantic_trend(result: ExperimentResult) -> Evidence | None:
    rows = rows_with(_labeled(result), "semantic")
    found = Evidence.of_trend(rows, "semantic", 1, "memories", form=format_share)
    return found and _evidence(found.shown, rows, found.holds, found.partly)


@claim(
    "Every key has a pattern that people see",
    "all memories have one; in part if nine in ten do (human labels only)",
)
def _every_key(result: ExperimentResult) -> Evidence | None:
    rows = _labeled(result)
    having = weighted_mean(rows, "with_pattern", "keys")
    if having is None:
        return None
    n = format_number(sum(row["keys"] for row in rows_with(rows, "keys")))
    return _evidence(f"{format_share(having)} of {n} memories", rows, having == 1, having >= 0.9)


@claim(
    "A key has several patterns",
    "the mean is within 1 of the paper's; in part if above 1 (human labels only)",
    PER_KEY,
)
def _several(result: ExperimentResult) -> Evidence | None:
    rows = _labeled(result)
    per_key = weighted_mean(rows, "patterns_per_key", "keys")
    if per_key is None:
        return None
    return _evidence(format_number(per_key), rows, 2.6 <= per_key <= 4.6, per_key > 1)


@claim(
    "Most of a key's triggers show a pattern",
    "the share over all layers is within the paper's range; in part if above 50 % (human labels"
    " only)",
    COVERED,
)
def _covered(result: ExperimentResult) -> Evidence | None:
    rows = _labeled(result)
    uncovered = weighted_mean(rows, "uncovered", "n")
    if uncovered is None:
        return None
    covered, each = 1 - uncovered, [1 - row["uncovered"] for row in rows_with(rows, "uncovered")]
    shown = (
        f"{format_share(covered)}, by layer {format_share(min(each))} to {format_share(max(each))}"
    )
    return _evidence(shown, rows, 0.65 <= covered <= 0.8, covered >= 0.5)


EXPERIMENT = Experiment(
    name="patterns",
    paper="Fig. 2, Table 1",
    title="Patterns in triggers",
    description="Share of a layer's trigger examples (the first 25 of a memory) that show a shallow"
    " pattern (such as a shared last word), a semantic one (a shared topic), both, or none."
    " Source human follows the paper's protocol. Sources automatic (the detector) and explained"
    " (a language model) do not.",
    finding="The paper's annotators saw mostly shallow patterns in the lower layers and more"
    " semantic ones in the upper; every key had at least one.",
    measure=measure,
    chart=chart,
    summary=summary,
    needs_model=False,
    paper_values=(KEYS, PER_KEY, COVERED, DEPTHS),
    claims=(_halves, _semantic_trend, _every_key, _several, _covered),
    panels=(
        Panel(
            title="triggers that show a pattern",
            value="covered",
            rows=_labeled,
            interval=("low", "high"),
            paper=(PaperMark(COVERED, 0.65, 0.80),),
        ),
        Panel(title="triggers with a shallow pattern alone", value="shallow", rows=_labeled),
        Panel(title="triggers with a semantic pattern alone", value="semantic", rows=_labeled),
        Panel(title="triggers with both", value="both", rows=_labeled),
    ),
)
