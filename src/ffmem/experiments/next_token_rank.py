"""Figure 5 (§4): where do values rank the next token of their memory's top trigger?

rank(w) = #{w′: z(w′) > z(w)},    z = logits of the value: 0 for its top token
"""

from typing import TYPE_CHECKING

import altair as alt

from ffmem.experiments.agreement import head_band
from ffmem.experiments.base import (
    ClaimCheck,
    Evidence,
    Experiment,
    ExperimentResult,
    Measurement,
    Row,
)
from ffmem.experiments.charts import Chart, boxes, figure_rows
from ffmem.experiments.rows import NOTHING, count_layers, known, smallest_n, trend
from ffmem.stats import spread
from ffmem.text import format_number

if TYPE_CHECKING:
    from ffmem.experiments.context import ExperimentContext
    from ffmem.experiments.triggers import TopTriggers
    from ffmem.experiments.values import ValueReadings
    from ffmem.models.memories import Memories


def measure(context: "ExperimentContext") -> Measurement:
    """Measure the spread of the ranks in each layer."""
    rows = [
        {
            "layer": layer,
            **rank_row(context.top_triggers[layer], context.values[layer], context.memories),
        }
        for layer in context.index.layout.memory_layers
    ]
    return Measurement(rows)


def rank_row(top_triggers: "TopTriggers", values: "ValueReadings", memories: "Memories") -> Row:
    """Return the spread of one layer's ranks, and their median where no band is in the way."""
    band = head_band(memories)
    in_band = top_triggers.exists & (top_triggers.next_token < (band or 0))
    median = None if band is None else spread(values.next_rank[in_band])["median"]
    return {**spread(values.next_rank[top_triggers.exists]), "head_band_median": median}


def chart(result: ExperimentResult) -> Chart:
    """Draw the quartiles of each layer on a logarithmic axis."""
    rows = figure_rows(result.rows, [], ["q1", "median", "q3"])
    for row in rows:  # a logarithm has no 0, which is the best rank
        row |= {
            name: None if row[name] is None else row[name] + 1 for name in ("q1", "median", "q3")
        }
    y = alt.Y(
        "q1:Q",
        title="rank of next token + 1 (log)",
        scale=alt.Scale(type="log", domainMin=1, nice=False),
        axis=alt.Axis(values=[10**power for power in range(7)], format="~s"),
    )
    return boxes(rows, count_layers(result), y)


def summary(result: ExperimentResult) -> str:
    """Say how the rank of the next token moves through the layers."""
    rows = known(result.rows, "q1", "median", "q3")
    if not rows:
        return NOTHING

    def rank(row: Row, field: str = "median") -> str:
        return format_number(round(row[field]))

    first, last = rows[0], rows[-1]
    best = min(rows, key=lambda row: (row["median"], row["layer"]))
    return (
        f"The median rank (0 is the top) is {rank(first)} in layer {first['layer'] + 1} and"
        f" {rank(last)} in layer {last['layer'] + 1}. It is lowest in layer {best['layer'] + 1}:"
        f" {rank(best)}, with the middle half of the memories between {rank(best, 'q1')} and"
        f" {rank(best, 'q3')} (n = {format_number(best['n'])})."
    )


def check_falling(result: ExperimentResult) -> Evidence | None:
    """Check: the rank improves through the layers."""
    return median_trend(result, "median rank", -1, "memories per layer")


def median_trend(result: ExperimentResult, what: str, sign: int, unit: str) -> Evidence | None:
    """Check that the medians of layers rise (+1) or fall (−1) with depth."""
    rows = known(result.rows, "median")
    along = trend([row["median"] for row in rows])
    if along is None:
        return None
    first, last = rows[0], rows[-1]
    shown = (
        f"{what} {format_number(first['median'])} in layer {first['layer'] + 1} and"
        f" {format_number(last['median'])} in layer {last['layer'] + 1}; correlation with depth"
        f" {format_number(along)}"
    )
    return Evidence(shown, smallest_n(rows), unit, sign * along >= 0.5, sign * along > 0)


EXPERIMENT = Experiment(
    name="next-token-rank",
    paper="Fig. 5",
    title="Rank of the next token",
    description="Rank of the token that follows a memory's strongest trigger in the distribution"
    " of its value; 0 is the top.",
    finding="The paper found that the rank of the next token improves through the layers; its text"
    " gives no number.",
    measure=measure,
    chart=chart,
    summary=summary,
    needs_values=True,
    claims=(
        ClaimCheck(
            claim="The next token's rank improves through the layers",
            rule="Spearman's correlation of layer and median rank is −0.5 or lower; in part if"
            " negative",
            check=check_falling,
            over_depth=True,
        ),
    ),
)
