"""Figure 6 (§4): the surer a value, the more often it agrees with its top trigger.

Memories of all layers are binned by the largest probability of their value's distribution.
"""

from itertools import pairwise

import altair as alt
import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

from ffmem.experiments import charts
from ffmem.experiments.agreement import agrees
from ffmem.experiments.base import (
    MIN_CASES,
    Evidence,
    Experiment,
    ExperimentResult,
    Panel,
    claim,
)
from ffmem.experiments.context import ExperimentContext
from ffmem.experiments.rows import Row
from ffmem.stats import share, wilson
from ffmem.text import format_interval, format_number, format_share

BINS = 8
"""Bins of equal width over the range of probabilities."""


def measure(context: ExperimentContext) -> tuple[list[Row], Row]:
    """Measure how often values agree with their top triggers, by their top token's probability."""
    exists = np.concatenate([triggers.exists for triggers in context.top_triggers])
    probability = np.concatenate([values.probability for values in context.values])[exists]
    pairs = zip(context.top_triggers, context.values, strict=True)
    agreeing = np.concatenate([agrees(triggers, values) for triggers, values in pairs])[exists]
    return bins(probability, agreeing), {"auc": auc(probability, agreeing)}


def bins(probability: Float[ndarray, " n"], agreeing: Bool[ndarray, " n"]) -> list[Row]:
    """Return the rate in bins of equal width; one bin if all probabilities are equal."""
    if not len(probability):
        return []
    exact = probability.astype(np.float64)
    low, high = float(exact.min()), float(exact.max())
    edges = np.linspace(low, high, BINS + 1) if low < high else np.array([low, high])
    place = np.searchsorted(edges, exact, side="right") - 1
    place = place.clip(0, len(edges) - 2)  # the last bin holds its upper edge
    rows = []
    for number, (left, right) in enumerate(pairwise(edges)):
        inside = place == number
        n, part = int(inside.sum()), int(agreeing[inside].sum())
        low_rate, high_rate = wilson(part, n)
        row = {"low": float(left), "high": float(right), "n": n, "rate": share(part, n)}
        rows.append(row | {"low_rate": low_rate, "high_rate": high_rate})
    return rows


def auc(probability: Float[ndarray, " n"], agreeing: Bool[ndarray, " n"]) -> float | None:
    """Return how well the probability separates agreeing values from others; None without both."""
    if agreeing.all() or not agreeing.any():
        return None
    from sklearn.metrics import roc_auc_score  # half a second that other experiments do not need

    return float(roc_auc_score(agreeing, probability))


def chart(result: ExperimentResult) -> charts.Chart:
    """Draw the rate of each bin, with its interval and its size."""
    rows = [
        row | {"top": row["rate"] if row.get("high_rate") is None else row["high_rate"]}
        for row in result.rows_with("rate")
    ]
    edges = sorted({row[end] for row in result.rows for end in ("low", "high")}) or [0.0, 1.0]
    low, high = edges[0], edges[-1]
    domain = [low, high] if low < high else [0.9 * low, 1.1 * high or 1.0]
    # As many digits as show the edges as different numbers.
    digits = (
        ".2~f" if high >= 0.2 else ".3~f" if high >= 0.01 else ".5~f" if high >= 1e-4 else ".1~e"
    )
    title = "largest probability of the value's distribution"
    x = alt.X(
        "low:Q",
        bin="binned",
        title=title,
        scale=alt.Scale(domain=domain, nice=False),
        axis=alt.Axis(values=edges[::2], format=digits),
    )
    top = max([0.0, *(row["top"] for row in rows)])
    y = charts.quantity("rate", "agreement rate", (0.0, min(1.15, 1.15 * top) or 1.0))
    bar = charts.plot(rows).mark_bar(color=charts.BLUE).encode(x=x, x2="high:Q", y=y)
    over = charts.plot(rows).transform_calculate(middle="(datum.low + datum.high) / 2")
    over = over.encode(x=alt.X("middle:Q", title=title))
    interval = over.mark_rule().encode(y=charts.same_axis(y, "low_rate"), y2="high_rate:Q")
    counts = over.mark_text(dy=-7).encode(
        y=charts.same_axis(y, "top"), text=alt.Text("n:Q", format=",")
    )
    return charts.layered(bar, interval, counts)


def summary(result: ExperimentResult) -> str:
    """Say how often the least and the most decided values agree."""
    rows = [row for row in result.rows_with("rate") if row["n"] >= MIN_CASES]
    auc = result.also.get("auc")
    detector = (
        "As a detector of agreement, the largest probability has an area under the curve of"
        f" {format_number(auc)} (0.5 is chance)."
        if auc is not None
        else "The area under the curve is undefined: no memory agrees, or all do."
    )
    if not rows:
        return f"No bin holds {MIN_CASES} memories or more. {detector}"
    shares = [
        f"{format_share(row['rate'])} ({format_interval(row.get('low_rate'), row.get('high_rate'))}"
        f", n = {format_number(row['n'])})"
        for row in ([rows[0], rows[-1]] if len(rows) > 1 else rows)
    ]
    return (
        f"Of the bins with at least {MIN_CASES} memories, the lowest agrees in"
        f" {' and the highest in '.join(shares)}. {detector}"
    )


@claim(
    "The larger a value's maximum, the more often it agrees",
    "the area under the curve is 0.7 or more; in part if above 0.5",
)
def _detector(result: ExperimentResult) -> Evidence | None:
    auc = result.also.get("auc")
    if auc is None:
        return None
    agreeing = sum(round(row["rate"] * row["n"]) for row in result.rows_with("rate", "n"))
    shown = f"area under the curve {format_number(auc)}"
    return Evidence(shown, agreeing, "agreeing memories", auc >= 0.7, auc > 0.5)


EXPERIMENT = Experiment(
    name="max-probability",
    paper="Fig. 6",
    title="Agreement by largest probability",
    description="Share of agreeing memories among those whose value's largest probability falls"
    " in the same bin, over all layers.",
    finding="The paper found that the larger a value's maximum probability, the more often it"
    " agrees with its key; its text gives no number.",
    measure=measure,
    chart=chart,
    summary=summary,
    needs_values=True,
    claims=(_detector,),
    panels=(
        Panel(
            title="area under the curve; 0.5 is chance",
            value="auc",
            percent=False,
            rows=lambda result: [result.also],
        ),
    ),
)
