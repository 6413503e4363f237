"""Figure 7 (§5.1): how many memories of a layer are active on a prefix?

    positive   m > 0
    gate       the gate's pre-activation > 0, in gated models
    effect     the smallest set of memories that carries 90 % of Σ |m|·‖v‖

The first is the paper's. In a gated model a coefficient's sign means nothing by itself, and no
coefficient is ever quite zero, hence the others. Weights of a softmax are all positive: there, only
the last tells memories apart. It needs static values, and is left out where there are none.
"""

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float32, Int64
from numpy import ndarray

from ffmem.experiments.base import (
    LAMBDA,
    PERSISTENT,
    SECTION_5_SAMPLE,
    SOFTMAX,
    ClaimCheck,
    Evidence,
    Experiment,
    ExperimentResult,
    LayerWork,
    Measurement,
    PaperValue,
    Row,
    SampleMetric,
)
from ffmem.experiments.charts import Chart, boxes, empty_plot, figure_rows, panels, quantity
from ffmem.experiments.rows import (
    NOTHING,
    count_layers,
    format_range,
    known,
    smallest_n,
    upper_layers,
)
from ffmem.stats import spread
from ffmem.text import format_share

if TYPE_CHECKING:
    from ffmem.experiments.context import ExperimentContext

CARRIED = 0.9
"""The share of the layer's contributions that the `effect` set carries."""

DEFINITIONS = {
    "positive": ("m > 0", "a positive coefficient"),
    "gate": ("gate open", "an open gate"),
    "effect": (
        "smallest set with 90 % of the contribution",
        "the smallest set that carries 90 % of the contribution",
    ),
}
"""By name: how the figure and the summary call it."""


class Activity(SampleMetric):
    """Shares of active memories, by definition, prefix and layer."""

    def __init__(self, context: "ExperimentContext", n_prefixes: int) -> None:
        memories = context.memories
        gate, effect = ("gate",) * memories.gated, ("effect",) * memories.has_values
        self.shares: dict[str, Float32[ndarray, "prefix layer"]] = {
            name: np.zeros((n_prefixes, memories.n_layers), np.float32)
            for name in ("positive", *gate, *effect)
        }

    def read(self, prefixes: Int64[ndarray, " row"], layer: int, work: LayerWork) -> None:
        """Count one layer's active memories."""
        found = {"positive": _positive(work.coefficients)}
        if work.contributions is not None:
            found["effect"] = carrying(work.contributions)
        if work.gate is not None:
            found["gate"] = _positive(work.gate)
        for name, share in found.items():
            self.shares[name][prefixes, layer] = share


def carrying(contributions: Float32[ndarray, "row memory"]) -> Float32[ndarray, " row"]:
    """Return the share of memories in the smallest set that carries `CARRIED` of the sum."""
    sums = np.cumsum(np.sort(contributions, axis=1), axis=1, dtype=np.float64)
    total = sums[:, -1:]
    spared = total - sums >= CARRIED * total  # what carries least is not needed
    size = contributions.shape[1] - spared.sum(axis=1)
    return np.asarray(np.where(total[:, 0] > 0, size, 0) / contributions.shape[1], np.float32)


def _positive(numbers: Float32[ndarray, "row memory"]) -> Float32[ndarray, " row"]:
    return np.asarray(np.count_nonzero(numbers > 0, axis=1) / numbers.shape[1], np.float32)


def measure(context: "ExperimentContext") -> Measurement:
    """Measure the spread of the shares over prefixes."""
    shares = context.measured(Activity).shares
    rows = [
        {"layer": layer, "definition": name, **spread(table[:, layer])}
        for layer in context.memories.layout.memory_layers
        for name, table in shares.items()
    ]
    return Measurement(rows)


def chart(result: ExperimentResult) -> Chart:
    """Draw the share of active memories, one panel per definition of active."""
    n_layers, names = count_layers(result), ["q1", "median", "q3"]
    present = [name for name in DEFINITIONS if any(r["definition"] == name for r in result.rows)]
    height = 180 if len(present) == 1 else 90
    charts = []
    for name in present:
        rows = figure_rows([row for row in result.rows if row["definition"] == name], names)
        y = quantity("q1", "% active", (0, 100), values=[0, 25, 50, 75, 100])
        box = boxes(rows, n_layers, y, "layer" if name == present[-1] else None)
        title, _ = DEFINITIONS[name]
        if result.settings.get("kind") in (SOFTMAX, PERSISTENT) and name == "positive":
            title += ": true of every weight of a softmax"
        charts.append(box.properties(height=height, title=title))
    return panels(charts) if charts else empty_plot()


