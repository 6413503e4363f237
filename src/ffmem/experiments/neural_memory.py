"""Equations 1 and 2: the feed-forward layer beside the neural memory that it resembles.

    FF(x) = f(x · Kᵀ) · V        MN(x) = softmax(x · Kᵀ) · V

Both read the same keys and values; neither has the output bias here. x · Kᵀ includes the keys'
bias. Gated models have two keys per memory: MN takes the gate's. In persistent memory, MN is each
head's softmax over its slots alone, without the tokens; entropy, effective number and largest
weight are then means over heads. A softmax memory is MN itself:

    softmax      FF(x) = MN(x)
    persistent   FF(x) = Σ over heads of (the head's attention on slots) · (its part of MN(x))
"""

import math
from typing import TYPE_CHECKING

import altair as alt
import numpy as np
from jaxtyping import Float32, Int64
from numpy import ndarray

from ffmem.experiments.base import (
    PERSISTENT,
    SOFTMAX,
    Experiment,
    ExperimentResult,
    LayerWork,
    Measurement,
    Row,
    SampleMetric,
)
from ffmem.experiments.charts import (
    Chart,
    figure_rows,
    layer_axis,
    layered,
    panels,
    plot,
    quantity,
    same_axis,
)
from ffmem.experiments.rows import NOTHING, count_layers, known, layer_widths, mean
from ffmem.stats import spread
from ffmem.text import format_number, format_share

if TYPE_CHECKING:
    from ffmem.experiments.context import ExperimentContext

COLUMNS = ("cosine", "entropy", "top1_mass", "distance", "effective")
SLOT_MASS = "slot_mass"
"""Of persistent memory alone: the part of the attention that slots get, mean over heads."""


class SoftmaxComparison(SampleMetric):
    """How concentrated the softmax is, and how far the two outputs lie apart."""

    needs_values = True

    def __init__(self, context: "ExperimentContext", n_prefixes: int) -> None:
        self.memories = context.memories
        groups = self.memories.row.softmax_groups
        self.groups: int = 1 if groups is None else getattr(self.memories.config, groups)
        """Heads, each with a softmax of its own; 1 where one runs over all memories."""
        is_shared = getattr(self.memories.config, "memory", None) == PERSISTENT
        self.columns = (*COLUMNS, SLOT_MASS) if is_shared else COLUMNS
        shape = (n_prefixes, self.memories.n_layers)
        self.found: dict[str, Float32[ndarray, "prefix layer"]] = {
            name: np.zeros(shape, np.float32) for name in self.columns
        }

    def read(self, prefixes: Int64[ndarray, " row"], layer: int, work: LayerWork) -> None:
        """Compare the two memories of one layer."""
        import torch
        from torch.nn import functional

        memories, trace = self.memories, work.trace
        feed_forward = trace.value_output.float() - memories.bias(layer).float()
        if trace.gate is None:
            keys, bias = memories.keys(layer), memories.key_bias(layer)
            scores = functional.linear(trace.ff_input.float(), keys.float(), bias.float())
        else:
            scores = trace.gate.float()
        scores = scores.unflatten(1, (self.groups, -1))
        logs = scores - scores.logsumexp(dim=2, keepdim=True)
        weights = logs.exp()
        neural = weights.flatten(1) @ memories.values(layer).float()
        entropy = -torch.linalg.vecdot(weights, logs)
        numbers = {
            "cosine": functional.cosine_similarity(feed_forward, neural),
            "entropy": entropy.mean(dim=1),
            "top1_mass": weights.amax(dim=2).mean(dim=1),
            "distance": (feed_forward - neural).norm(dim=1) / feed_forward.norm(dim=1),
            "effective": entropy.exp().mean(dim=1),
            SLOT_MASS: trace.coefficients.float().sum(dim=1) / self.groups,
        }
        for name in self.columns:
            self.found[name][prefixes, layer] = numbers[name].cpu().numpy()

    def row(self, layer: int) -> Row:
        """Return the means of one layer."""
        by_name = {name: column[:, layer] for name, column in self.found.items()}
        # A layer that adds nothing lies at no distance that could be told in its own lengths.
        some = np.isfinite(by_name["distance"])
        spreads = {name: spread(column[some]) for name, column in by_name.items()}
        return {
            "layer": layer,
            **{name: spreads[name]["mean"] for name in self.columns},
            "cosine_q1": spreads["cosine"]["q1"],
            "cosine_q3": spreads["cosine"]["q3"],
            "n": int(some.sum()),
        }


