"""Figure 11 (§5.2): who decides a layer's prediction: the residual, the feed-forward part, both?

residual      top(o) = top(r) ≠ top(y)          ffn           top(o) = top(y) ≠ top(r)
agreement     top(o) = top(r) = top(y)          composition   top(o) is neither
"""

from typing import TYPE_CHECKING

from ffmem.experiments.base import (
    LAMBDA,
    PERSISTENT,
    SECTION_5_SAMPLE,
    ClaimCheck,
    Evidence,
    Experiment,
    ExperimentResult,
    Measurement,
)
from ffmem.experiments.charts import (
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    Chart,
    figure_rows,
    stacked_bars,
)
from ffmem.experiments.predictions import CASES, Predictions
from ffmem.experiments.residual_prediction import STREAM_NOTES
from ffmem.experiments.rows import NOTHING, count_layers, known, mean, smallest_n
from ffmem.stats import share, spread
from ffmem.text import format_number, format_share

if TYPE_CHECKING:
    from ffmem.experiments.context import ExperimentContext


def measure(context: "ExperimentContext") -> Measurement:
    """Measure the share of each case, and how y ranks the tokens that the layer drops and keeps."""
    found = context.measured(Predictions)
    cases = found.cases()
    broken = cases["composition"] & (found.residual_top == found.ff_top)
    kept = cases["residual"] | cases["agreement"]
    rows = []
    for layer in context.memories.layout.memory_layers:
        n = len(kept)
        under_y = found.ff_residual_rank[:, layer]
        rows.append(
            {
                "layer": layer,
                **{name: share(int(cases[name][:, layer].sum()), n) for name in CASES},
                "broken_agreement": share(int(broken[:, layer].sum()), n),
                "n": n,
                "veto_rank_median": spread(under_y[~kept[:, layer]])["median"],
                "kept_rank_median": spread(under_y[kept[:, layer]])["median"],
            }
        )
    return Measurement(rows)


def chart(result: ExperimentResult) -> Chart:
    """Draw the cases as stacked bars."""
    colors = dict(zip(CASES, (GREY, GREEN, ORANGE, PURPLE), strict=True))
    parts = {name: (name, color) for name, color in colors.items()}
    return stacked_bars(
        figure_rows(result.rows, CASES), count_layers(result), parts, "% of prefixes"
    )


def summary(result: ExperimentResult) -> str:
    """Say whose prediction the layers keep, and what they change it to."""
    rows = known(result.rows, *CASES)
    if not rows:
        return NOTHING
    kept = [row["residual"] + row["agreement"] for row in rows]
    least = min(range(len(rows)), key=kept.__getitem__)
    ffn, composition = (sum(row[name] for row in rows) for name in ("ffn", "composition"))
    parts = {PERSISTENT: "the slots'", LAMBDA: "the static keys'"}
    part = parts.get(str(result.settings.get("kind")), "the feed-forward part's")
    changed = (
        f" Where the layer changes it, the new token is {part} own in"
        f" {format_share(ffn / (ffn + composition))} of cases and a third one (composition) in"
        f" {format_share(composition / (ffn + composition))}."
        if ffn + composition
        else " No layer ever changes it."
    )
    veto, stay = (
        mean([row[name] for row in known(rows, name)])
        for name in ("veto_rank_median", "kept_rank_median")
    )
    ranks = (
        f" A token that loses its place ranks {format_number(round(veto))} under y, one that keeps"
        f" it {format_number(round(stay))} (mean over layers of the median)."
        if veto is not None and stay is not None
        else ""
    )
    return (
        f"The residual's top token stays on top on {format_share(mean(kept))} of the prefixes (mean"
        f" over layers; least in layer {rows[least]['layer'] + 1}, {format_share(kept[least])})."
        f"{changed}{ranks}"
    )


def check_residual(result: ExperimentResult) -> Evidence | None:
    """Check: layers mostly keep the residual's prediction."""
    rows = known(result.rows, "residual", "agreement")
    if not rows:
        return None
    kept = [row["residual"] + row["agreement"] for row in rows]
    inside = sum(part > 0.5 for part in kept)
    shown = (
        f"kept on {format_share(min(kept))} to {format_share(max(kept))} of prefixes; the majority"
        f" in {inside} of {len(rows)} layers"
    )
    good = inside == len(rows), 2 * inside >= len(rows)
    return Evidence(shown, smallest_n(rows), "prefixes", *good)


def check_composition(result: ExperimentResult) -> Evidence | None:
    """Check: a changed prediction is mostly a composition."""
    changed = [
        row for row in known(result.rows, "ffn", "composition") if row["ffn"] + row["composition"]
    ]
    if not changed:
        return None
    ffn, composition = (sum(row[name] for row in changed) for name in ("ffn", "composition"))
    inside = sum(row["composition"] > row["ffn"] for row in changed)
    shown = (
        f"composition is {format_share(composition / (ffn + composition))} of the changes of all"
        f" layers; the majority in {inside} of {len(changed)} layers"
    )
    n = round(sum((row["ffn"] + row["composition"]) * (row.get("n") or 0) for row in changed))
    good = inside == len(changed), 2 * inside >= len(changed)
    return Evidence(shown, n, "changes", *good)


EXPERIMENT = Experiment(
    name="prediction-cases",
    paper="Fig. 11",
    title="Residual, feed-forward, or both",
    description="Whether the top token of a layer's output o is that of the residual r, of the"
    " feed-forward output y (ffn), of both (agreement), or of neither (composition).",
    finding="The paper found that layers mostly keep the residual's prediction; where one changes"
    " it, the new token is rarely the feed-forward part's own and mostly a composition.",
    measure=measure,
    chart=chart,
    summary=summary,
    metrics=(Predictions,),
    paper_values=(SECTION_5_SAMPLE,),
    claims=(
        ClaimCheck(
            claim="Layers mostly keep the residual's prediction",
            rule="residual and agreement together exceed 50 % in every layer; in part if in half of"
            " them",
            check=check_residual,
        ),
        ClaimCheck(
            claim="A changed prediction is rarely the feed-forward part's own, mostly a"
            " composition",
            rule="composition is the majority of changes in every layer; in part if in half of"
            " them",
            check=check_composition,
        ),
    ),
    notes=STREAM_NOTES,
)
