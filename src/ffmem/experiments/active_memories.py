"""Figure 7 (§5.1): how many memories of a layer are active on a prefix?

    positive   m > 0
    gate       the gate's pre-activation > 0, in gated models
    effect     the smallest set of memories that carries 90 % of Σ |m|·‖v‖

The first is the paper's. In a gated model, the sign of a coefficient means nothing by itself, and
hardly any coefficient is exactly 0; hence the other two. The weights of a softmax are all positive:
there, only the last one separates memories. It needs static values, and is left out without them.

In a mixture of experts a prefix reaches a few experts only, and all others have m = 0. So models
with experts have each definition twice:

    of = all        share of the layer's memories, as in the paper
    of = reached    share of the memories in banks that the prefix reaches
"""

import numpy as np
from jaxtyping import Float32, Float64, Int64
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
from ffmem.experiments.metrics import SECTION_5_SAMPLE, LayerActivity, SampleMetric
from ffmem.experiments.rows import NOTHING, Row, format_range, layer_of, smallest_n, upper_layers
from ffmem.stats import spread
from ffmem.text import format_share

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

OF = {"all": "", "reached": ", of the memories that the router reaches"}
"""What a share is of, in models with experts: how the figure calls it."""

NOT_ACTIVITY = {
    "softmax": "every softmax weight is above 0",
    "persistent": "every softmax weight is above 0",
    "lambda": "coefficients are linear: m > 0 is a sign, not activity",
}
"""Why m > 0 does not mean active, by kind of memory."""

ACTIVE = PaperValue("active memories", "10–50 % of 4,096, with a drop towards layer 10", "Fig. 7")


class ActiveShares(SampleMetric):
    """Shares of active memories, by definition, prefix and layer."""

    def __init__(self, context: ExperimentContext, n_prefixes: int) -> None:
        memories = context.memories
        self.layout = memories.layout
        gate, effect = ("gate",) * memories.gated, ("effect",) * memories.has_values
        shape = (n_prefixes, memories.n_layers)
        self.shares: dict[str, Float32[ndarray, "prefix layer"]] = {
            name: np.zeros(shape, np.float32) for name in ("positive", *gate, *effect)
        }
        self.reached: Float64[ndarray, "prefix layer"] = np.ones(shape)
        """Share of a layer's memories that are in banks which the prefix reaches."""

    def read(self, prefixes: Int64[ndarray, " row"], layer: int, activity: LayerActivity) -> None:
        """Count one layer's active memories."""
        found = {"positive": _positive(activity.coefficients)}
        if activity.contributions is not None:
            found["effect"] = carrying(activity.contributions)
        if activity.gate is not None:  # 0 in experts that the prefix does not reach
            found["gate"] = _positive(activity.gate)
        for name, share in found.items():
            self.shares[name][prefixes, layer] = share
        if activity.trace.weights is not None:
            sizes = np.array([bank.size for bank in self.layout.banks(layer)])
            n_reached = (activity.trace.weights != 0).cpu().numpy() @ sizes
            self.reached[prefixes, layer] = n_reached / sizes.sum()


def carrying(contributions: Float32[ndarray, "row memory"]) -> Float32[ndarray, " row"]:
    """Return the share of memories in the smallest set that carries `CARRIED` of the sum."""
    sums = np.cumsum(np.sort(contributions, axis=1), axis=1, dtype=np.float64)
    total = sums[:, -1:]
    spared = total - sums >= CARRIED * total  # what carries least is not needed
    size = contributions.shape[1] - spared.sum(axis=1)
    return np.asarray(np.where(total[:, 0] > 0, size, 0) / contributions.shape[1], np.float32)


def _positive(numbers: Float32[ndarray, "row memory"]) -> Float32[ndarray, " row"]:
    return np.asarray(np.count_nonzero(numbers > 0, axis=1) / numbers.shape[1], np.float32)


def measure(context: ExperimentContext) -> tuple[list[Row], Row]:
    """Measure the spread of the shares over prefixes."""
    activity, layout = context.measured(ActiveShares), context.memories.layout
    rows: list[Row] = []
    for layer in layout.memory_layers:
        for name, table in activity.shares.items():
            row, shares = {"layer": layer, "definition": name}, table[:, layer]
            if not layout.has_experts:
                rows.append(row | spread(shares))
                continue
            rows.append(row | {"of": "all"} | spread(shares))
            rows.append(row | {"of": "reached"} | spread(shares / activity.reached[:, layer]))
    return rows, {}


def _rows_of(result: ExperimentResult, definition: str, of: str) -> list[Row]:
    """Return the rows of one definition; without experts, the layer's memories are all reached."""
    has_experts = bool(result.settings.get("experts"))
    wanted = {"of": of} if has_experts else {}
    if of == "reached" and not has_experts:
        return []
    return result.rows_with("median", definition=definition, **wanted)


def chart(result: ExperimentResult) -> charts.Chart:
    """Draw the share of active memories, one panel per definition of active."""
    present = {
        (name, of): rows
        for name in DEFINITIONS
        for of in OF
        if (rows := _rows_of(result, name, of))
    }
    panels: list[charts.Chart] = []
    for (name, of), rows in present.items():
        y = charts.quantity("q1", "% active", (0, 100), values=[0, 25, 50, 75, 100])
        is_last = len(panels) == len(present) - 1
        numbers = charts.figure_rows(rows, ["q1", "median", "q3"])
        box = charts.boxes(numbers, result.n_layers, y, "layer" if is_last else None)
        title, _ = DEFINITIONS[name]
        if result.kind in ("softmax", "persistent") and name == "positive":
            title += ": true for every softmax weight"
        title += OF[of]
        panels.append(box.properties(height=180 if len(present) == 1 else 90, title=title))
    return charts.panels(panels)


