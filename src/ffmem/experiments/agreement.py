"""Figure 4 (§4): do values predict the next token of their memory's top trigger?

    rate = #{i: top(vᵢ) = wᵢ} / n,    wᵢ = next token of memory i's top trigger,    n = #{wᵢ}
    permutation = Σ_w P(top = w) · P(next = w): the rate that chance gives to the same tokens

The published script compares with the last token of the trigger: `last_token_rate`.
"""

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Shaped
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
from ffmem.experiments.rows import NOTHING, Row, halves, layer_of, rows_with, smallest_n
from ffmem.indexing.triggers import TopTriggers, last_tokens
from ffmem.stats import share, share_row
from ffmem.text import format_interval, format_number, format_share

if TYPE_CHECKING:
    from ffmem.experiments.values import ValueReadings
    from ffmem.models.memories import Memories

LOWER_RATE = PaperValue("agreement rate, layers 1–10", "about 0 %", "Sec. 4, Fig. 4")
UPPER_RATE = PaperValue("agreement rate, layers 11–16", "up to 3.5 %", "Sec. 4, Fig. 4")
RANDOM_RATE = PaperValue("agreement of a random token", "0.0004 %", "Sec. 4")


def measure(context: ExperimentContext) -> tuple[list[Row], Row]:
    """Measure how often the values of each layer predict the next token of their top trigger."""
    commonest = int(context.frequencies.argmax())
    baselines = {
        "uniform": 1 / context.memories.vocabulary,
        "unigram": share(int(context.frequencies[commonest]), int(context.frequencies.sum())),
    }
    rows = [
        {"layer": layer, **agreement_row(context, layer, baselines)}
        for layer in context.index.layout.memory_layers
    ]
    also = {
        "unigram_token": context.index.token(commonest),
        "unigram_over": "every token of the index's corpus",
    }
    return rows, also


def agrees(triggers: TopTriggers, values: "ValueReadings") -> Bool[ndarray, " memory"]:
    """Return which memories' values have the next token of their top trigger as top token."""
    agreeing: ndarray = triggers.exists & (values.top == triggers.next_token)
    return agreeing


def agreement_row(context: ExperimentContext, layer: int, baselines: Row) -> Row:
    """Return the rate of one layer, its interval, and what chance would give."""
    triggers, values = context.top_triggers[layer], context.values[layer]
    exists, agreeing = triggers.exists, agrees(triggers, values)
    n = int(exists.sum())
    predicts_last = exists & (values.top == last_tokens(context.index, triggers.prefix))
    row = {
        **share_row("rate", agreeing[exists]),
        "no_next": int(triggers.no_next.sum()),
        "no_trigger": int(triggers.no_trigger.sum()),
        **baselines,
        "permutation": permutation(values.top[exists], triggers.next_token[exists]),
        "last_token_rate": share(int(predicts_last.sum()), n),
        "rate_at_10": share(int((exists & (values.next_rank < 10)).sum()), n),
    }
    for name, sign in (("positive", 1), ("negative", -1)):  # one sign alone in ungated models
        own = triggers.sign == sign
        size = int(own.sum()) if context.memories.gated else None
        rate = None if size is None else share(int((agreeing & own).sum()), size)
        row |= {f"{name}_rate": rate, f"{name}_n": size}
    in_band = in_head_band(context.memories, triggers)
    return row | {"head_band_share": None if in_band is None else share(int(in_band.sum()), n)}


def in_head_band(memories: "Memories", triggers: TopTriggers) -> Bool[ndarray, " memory"] | None:
    """Return which next tokens are in the head band of an adaptive softmax; None without one.

    With coefficient 1 words of other bands hardly ever win: they rank behind most of the head.
    """
    if not memories.head.adaptive:
        return None
    inside: ndarray = triggers.exists & (triggers.next_token < memories.config.band_sizes[0])
    return inside


def permutation(tops: Shaped[ndarray, " n"], nexts: Shaped[ndarray, " n"]) -> float | None:
    """Return the expected rate if next tokens were shuffled among the same memories."""
    if not len(tops):
        return None
    size = int(max(tops.max(), nexts.max())) + 1
    pairs = np.bincount(tops, minlength=size) * np.bincount(nexts, minlength=size)
    return int(pairs.sum()) / len(tops) ** 2


