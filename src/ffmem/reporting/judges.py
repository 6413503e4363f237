"""How a model's rows speak for or against a claim: its number, and whether a rule is met.

Each function returns None where the rows hold nothing to compare. The rules stand in words in
`claims.py`; the paper's layers are those of the same relative depth (`numbers.py`).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ffmem.experiments.kinds import LAMBDA, PERSISTENT, SOFTMAX
from ffmem.experiments.result import Result
from ffmem.reporting.numbers import (
    Row,
    deep,
    interval,
    interval_of_cases,
    known,
    mean,
    n_layers_of,
    n_values_of,
    number,
    percent,
    shallow,
    span,
    trend,
    widths_of,
)
from ffmem.stats import wilson


class Judged(NamedTuple):
    """A model's number, and which of a rule's two thresholds it passes."""

    model: str
    holds: bool
    partly: bool
    comparable: bool = True
    """Whether the number means what the paper's does."""


_OTHER_ACTIVITY = {
    SOFTMAX: "every weight of a softmax is above 0",
    PERSISTENT: "every weight of a softmax is above 0",
    LAMBDA: "coefficients are linear: m > 0 is a sign, not activity",
}
"""Why m > 0 does not tell which memories are active, by kind of memory."""


def halves(rows: Sequence[Row], field: str, result: Result, paper_layer: int) -> list[float | None]:
    """Return the mean below and from the paper's layer on."""
    n_layers = n_layers_of(result)
    halves = shallow(n_layers, paper_layer - 1), deep(n_layers, paper_layer)
    return [mean([row[field] for row in rows if row["layer"] in half]) for half in halves]


def spans(result: Result, paper_layer: int) -> tuple[str, str]:
    """Return which layers those are."""
    n_layers = n_layers_of(result)
    return span(shallow(n_layers, paper_layer - 1)), span(deep(n_layers, paper_layer))


def last_token(result: Result) -> Judged | None:
    """Judge: the last token matters most, less so in upper layers."""
    medians = {
        (row["layer"], row["token"]): row["median"]
        for row in known(result.rows, "median")
        if row["how"] == "removed"
    }
    rows = [
        {"layer": layer, "last": median, "most": median < min(others)}
        for (layer, token), median in medians.items()
        if token == "last"
        and (others := [medians[layer, o] for o in ("first", "random") if (layer, o) in medians])
    ]
    below, above = halves(rows, "last", result, 10)
    if below is None or above is None:
        return None
    lower, upper = spans(result, 10)
    n = sum(row["most"] for row in rows)
    model = (
        f"largest drop in {n} of {len(rows)} layers; {percent(below, True)} in {lower},"
        f" {percent(above, True)} in {upper}"
    )
    good = (n >= 0.8 * len(rows), above > below)
    return Judged(model, all(good), any(good))


def agreement(result: Result) -> Judged | None:
    """Judge: values agree with their keys in upper layers only."""
    rows = known(result.rows, "rate", "low", "permutation")
    below, above = halves(rows, "rate", result, 11)
    if below is None or above is None:
        return None
    best = max(rows, key=lambda row: row["rate"])
    lower, upper = spans(result, 11)
    model = (
        f"{percent(below)} in {lower}, {percent(above)} in {upper}, at most"
        f" {percent(best['rate'])} (layer {best['layer'] + 1}; permuted"
        f" {percent(best['permutation'])})"
    )
    good = (above > 0 and above >= 2 * below, best["low"] > best["permutation"])
    return Judged(model, all(good), any(good))


def above_chance(result: Result) -> Judged | None:
    """Judge: the highest rate is no accident."""
    rows = known(result.rows, "rate", "low", "uniform", "unigram")
    if not rows:
        return None
    best = max(rows, key=lambda row: row["rate"])
    model = (
        f"{percent(best['rate'])} ({interval(best['low'], best.get('high'))}); random token"
        f" {percent(best['uniform'])}, most frequent token {percent(best['unigram'])}"
    )
    return Judged(model, best["low"] > best["unigram"], best["low"] > best["uniform"])


def falling_rank(result: Result) -> Judged | None:
    """Judge: the next token's rank improves through the layers."""
    return _moving(result, "median rank", -1)


def rising_probability(result: Result) -> Judged | None:
    """Judge: the prediction's probability rises through the layers."""
    return _moving(result, "median", 1)


