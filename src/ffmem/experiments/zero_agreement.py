"""Figure 8 (§5.1): how often does no single memory say what its layer says?

A memory's token is top(m·v). It hits if that is the layer's own token: top(y) by the paper's text,
top(o) by its code. Zero agreement: no memory hits.

    all      every memory counts, with top(v); in gated models with top(sign(m)·v)
    active   those with m > 0, in gated models those with an open gate, count with top(m·v)

Of thousands of memories, some hit a frequent token by chance. `chance` is the share of zero
agreement that a random token as frequent as the layer's would have: frequencies are binned by
⌊log₂(count + 1)⌋ of the index's corpus.
"""

from typing import TYPE_CHECKING, Any

import altair as alt
import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64
from numpy import ndarray

from ffmem.experiments.base import (
    PERSISTENT,
    SECTION_5_SAMPLE,
    SOFTMAX,
    ClaimCheck,
    Evidence,
    Experiment,
    ExperimentResult,
    LayerWork,
    Measurement,
    PaperValue,
    Row,
    SampleMetric,
)
from ffmem.experiments.charts import (
    BLUE,
    VERMILION,
    Chart,
    empty_plot,
    figure_rows,
    layer_axis,
    layered,
    panels,
    plot,
    quantity,
    same_axis,
    series_color,
)
from ffmem.experiments.predictions import Predictions
from ffmem.experiments.rows import NOTHING, count_layers, format_range, known, smallest_n
from ffmem.stats import share, wilson
from ffmem.text import format_share

if TYPE_CHECKING:
    from ffmem.experiments.context import ExperimentContext
    from ffmem.experiments.values import ValueTops

TARGETS, MEMORIES = ("y", "o"), ("all", "active")

MemoryTokens = tuple[
    Int64[ndarray, "#row memory"], list[tuple[int, Bool[ndarray, "row memory"] | None]]
]
"""The token of each memory, in one row where it is the same for all prefixes, and for each group
(`all`, `active`) which memories count; None for every one."""

CompactTokens = tuple[Int64[ndarray, "#row memory"], Float32[ndarray, "token bin"]]
"""The number of each memory's token among those that occur, and the frequency bin of each such."""


