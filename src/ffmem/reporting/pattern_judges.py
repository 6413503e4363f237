"""How Figure 2's rows speak for or against the paper's claims on patterns.

Judged is one source of labels: people's where they looked, else a language model's, else the
detector's. Only people's follow the paper's protocol; every number says whose it is.
"""

from ffmem.experiments.result import Result
from ffmem.reporting.judges import Judged, halves, spans
from ffmem.reporting.numbers import Row, known, number, percent, sources_of, trend, weighted


def patterns(result: Result) -> Judged | None:
    """Judge: shallow patterns below, semantic ones above."""
    source, labelled = _labelled(result)
    rows = [
        row | {"semantic_more": float(row["semantic"] > row["shallow"])}
        for row in known(labelled, "shallow", "semantic")
    ]
    below, above = halves(rows, "semantic_more", result, 10)
    if below is None or above is None:
        return None
    lower, upper = spans(result, 10)
    model = (
        f"semantic prevails in {percent(below)} of {lower} and {percent(above)} of {upper}"
        f" (source: {source})"
    )
    # Patterns of one kind alone would meet half of the rule everywhere, and say nothing.
    return Judged(model, below <= 0.2 and above >= 0.8, above > below)


def rising_semantic(result: Result) -> Judged | None:
    """Judge: the share of semantic triggers grows with depth."""
    source, labelled = _labelled(result)
    rows = known(labelled, "semantic")
    along = trend([row["semantic"] for row in rows])
    if along is None:
        return None
    first, last = rows[0], rows[-1]
    model = (
        f"{percent(first['semantic'])} in layer {first['layer'] + 1} and"
        f" {percent(last['semantic'])} in layer {last['layer'] + 1}; correlation with depth"
        f" {number(along)} (source: {source})"
    )
    return Judged(model, along >= 0.5, along > 0)


def every_key(result: Result) -> Judged | None:
    """Judge: every key has a pattern."""
    source, rows = _labelled(result)
    having = weighted(rows, "with_pattern", "keys")
    if having is None:
        return None
    n = sum(row["keys"] for row in known(rows, "keys"))
    model = f"{percent(having)} of {number(n)} memories (source: {source})"
    return Judged(model, having == 1, having >= 0.9)


def several_patterns(result: Result) -> Judged | None:
    """Judge: a key has several patterns."""
    source, rows = _labelled(result)
    per_key = weighted(rows, "patterns_per_key", "keys")
    if per_key is None:
        return None
    model = f"{number(per_key)} (source: {source})"
    return Judged(model, 2.6 <= per_key <= 4.6, per_key > 1)


def covered(result: Result) -> Judged | None:
    """Judge: most triggers show a pattern."""
    source, rows = _labelled(result)
    uncovered = weighted(rows, "uncovered", "n")
    if uncovered is None:
        return None
    share = 1 - uncovered
    each = [1 - row["uncovered"] for row in known(rows, "uncovered")]
    model = (
        f"{percent(share)}, by layer {percent(min(each))} to {percent(max(each))}"
        f" (source: {source})"
    )
    return Judged(model, 0.65 <= share <= 0.8, share >= 0.5)


def _labelled(result: Result) -> tuple[str, list[Row]]:
    """Return the rows of one source of labels: people's where they looked."""
    sources = [
        source
        for source in sources_of(result)
        if any(row["source"] == source and row.get("shallow") is not None for row in result.rows)
    ]
    source = next(iter(sources), "automatic")
    return source, [row for row in result.rows if row["source"] == source]