def summary(result: ExperimentResult) -> str:
    """Say how many memories are active, by each definition."""
    parts = [
        f"by {words} {format_range(rows, 'median')}"
        for name, (_, words) in DEFINITIONS.items()
        if (rows := [row for row in known(result.rows, "median") if row["definition"] == name])
    ]
    return f"The median share of active memories is {'; '.join(parts)}." if parts else NOTHING


OTHER_ACTIVITY = {
    SOFTMAX: "every weight of a softmax is above 0",
    PERSISTENT: "every weight of a softmax is above 0",
    LAMBDA: "coefficients are linear: m > 0 is a sign, not activity",
}
"""Why m > 0 does not tell which memories are active, by kind of memory."""


def _rows_to_judge(result: ExperimentResult) -> list[Row]:
    definition = "gate" if result.settings.get("gated") else "positive"
    return [row for row in known(result.rows, "median") if row["definition"] == definition]


def check_share(result: ExperimentResult) -> Evidence | None:
    """Check: a tenth to a half of the memories are active."""
    rows = _rows_to_judge(result)
    if why := OTHER_ACTIVITY.get(str(result.settings.get("kind"))):
        return Evidence("", smallest_n(rows), "prefixes", False, False, why)
    if not rows:
        return None
    inside = sum(0.1 <= row["median"] <= 0.5 for row in rows)
    low, high = min(row["median"] for row in rows), max(row["median"] for row in rows)
    shown = (
        f"medians from {format_share(low)} to {format_share(high)}"
        f" ({DEFINITIONS[rows[0]['definition']][0]}); {inside} of {len(rows)} layers within"
    )
    good = inside == len(rows), 2 * inside >= len(rows)
    return Evidence(shown, smallest_n(rows), "prefixes", *good)


def check_dip(result: ExperimentResult) -> Evidence | None:
    """Check: fewest memories are active around the paper's layer 10."""
    rows, n_layers = _rows_to_judge(result), count_layers(result)
    if why := OTHER_ACTIVITY.get(str(result.settings.get("kind"))):
        return Evidence("", smallest_n(rows), "prefixes", False, False, why)
    if len(rows) < 3:
        return None
    least = min(rows, key=lambda row: row["median"])
    depth = (least["layer"] + 1) / n_layers
    shown = (
        f"fewest in layer {least['layer'] + 1} of {n_layers}, {format_share(least['median'])}; the"
        f" paper's layer 10 lies at layer {upper_layers(n_layers, 10)[0] + 1}"
    )
    good = abs(depth - 10 / 16) <= 2 / 16, 0.25 < depth <= 0.75
    return Evidence(shown, smallest_n(rows), "prefixes", *good)


_ALL_POSITIVE = (
    "Coefficients are weights of a softmax, all of them positive: m > 0 holds of every memory,"
    " whatever the model does, unless a weight rounds to 0."
)

EXPERIMENT = Experiment(
    name="active-memories",
    paper="Fig. 7",
    title="Active memories",
    description="Share of a layer's memories that are active on a prefix: by a coefficient m > 0,"
    " by an open gate (gated models), or in the smallest set that carries 90 % of Σ|m|·‖v‖.",
    finding="The paper found that hundreds of memories are active in every layer, fewest where"
    " semantic patterns take over from shallow ones.",
    measure=measure,
    chart=chart,
    summary=summary,
    metrics=(Activity,),
    paper_values=(
        SECTION_5_SAMPLE,
        PaperValue("active memories", "10–50 % of 4,096, with a drop towards layer 10", "Fig. 7"),
    ),
    claims=(
        ClaimCheck(
            claim="A tenth to a half of a layer's memories are active",
            rule="the median lies between 10 and 50 % in every layer; in part if in half of them"
            " (gated models: active is an open gate)",
            check=check_share,
            values=(1,),
        ),
        ClaimCheck(
            claim="Fewest memories are active where semantic patterns take over",
            rule="the layer with the lowest median lies within an eighth of the depth of the"
            " paper's layer 10; in part if in the middle half",
            check=check_dip,
            values=(1,),
            over_depth=True,
        ),
    ),
    notes={
        SOFTMAX: _ALL_POSITIVE,
        PERSISTENT: _ALL_POSITIVE,
        LAMBDA: "Coefficients are linear in x: a negative one does as much as a positive one, and"
        " all are 0 where no token lies so far in front. The definition “effect” is left out: it"
        " needs static values, which memories of a lambda layer do not have.",
    },
)
