"""What a model shows in the experiments of Section 5, in words, from the rows alone."""

from itertools import pairwise

from ffmem.experiments.kinds import LAMBDA, PERSISTENT
from ffmem.experiments.result import Result
from ffmem.reporting.key_findings import NOTHING
from ffmem.reporting.numbers import (
    Row,
    interval,
    interval_of_cases,
    known,
    mean,
    most_entropy,
    n_layers_of,
    number,
    percent,
)
from ffmem.stats import wilson

ACTIVE = {
    "positive": "a positive coefficient",
    "gate": "an open gate",
    "effect": "the smallest set that carries 90 % of the contribution",
}

PARTS = {PERSISTENT: "the slots'", LAMBDA: "the static keys'"}
"""Whose y is, where it is not a feed-forward layer's."""


def _ends(rows: list[Row], field: str) -> tuple[Row, Row]:
    """Return the rows of the smallest and the largest number, ties to the earlier."""
    return min(rows, key=lambda row: row[field]), max(rows, key=lambda row: row[field])


def _range(rows: list[Row], field: str, beside: str | None = None) -> str:
    """Return the smallest and the largest share with their layers."""

    def told(row: Row) -> str:
        more = f"; {beside} {percent(row.get(beside))}" if beside else ""
        return f"{percent(row[field])} (layer {row['layer'] + 1}{more})"

    low, high = _ends(rows, field)
    return told(low) if low is high else f"{told(low)} to {told(high)}"


def active_memories(result: Result) -> str:
    """Return how many memories are active, by each definition."""
    told = []
    for name, words in ACTIVE.items():
        rows = [row for row in known(result.rows, "median") if row["definition"] == name]
        if rows:
            told.append(f"by {words} {_range(rows, 'median')}")
    if not told:
        return NOTHING
    return f"The median share of active memories is {'; '.join(told)}."


def zero_agreement(result: Result) -> str:
    """Return how often no memory agrees with the layer, beside chance."""
    rows = known(result.rows, "share")
    told = []
    for target, memories in (("y", "all"), ("o", "all"), ("y", "active"), ("o", "active")):
        own = [row for row in rows if (row["target"], row["memories"]) == (target, memories)]
        if own:
            told.append(
                f"{memories} memories against top({target}) {_range(own, 'share', 'chance')}"
            )
    if not told:
        return NOTHING
    widest = max(((r["high"] - r["low"]) / 2 for r in known(rows, "low", "high")), default=None)
    sure = f" Intervals reach at most ±{100 * widest:.1f} points." if widest is not None else ""
    return f"Examples without any agreeing memory: {'; '.join(told)}.{sure}"


def stop_words(result: Result) -> str:
    """Return whether agreement prefers stop words and short prefixes."""
    groups = {row["group"]: row for row in result.rows}
    agreeing, every = groups.get("agreeing"), groups.get("all")
    if agreeing is None or not agreeing.get("n"):
        return "No memory agreed with its layer in any example: there is no case to describe."

    def told(field: str) -> str:
        low, high = interval_of_cases(result, agreeing, field)
        base = f", {percent(every.get(field))} of all cases" if every else ""
        return f"{percent(agreeing[field])} ({interval(low, high)}{base})"

    return (
        f"Of {number(agreeing['n'])} cases with an agreeing memory the target is a stop word in"
        f" {told('stop_word_share')}, and the prefix is shorter than five tokens in"
        f" {told('short_prefix_share')}."
    )