def measure(context: "ExperimentContext") -> Measurement:
    """Measure how the feed-forward layer differs from a softmax over its keys."""
    compared, layout = context.measured(SoftmaxComparison), context.memories.layout
    also = {
        "keys": "gate" if context.memories.gated else "keys",
        "max_entropy": float(np.log(max(layout.widths) / compared.groups)),
    }
    return Measurement([compared.row(layer) for layer in layout.memory_layers], also)


def max_entropy(result: ExperimentResult) -> float | None:
    """Return the entropy of a softmax that is the same for all memories that it runs over."""
    widest = max(layer_widths(result))
    found = result.also.get("max_entropy", math.log(widest) if widest else None)
    return None if found is None else float(found)


def chart(result: ExperimentResult) -> Chart:
    """Draw how close the outputs are, and how concentrated the softmax is."""
    n_layers = count_layers(result)
    names = ["cosine", "cosine_q1", "cosine_q3", "entropy", "top1_mass"]
    rows = figure_rows(result.rows, [], names)

    def panel(y: alt.Y, x: alt.X) -> alt.LayerChart:
        base = plot(rows, 72).encode(x=x, y=y)
        return layered(base.mark_line(style="ink"), base.mark_point(style="ink"))

    inner, bottom = layer_axis(n_layers, None), layer_axis(n_layers)
    cosine = quantity("cosine", "cosine", tickCount=4)
    entropy = quantity("entropy", "entropy (nats)", tickCount=4)
    top1_mass = quantity("top1_mass", "top-1 mass", (0, 1), tickCount=4)
    quartiles = plot(known(rows, "cosine_q1", "cosine_q3"), 72).mark_bar(style="box")
    even = plot([{"at": max_entropy(result) or 0.0}], 72).mark_rule(style="soft", strokeDash=[3, 3])
    return panels(
        [
            layered(
                quartiles.encode(x=inner, y=same_axis(cosine, "cosine_q1"), y2="cosine_q3:Q"),
                panel(cosine, inner),
            ),
            layered(even.encode(y=same_axis(entropy, "at")), panel(entropy, inner)),
            panel(top1_mass, bottom),
        ]
    )


def summary(result: ExperimentResult) -> str:
    """Say how far the softmax memory is from the layer."""
    rows = known(result.rows, "cosine", "entropy", "top1_mass")
    if not rows:
        return NOTHING

    def ends(field: str) -> str:
        low, high = min(rows, key=lambda row: row[field]), max(rows, key=lambda row: row[field])
        return (
            f"{format_number(low[field])} (layer {low['layer'] + 1}) to"
            f" {format_number(high[field])} (layer {high['layer'] + 1})"
        )

    highest = max_entropy(result)
    most = "" if highest is None else f" of at most {format_number(highest)}"
    masses = [row["slot_mass"] for row in known(rows, "slot_mass")]
    slots = f" Slots get {format_share(mean(masses))} of the attention." if masses else ""
    return (
        f"The softmax memory's output has a mean cosine of {ends('cosine')} with the layer's own."
        f" Its entropy is {format_number(mean([row['entropy'] for row in rows]))} nats{most} on"
        f" average over layers, and its largest weight {ends('top1_mass')}.{slots}"
    )


EXPERIMENT = Experiment(
    name="neural-memory",
    paper="Eq. 1, 2",
    title="The layer beside a softmax memory",
    description="FF(x) = f(x·Kᵀ)·V beside MN(x) = softmax(x·Kᵀ)·V with the same keys K and values"
    " V: cosine of the outputs, entropy of the softmax, and its largest weight.",
    finding="The paper notes that the two formulas differ only in the normalization of the"
    " coefficients, and measures nothing on it.",
    measure=measure,
    chart=chart,
    summary=summary,
    metrics=(SoftmaxComparison,),
    needs_values=True,
    notes={
        SOFTMAX: "This memory is a neural memory itself, FF(x) = MN(x): a cosine of 1 and a"
        " distance of 0 are its definition, not a finding.",
        PERSISTENT: "FF(x) is what the slots add. MN is the softmax over the slots of each head"
        " alone, without the tokens; entropy, largest weight and effective number are means over"
        " heads. slot_mass is the part of the attention that slots get beside the tokens.",
    },
)