class TokenHits(SampleMetric):
    """By prefix, layer, target and group of memories: how many hit, and what chance would give."""

    needs_values = True
    needs_predictions = True

    def __init__(self, context: "ExperimentContext", n_prefixes: int) -> None:
        n_layers, frequencies = context.memories.n_layers, context.frequencies
        self.tops = [context.value_tops(layer) for layer in range(n_layers)]
        shape = (n_prefixes, n_layers, len(TARGETS), len(MEMORIES))
        self.agreeing: Int64[ndarray, "prefix layer target memories"] = np.zeros(shape, np.int64)
        self.carried: Float64[ndarray, "prefix layer target memories"] = np.zeros(shape)
        self.chance: Float64[ndarray, "prefix layer target memories"] = np.zeros(shape)
        self.bins: Int64[ndarray, " vocab"] = np.floor(np.log2(frequencies + 1)).astype(np.int64)
        self.bin_sizes = np.bincount(self.bins)

    def read(self, prefixes: Int64[ndarray, " row"], layer: int, work: LayerWork) -> None:
        """Count one layer's hits of top(y) and of top(o)."""
        targets = (work.ff_top, work.output_top)
        for tokens, groups in self._memory_tokens(self.tops[layer], work):
            compact = self._compact(tokens)
            for group, counts in groups:
                distinct = self._distinct(compact, counts)
                for target, wanted in enumerate(targets):
                    assert wanted is not None  # `needs_predictions`
                    place = (prefixes, layer, target, group)
                    hits = tokens == wanted[:, None]
                    self._count(place, hits if counts is None else hits & counts, work)
                    bins = self.bins[wanted]
                    met = np.broadcast_to(distinct, (len(wanted), distinct.shape[1]))
                    by_chance = met[np.arange(len(wanted)), bins] / self.bin_sizes[bins]
                    self.chance[place] = 1 - by_chance

    def _count(
        self, place: tuple[Any, ...], hits: Bool[ndarray, "row memory"], work: LayerWork
    ) -> None:
        """Count the memories that hit, and which share of all contributions they carry."""
        carried = work.contributions
        assert carried is not None  # hits are counted only where there are values
        n, total = len(carried), carried.sum(axis=1, dtype=np.float64)
        # Few memories hit: their places cost less than sums over all of them.
        cells = np.flatnonzero(hits)
        example = cells // hits.shape[1]
        weight = np.zeros(n)
        np.add.at(weight, example, carried.reshape(-1)[cells])
        self.agreeing[place] = np.bincount(example, minlength=n)
        self.carried[place] = np.divide(weight, total, where=total > 0, out=np.zeros(n))

    def _memory_tokens(self, tops: "ValueTops", work: LayerWork) -> list[MemoryTokens]:
        """Return each memory's token and which memories count: for `all`, then for `active`."""
        m = work.coefficients
        if work.gate is not None:
            return [(tops.at(m), [(0, None), (1, work.gate > 0)])]
        return [(tops.plain[None], [(0, None)]), (tops.at(m), [(1, m > 0)])]

    def _compact(self, tokens: Int64[ndarray, "#row memory"]) -> CompactTokens:
        """Number the tokens that any memory has."""
        given = np.zeros(len(self.bins), bool)
        given[tokens] = True
        found = np.flatnonzero(given)
        number = np.zeros(len(self.bins), np.int64)
        number[found] = np.arange(len(found))
        in_bin = np.zeros((len(found), len(self.bin_sizes)), np.float32)
        in_bin[np.arange(len(found)), self.bins[found]] = 1
        return number[tokens], in_bin

    def _distinct(
        self, compact: CompactTokens, counts: Bool[ndarray, "row memory"] | None
    ) -> Float32[ndarray, "#row bin"]:
        """Return how many different tokens of each frequency bin the memories have."""
        numbers, in_bin = compact
        width = len(in_bin) + 1  # the last column is for memories that do not count
        if counts is not None:
            numbers = np.where(counts, numbers, width - 1)
        seen = np.zeros((len(numbers), width), np.float32)
        seen.reshape(-1)[numbers + width * np.arange(len(numbers))[:, None]] = 1
        return np.asarray(seen[:, :-1] @ in_bin)

    def variants(self) -> list[tuple[str, str, tuple[Any, ...]]]:
        """Return every target and group of memories with its place in the arrays."""
        return [
            (target, memories, (slice(None), slice(None), i, j))
            for i, target in enumerate(TARGETS)
            for j, memories in enumerate(MEMORIES)
        ]


def measure(context: "ExperimentContext") -> Measurement:
    """Measure how often no memory hits, for both targets and both groups of memories."""
    hits = context.measured(TokenHits)
    rows = []
    for layer in context.memories.layout.memory_layers:
        for target, memories, place in hits.variants():
            agreeing = hits.agreeing[place][:, layer]
            n, none = len(agreeing), int((agreeing == 0).sum())
            low, high = wilson(none, n)
            rows.append(
                {
                    "layer": layer,
                    "target": target,
                    "memories": memories,
                    "share": share(none, n),
                    "low": low,
                    "high": high,
                    "n": n,
                    "chance": float(hits.chance[place][:, layer].mean()),
                    "agreeing": float(agreeing.mean()),
                    "carried": float(hits.carried[place][:, layer].mean()),
                }
            )
    return Measurement(rows)


def chart(result: ExperimentResult) -> Chart:
    """Draw the share of zero agreement beside chance, one panel per target."""
    n_layers, charts = count_layers(result), []
    names = ["share", "low", "high", "chance"]
    for target in TARGETS:
        rows = [
            numbers | {"series": f"{row['memories']} memories"}
            for row, numbers in zip(result.rows, figure_rows(result.rows, names), strict=True)
            if row["target"] == target
        ]
        if rows:
            axis = layer_axis(n_layers, "layer" if target == "o" else None)
            title = f"target: top token of {target} (dotted: by chance)"
            charts.append(_against_chance(rows, axis).properties(height=105, title=title))
    return panels(charts) if charts else empty_plot()