def _moving(result: Result, what: str, sign: int) -> Judged | None:
    rows = known(result.rows, "median")
    along = trend([row["median"] for row in rows])
    if along is None:
        return None
    first, last = rows[0], rows[-1]
    model = (
        f"{what} {number(first['median'])} in layer {first['layer'] + 1} and"
        f" {number(last['median'])} in layer {last['layer'] + 1}; correlation with depth"
        f" {number(along)}"
    )
    return Judged(model, sign * along >= 0.5, sign * along > 0)


def detected(result: Result) -> Judged | None:
    """Judge: values with a larger maximum agree more often."""
    auc = result.also.get("auc")
    if auc is None:
        return None
    return Judged(f"area under the curve {number(auc)}", auc >= 0.7, auc > 0.5)


def predictive_layers(result: Result) -> Judged | None:
    """Judge: the most predictive values are in the upper layers."""
    n, n_layers = len(result.rows), n_layers_of(result)
    upper = deep(n_layers, 11)
    if not n or len(upper) == n_layers:
        return None
    inside = sum(row["layer"] in upper for row in result.rows)
    widths = widths_of(result)
    even = len(upper) / n_layers
    if any(widths):
        even = sum(widths[layer] for layer in upper) / sum(widths)
    model = f"{inside} of {n} in {span(upper)} ({percent(even)} if spread evenly)"
    low = wilson(inside, n)[0] or 0.0
    return Judged(model, inside / n >= 0.87, low > even)


def predictive_triggers(result: Result) -> Judged | None:
    """Judge: many of the most predictive values have a trigger that they predict."""
    n = len(result.rows)
    if not n or n >= n_values_of(result):  # all values are not the most predictive ones
        return None
    agreeing = sum((row.get("agreeing") or 0) > 0 for row in result.rows)
    control = result.also.get("random_control") or {}
    beside, share = "", 0.0
    if control.get("n") and control.get("with_agreeing_trigger") is not None:
        share = control["with_agreeing_trigger"] / control["n"]
        beside = f" ({percent(share)} of values drawn at random)"
    more = (wilson(agreeing, n)[0] or 0.0) > share
    return Judged(f"{agreeing} of {n}{beside}", more and agreeing / n >= 0.36, more)


def active(result: Result) -> Judged | None:
    """Judge: a tenth to a half of the memories are active."""
    if why := _OTHER_ACTIVITY.get(str(result.settings.get("kind"))):
        return Judged(why, False, False, comparable=False)
    definition = "gate" if result.settings.get("gated") else "positive"
    rows = [row for row in known(result.rows, "median") if row["definition"] == definition]
    if not rows:
        return None
    inside = sum(0.1 <= row["median"] <= 0.5 for row in rows)
    low, high = min(row["median"] for row in rows), max(row["median"] for row in rows)
    words = "gate open" if definition == "gate" else "m > 0"
    model = (
        f"medians from {percent(low)} to {percent(high)} ({words}); {inside} of {len(rows)} layers"
        " within"
    )
    return Judged(model, inside == len(rows), 2 * inside >= len(rows))


def dip(result: Result) -> Judged | None:
    """Judge: fewest memories are active around the paper's layer 10."""
    if why := _OTHER_ACTIVITY.get(str(result.settings.get("kind"))):
        return Judged(why, False, False, comparable=False)
    definition = "gate" if result.settings.get("gated") else "positive"
    rows = [row for row in known(result.rows, "median") if row["definition"] == definition]
    n_layers = n_layers_of(result)
    if len(rows) < 3:
        return None
    least = min(rows, key=lambda row: row["median"])
    depth = (least["layer"] + 1) / n_layers
    model = (
        f"fewest in layer {least['layer'] + 1} of {n_layers}, {percent(least['median'])}; the"
        f" paper's layer 10 lies at layer {deep(n_layers, 10)[0] + 1}"
    )
    return Judged(model, abs(depth - 10 / 16) <= 2 / 16, 0.25 < depth <= 0.75)