def summary(result: ExperimentResult) -> str:
    """Say how many memories are active, by each definition."""

    def parts(of: str) -> str:
        found = [
            f"by {words} {format_range(rows, 'median')}"
            for name, (_, words) in DEFINITIONS.items()
            if (rows := _rows_of(result, name, of))
        ]
        return "; ".join(found)

    if not parts("all"):
        return NOTHING
    shown = f"The median share of active memories is {parts('all')}."
    if parts("reached"):
        shown += f" Of the memories that the router reaches: {parts('reached')}."
    return shown


def _rows_to_judge(result: ExperimentResult, of: str = "all") -> list[Row]:
    return _rows_of(result, "gate" if result.settings.get("gated") else "positive", of)


@claim(
    "A tenth to a half of a layer's memories are active",
    "the median is between 10 and 50 % in every layer; in part if in half of the layers (gated"
    " models: active means an open gate)",
    ACTIVE,
)
def _share(result: ExperimentResult) -> Evidence | None:
    rows = _rows_to_judge(result)
    if why := NOT_ACTIVITY.get(result.kind):
        return Evidence("", smallest_n(rows), "prefixes", False, False, why)
    if not rows:
        return None
    medians = [row["median"] for row in rows]
    inside = [0.1 <= median <= 0.5 for median in medians]
    shown = (
        f"medians from {format_share(min(medians))} to {format_share(max(medians))}"
        f" ({DEFINITIONS[rows[0]['definition']][0]}); {sum(inside)} of {len(rows)} layers within"
    )
    if reached := [row["median"] for row in _rows_to_judge(result, "reached")]:
        shown += (
            f"; of the memories that the router reaches, {format_share(min(reached))} to"
            f" {format_share(max(reached))}"
        )
    return Evidence.by_layer(shown, rows, "prefixes", inside)


@claim(
    "Fewest memories are active where semantic patterns take over",
    "the layer with the lowest median is within an eighth of the depth of the paper's layer 10; in"
    " part if it is in the middle half (with experts: the median of the memories that the router"
    " reaches)",
    ACTIVE,
    over_depth=True,
)
def _dip(result: ExperimentResult) -> Evidence | None:
    rows = _rows_to_judge(result, "reached") or _rows_to_judge(result)
    n_layers = result.n_layers
    if why := NOT_ACTIVITY.get(result.kind):
        return Evidence("", smallest_n(rows), "prefixes", False, False, why)
    if len(rows) < 3:
        return None
    least = min(rows, key=lambda row: row["median"])
    depth = (least["layer"] + 1) / n_layers
    shown = (
        f"fewest in {layer_of(least)} of {n_layers}, {format_share(least['median'])}; the paper's"
        f" layer 10 corresponds to layer {upper_layers(n_layers, 10)[0] + 1}"
    )
    good = abs(depth - 10 / 16) <= 2 / 16, 0.25 < depth <= 0.75
    return Evidence(shown, smallest_n(rows), "prefixes", *good)


def _active(result: ExperimentResult) -> list[Row]:
    """Return the rows of the definition that the claims take, where it means activity."""
    return [] if result.kind in NOT_ACTIVITY else _rows_to_judge(result)


_ALL_POSITIVE = (
    "Coefficients are softmax weights and thus positive: m > 0 holds for every memory, unless a"
    " weight rounds to 0."
)

EXPERIMENT = Experiment(
    name="active-memories",
    paper="Fig. 7",
    title="Active memories",
    description="Share of a layer's memories that are active on a prefix: by a coefficient m > 0,"
    " by an open gate (gated models), or in the smallest set that carries 90 % of Σ|m|·‖v‖.",
    finding="The paper found that hundreds of memories are active in every layer, and fewest"
    " where semantic patterns take over from shallow ones.",
    measure=measure,
    chart=chart,
    summary=summary,
    metrics=(ActiveShares,),
    paper_values=(SECTION_5_SAMPLE, ACTIVE),
    claims=(_share, _dip),
    panels=(
        Panel(
            title="active: m > 0, in gated models an open gate (median)",
            value="median",
            rows=_active,
            paper=(PaperMark(ACTIVE, 0.1, 0.5),),
        ),
        Panel(
            title="the same, of the memories that the router reaches (median)",
            value="median",
            rows=lambda result: _rows_to_judge(result, "reached"),
        ),
        Panel(
            title="smallest set with 90 % of the contribution (median)",
            value="median",
            rows=lambda result: _rows_of(result, "effect", "all"),
        ),
    ),
    notes={
        "softmax": _ALL_POSITIVE,
        "persistent": _ALL_POSITIVE,
        "experts": "A prefix reaches only a few experts, and all other memories have m = 0, so"
        " the share of a layer's memories is small by design. The share of the memories in banks"
        " that the prefix reaches is shown next to it.",
        "lambda": "Coefficients are linear in x: a negative one has as much effect as a positive"
        " one, and all are 0 where no token is that far back. The definition “effect” is omitted:"
        " it needs static values, which memories of a lambda layer do not have.",
    },
)
