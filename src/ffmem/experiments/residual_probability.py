"""Figure 10 (§5.2): how probable does the residual find the model's prediction?"""

from typing import TYPE_CHECKING

from ffmem.experiments.base import (
    SECTION_5_SAMPLE,
    ClaimCheck,
    Evidence,
    Experiment,
    ExperimentResult,
    Measurement,
)
from ffmem.experiments.charts import Chart, boxes, figure_rows, quantity
from ffmem.experiments.next_token_rank import median_trend
from ffmem.experiments.predictions import Predictions
from ffmem.experiments.residual_prediction import STREAM_NOTES
from ffmem.experiments.rows import NOTHING, count_layers, known
from ffmem.stats import spread
from ffmem.text import format_number

if TYPE_CHECKING:
    from ffmem.experiments.context import ExperimentContext


def measure(context: "ExperimentContext") -> Measurement:
    """Measure the spread of the probability in each layer."""
    columns = context.measured(Predictions).residual_final_probability.T
    return Measurement([{"layer": layer, **spread(one)} for layer, one in enumerate(columns)])


def chart(result: ExperimentResult) -> Chart:
    """Draw the quartiles of each layer."""
    rows = figure_rows(result.rows, [], ["q1", "median", "q3"])
    return boxes(rows, count_layers(result), quantity("q1", "probability", (0, 1)))


def summary(result: ExperimentResult) -> str:
    """Say how sure the residual becomes of the prediction."""
    rows = known(result.rows, "q1", "median", "q3")
    if not rows:
        return NOTHING
    first, last = rows[0], rows[-1]
    half = next((row for row in rows if row["median"] >= 0.5), None)
    passed = f"passes 0.5 in layer {half['layer'] + 1}" if half else "stays below 0.5"
    return (
        "The median probability of the final prediction goes from"
        f" {format_number(first['median'])} in layer {first['layer'] + 1} to"
        f" {format_number(last['median'])} in layer {last['layer'] + 1} (middle half"
        f" {format_number(last['q1'])} to {format_number(last['q3'])}); it {passed}."
    )


def check_rising(result: ExperimentResult) -> Evidence | None:
    """Check: the prediction's probability rises through the layers."""
    return median_trend(result, "median", 1, "prefixes")


EXPERIMENT = Experiment(
    name="residual-probability",
    paper="Fig. 10",
    title="The prediction's probability in the residual",
    description="Probability of the model's prediction when a layer's residual r is read by the"
    " output head.",
    finding="The paper found that the probability of the final prediction rises through the layers;"
    " its text gives no number for it.",
    measure=measure,
    chart=chart,
    summary=summary,
    metrics=(Predictions,),
    paper_values=(SECTION_5_SAMPLE,),
    claims=(
        ClaimCheck(
            claim="The residual grows surer of the prediction through the layers",
            rule="Spearman's correlation of layer and median probability is 0.5 or higher; in part"
            " if positive",
            check=check_rising,
            over_depth=True,
        ),
    ),
    notes=STREAM_NOTES,
)
