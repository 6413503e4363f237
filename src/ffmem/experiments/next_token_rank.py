"""Figure 5 (§4): where do values rank the next token of their memory's top trigger?

rank(w) = #{w′: z(w′) > z(w)},    z = logits of the value: 0 for its top token
"""

import altair as alt

from ffmem.experiments import charts
from ffmem.experiments.agreement import in_head_band
from ffmem.experiments.base import Evidence, Experiment, ExperimentResult, Panel, claim
from ffmem.experiments.context import ExperimentContext
from ffmem.experiments.rows import NOTHING, Row, layer_of
from ffmem.stats import spread
from ffmem.text import format_number

QUARTILES = ("q1", "median", "q3")


def measure(context: ExperimentContext) -> tuple[list[Row], Row]:
    """Measure the spread of the ranks in each layer, and their median where no band interferes."""
    rows = []
    for layer in context.index.layout.memory_layers:
        triggers, ranks = context.top_triggers[layer], context.values[layer].next_rank
        in_band = in_head_band(context.memories, triggers)
        median = None if in_band is None else spread(ranks[in_band])["median"]
        row = {"layer": layer, **spread(ranks[triggers.exists]), "head_band_median": median}
        rows.append(row)
    return rows, {}


def chart(result: ExperimentResult) -> charts.Chart:
    """Draw the quartiles of each layer on a logarithmic axis."""
    rows = charts.figure_rows(result.rows, [], QUARTILES)
    for row in rows:  # a logarithm has no 0, which is the best rank
        row |= {name: None if row[name] is None else row[name] + 1 for name in QUARTILES}
    y = alt.Y(
        "q1:Q",
        title="rank of next token + 1 (log)",
        scale=alt.Scale(type="log", domainMin=1, nice=False),
        axis=alt.Axis(values=[10**power for power in range(7)], format="~s"),
    )
    return charts.boxes(rows, result.n_layers, y)


def summary(result: ExperimentResult) -> str:
    """Say how the rank of the next token moves through the layers."""
    rows = result.rows_with(*QUARTILES)
    if not rows:
        return NOTHING

    def rank(row: Row, field: str = "median") -> str:
        return format_number(round(row[field]))

    first, last = rows[0], rows[-1]
    best = min(rows, key=lambda row: (row["median"], row["layer"]))
    return (
        f"The median rank (0 is the top) is {rank(first)} in {layer_of(first)} and {rank(last)} in"
        f" {layer_of(last)}. It is lowest in {layer_of(best)}: {rank(best)}, with the middle half"
        f" of the memories between {rank(best, 'q1')} and {rank(best, 'q3')}"
        f" (n = {format_number(best['n'])})."
    )


@claim(
    "The next token's rank improves with depth",
    "Spearman's correlation of layer and median rank is −0.5 or lower; in part if negative",
    over_depth=True,
)
def _falling(result: ExperimentResult) -> Evidence | None:
    return Evidence.of_trend(
        result.rows_with("median"), "median", -1, "memories per layer", "median rank "
    )


EXPERIMENT = Experiment(
    name="next-token-rank",
    paper="Fig. 5",
    title="Rank of the next token",
    description="Rank of the token that follows a memory's strongest trigger in the distribution"
    " of its value; 0 is the top.",
    finding="The paper found that the rank of the next token improves with depth; its text"
    " gives no number.",
    measure=measure,
    chart=chart,
    summary=summary,
    needs_values=True,
    claims=(_falling,),
    panels=(
        Panel(title="median rank of the next token (log)", value="median", percent=False, log=True),
    ),
)
