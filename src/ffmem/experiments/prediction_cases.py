"""Figure 11 (§5.2): who decides a layer's prediction: the residual, the feed-forward part, both?

residual      top(o) = top(r) ≠ top(y)          ffn           top(o) = top(y) ≠ top(r)
agreement     top(o) = top(r) = top(y)          composition   top(o) is neither
"""

from ffmem.experiments import charts
from ffmem.experiments.base import Evidence, Experiment, ExperimentResult, Panel, claim
from ffmem.experiments.context import ExperimentContext
from ffmem.experiments.metrics import CASES, SECTION_5_SAMPLE, STREAM_NOTES, Predictions
from ffmem.experiments.rows import NOTHING, Row, layer_of, mean, rows_with
from ffmem.stats import share, spread
from ffmem.text import format_number, format_share


def measure(context: ExperimentContext) -> tuple[list[Row], Row]:
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
    return rows, {}


def chart(result: ExperimentResult) -> charts.Chart:
    """Draw the cases as stacked bars."""
    colors = (charts.GRAY, charts.GREEN, charts.ORANGE, charts.PURPLE)
    parts = {name: (name, color) for name, color in zip(CASES, colors, strict=True)}
    rows = charts.figure_rows(result.rows, CASES)
    return charts.stacked_bars(rows, result.n_layers, parts, "% of prefixes")


def summary(result: ExperimentResult) -> str:
    """Say whose prediction the layers keep, and what they change it to."""
    rows = result.rows_with(*CASES)
    if not rows:
        return NOTHING
    kept = [row["residual"] + row["agreement"] for row in rows]
    least = min(range(len(rows)), key=kept.__getitem__)
    ffn, composition = (sum(row[name] for row in rows) for name in ("ffn", "composition"))
    owners = {"persistent": "the slots'", "lambda": "the static keys'"}
    owner = owners.get(result.kind, "the feed-forward part's")
    changed = (
        f" Where the layer changes it, the new token is {owner} own in"
        f" {format_share(ffn / (ffn + composition))} of cases and a third one (composition) in"
        f" {format_share(composition / (ffn + composition))}."
        if ffn + composition
        else " No layer ever changes it."
    )
    veto, stay = (
        mean([row[name] for row in rows_with(rows, name)])
        for name in ("veto_rank_median", "kept_rank_median")
    )
    ranks = (
        f" A token that is replaced ranks {format_number(round(veto))} under y, one that is kept"
        f" {format_number(round(stay))} (mean over layers of the median)."
        if veto is not None and stay is not None
        else ""
    )
    return (
        f"The residual's top token stays on top on {format_share(mean(kept))} of the prefixes (mean"
        f" over layers; least in {layer_of(rows[least])}, {format_share(kept[least])})."
        f"{changed}{ranks}"
    )


@claim(
    "Layers mostly keep the residual's prediction",
    "residual and agreement together exceed 50 % in every layer; in part if in half of the layers",
)
def _kept(result: ExperimentResult) -> Evidence | None:
    rows = result.rows_with("residual", "agreement")
    if not rows:
        return None
    kept = [row["residual"] + row["agreement"] for row in rows]
    inside = [part > 0.5 for part in kept]
    shown = (
        f"kept on {format_share(min(kept))} to {format_share(max(kept))} of prefixes; the majority"
        f" in {sum(inside)} of {len(rows)} layers"
    )
    return Evidence.by_layer(shown, rows, "prefixes", inside)


@claim(
    "A changed prediction is rarely the feed-forward part's own, mostly a composition",
    "composition is the majority of changes in every layer; in part if in half of the layers",
)
def _composition(result: ExperimentResult) -> Evidence | None:
    rows = [
        row for row in result.rows_with("ffn", "composition") if row["ffn"] + row["composition"]
    ]
    if not rows:
        return None
    ffn, composition = (sum(row[name] for row in rows) for name in ("ffn", "composition"))
    inside = [row["composition"] > row["ffn"] for row in rows]
    shown = (
        f"composition is {format_share(composition / (ffn + composition))} of the changes over all"
        f" layers; the majority in {sum(inside)} of {len(rows)} layers"
    )
    n = round(sum((row["ffn"] + row["composition"]) * (row.get("n") or 0) for row in rows))
    return Evidence.by_layer(shown, rows, "changes", inside)._replace(n=n)


EXPERIMENT = Experiment(
    name="prediction-cases",
    paper="Fig. 11",
    title="Residual, feed-forward, or both",
    description="Whether the top token of a layer's output o is that of the residual r, of the"
    " feed-forward output y (ffn), of both (agreement), or of neither (composition).",
    finding="The paper found that layers mostly keep the residual's prediction; where a layer"
    " changes it, the new token is rarely the feed-forward part's own, but mostly a composition.",
    measure=measure,
    chart=chart,
    summary=summary,
    metrics=(Predictions,),
    paper_values=(SECTION_5_SAMPLE,),
    claims=(_kept, _composition),
    panels=tuple(Panel(title=f"prefixes with top(o) by {name}", value=name) for name in CASES),
    notes=STREAM_NOTES,
)