def residual_prediction(result: Result) -> str:
    """Return how early the prediction stands."""
    rows = known(result.rows, "residual_share")
    if not rows:
        return NOTHING
    middle = rows[(len(rows) - 1) // 2]
    first, last = rows[0], rows[-1]
    told = (
        f"The residual's top token is the model's prediction in {percent(first['residual_share'])}"
        f" of examples in layer {first['layer'] + 1},"
        f" {percent(middle['residual_share'])} at mid-depth (layer {middle['layer'] + 1};"
        f" {interval(middle.get('low'), middle.get('high'))}) and"
        f" {percent(last['residual_share'])} in layer {last['layer'] + 1}."
        f" By mid-depth {percent(middle.get('decided_share'))} are decided for good."
    )
    steps = [
        (after["residual_share"] - before["residual_share"], before["layer"])
        for before, after in pairwise(rows)
    ]
    if not steps:
        return told
    size, layer = max(steps, key=lambda step: (step[0], -step[1]))
    points = f"{100 * size:+.1f}".replace("-", "−")
    return f"{told} The largest step, {points} points, is from layer {layer + 1} to the next."


def residual_probability(result: Result) -> str:
    """Return how sure the residual becomes of the prediction."""
    rows = known(result.rows, "q1", "median", "q3")
    if not rows:
        return NOTHING
    first, last = rows[0], rows[-1]
    half = next((row for row in rows if row["median"] >= 0.5), None)
    passed = f"passes 0.5 in layer {half['layer'] + 1}" if half else "stays below 0.5"
    return (
        f"The median probability of the final prediction goes from {number(first['median'])} in"
        f" layer {first['layer'] + 1} to {number(last['median'])} in layer {last['layer'] + 1}"
        f" (middle half {number(last['q1'])} to {number(last['q3'])}); it {passed}."
    )


def prediction_cases(result: Result) -> str:
    """Return whose prediction the layers keep, and what they change it to."""
    rows = known(result.rows, "residual", "agreement", "ffn", "composition")
    if not rows:
        return NOTHING
    kept = mean([row["residual"] + row["agreement"] for row in rows])
    least = min(rows, key=lambda row: row["residual"] + row["agreement"])
    ffn, composition = (sum(row[name] for row in rows) for name in ("ffn", "composition"))
    part = PARTS.get(str(result.settings.get("kind")), "the feed-forward part's")
    changed = (
        f" Where the layer changes it, the new token is {part} own in"
        f" {percent(ffn / (ffn + composition))} of cases and a third one (composition) in"
        f" {percent(composition / (ffn + composition))}."
        if ffn + composition
        else " No layer ever changes it."
    )
    ranks = [
        mean([row[name] for row in known(rows, name)])
        for name in ("veto_rank_median", "kept_rank_median")
    ]
    veto = (
        f" The token that loses its place ranks {number(round(ranks[0]))} under y, one that keeps"
        f" it {number(round(ranks[1]))} (median, mean over layers)."
        if ranks[0] is not None and ranks[1] is not None
        else ""
    )
    return (
        f"The residual's top token stays on top in {percent(kept)} of examples (mean over layers;"
        f" least in layer {least['layer'] + 1},"
        f" {percent(least['residual'] + least['agreement'])}).{changed}{veto}"
    )


def neural_memory(result: Result) -> str:
    """Return how far the softmax memory is from the layer."""
    rows = known(result.rows, "cosine", "entropy", "top1_mass")
    if not rows:
        return NOTHING
    (low, high), (even, sharp) = _ends(rows, "cosine"), _ends(rows, "top1_mass")
    highest = most_entropy(result)
    most = "" if highest is None else f" of at most {number(highest)}"
    masses = [row["slot_mass"] for row in known(rows, "slot_mass")]
    slots = f" Slots get {percent(mean(masses))} of the attention." if masses else ""
    return (
        f"The softmax memory's output has a mean cosine of {number(low['cosine'])} (layer"
        f" {low['layer'] + 1}) to {number(high['cosine'])} (layer {high['layer'] + 1}) with the"
        f" layer's own. Its entropy is {number(mean([row['entropy'] for row in rows]))} nats{most}"
        f" on average over layers, and its largest weight {number(even['top1_mass'])} (layer"
        f" {even['layer'] + 1}) to {number(sharp['top1_mass'])} (layer {sharp['layer'] + 1})."
        f"{slots}"
    )


def last_layer_composition(result: Result) -> str:
    """Return how many compositions go to a related token."""
    rows = known(result.rows, "related")
    if not rows:
        return "The last layer composed no prediction in the sample that could be judged."
    related = sum(bool(row["related"]) for row in rows)
    low, high = wilson(related, len(rows))
    found = result.also.get("compositions")
    of = f" (of {number(found)} in the sample)" if found is not None else ""
    threshold = result.also.get("threshold")
    rule = result.also.get("rule") or "cosine of the two tokens' embeddings above the threshold"
    layer = result.also.get("layer", n_layers_of(result) - 1) + 1
    limit = f" (threshold {number(threshold)})" if threshold is not None else ""
    return (
        f"Of {number(len(rows))} compositions in layer {layer}{of} {related} go to a"
        f" related token, {percent(related / len(rows))} ({interval(low, high)})."
        f" Related is judged by a rule, not by people: {rule}{limit}."
    )
