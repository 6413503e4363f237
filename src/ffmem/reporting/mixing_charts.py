"""Figures of Section 5: how memories and layers add up to a prediction (Fig. 7 to 11)."""

import math

import altair as alt

from ffmem.experiments.kinds import PERSISTENT, SOFTMAX
from ffmem.experiments.result import Result
from ffmem.reporting.marks import (
    bars,
    boxes,
    by_series,
    intervals,
    layered,
    line,
    nothing,
    panels,
    plot,
    same,
    series,
    shown,
    stacked,
    up,
)
from ffmem.reporting.numbers import Row, known, most_entropy, n_layers_of
from ffmem.reporting.style import (
    BLUE,
    BOX,
    GREEN,
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
from ffmem.stats import wilson

DEFINITIONS = {
    "positive": "m > 0",
    "gate": "gate open",
    "effect": "smallest set with 90 % of the contribution",
}
ALWAYS = ": true of every weight of a softmax"
CASES = {
    "residual": ("residual", GREY),
    "agreement": ("agreement", GREEN),
    "ffn": ("ffn", ORANGE),
    "composition": ("composition", PURPLE),
}
PREDICTED = {
    "residual": SKY,
    "layer output": BLUE,
    "decided for good": VERMILION,
}
COUNTED = {"all memories": BLUE, "active memories": VERMILION}
BY_RELATED = {"related": GREEN, "distant": GREY, "not judged": SKY}
_KINDS = {True: "related", False: "distant", None: "not judged"}
STEP = 0.05
"""Width of a bin of similarities."""


def active_memories(result: Result) -> Chart:
    """Return Figure 7: the share of active memories, one panel per definition of active."""
    n_layers, names = n_layers_of(result), ["q1", "median", "q3"]
    present = [name for name in DEFINITIONS if any(r["definition"] == name for r in result.rows)]
    height = 180 if len(present) == 1 else 90
    charts = []
    for name in present:
        rows = shown([row for row in result.rows if row["definition"] == name], names)
        y = up("q1", "% active", (0, 100), values=[0, 25, 50, 75, 100])
        box = boxes(rows, n_layers, y, "layer" if name == present[-1] else None)
        always = result.settings.get("kind") in (SOFTMAX, PERSISTENT) and name == "positive"
        title = f"{DEFINITIONS[name]}{ALWAYS if always else ''}"
        charts.append(box.properties(height=height, title=title))
    return panels(charts) if charts else nothing()


def zero_agreement(result: Result) -> Chart:
    """Return Figure 8: examples in which no memory's top token is the layer's, beside chance."""
    n_layers, charts = n_layers_of(result), []
    for target, title in (("y", "target: top token of y"), ("o", "target: top token of o")):
        rows = [
            numbers | {"series": f"{row['memories']} memories"}
            for row, numbers in zip(
                result.rows, shown(result.rows, ["share", "low", "high", "chance"]), strict=True
            )
            if row["target"] == target
        ]
        if rows:
            axis = layer_axis(n_layers, "layer" if target == "o" else None)
            charts.append(_against_chance(rows, axis).properties(height=105, title=title))
    return panels(charts) if charts else nothing()


def _against_chance(rows: list[Row], x: alt.X) -> alt.LayerChart:
    colour = alt.Color("series:N", scale=coloured(COUNTED))
    y = up("share", "% zero agreement", (0, 100), values=[0, 25, 50, 75, 100])
    dashes = alt.StrokeDash(
        "kind:N",
        scale=alt.Scale(domain=["measured", "chance"], range=[[1, 0], [2, 3]]),
        legend=alt.Legend(symbolType="stroke", symbolStrokeColor=INK),
    )

    def base(kind: str) -> alt.Chart:
        return plot([row | {"kind": kind} for row in rows]).encode(x=x, y=y, color=colour)

    chance = base("chance").mark_line(strokeWidth=1.2)
    sure = plot(known(rows, "low", "high")).mark_rule(strokeWidth=1.2)
    return layered(
        chance.encode(y=same(y, "chance"), strokeDash=dashes),
        sure.encode(x=x, y=same(y, "low"), y2="high:Q", color=colour),
        base("measured").mark_line().encode(strokeDash=dashes),
        base("measured").mark_point(),
    )


def stop_words(result: Result) -> Chart:
    """Return Section 5.1's shares of stop words and short prefixes, beside those of all cases."""
    measures = (
        ("stop_word_share", "n", "target is|a stop word"),
        ("short_prefix_share", "n", "prefix of less|than 5 tokens"),
        ("next_stop_word_share", "next_n", "next token is|a stop word"),
    )
    rows = []
    for row in result.rows:
        for field, size, name in measures:
            if row.get(field) is not None:
                low, high = wilson(round(row[field] * (row.get(size) or 0)), row.get(size) or 0)
                ends = {"low": low and 100 * low, "high": high and 100 * high}
                group = "an agreeing memory" if row["group"] == "agreeing" else "all cases"
                rows.append({"what": name, "share": 100 * row[field], "group": group} | ends)
    colours = {"an agreeing memory": BLUE, "all cases": GREY}
    wrapped = alt.Axis(labelExpr="split(datum.label, '|')")
    x = alt.X("what:N", title=None, sort=[name for *_, name in measures], axis=wrapped)
    y = up("share", "% of cases", (0, 100))
    offset = alt.XOffset("group:N", sort=list(colours))
    bar = (
        plot(rows)
        .mark_bar()
        .encode(
            x=x.scale(paddingInner=0.35),
            xOffset=offset,
            y=y,
            color=alt.Color("group:N", scale=coloured(colours)),
        )
    )
    sure = plot(known(rows, "low", "high")).mark_rule()
    return layered(bar, sure.encode(x=x, xOffset=offset, y=same(y, "low"), y2="high:Q"))


def residual_prediction(result: Result) -> Chart:
    """Return Figure 9: how often the residual's top token is already the model's output."""
    rows = shown(result.rows, ["residual_share", "output_share", "decided_share", "low", "high"])
    n_layers = n_layers_of(result)

    colour = by_series(PREDICTED)
    y = up("residual_share", "% with the final prediction", (0, 100))
    return layered(
        bars(series(rows, "residual"), n_layers, y, colour),
        intervals(rows, n_layers, y, ("low", "high")),
        line(series(rows, "layer output"), n_layers, same(y, "output_share"), colour),
        line(series(rows, "decided for good"), n_layers, same(y, "decided_share"), colour),
    )


def residual_probability(result: Result) -> Chart:
    """Return Figure 10: the probability that the residual gives to the model's prediction."""
    rows = shown(result.rows, [], ["q1", "median", "q3"])
    return boxes(rows, n_layers_of(result), up("q1", "probability", (0, 1)))


def prediction_cases(result: Result) -> Chart:
    """Return Figure 11: whose top token the layer's output has."""
    rows = shown(result.rows, list(CASES))
    return stacked(rows, n_layers_of(result), CASES, "% examples")


def neural_memory(result: Result) -> Chart:
    """Return equations 1 and 2 side by side: closeness, and how concentrated the softmax is."""
    n_layers = n_layers_of(result)
    names = ["cosine", "cosine_q1", "cosine_q3", "entropy", "top1_mass"]
    rows = shown(result.rows, [], names)
    highest = most_entropy(result) or 0.0

    def panel(field: str, y: alt.Y, x: alt.X) -> alt.LayerChart:
        base = plot(rows, 72).encode(x=x, y=y)
        return layered(base.mark_line(color=INK), base.mark_point(color=INK))

    inner, bottom = layer_axis(n_layers, None), layer_axis(n_layers)
    cosine = up("cosine", "cosine", tickCount=4)
    entropy = up("entropy", "entropy (nats)", tickCount=4)
    top1_mass = up("top1_mass", "top-1 mass", (0, 1), tickCount=4)
    quartiles = plot(known(rows, "cosine_q1", "cosine_q3"), 72).mark_bar(color=BOX)
    even = plot([{"at": highest}], 72).mark_rule(color=SOFT, strokeDash=[3, 3])
    return panels(
        [
            layered(
                quartiles.encode(x=inner, y=same(cosine, "cosine_q1"), y2="cosine_q3:Q"),
                panel("cosine", cosine, inner),
            ),
            layered(even.encode(y=same(entropy, "at")), panel("entropy", entropy, inner)),
            panel("top1_mass", top1_mass, bottom),
        ]
    )


def last_layer_composition(result: Result) -> Chart:
    """Return Section 5.2's compositions: how close the new prediction is to the residual's."""
    counts: dict[tuple[int, str], int] = {}
    for row in known(result.rows, "similarity"):
        # Bins are half-open, [low, high); the tiny step keeps 0.3 out of the bin that ends there.
        place = math.floor(row["similarity"] / STEP + 1e-9)
        key = (place, _KINDS[row.get("related")])
        counts[key] = counts.get(key, 0) + 1
    if not counts:
        return nothing()
    rows = [
        {"low": place * STEP, "high": (place + 1) * STEP, "kind": kind, "n": n}
        for (place, kind), n in sorted(counts.items())
    ]
    present = {kind: BY_RELATED[kind] for kind in BY_RELATED if any(k == kind for _, k in counts)}
    title = "cosine of the residual's and the output's top token"
    bar: alt.Chart = (
        plot(rows)
        .mark_bar()
        .encode(
            x=alt.X("low:Q", bin="binned", title=title, scale=alt.Scale(zero=False)),
            x2="high:Q",
            y=alt.Y("n:Q", title="compositions", stack="zero", axis=alt.Axis(tickMinStep=1)),
            color=alt.Color("kind:N", scale=coloured(present)),
        )
    )
    threshold = result.also.get("threshold")
    if threshold is None:
        return bar
    rule = plot([{"at": threshold}]).mark_rule(strokeDash=[4, 3])
    return layered(bar, rule.encode(x="at:Q"))
