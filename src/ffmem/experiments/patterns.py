"""Figure 2 (§3.2): what share of each layer's triggers shows shallow and semantic patterns?

    share of a label = a layer's triggers with it / a layer's triggers

One row per layer and source of the patterns that the index keeps: people (human), a language model
(explained), the detector (automatic). Only people's labels follow the paper's protocol. A memory
stands with its main list of triggers. Intervals draw memories anew, with replacement: the triggers
of one memory are no independent draws. No model is needed.
"""

from typing import TYPE_CHECKING

import altair as alt
import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ffmem.errors import StoreError
from ffmem.experiments.base import (
    ClaimCheck,
    Evidence,
    Experiment,
    ExperimentResult,
    Measurement,
    PaperValue,
    Row,
)
from ffmem.experiments.charts import (
    BLUE,
    GREY,
    ORANGE,
    SKY,
    Chart,
    empty_plot,
    figure_rows,
    panels,
    stacked_bars,
)
from ffmem.experiments.rows import (
    NOTHING,
    count_layers,
    format_halves,
    known,
    means_below_and_above,
    trend,
    weighted_mean,
)
from ffmem.indexing.store import Index
from ffmem.patterns.store import (
    LABELS,
    SOURCES,
    Patterns,
    is_stale,
    labels,
    main_sign,
    open_patterns,
)
from ffmem.text import format_number, format_share

if TYPE_CHECKING:
    from ffmem.experiments.context import ExperimentContext

DRAWS = 1000
"""Of the bootstrap."""

PROTOCOL = (
    "human: the paper's protocol. explained (a language model) and automatic (the detector) are"
    " not: nobody looked at the triggers."
)

_SPREAD = ("covered", "low", "high", "patterns_min", "patterns_max")

PAPER_VALUES = (
    PaperValue(
        "keys analysed by people",
        "160 (10 per layer), top 25 prefixes, a pattern occurs in 3 or more, one annotator",
        "Sec. 3.1",
    ),
    PaperValue("patterns per key", "3.6", "Sec. 3.2"),
    PaperValue("prefixes covered by a pattern", "65–80 %", "Fig. 2"),
    PaperValue("layers of shallow and of semantic patterns", "1–9 and 10–16", "Sec. 3.2"),
)


class NoPatterns(StoreError):
    """Figure 2 of an index in which nobody has looked for patterns."""

    def __init__(self, index: Index) -> None:
        stale = [source for source in SOURCES if is_stale(index, source)]
        found = (
            f"those there ({', '.join(stale)}) are of another state of it"
            if stale
            else "it has none"
        )
        super().__init__(
            f"The experiment `patterns` reads the patterns of an index, and {found}."
            f" Find them with `ffmem patterns detect {index.folder}`."
        )


def has_patterns(index: Index) -> bool:
    """Return whether there is something to measure."""
    return bool(open_patterns(index))


def measure(context: "ExperimentContext") -> Measurement:
    """Measure the shares of labels by layer and source."""
    index, sources = context.index, open_patterns(context.index)
    if not sources:
        raise NoPatterns(index)
    rows = [
        {"layer": layer, "source": found.source, **layer_row(index, found, layer, context.seed)}
        for found in sources
        for layer in index.layout.memory_layers
    ]
    also = {"sources": {found.source: found.settings for found in sources}, "protocol": PROTOCOL}
    return Measurement(rows, also)


def layer_row(index: Index, found: Patterns, layer: int, seed: int) -> Row:
    """Return what one source saw in a layer; without a list, without numbers."""
    main = main_sign(index, layer)
    sums = []  # of each memory: triggers by label, patterns, whether there is one, triggers
    for one in found.lists(layer):
        if one.n and one.sign == main[one.cell.memory]:
            own = [pattern for pattern in found.of(one.cell) if pattern.sign == one.sign]
            seen = labels(one.n, [(pattern.kind, pattern.ranks) for pattern in own])
            counts = [seen.count(label) for label in LABELS]
            sums.append([*counts, len(own), bool(own), one.n])
    table = np.array(sums, np.float64).reshape(len(sums), len(LABELS) + 3)
    n, low, high = table[:, -1].sum(), *bootstrap_interval(table, seed)
    if not n:
        empty = (*LABELS, "patterns_per_key", "n", "keys", "with_pattern", *_SPREAD)
        return dict.fromkeys(empty) | {"n": 0, "keys": 0}
    shares = dict(zip(LABELS, (table[:, : len(LABELS)].sum(axis=0) / n).tolist(), strict=True))
    patterns, found_any = table[:, -3], table[:, -2]
    return {
        **shares,
        "patterns_per_key": float(patterns.mean()),
        "n": int(n),
        "keys": len(table),
        "with_pattern": float(found_any.mean()),
        "covered": 1 - shares["uncovered"],
        "low": low,
        "high": high,
        "patterns_min": float(patterns.min()),
        "patterns_max": float(patterns.max()),
    }


