"""Figure 4 (§4): do values predict the next token of their memory's top trigger?

    rate = #{i: top(vᵢ) = wᵢ} / n,    wᵢ = next token of memory i's top trigger,    n = #{wᵢ}
    permutation = Σ_w P(top = w) · P(next = w): the rate that chance gives to the same tokens

The published script compares with the last token of the trigger: `last_token_rate`.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Int, Shaped
from numpy import ndarray

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
    ORANGE,
    PURPLE,
    VERMILION,
    Chart,
    bars,
    figure_rows,
    intervals,
    layer_axis,
    layered,
    plot,
    quantity,
    same_axis,
    series,
    series_color,
    ticks,
)
from ffmem.experiments.rows import (
    NOTHING,
    count_layers,
    format_halves,
    format_layers,
    known,
    lower_layers,
    mean,
    means_below_and_above,
    smallest_n,
    upper_layers,
)
from ffmem.stats import share, wilson
from ffmem.text import format_interval, format_number, format_share

if TYPE_CHECKING:
    from ffmem.experiments.context import ExperimentContext
    from ffmem.experiments.triggers import TopTriggers
    from ffmem.experiments.values import ValueReadings
    from ffmem.models.memories import Memories

PAPER_VALUES = (
    PaperValue("agreement rate, layers 1–10", "about 0 %", "Sec. 4, Fig. 4"),
    PaperValue("agreement rate, layers 11–16", "up to 3.5 %", "Sec. 4, Fig. 4"),
    PaperValue("agreement of a random token", "0.0004 %", "Sec. 4"),
)


def measure(context: "ExperimentContext") -> Measurement:
    """Measure how often the values of each layer predict the next token of their top trigger."""
    commonest = int(context.frequencies.argmax())
    unigram = share(int(context.frequencies[commonest]), int(context.frequencies.sum()))
    baselines = {"uniform": 1 / context.memories.vocabulary, "unigram": unigram}
    rows = [
        {
            "layer": layer,
            **agreement_row(
                context.top_triggers[layer], context.values[layer], context.memories, baselines
            ),
        }
        for layer in context.index.layout.memory_layers
    ]
    also = {
        "unigram_token": context.index.token(commonest),
        "unigram_over": "every token of the index's corpus",
    }
    return Measurement(rows, also)


def agrees(top_triggers: "TopTriggers", values: "ValueReadings") -> Bool[ndarray, " memory"]:
    """Return which memories' values have the next token of their top trigger as top token."""
    agreeing: ndarray = top_triggers.exists & (values.top == top_triggers.next_token)
    return agreeing


def agreement_row(
    top_triggers: "TopTriggers",
    values: "ValueReadings",
    memories: "Memories",
    baselines: dict[str, Any],
) -> Row:
    """Return the rate of one layer, its interval, and what chance would give."""
    exists, agreeing = top_triggers.exists, agrees(top_triggers, values)
    n, part = int(exists.sum()), int(agreeing.sum())
    low, high = wilson(part, n)
    band = head_band(memories)
    in_band = exists & (top_triggers.next_token < (band or 0))
    last_token = values.top[exists] == top_triggers.last_token[exists]
    return {
        "rate": share(part, n),
        "low": low,
        "high": high,
        "n": n,
        "no_next": int(top_triggers.no_next.sum()),
        "no_trigger": int(top_triggers.no_trigger.sum()),
        **baselines,
        "permutation": permutation(values.top[exists], top_triggers.next_token[exists]),
        "last_token_rate": share(int(last_token.sum()), n),
        "rate_at_10": share(int((exists & (values.next_rank < 10)).sum()), n),
        **_of_sign("positive", top_triggers.sign == 1, agreeing, memories.gated),
        **_of_sign("negative", top_triggers.sign == -1, agreeing, memories.gated),
        "head_band_share": None if band is None else share(int(in_band.sum()), n),
    }


def head_band(memories: "Memories") -> int | None:
    """Return how many tokens the head band of an adaptive softmax holds; None without one.

    With coefficient 1 words of other bands hardly ever win: they rank behind most of the head.
    """
    return int(memories.config.band_sizes[0]) if memories.head.adaptive else None


def permutation(tops: Shaped[ndarray, " n"], nexts: Shaped[ndarray, " n"]) -> float | None:
    """Return the expected rate if next tokens were dealt out anew among the same memories."""
    if not len(tops):
        return None
    size = int(max(tops.max(), nexts.max())) + 1
    pairs: Int[ndarray, " vocab"] = np.bincount(tops, minlength=size) * np.bincount(
        nexts, minlength=size
    )
    return int(pairs.sum()) / len(tops) ** 2


def _of_sign(
    name: str, mask: Bool[ndarray, " memory"], agreeing: Bool[ndarray, " memory"], gated: bool
) -> Row:
    """Return the rate among top triggers of one sign; None in ungated models, with one sign."""
    n = int(mask.sum())
    rate = share(int((agreeing & mask).sum()), n)
    return {f"{name}_rate": rate if gated else None, f"{name}_n": n if gated else None}


