"""Figure 10 (§5.2): how probable does the residual find the model's prediction?"""

from ffmem.experiments import charts
from ffmem.experiments.base import Evidence, Experiment, ExperimentResult, Panel, claim
from ffmem.experiments.context import ExperimentContext
from ffmem.experiments.metrics import SECTION_5_SAMPLE, STREAM_NOTES, Predictions
from ffmem.experiments.rows import NOTHING, Row, layer_of
from ffmem.stats import spread
from ffmem.text import format_number


def measure(context: ExperimentContext) -> tuple[list[Row], Row]:
    """Measure the spread of the probability in each layer."""
    columns = context.measured(Predictions).residual_final_probability.T
    return [{"layer": layer, **spread(one)} for layer, one in enumerate(columns)], {}


def chart(result: ExperimentResult) -> charts.Chart:
    """Draw the quartiles of each layer."""
    rows = charts.figure_rows(result.rows, [], ["q1", "median", "q3"])
    return charts.boxes(rows, result.n_layers, charts.quantity("q1", "probability", (0, 1)))


def summary(result: ExperimentResult) -> str:
    """Say how sure the residual becomes of the prediction."""
    rows = result.rows_with("q1", "median", "q3")
    if not rows:
        return NOTHING
    first, last = rows[0], rows[-1]
    half = next((row for row in rows if row["median"] >= 0.5), None)
    return (
        "The median probability of the final prediction goes from"
        f" {format_number(first['median'])} in {layer_of(first)} to"
        f" {format_number(last['median'])} in {layer_of(last)} (middle half"
        f" {format_number(last['q1'])} to {format_number(last['q3'])}); it"
        f" {f'passes 0.5 in {layer_of(half)}' if half else 'stays below 0.5'}."
    )


@claim(
    "The residual becomes more confident in the prediction with depth",
    "Spearman's correlation of layer and median probability is 0.5 or higher; in part if positive",
    over_depth=True,
)
def _rising(result: ExperimentResult) -> Evidence | None:
    return Evidence.of_trend(result.rows_with("median"), "median", 1, "prefixes", "median ")


EXPERIMENT = Experiment(
    name="residual-probability",
    paper="Fig. 10",
    title="Probability of the prediction in the residual",
    description="Probability of the model's prediction when a layer's residual r is read by the"
    " output head.",
    finding="The paper found that the probability of the final prediction rises through the layers;"
    " its text gives no number for it.",
    measure=measure,
    chart=chart,
    summary=summary,
    metrics=(Predictions,),
    paper_values=(SECTION_5_SAMPLE,),
    claims=(_rising,),
    panels=(
        Panel(title="median probability of the final prediction", value="median", percent=False),
    ),
    notes=STREAM_NOTES,
)