def chart(result: ExperimentResult) -> charts.Chart:
    """Draw the rate of each layer beside its baselines."""
    colors = {
        "next token": charts.BLUE,
        "permuted": charts.VERMILION,
        "most frequent token": charts.ORANGE,
        "last token": charts.PURPLE,
    }
    names = ["rate", "low", "high", "permutation", "unigram", "last_token_rate"]
    plot = charts.LayerPlot(result, names, charts.quantity("rate", "agreement rate (%)"), colors)
    return charts.layered(
        plot.bars("rate", "next token"),
        plot.intervals("low", "high"),
        plot.ticks("unigram", "most frequent token"),
        plot.ticks("permutation", "permuted"),
        plot.points("last_token_rate", "last token"),
    )


def summary(result: ExperimentResult) -> str:
    """Say where agreement is highest, beside its baselines."""
    rows = result.rows_with("rate")
    if not rows:
        return NOTHING
    best = max(rows, key=lambda row: (row["rate"], -row["layer"]))
    parts = halves(rows, "rate", result.n_layers, 11)
    means = (
        f"The mean rate is {format_share(parts.below)} in {parts.lower} and"
        f" {format_share(parts.above)} in {parts.upper}; the"
        if parts
        else "The"
    )
    above = sum(row["low"] > row["permutation"] for row in rows_with(rows, "low", "permutation"))
    return (
        f"The rate is highest in {layer_of(best)}: {format_share(best['rate'])}"
        f" ({format_interval(best.get('low'), best.get('high'))}, n = {format_number(best['n'])})."
        f" There, permuted next tokens give {format_share(best.get('permutation'))}, the most"
        f" frequent token {format_share(best.get('unigram'))}, and the trigger's last token"
        f" {format_share(best.get('last_token_rate'))}. {means} interval lies above the permuted"
        f" baseline in {above} of {len(rows)} layers."
    )


@claim(
    "Values predict what follows their keys' triggers in upper layers, not in lower ones",
    "the mean rate of the upper layers (the paper's 11–16) is at least twice that of the lower"
    " ones, and the highest layer's interval is above the permuted baseline; in part if only one"
    " is true",
    LOWER_RATE,
    UPPER_RATE,
    over_depth=True,
)
def _upper_layers(result: ExperimentResult) -> Evidence | None:
    rows = result.rows_with("rate", "low", "permutation")
    parts = halves(rows, "rate", result.n_layers, 11)
    if parts is None:
        return None
    best = max(rows, key=lambda row: row["rate"])
    shown = (
        f"{format_share(parts.below)} in {parts.lower}, {format_share(parts.above)} in"
        f" {parts.upper}, at most {format_share(best['rate'])} ({layer_of(best)}; permuted"
        f" {format_share(best['permutation'])})"
    )
    good = parts.above > 0 and parts.above >= 2 * parts.below, best["low"] > best["permutation"]
    return Evidence(shown, smallest_n(rows), "memories per layer", all(good), any(good))


@claim(
    "Values agree with what follows far more often than by chance",
    "the highest layer's interval is above always guessing the most frequent token; in part if"
    " above a random token",
    UPPER_RATE,
    RANDOM_RATE,
)
def _above_chance(result: ExperimentResult) -> Evidence | None:
    rows = result.rows_with("rate", "low", "uniform", "unigram")
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
    " vocabulary, ranks first the token that follows the memory's strongest trigger.",
    finding="The paper found almost no agreement in the lower layers, and a rate far above chance"
    " in the upper ones.",
    measure=measure,
    chart=chart,
    summary=summary,
    needs_values=True,
    paper_values=(LOWER_RATE, UPPER_RATE, RANDOM_RATE),
    claims=(_upper_layers, _above_chance),
    panels=(
        Panel(
            title="agreement rate",
            value="rate",
            interval=("low", "high"),
            control=("permutation", "next tokens permuted"),
            paper=(
                PaperMark(LOWER_RATE, 0.0, layers=(1, 10)),
                PaperMark(UPPER_RATE, 0.035, layers=(11, 16)),
            ),
        ),
        Panel(title="the trigger's last token instead of the next", value="last_token_rate"),
    ),
)
