"""Section 5.1: what is special about cases in which a memory does agree with its layer?

A case is a (prefix, layer). The paper counts how often its target is a stop word, and how often its
prefix is short. For comparison, the same shares are given for all cases.
"""

import altair as alt
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
from ffmem.experiments.metrics import Predictions
from ffmem.experiments.rows import Row, rows_with
from ffmem.experiments.zero_agreement import VARIANTS, TokenHits
from ffmem.stats import share, wilson
from ffmem.text import format_interval, format_number, format_share

SHORT = 5
"""A prefix of fewer tokens is short."""

STOP_WORD_TARGETS = PaperValue("agreeing cases whose target is a stop word", "60 %", "Sec. 5.1")
SHORT_PREFIXES = PaperValue(
    "agreeing cases with a prefix of less than 5 tokens", "43 %", "Sec. 5.1"
)

STOP_WORDS = "scikit-learn's ENGLISH_STOP_WORDS, of tokens without case and surrounding space"


def measure(context: ExperimentContext) -> tuple[list[Row], Row]:
    """Measure stop words and short prefixes, among cases with an agreeing memory and among all."""
    predictions, hits = context.measured(Predictions), context.measured(TokenHits)
    is_stop = are_stop_words(context.memories.tokenizer.token_texts(context.memories.vocabulary))
    layers = context.memories.layout.memory_layers
    tokens = {"y": predictions.ff_top[:, layers], "o": predictions.output_top[:, layers]}
    variants = []
    for target, memories in VARIANTS:
        agreeing = hits.agreeing[target, memories][:, layers] > 0
        for group, cases in (("agreeing", agreeing), ("all", np.ones_like(agreeing))):
            row = {"target": target, "memories": memories, "group": group}
            variants.append(row | _shares(context, is_stop, tokens[target], cases))
    main = [row for row in variants if (row["target"], row["memories"]) == ("y", "all")]
    rows = [{k: v for k, v in row.items() if k not in ("target", "memories")} for row in main]
    also = {"variants": variants, "stop_words": STOP_WORDS, "short": f"fewer than {SHORT} tokens"}
    return rows, also


def _shares(
    context: ExperimentContext,
    is_stop: Bool[ndarray, " vocab"],
    tokens: Shaped[ndarray, "prefix layer"],
    cases: Bool[ndarray, "prefix layer"],
) -> Row:
    """Return the shares of stop words and short prefixes among some cases."""
    shape = cases.shape
    short = np.broadcast_to((context.prompt_sample.lengths < SHORT)[:, None], shape)
    following = context.prompt_sample.next_tokens()
    has_next = np.broadcast_to((following >= 0)[:, None], shape) & cases
    next_stop = np.broadcast_to(is_stop[following][:, None], shape)
    n, next_n = int(cases.sum()), int(has_next.sum())
    return {
        "stop_word_share": share(int(is_stop[tokens][cases].sum()), n),
        "short_prefix_share": share(int(short[cases].sum()), n),
        "n": n,
        "next_stop_word_share": share(int(next_stop[has_next].sum()), next_n),
        "next_n": next_n,
    }


def are_stop_words(tokens: list[str]) -> Bool[ndarray, " token"]:
    """Return which tokens, as they are shown, are common English stop words."""
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

    return np.array([token.strip().lower() in ENGLISH_STOP_WORDS for token in tokens])


def independent_cases(result: ExperimentResult, n: int) -> int:
    """Return how many prefixes n (prefix, layer) cases come from, at most.

    The layers of one prefix are not independent draws: their number must not narrow an interval.
    """
    prefixes = (result.settings.get("sample") or {}).get("prefixes") or n
    return int(min(n, prefixes))


def case_interval(
    result: ExperimentResult, row: Row, field: str
) -> tuple[float | None, float | None]:
    """Return the interval of a share over (prefix, layer) cases, as if each prefix were one."""
    size = "next_n" if field == "next_stop_word_share" else "n"
    n = independent_cases(result, row.get(size) or 0)
    return wilson(round((row[field] or 0.0) * n), n)