def zero(result: Result) -> Judged | None:
    """Judge: in most examples no memory agrees with the layer."""
    rows = [
        row
        for row in known(result.rows, "share")
        if (row["target"], row["memories"]) == ("y", "all")
    ]
    if not rows:
        return None
    least = min(rows, key=lambda row: row["share"])
    inside = sum(row["share"] >= 0.68 for row in rows)
    model = (
        f"at least {percent(least['share'])} (layer {least['layer'] + 1}); {inside} of {len(rows)}"
        f" layers reach it; chance there {percent(least.get('chance'))}"
    )
    return Judged(model, inside == len(rows), 2 * inside >= len(rows))


def stop_word(result: Result) -> Judged | None:
    """Judge: agreeing cases are mostly stop words."""
    return _preferred(result, "stop_word_share", 0.5)


def short_prefix(result: Result) -> Judged | None:
    """Judge: agreeing cases are often short prefixes."""
    return _preferred(result, "short_prefix_share", 0.33)


def _preferred(result: Result, field: str, enough: float) -> Judged | None:
    groups = {row["group"]: row for row in known(result.rows, field)}
    if not {"agreeing", "all"} <= set(groups):
        return None
    share, base = groups["agreeing"][field], groups["all"][field]
    low, high = interval_of_cases(result, groups["agreeing"], field)
    more = low is not None and low > base
    model = f"{percent(share)} ({interval(low, high)}); {percent(base)} of all cases"
    return Judged(model, more and share >= enough, more)


def early(result: Result) -> Judged | None:
    """Judge: a third of the predictions stand in the bottom few layers."""
    n_layers = n_layers_of(result)
    bottom = shallow(n_layers, 4)
    rows = [row for row in known(result.rows, "residual_share") if row["layer"] in bottom]
    if not rows or n_layers == 1:
        return None
    best = max(rows, key=lambda row: row["residual_share"])
    share = best["residual_share"]
    model = f"up to {percent(share)} in {span(bottom)}"
    return Judged(model, share >= 0.25, share >= 0.125)


def late_growth(result: Result) -> Judged | None:
    """Judge: the share grows fastest from the paper's layer 10 on."""
    rows, n_layers = known(result.rows, "residual_share"), n_layers_of(result)
    upper = deep(n_layers, 10)
    steps: list[Row] = [
        {"layer": after["layer"], "step": after["residual_share"] - before["residual_share"]}
        for before, after in pairwise(rows)
    ]
    below, above = (
        mean([one["step"] for one in steps if (one["layer"] in upper) == late])
        for late in (False, True)
    )
    if below is None or above is None:
        return None
    lower_span, upper_span = spans(result, 10)
    model = (
        f"{100 * below:+.1f} points per layer in {lower_span}, {100 * above:+.1f} in {upper_span}"
    ).replace("-", "−")
    return Judged(model, above > 0 and above >= 1.5 * below, above > max(below, 0.0))


def residual_wins(result: Result) -> Judged | None:
    """Judge: layers mostly keep the residual's prediction."""
    rows = known(result.rows, "residual", "agreement")
    if not rows:
        return None
    kept = [row["residual"] + row["agreement"] for row in rows]
    inside = sum(share > 0.5 for share in kept)
    model = (
        f"kept in {percent(min(kept))} to {percent(max(kept))} of examples; the majority in"
        f" {inside} of {len(rows)} layers"
    )
    return Judged(model, inside == len(rows), 2 * inside >= len(rows))


def composes(result: Result) -> Judged | None:
    """Judge: a changed prediction is mostly a composition."""
    changed = [
        row for row in known(result.rows, "ffn", "composition") if row["ffn"] + row["composition"]
    ]
    if not changed:
        return None
    ffn, composition = (sum(row[name] for row in changed) for name in ("ffn", "composition"))
    inside = sum(row["composition"] > row["ffn"] for row in changed)
    model = (
        f"composition is {percent(composition / (ffn + composition))} of the changes of all layers;"
        f" the majority in {inside} of {len(changed)} layers"
    )
    return Judged(model, inside == len(changed), 2 * inside >= len(changed))


def distant(result: Result) -> Judged | None:
    """Judge: most compositions of the last layer go to a distant word."""
    rows = known(result.rows, "related")
    if not rows:
        return None
    n = sum(not row["related"] for row in rows)
    low, high = wilson(n, len(rows))
    share = n / len(rows)
    model = f"{n} of {len(rows)} distant by embeddings ({interval(low, high)})"
    return Judged(model, low is not None and low > 0.5, share > 0.5)