def chart(result: ExperimentResult) -> Chart:
    """Draw the rate of each layer beside its baselines."""
    names = ["rate", "low", "high", "permutation", "unigram", "last_token_rate"]
    rows, n_layers = figure_rows(result.rows, names), count_layers(result)
    color = series_color(
        {
            "next token": BLUE,
            "permuted": VERMILION,
            "most frequent token": ORANGE,
            "last token": PURPLE,
        }
    )
    y = quantity("rate", "agreement rate (%)")
    last = plot(series(known(rows, "last_token_rate"), "last token")).mark_point(size=22)
    return layered(
        bars(series(rows, "next token"), n_layers, y, color),
        intervals(rows, n_layers, y, "low", "high"),
        ticks(series(rows, "most frequent token"), n_layers, same_axis(y, "unigram"), color),
        ticks(series(rows, "permuted"), n_layers, same_axis(y, "permutation"), color),
        last.encode(x=layer_axis(n_layers), y=same_axis(y, "last_token_rate"), color=color),
    )


def summary(result: ExperimentResult) -> str:
    """Say where agreement is highest, beside its baselines."""
    rows, n_layers = known(result.rows, "rate"), count_layers(result)
    if not rows:
        return NOTHING
    best = max(rows, key=lambda row: (row["rate"], -row["layer"]))
    averages = [
        f"{format_share(mean(rates))} in {format_layers(layers)}"
        for layers in (lower_layers(n_layers, 10), upper_layers(n_layers, 11))
        if (rates := [row["rate"] for row in rows if row["layer"] in layers])
    ]
    above = sum(row["low"] > row["permutation"] for row in known(rows, "low", "permutation"))
    return (
        f"The rate is highest in layer {best['layer'] + 1}: {format_share(best['rate'])}"
        f" ({format_interval(best.get('low'), best.get('high'))}, n = {format_number(best['n'])})."
        f" There, permuted next tokens give {format_share(best.get('permutation'))}, the most"
        f" frequent token {format_share(best.get('unigram'))}, and the trigger's last token"
        f" {format_share(best.get('last_token_rate'))}. The mean rate is {' and '.join(averages)};"
        f" the interval lies above the permuted baseline in {above} of {len(rows)} layers."
    )


def check_upper_layers(result: ExperimentResult) -> Evidence | None:
    """Check: values agree with their keys in upper layers only."""
    rows = known(result.rows, "rate", "low", "permutation")
    below, above = means_below_and_above(rows, "rate", result, 11)
    if below is None or above is None:
        return None
    best = max(rows, key=lambda row: row["rate"])
    lower, upper = format_halves(result, 11)
    shown = (
        f"{format_share(below)} in {lower}, {format_share(above)} in {upper}, at most"
        f" {format_share(best['rate'])} (layer {best['layer'] + 1}; permuted"
        f" {format_share(best['permutation'])})"
    )
    good = (above > 0 and above >= 2 * below, best["low"] > best["permutation"])
    return Evidence(shown, smallest_n(rows), "memories per layer", all(good), any(good))


def check_above_chance(result: ExperimentResult) -> Evidence | None:
    """Check: the highest rate is no accident."""
    rows = known(result.rows, "rate", "low", "uniform", "unigram")
    if not rows:
        return None
    best = max(rows, key=lambda row: row["rate"])
    shown = (
        f"{format_share(best['rate'])} ({format_interval(best['low'], best.get('high'))}); random"
        f" token {format_share(best['uniform'])}, most frequent token"
        f" {format_share(best['unigram'])}"
    )
    above = best["low"] > best["unigram"], best["low"] > best["uniform"]
    return Evidence(shown, int(best["n"]), "memories", *above)


EXPERIMENT = Experiment(
    name="agreement",
    paper="Fig. 4",
    title="Agreement of keys and values",
    description="Share of a layer's memories whose value v, read as a distribution over the"
    " vocabulary, has on top the token that follows the memory's strongest trigger.",
    finding="The paper found almost no agreement in the lower layers, and a rate far above chance"
    " in the upper ones.",
    measure=measure,
    chart=chart,
    summary=summary,
    needs_values=True,
    paper_values=PAPER_VALUES,
    claims=(
        ClaimCheck(
            claim="Values predict what follows their keys' triggers in upper layers, not in lower"
            " ones",
            rule="the mean rate of the upper layers (the paper's 11–16) is at least twice that of"
            " the lower ones, and the highest layer's interval lies above the permuted baseline;"
            " in part if one of the two",
            check=check_upper_layers,
            values=(0, 1),
            over_depth=True,
        ),
        ClaimCheck(
            claim="This agreement is far above chance",
            rule="the highest layer's interval lies above always guessing the most frequent token;"
            " in part if above a random token",
            check=check_above_chance,
            values=(1, 2),
        ),
    ),
)