def bootstrap_interval(
    table: Float[ndarray, "memory column"], seed: int
) -> tuple[float | None, float | None]:
    """Return the 95 % interval of the covered share over memories drawn anew; None of one."""
    n = len(table)
    if n < 2:
        return None, None
    weights = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=DRAWS)
    sums = weights.astype(np.float64) @ table
    covered = 1 - sums[:, LABELS.index("uncovered")] / sums[:, -1]
    low, high = np.quantile(covered, (0.025, 0.975))
    return float(low), float(high)


def sources_of(result: ExperimentResult) -> list[str]:
    """Return who labelled the triggers: people first."""
    named = {str(row["source"]) for row in result.rows}
    return sorted(named, key=lambda source: (SOURCES.index(source), source))


def chart(result: ExperimentResult) -> Chart:
    """Draw shallow and semantic triggers by layer, one panel per source of labels."""
    parts = {
        "shallow": ("shallow", SKY),
        "both": ("shallow + semantic", BLUE),
        "semantic": ("semantic", ORANGE),
        "uncovered": ("not covered", GREY),
    }
    charts: list[Chart] = []
    for source in sources_of(result):
        rows = figure_rows([row for row in result.rows if row["source"] == source], list(parts))
        bars = stacked_bars(rows, count_layers(result), parts, "% trigger examples")
        charts.append(bars.properties(title=alt.Title(f"source: {source}")))
    if not charts:
        return empty_plot()
    return charts[0] if len(charts) == 1 else panels(charts)


def summary(result: ExperimentResult) -> str:
    """Say where shallow and semantic patterns prevail, source by source."""
    rows = known(result.rows, "shallow", "semantic", "uncovered")
    if not rows:
        return NOTHING
    return " ".join(
        _source_summary(source, own)
        for source in sources_of(result)
        if (own := [row for row in rows if row["source"] == source])
    )


def _source_summary(source: str, rows: list[Row]) -> str:
    uncovered = weighted_mean(rows, "uncovered", "n")
    covered = None if uncovered is None else 1 - uncovered
    per_key = weighted_mean(rows, "patterns_per_key", "keys" if known(rows, "keys") else "n")
    having = weighted_mean(rows, "with_pattern", "keys")
    shown = f"Source {source}: {format_share(covered)} of the triggers show a pattern, "
    shown += f"{format_number(per_key)} patterns per memory"
    if having is not None:
        n = format_number(sum(row["keys"] for row in rows))
        shown += f", and {format_share(having)} of {n} memories have one"
    semantic = [row["layer"] for row in rows if row["semantic"] > row["shallow"]]
    shown += f"; semantic triggers outnumber shallow ones in {len(semantic)} of {len(rows)} layers"
    shown += f", first in layer {min(semantic) + 1}" if semantic else ""
    along = {name: trend([row[name] for row in rows]) for name in ("shallow", "semantic")}
    if None not in along.values():
        shown += (
            f". With depth the shallow share correlates at {format_number(along['shallow'])},"
            f" the semantic share at {format_number(along['semantic'])} (Spearman)"
        )
    return f"{shown}."


# Claims: checked on people's labels where there are any. Those of programs are shown, not judged.


def _labelled(result: ExperimentResult) -> tuple[str, list[Row]]:
    """Return the rows of one source of labels: people's where they looked."""
    source = next(
        (
            source
            for source in sources_of(result)
            if any(
                row["source"] == source and row.get("shallow") is not None for row in result.rows
            )
        ),
        "automatic",
    )
    return source, [row for row in result.rows if row["source"] == source]


def _evidence(shown: str, source: str, rows: list[Row], holds: bool, partly: bool) -> Evidence:
    why = None if source == "human" else "the paper's labels are people's, these a program's"
    n = sum(int(row.get("keys") or 0) for row in rows)
    return Evidence(f"{shown} (source: {source})", n, "memories", holds, partly, why)