def chart(result: ExperimentResult) -> charts.Chart:
    """Draw both groups side by side."""
    names = {
        "stop_word_share": "target is|a stop word",
        "short_prefix_share": "prefix of less|than 5 tokens",
        "next_stop_word_share": "next token is|a stop word",
    }
    rows = []
    for row in result.rows:
        group = "an agreeing memory" if row["group"] == "agreeing" else "all cases"
        for field in (name for name in names if row.get(name) is not None):
            low, high = case_interval(result, row, field)
            ends = {"low": low and 100 * low, "high": high and 100 * high}
            rows.append({"what": names[field], "share": 100 * row[field], "group": group} | ends)
    colors = {"an agreeing memory": charts.BLUE, "all cases": charts.GRAY}
    wrapped = alt.Axis(labelExpr="split(datum.label, '|')")
    x = alt.X("what:N", title=None, sort=list(names.values()), axis=wrapped)
    y = charts.quantity("share", "% of cases", (0, 100))
    offset = alt.XOffset("group:N", sort=list(colors))
    color = charts.series_color(colors, "group")
    bar = charts.plot(rows).mark_bar()
    interval = charts.plot(rows_with(rows, "low", "high")).mark_rule()
    return charts.layered(
        bar.encode(x=x.scale(paddingInner=0.35), xOffset=offset, y=y, color=color),
        interval.encode(x=x, xOffset=offset, y=charts.same_axis(y, "low"), y2="high:Q"),
    )


def summary(result: ExperimentResult) -> str:
    """Say whether agreement prefers stop words and short prefixes."""
    groups = {row["group"]: row for row in result.rows}
    agreeing, every = groups.get("agreeing"), groups.get("all")
    if agreeing is None or not agreeing.get("n"):
        return "No memory agreed with its layer on any prefix."

    def shown(field: str) -> str:
        interval = format_interval(*case_interval(result, agreeing, field))
        base = f", {format_share(every.get(field))} of all cases" if every else ""
        return f"{format_share(agreeing[field])} ({interval}{base})"

    return (
        f"Of {format_number(agreeing['n'])} cases with an agreeing memory, the target is a stop"
        f" word in {shown('stop_word_share')}, and the prefix is shorter than five tokens in"
        f" {shown('short_prefix_share')}."
    )


_RULE = (
    "the share is at most 10 points below the paper's and its interval is above the share of all"
    " cases; in part if only the latter"
)


@claim("Where a memory does agree, the target is mostly a stop word", _RULE, STOP_WORD_TARGETS)
def _stop_words(result: ExperimentResult) -> Evidence | None:
    return _preference(result, "stop_word_share", 0.5)


@claim("Where a memory does agree, the prefix is often very short", _RULE, SHORT_PREFIXES)
def _short_prefixes(result: ExperimentResult) -> Evidence | None:
    return _preference(result, "short_prefix_share", 0.33)


def _preference(result: ExperimentResult, field: str, enough: float) -> Evidence | None:
    groups = {row["group"]: row for row in result.rows_with(field)}
    if not {"agreeing", "all"} <= set(groups):
        return None
    found, base = groups["agreeing"][field], groups["all"][field]
    low, high = case_interval(result, groups["agreeing"], field)
    more = low is not None and low > base
    shown = (
        f"{format_share(found)} ({format_interval(low, high)}); {format_share(base)} of all cases"
    )
    n = independent_cases(result, groups["agreeing"]["n"])
    return Evidence(shown, n, "independent cases", more and found >= enough, more)


def _panel(title: str, field: str, mark: PaperMark) -> Panel:
    """Return a share of the agreeing cases, with its interval and that of all cases."""

    def rows(result: ExperimentResult) -> list[Row]:
        groups = {row["group"]: row for row in result.rows_with(field)}
        if "agreeing" not in groups:
            return []
        low, high = case_interval(result, groups["agreeing"], field)
        base = groups.get("all", {}).get(field)
        return [{"share": groups["agreeing"][field], "low": low, "high": high, "base": base}]

    return Panel(
        title=title,
        value="share",
        rows=rows,
        interval=("low", "high"),
        control=("base", "all cases"),
        paper=(mark,),
    )


EXPERIMENT = Experiment(
    name="stop-words",
    paper="Sec. 5.1",
    title="Stop words and short prefixes",
    description="Among the (prefix, layer) pairs in which some memory agrees with the layer: how"
    " often the target is a stop word, and how often the prefix is shorter than five tokens.",
    finding="The paper found that where a memory does agree with its layer, the target is mostly a"
    " stop word or the prefix very short.",
    measure=measure,
    chart=chart,
    summary=summary,
    metrics=(TokenHits, Predictions),
    needs_values=True,
    paper_values=(STOP_WORD_TARGETS, SHORT_PREFIXES),
    claims=(_stop_words, _short_prefixes),
    panels=(
        _panel(
            "agreeing cases whose target is a stop word",
            "stop_word_share",
            PaperMark(STOP_WORD_TARGETS, 0.6),
        ),
        _panel(
            "agreeing cases with a prefix of less than 5 tokens",
            "short_prefix_share",
            PaperMark(SHORT_PREFIXES, 0.43),
        ),
    ),
)
