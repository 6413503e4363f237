"""What a model shows in the experiments of Sections 3 and 4, in words, from the rows alone."""

from ffmem.experiments.result import Result
from ffmem.reporting.numbers import (
    Row,
    deep,
    interval,
    known,
    mean,
    n_layers_of,
    number,
    percent,
    shallow,
    sources_of,
    span,
    trend,
    weighted,
)
from ffmem.stats import wilson

NOTHING = "No layer gave a number: there was nothing to measure."
ENOUGH = 30
"""Memories that a bin needs before a sentence speaks of it."""


def patterns(result: Result) -> str:
    """Return where shallow and semantic patterns prevail, source by source."""
    rows = known(result.rows, "shallow", "semantic", "uncovered")
    if not rows:
        return NOTHING
    return " ".join(
        _of_source(source, own)
        for source in sources_of(result)
        if (own := [row for row in rows if row["source"] == source])
    )


def _of_source(source: str, rows: list[Row]) -> str:
    uncovered = weighted(rows, "uncovered", "n")
    covered = None if uncovered is None else 1 - uncovered
    per_key = weighted(rows, "patterns_per_key", "keys" if known(rows, "keys") else "n")
    having = weighted(rows, "with_pattern", "keys")
    told = f"Source {source}: {percent(covered)} of the triggers show a pattern, "
    told += f"{number(per_key)} patterns per memory"
    if having is not None:
        told += f", and {percent(having)} of {number(sum(row['keys'] for row in rows))} memories"
        told += " have one"
    semantic = [row["layer"] for row in rows if row["semantic"] > row["shallow"]]
    told += f"; semantic triggers outnumber shallow ones in {len(semantic)} of {len(rows)} layers"
    told += f", first in layer {min(semantic) + 1}" if semantic else ""
    along = {name: trend([row[name] for row in rows]) for name in ("shallow", "semantic")}
    if None not in along.values():
        told += (
            f". With depth the shallow share correlates at {number(along['shallow'])},"
            f" the semantic share at {number(along['semantic'])} (Spearman)"
        )
    return f"{told}."


def token_removal(result: Result) -> str:
    """Return what each token means to the coefficient."""
    removed = [row for row in known(result.rows, "median") if row["how"] == "removed"]
    last = [row for row in removed if row["token"] == "last"]
    if not last:
        return NOTHING

    def typical(token: str, how: str) -> str:
        rows = [r for r in known(result.rows, "median") if (r["token"], r["how"]) == (token, how)]
        return percent(mean([row["median"] for row in rows]), signed=True)

    ends = f"{percent(last[0]['median'], True)} in layer {last[0]['layer'] + 1}"
    if len(last) > 1:
        ends += f" and {percent(last[-1]['median'], True)} in layer {last[-1]['layer'] + 1}"
    worst = min(removed, key=lambda row: (row["median"], row["layer"]))
    return (
        f"Without its last token a trigger's coefficient changes by {typical('last', 'removed')}"
        f" (median, mean over layers; {ends}), without the first by"
        f" {typical('first', 'removed')}, without a random one by {typical('random', 'removed')};"
        f" replacing the last token instead gives {typical('last', 'replaced')}."
        f" The largest drop is that of the {worst['token']} token in layer {worst['layer'] + 1}:"
        f" {percent(worst['median'], True)}{_middle_half(worst)}, n = {number(worst['n'])}."
    )


def _middle_half(row: Row) -> str:
    if row.get("q1") is None or row.get("q3") is None:
        return ""
    return f" (middle half {percent(row['q1'], True)} to {percent(row['q3'], True)})"


def agreement(result: Result) -> str:
    """Return where agreement is highest, beside its baselines."""
    rows = known(result.rows, "rate")
    if not rows:
        return NOTHING
    n_layers = n_layers_of(result)
    best = max(rows, key=lambda row: (row["rate"], -row["layer"]))
    lower = [row["rate"] for row in rows if row["layer"] in shallow(n_layers, 10)]
    upper = [row["rate"] for row in rows if row["layer"] in deep(n_layers, 11)]
    parts = [
        f"{percent(mean(rates))} in {span(layers)}"
        for rates, layers in ((lower, shallow(n_layers, 10)), (upper, deep(n_layers, 11)))
        if rates
    ]
    above = sum(row["low"] > row["permutation"] for row in known(rows, "low", "permutation"))
    return (
        f"The rate is highest in layer {best['layer'] + 1}: {percent(best['rate'])}"
        f" ({interval(best.get('low'), best.get('high'))}, n = {number(best['n'])}), where permuted"
        f" next tokens give {percent(best.get('permutation'))}, always guessing the most frequent"
        f" token {percent(best.get('unigram'))}, and the last token in place of the next"
        f" {percent(best.get('last_token_rate'))}. On average it is {' and '.join(parts)};"
        f" the interval lies above the permuted baseline in {above} of {len(rows)} layers."
    )


def next_token_rank(result: Result) -> str:
    """Return how the rank of the next token moves through the layers."""
    rows = known(result.rows, "q1", "median", "q3")
    if not rows:
        return NOTHING
    best = min(rows, key=lambda row: (row["median"], row["layer"]))
    return (
        f"The median rank (0 is the top) is {number(round(rows[0]['median']))} in layer"
        f" {rows[0]['layer'] + 1} and {number(round(rows[-1]['median']))} in layer"
        f" {rows[-1]['layer'] + 1}; it is lowest in layer {best['layer'] + 1},"
        f" {number(round(best['median']))}, where the middle half of the memories lies between"
        f" {number(round(best['q1']))} and {number(round(best['q3']))} (n = {number(best['n'])})."
    )


def max_probability(result: Result) -> str:
    """Return agreement among the least and the most decided values."""
    rows = [row for row in known(result.rows, "rate") if row["n"] >= ENOUGH]
    auc = result.also.get("auc")
    told = (
        "The area under the curve of the largest probability as a detector of agreement is"
        f" {number(auc)} (0.5 is chance)."
        if auc is not None
        else "No area under the curve is defined: no memory agrees, or all do."
    )
    if not rows:
        return f"No bin holds {ENOUGH} memories or more. {told}"
    ends = [rows[0], rows[-1]] if len(rows) > 1 else rows
    shares = [
        f"{percent(row['rate'])} ({interval(row.get('low_rate'), row.get('high_rate'))},"
        f" n = {number(row['n'])})"
        for row in ends
    ]
    return (
        f"Of the bins with at least {ENOUGH} memories, the lowest agrees in"
        f" {' and the highest in '.join(shares)}. {told}"
    )


def predictive_values(result: Result) -> str:
    """Return where the most predictive values are, and whether their triggers bear them out."""
    n = len(result.rows)
    if not n:
        return NOTHING
    upper = deep(n_layers_of(result), 11)
    inside = sum(row["layer"] in upper for row in result.rows)
    agreeing = sum((row.get("agreeing") or 0) > 0 for row in result.rows)
    low, high = wilson(agreeing, n)
    control = result.also.get("random_control") or {}
    beside = (
        f", against {number(control['with_agreeing_trigger'])} of {number(control['n'])} values"
        f" drawn at random (mean precision {percent(result.also.get('mean_precision'))} against"
        f" {percent(control.get('mean_precision'))})"
        if control.get("n") and control.get("with_agreeing_trigger") is not None
        else ""
    )
    return (
        f"Of the {n} values with the largest probabilities {inside} lie in {span(upper)};"
        f" {agreeing} have a trigger whose next token they predict"
        f" ({interval(low, high)}){beside}."
    )
