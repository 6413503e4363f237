"""Figures of Sections 3 and 4: what keys respond to, and what values promote (Fig. 2 to 6)."""

from collections import Counter
from typing import Any

import altair as alt

from ffmem.experiments.result import Result
from ffmem.reporting.marks import (
    bars,
    boxes,
    by_series,
    intervals,
    layered,
    panels,
    plot,
    same,
    series,
    shown,
    stacked,
    ticks,
    up,
)
from ffmem.reporting.numbers import known, n_layers_of, sources_of
from ffmem.reporting.style import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    SOFT,
    VERMILION,
    Chart,
    coloured,
    layer_axis,
)

COVERAGE = {
    "shallow": ("shallow", SKY),
    "both": ("shallow + semantic", BLUE),
    "semantic": ("semantic", ORANGE),
    "uncovered": ("not covered", GREY),
}
REMOVED = {"first": SKY, "random": ORANGE, "last": BLUE}
AGREEMENT = {
    "next token": BLUE,
    "permuted": VERMILION,
    "most frequent token": ORANGE,
    "last token": PURPLE,
}


def patterns(result: Result) -> Chart:
    """Return Figure 2: shallow and semantic triggers by layer, one panel per source of labels."""
    n_layers = n_layers_of(result)
    charts: list[Chart] = []
    for source in sources_of(result):
        rows = shown([row for row in result.rows if row["source"] == source], list(COVERAGE))
        bars = stacked(rows, n_layers, COVERAGE, "% trigger examples")
        charts.append(bars.properties(title=alt.Title(f"source: {source}")))
    return charts[0] if len(charts) == 1 else panels(charts)


def token_removal(result: Result, centre: str = "median") -> Chart:
    """Return Figure 3: how the coefficient changes without a token; `centre` may be "mean"."""
    rows = [
        numbers | {"how": row["how"], "token": row["token"]}
        for row, numbers in zip(result.rows, shown(result.rows, [centre]), strict=True)
        if row["token"] in REMOVED
    ]
    dashes = alt.Scale(domain=["removed", "replaced"], range=[[1, 0], [4, 3]])
    y = up(centre, f"{centre} change in coefficient (%)")
    base = plot(rows).encode(
        x=layer_axis(n_layers_of(result)),
        y=y,
        color=alt.Color("token:N", scale=coloured(REMOVED)),
        detail="how:N",
    )
    symbols = alt.Legend(symbolType="stroke", symbolStrokeColor=INK)
    lines = base.mark_line().encode(
        strokeDash=alt.StrokeDash("how:N", scale=dashes, legend=symbols)
    )
    zero = plot([{"at": 0}]).mark_rule(color=SOFT).encode(y=same(y, "at"))
    return layered(zero, lines, base.mark_point())


def agreement(result: Result) -> Chart:
    """Return Figure 4: how often a value's top token is its best trigger's next token."""
    names = ["rate", "low", "high", "permutation", "unigram", "last_token_rate"]
    rows, n_layers = shown(result.rows, names), n_layers_of(result)

    colour = by_series(AGREEMENT)
    y = up("rate", "agreement rate (%)")
    last = plot(series(known(rows, "last_token_rate"), "last token")).mark_point(size=22)
    return layered(
        bars(series(rows, "next token"), n_layers, y, colour),
        intervals(rows, n_layers, y, ("low", "high")),
        ticks(series(rows, "most frequent token"), n_layers, same(y, "unigram"), colour),
        ticks(series(rows, "permuted"), n_layers, same(y, "permutation"), colour),
        last.encode(x=layer_axis(n_layers), y=same(y, "last_token_rate"), color=colour),
    )


def next_token_rank(result: Result) -> Chart:
    """Return Figure 5: the rank of the next token in the value's distribution."""
    rows = shown(result.rows, [], ["q1", "median", "q3"])
    for row in rows:  # a logarithm has no 0, which is the best rank
        row |= {
            name: None if row[name] is None else row[name] + 1 for name in ("q1", "median", "q3")
        }
    y = alt.Y(
        "q1:Q",
        title="rank of next token + 1 (log)",
        scale=alt.Scale(type="log", domainMin=1, nice=False),
        axis=alt.Axis(values=[10**power for power in range(7)], format="~s"),
    )
    return boxes(rows, n_layers_of(result), y)


def max_probability(result: Result) -> Chart:
    """Return Figure 6: agreement by the value's largest probability, with the size of each bin."""
    rows = [
        row | {"top": row["rate"] if row.get("high_rate") is None else row["high_rate"]}
        for row in known(result.rows, "rate")
    ]
    edges = sorted({row[end] for row in result.rows for end in ("low", "high")})
    top = max([0.0, *(row["top"] for row in rows)])
    title = "largest probability of the value's distribution"
    x = alt.X(
        "low:Q",
        bin="binned",
        title=title,
        scale=alt.Scale(domain=_domain(edges), nice=False),
        axis=alt.Axis(values=edges[::2], format=_digits(edges)),
    )
    y = up("rate", "agreement rate", (0.0, min(1.15, 1.15 * top) or 1.0))
    bar = plot(rows).mark_bar(color=BLUE).encode(x=x, x2="high:Q", y=y)
    middle = "(datum.low + datum.high) / 2"
    over = plot(rows).transform_calculate(middle=middle).encode(x=alt.X("middle:Q", title=title))
    sure = over.mark_rule().encode(y=same(y, "low_rate"), y2="high_rate:Q")
    counts = over.mark_text(dy=-7).encode(y=same(y, "top"), text=alt.Text("n:Q", format=","))
    return layered(bar, sure, counts)


def predictive_values(result: Result) -> Chart:
    """Return where the most predictive values are, and how precise they are on their triggers."""
    n_layers = n_layers_of(result)
    counted = Counter(row["layer"] for row in result.rows)
    histogram = [{"layer": layer + 1, "n": n} for layer, n in sorted(counted.items())]
    rows = known(shown(result.rows, ["precision"]), "precision")
    counts = (
        plot(histogram, 100)
        .mark_bar(color=BLUE)
        .encode(
            x=layer_axis(n_layers, None),
            y=up("n", f"of the top {len(result.rows)}", tickCount=4, format="d"),
        )
    )
    points = (
        plot(rows, 100)
        .mark_point(color=VERMILION, filled=False, size=22, strokeWidth=1.2)
        .encode(x=layer_axis(n_layers), y=up("precision", "precision (%)", (0, 100)))
    )
    return panels([counts, points])


def _domain(edges: list[Any]) -> list[float]:
    """Return where the x axis of bins begins and ends; some room even if all is one number."""
    if not edges:
        return [0.0, 1.0]
    low, high = float(edges[0]), float(edges[-1])
    return [low, high] if low < high else [0.9 * low, 1.1 * high or 1.0]


def _digits(edges: list[Any]) -> str:
    """Return the format that shows edges of bins as different numbers."""
    if not edges or edges[-1] >= 0.01:
        return ".2~f" if edges and edges[-1] >= 0.2 else ".3~f"
    return ".1e"