def _against_chance(rows: list[Row], x: alt.X) -> alt.LayerChart:
    color = series_color({"all memories": BLUE, "active memories": VERMILION})
    y = quantity("share", "% zero agreement", (0, 100), values=[0, 25, 50, 75, 100])
    # A second legend beside the first would run into it in a browser: the title tells instead.
    scale = alt.Scale(domain=["measured", "chance"], range=[[1, 0], [2, 3]])
    dashes = alt.StrokeDash("kind:N", scale=scale, legend=None)

    def base(kind: str) -> alt.Chart:
        return plot([row | {"kind": kind} for row in rows]).encode(x=x, y=y, color=color)

    chance = base("chance").mark_line(strokeWidth=1.2)
    interval = plot(known(rows, "low", "high")).mark_rule(strokeWidth=1.2)
    return layered(
        chance.encode(y=same_axis(y, "chance"), strokeDash=dashes),
        interval.encode(x=x, y=same_axis(y, "low"), y2="high:Q", color=color),
        base("measured").mark_line().encode(strokeDash=dashes),
        base("measured").mark_point(),
    )


def summary(result: ExperimentResult) -> str:
    """Say how often no memory agrees with the layer, beside chance."""
    rows = known(result.rows, "share")
    parts = []
    for target, memories in (("y", "all"), ("o", "all"), ("y", "active"), ("o", "active")):
        own = [row for row in rows if (row["target"], row["memories"]) == (target, memories)]
        if own:
            shown = format_range(own, "share", "chance")
            parts.append(f"{memories} memories against top({target}) {shown}")
    if not parts:
        return NOTHING
    widest = max(((r["high"] - r["low"]) / 2 for r in known(rows, "low", "high")), default=None)
    reach = f" Intervals reach at most ±{100 * widest:.1f} points." if widest is not None else ""
    return f"Prefixes without any agreeing memory: {'; '.join(parts)}.{reach}"


def check_zero(result: ExperimentResult) -> Evidence | None:
    """Check: on most prefixes no memory agrees with the layer."""
    rows = [
        row
        for row in known(result.rows, "share")
        if (row["target"], row["memories"]) == ("y", "all")
    ]
    if not rows:
        return None
    least = min(rows, key=lambda row: row["share"])
    inside = sum(row["share"] >= 0.68 for row in rows)
    shown = (
        f"at least {format_share(least['share'])} (layer {least['layer'] + 1}); {inside} of"
        f" {len(rows)} layers reach it; chance there {format_share(least.get('chance'))}"
    )
    good = inside == len(rows), 2 * inside >= len(rows)
    return Evidence(shown, smallest_n(rows), "prefixes", *good)


_ALL_COUNT = (
    "Coefficients are weights of a softmax, all of them positive: every memory is active, and as"
    " such counts with top(m·v) in place of top(v)."
)

EXPERIMENT = Experiment(
    name="zero-agreement",
    paper="Fig. 8",
    title="Layers that no memory agrees with",
    description="Share of prefixes on which no memory's top token is the layer's: top(y) of the"
    " feed-forward output y, or top(o) of the layer's output o = r + y, r being the residual.",
    finding="The paper found that on most inputs the layer's prediction is that of none of its"
    " memories: the layer composes them.",
    measure=measure,
    chart=chart,
    summary=summary,
    metrics=(TokenHits, Predictions),
    needs_values=True,
    paper_values=(
        SECTION_5_SAMPLE,
        PaperValue(
            "examples in which no memory agrees with the layer",
            "at least ~68 % in every layer",
            "Fig. 8",
        ),
    ),
    claims=(
        ClaimCheck(
            claim="In most examples no single memory predicts what the layer does",
            rule="the share reaches 68 % in every layer (all memories against top(y)); in part if"
            " in half of them",
            check=check_zero,
            values=(1,),
        ),
    ),
    notes={SOFTMAX: _ALL_COUNT, PERSISTENT: _ALL_COUNT},
)
