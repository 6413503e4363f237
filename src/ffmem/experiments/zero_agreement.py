"""Figure 8 (§5.1): how often does no single memory say what its layer says?

A memory's token is top(m·v). It hits if that is the layer's own token: top(y) by the paper's text,
top(o) by its code. Zero agreement: no memory hits.

    all      every memory counts, with top(v); in gated models with top(sign(m)·v)
    active   those with m > 0, in gated models those with an open gate, count with top(m·v)

Of thousands of memories, some hit a frequent token by chance. `chance` is the share of zero
agreement that a random token as frequent as the layer's would have: frequencies are binned by
⌊log₂(count + 1)⌋ of the index's corpus.
"""

from itertools import product

import altair as alt
import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64
from numpy import ndarray

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
from ffmem.experiments.metrics import SECTION_5_SAMPLE, LayerActivity, Predictions, SampleMetric
from ffmem.experiments.rows import NOTHING, Row, format_range, layer_of, rows_with
from ffmem.stats import share_row
from ffmem.text import format_share

TARGETS, MEMORIES = ("y", "o"), ("all", "active")

NO_MEMORY = PaperValue(
    "examples in which no memory agrees with the layer", "at least ~68 % in every layer", "Fig. 8"
)

VARIANTS = list(product(TARGETS, MEMORIES))


class TokenHits(SampleMetric):
    """By target and group of memories: how many hit on each prefix in each layer, and chance."""

    needs_predictions = True

    def __init__(self, context: ExperimentContext, n_prefixes: int) -> None:
        from ffmem.experiments.values import value_tops

        n_layers, frequencies = context.memories.n_layers, context.frequencies
        self.tops = [
            value_tops(context.index, context.memories, layer) for layer in range(n_layers)
        ]
        self.agreeing, self.carried, self.chance = (
            {variant: np.zeros((n_prefixes, n_layers)) for variant in VARIANTS} for _ in range(3)
        )
        self.bins: Int64[ndarray, " vocab"] = np.floor(np.log2(frequencies + 1)).astype(np.int64)
        self.bin_sizes = np.bincount(self.bins)

    def read(self, prefixes: Int64[ndarray, " row"], layer: int, activity: LayerActivity) -> None:
        """Count one layer's hits of top(y) and of top(o)."""
        m, gate, tops = activity.coefficients, activity.gate, self.tops[layer]
        tokens, is_active = tops.at(m), (m if gate is None else gate) > 0
        # Without a gate, all memories count with top(v): one row, the same for all prefixes.
        everybody = tops.plain[None] if gate is None else tokens
        targets = {"y": activity.ff_top, "o": activity.output_top}
        for memories, own, counted in (("all", everybody, None), ("active", tokens, is_active)):
            distinct = self._distinct(own, counted)
            for target, wanted in targets.items():
                assert wanted is not None  # `needs_predictions`
                hits = own == wanted[:, None]
                n_hits, carried = _count(hits if counted is None else hits & counted, activity)
                bins = self.bins[wanted]
                met = np.broadcast_to(distinct, (len(wanted), distinct.shape[1]))
                by_chance = met[np.arange(len(wanted)), bins] / self.bin_sizes[bins]
                self.agreeing[target, memories][prefixes, layer] = n_hits
                self.carried[target, memories][prefixes, layer] = carried
                self.chance[target, memories][prefixes, layer] = 1 - by_chance

    def _distinct(
        self, tokens: Int64[ndarray, "#row memory"], counted: Bool[ndarray, "row memory"] | None
    ) -> Float32[ndarray, "#row bin"]:
        """Return how many different tokens of each frequency bin the memories have."""
        occurs = np.zeros(len(self.bins), bool)
        occurs[tokens] = True
        found = np.flatnonzero(occurs)
        columns = np.zeros(len(self.bins), np.int64)
        columns[found] = np.arange(len(found))
        place = columns[tokens]
        if counted is not None:
            place = np.where(counted, place, len(found))  # the last column is dropped again
        seen = np.zeros((len(tokens), len(found) + 1), np.float32)
        np.put_along_axis(seen, place, 1, axis=1)
        in_bin = np.zeros((len(found), len(self.bin_sizes)), np.float32)
        in_bin[np.arange(len(found)), self.bins[found]] = 1
        return np.asarray(seen[:, :-1] @ in_bin)


def _count(
    hits: Bool[ndarray, "row memory"], activity: LayerActivity
) -> tuple[Int64[ndarray, " row"], Float64[ndarray, " row"]]:
    """Return how many memories hit, and which share of all contributions they carry."""
    carried = activity.contributions
    assert carried is not None  # hits are counted only where there are values
    n, total = len(carried), carried.sum(axis=1, dtype=np.float64)
    # Few memories hit: their places cost less than sums over all of them.
    cells = np.flatnonzero(hits)
    row = cells // hits.shape[1]
    weight = np.bincount(row, carried.reshape(-1)[cells], minlength=n)
    share = np.divide(weight, total, where=total > 0, out=np.zeros(n))
    return np.bincount(row, minlength=n), share