def check_halves(result: ExperimentResult) -> Evidence | None:
    """Check: shallow patterns below, semantic ones above."""
    source, labelled = _labelled(result)
    rows = [
        row | {"semantic_more": float(row["semantic"] > row["shallow"])}
        for row in known(labelled, "shallow", "semantic")
    ]
    below, above = means_below_and_above(rows, "semantic_more", result, 10)
    if below is None or above is None:
        return None
    lower, upper = format_halves(result, 10)
    shown = (
        f"semantic prevails in {format_share(below)} of {lower} and {format_share(above)} of"
        f" {upper}"
    )
    # Patterns of one kind alone would meet half of the rule everywhere, and say nothing.
    return _evidence(shown, source, rows, below <= 0.2 and above >= 0.8, above > below)


def check_semantic_trend(result: ExperimentResult) -> Evidence | None:
    """Check: the share of semantic triggers grows with depth."""
    source, labelled = _labelled(result)
    rows = known(labelled, "semantic")
    along = trend([row["semantic"] for row in rows])
    if along is None:
        return None
    first, last = rows[0], rows[-1]
    shown = (
        f"{format_share(first['semantic'])} in layer {first['layer'] + 1} and"
        f" {format_share(last['semantic'])} in layer {last['layer'] + 1}; correlation with depth"
        f" {format_number(along)}"
    )
    return _evidence(shown, source, rows, along >= 0.5, along > 0)


def check_every_key(result: ExperimentResult) -> Evidence | None:
    """Check: every key has a pattern."""
    source, rows = _labelled(result)
    having = weighted_mean(rows, "with_pattern", "keys")
    if having is None:
        return None
    n = format_number(sum(row["keys"] for row in known(rows, "keys")))
    shown = f"{format_share(having)} of {n} memories"
    return _evidence(shown, source, rows, having == 1, having >= 0.9)


def check_several(result: ExperimentResult) -> Evidence | None:
    """Check: a key has several patterns."""
    source, rows = _labelled(result)
    per_key = weighted_mean(rows, "patterns_per_key", "keys")
    if per_key is None:
        return None
    return _evidence(format_number(per_key), source, rows, 2.6 <= per_key <= 4.6, per_key > 1)


def check_covered(result: ExperimentResult) -> Evidence | None:
    """Check: most triggers show a pattern."""
    source, rows = _labelled(result)
    uncovered = weighted_mean(rows, "uncovered", "n")
    if uncovered is None:
        return None
    covered = 1 - uncovered
    each = [1 - row["uncovered"] for row in known(rows, "uncovered")]
    shown = (
        f"{format_share(covered)}, by layer {format_share(min(each))} to {format_share(max(each))}"
    )
    return _evidence(shown, source, rows, 0.65 <= covered <= 0.8, covered >= 0.5)


EXPERIMENT = Experiment(
    name="patterns",
    paper="Fig. 2, Table 1",
    title="Patterns in triggers",
    description="Share of a layer's trigger examples (the first 25 of a memory) that show a shallow"
    " pattern (such as a shared last word), a semantic one (a shared topic), both, or none."
    " Source human: people's labels, the paper's protocol. Sources automatic (a detector) and"
    " explained (a language model) are not that protocol.",
    finding="The paper's annotators saw mostly shallow patterns in the lower layers and more"
    " semantic ones in the upper; every key had at least one.",
    measure=measure,
    chart=chart,
    summary=summary,
    needs_model=False,
    paper_values=PAPER_VALUES,
    claims=(
        ClaimCheck(
            claim="Lower layers catch shallow patterns, upper layers semantic ones",
            rule="semantic patterns outnumber shallow ones in at most 20 % of the lower layers and"
            " at least 80 % of the upper (the paper's 10–16); in part if in a larger share of the"
            " upper than of the lower (people's labels only)",
            check=check_halves,
            values=(3,),
            over_depth=True,
        ),
        ClaimCheck(
            claim="The share of semantic triggers grows through the layers",
            rule="Spearman's correlation of layer and semantic share is 0.5 or higher; in part if"
            " positive (people's labels only)",
            check=check_semantic_trend,
            over_depth=True,
        ),
        ClaimCheck(
            claim="Every key has a pattern that people see",
            rule="all memories have one; in part if nine in ten (people's labels only)",
            check=check_every_key,
        ),
        ClaimCheck(
            claim="A key has several patterns",
            rule="the mean is within 1 of the paper's; in part if above 1 (people's labels only)",
            check=check_several,
            values=(1,),
        ),
        ClaimCheck(
            claim="Most of a key's triggers show a pattern",
            rule="the share of all layers together lies within the paper's range; in part if above"
            " 50 % (people's labels only)",
            check=check_covered,
            values=(2,),
        ),
    ),
)