def measure(context: ExperimentContext) -> tuple[list[Row], Row]:
    """Measure how often no memory hits, for both targets and both groups of memories."""
    hits = context.measured(TokenHits)
    rows = []
    for layer in context.memories.layout.memory_layers:
        for target, memories in VARIANTS:
            agreeing = hits.agreeing[target, memories][:, layer]
            rows.append(
                {
                    "layer": layer,
                    "target": target,
                    "memories": memories,
                    **share_row("share", agreeing == 0),
                    "chance": float(hits.chance[target, memories][:, layer].mean()),
                    "agreeing": float(agreeing.mean()),
                    "carried": float(hits.carried[target, memories][:, layer].mean()),
                }
            )
    return rows, {}


def chart(result: ExperimentResult) -> charts.Chart:
    """Draw the share of zero agreement beside chance, one panel per target."""
    panels = []
    for target in TARGETS:
        rows = []
        for memories in MEMORIES:
            own = result.rows_with(target=target, memories=memories)
            numbers = charts.figure_rows(own, ["share", "low", "high", "chance"])
            rows += charts.series(numbers, f"{memories} memories")
        if rows:
            axis = charts.layer_axis(result.n_layers, "layer" if target == "o" else None)
            title = f"target: top token of {target} (dotted: by chance)"
            panels.append(_against_chance(rows, axis).properties(height=105, title=title))
    return charts.panels(panels)


def _against_chance(rows: list[Row], x: alt.X) -> alt.LayerChart:
    color = charts.series_color({"all memories": charts.BLUE, "active memories": charts.VERMILION})
    y = charts.quantity("share", "% zero agreement", (0, 100), values=[0, 25, 50, 75, 100])
    # A second legend beside the first would overlap it in a browser: the title explains the dots.
    scale = alt.Scale(domain=["measured", "chance"], range=[[1, 0], [2, 3]])
    dashes = alt.StrokeDash("kind:N", scale=scale, legend=None)

    def base(kind: str) -> alt.Chart:
        return charts.plot([row | {"kind": kind} for row in rows]).encode(x=x, y=y, color=color)

    chance = base("chance").mark_line(strokeWidth=1.2)
    interval = charts.plot(rows_with(rows, "low", "high")).mark_rule(strokeWidth=1.2)
    return charts.layered(
        chance.encode(y=charts.same_axis(y, "chance"), strokeDash=dashes),
        interval.encode(x=x, y=charts.same_axis(y, "low"), y2="high:Q", color=color),
        base("measured").mark_line().encode(strokeDash=dashes),
        base("measured").mark_point(),
    )


def summary(result: ExperimentResult) -> str:
    """Say how often no memory agrees with the layer, beside chance."""
    parts = [
        f"{memories} memories against top({target}) {format_range(rows, 'share', 'chance')}"
        for memories in MEMORIES
        for target in TARGETS
        if (rows := result.rows_with("share", target=target, memories=memories))
    ]
    if not parts:
        return NOTHING
    reach = [(row["high"] - row["low"]) / 2 for row in result.rows_with("share", "low", "high")]
    reached = f" Intervals reach at most ±{100 * max(reach):.1f} points." if reach else ""
    return f"Prefixes without any agreeing memory: {'; '.join(parts)}.{reached}"


@claim(
    "In most examples, no single memory predicts what the layer predicts",
    "the share reaches 68 % in every layer (all memories, compared with top(y)); in part if in"
    " half of the layers",
    NO_MEMORY,
)
def _zero(result: ExperimentResult) -> Evidence | None:
    rows = result.rows_with("share", target="y", memories="all")
    if not rows:
        return None
    least = min(rows, key=lambda row: row["share"])
    inside = [row["share"] >= 0.68 for row in rows]
    shown = (
        f"at least {format_share(least['share'])} ({layer_of(least)}); {sum(inside)} of"
        f" {len(rows)} layers reach it; chance there {format_share(least.get('chance'))}"
    )
    return Evidence.by_layer(shown, rows, "prefixes", inside)


def _panel(memories: str, *paper: PaperMark) -> Panel:
    """Return the share of prefixes on which none of these memories says what y does."""
    return Panel(
        title=f"zero agreement with top(y), {memories} memories",
        value="share",
        rows=lambda result: result.rows_with(target="y", memories=memories),
        interval=("low", "high"),
        control=("chance", "a random token as frequent"),
        paper=paper,
    )


_ALL_COUNT = (
    "Coefficients are softmax weights and thus positive: every memory is active, and counts with"
    " top(m·v) instead of top(v)."
)

EXPERIMENT = Experiment(
    name="zero-agreement",
    paper="Fig. 8",
    title="Layers that no memory agrees with",
    description="Share of prefixes on which no memory's top token is the layer's: top(y) of the"
    " feed-forward output y, or top(o) of the layer's output o = r + y, where r is the residual.",
    finding="The paper found that on most inputs none of a layer's memories predicts what the"
    " layer predicts: the layer composes them.",
    measure=measure,
    chart=chart,
    summary=summary,
    metrics=(TokenHits, Predictions),
    needs_values=True,
    paper_values=(SECTION_5_SAMPLE, NO_MEMORY),
    claims=(_zero,),
    panels=(_panel("all", PaperMark(NO_MEMORY, 0.68)), _panel("active")),
    notes={
        "softmax": _ALL_COUNT,
        "persistent": _ALL_COUNT,
        "experts": "“All” means the memories of all experts of a layer: those that a prefix does"
        " not reach count with top(v), like any memory with m = 0. “Active” memories are in"
        " experts that it reaches.",
    },
)
