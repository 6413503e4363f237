"""Equations 1 and 2: the feed-forward layer beside the neural memory that it resembles.

    FF(x) = f(x · Kᵀ) · V        MN(x) = softmax(x · Kᵀ) · V

Both read the same keys and values; neither has the output bias here. x · Kᵀ includes the keys'
bias. Gated models have two keys per memory: MN takes the gate's. In persistent memory, MN is each
head's softmax over its slots alone, without the tokens; entropy, effective number and largest
weight are then means over heads. A softmax memory is MN itself:

    softmax      FF(x) = MN(x)
    persistent   FF(x) = Σ over heads of (the head's attention on slots) · (its part of MN(x))

An expert is a memory of its own: its keys compete with each other, not with those of experts that
the prefix does not reach. So MN has one softmax per bank, and the router's weights stay:

    FF(x) = Σ over banks of w · f(x · Kᵀ) · V        MN(x) = Σ over banks of w · softmax(x · Kᵀ) · V

Entropy, effective number and largest weight are then means over the banks that a prefix reaches.
"""

from typing import Any

import altair as alt
import numpy as np
from jaxtyping import Float32, Int64
from numpy import ndarray

from ffmem.experiments import charts
from ffmem.experiments.base import Experiment, ExperimentResult, Panel
from ffmem.experiments.context import ExperimentContext
from ffmem.experiments.metrics import LayerActivity, SampleMetric
from ffmem.experiments.rows import NOTHING, Row, layer_of, mean, rows_with
from ffmem.stats import spread
from ffmem.text import format_number, format_share

COLUMNS = ("cosine", "entropy", "top1_mass", "distance", "effective")
"""Persistent memory adds slot_mass: the part of the attention that slots get, mean over heads."""


class SoftmaxComparison(SampleMetric):
    """How concentrated the softmax is, and how far apart the two outputs are."""

    def __init__(self, context: ExperimentContext, n_prefixes: int) -> None:
        self.memories = context.memories
        groups = self.memories.row.softmax_groups
        self.groups: int = 1 if groups is None else getattr(self.memories.config, groups)
        """Heads, each with a softmax of its own; 1 where one runs over all memories."""
        is_shared = getattr(self.memories.config, "memory", None) == "persistent"
        self.columns = (*COLUMNS, "slot_mass") if is_shared else COLUMNS
        shape = (n_prefixes, self.memories.n_layers)
        self.found: dict[str, Float32[ndarray, "prefix layer"]] = {
            name: np.zeros(shape, np.float32) for name in self.columns
        }

    def read(self, prefixes: Int64[ndarray, " row"], layer: int, activity: LayerActivity) -> None:
        """Compare the two memories of one layer."""
        from torch.nn import functional

        trace = activity.trace
        bias = self.memories.bias_at(layer, trace)
        feed_forward = trace.value_output.float() - bias.float()
        neural, numbers = self._neural_memory(layer, trace)
        numbers |= {
            "cosine": functional.cosine_similarity(feed_forward, neural),
            "distance": (feed_forward - neural).norm(dim=1) / feed_forward.norm(dim=1),
            "slot_mass": trace.coefficients.float().sum(dim=1) / self.groups,
        }
        for name in self.columns:
            self.found[name][prefixes, layer] = numbers[name].cpu().numpy()

    def _neural_memory(self, layer: int, trace: Any) -> tuple[Any, dict[str, Any]]:
        """Return MN(x) of a layer, and the means over the banks that each prefix reaches."""
        import torch
        from torch.nn import functional

        neural = torch.zeros_like(trace.value_output, dtype=torch.float32)
        numbers = {
            name: neural.new_zeros(len(neural)) for name in ("entropy", "top1_mass", "effective")
        }
        banks = list(self.memories.banks[layer])
        # A layer without experts is one bank of weight 1.
        w = neural.new_ones(len(neural), len(banks)) if trace.weights is None else trace.weights
        for number, bank in enumerate(banks):
            (rows,) = w[:, number].nonzero(as_tuple=True)
            if not len(rows):
                continue
            if trace.gate is None:
                keys, bias = bank.key_rows().float(), bank.key_bias().float()
                scores = functional.linear(trace.ff_input[rows].float(), keys, bias)
            else:
                scores = trace.gate[rows, bank.memories].float()
            weights, of_groups = softmax_numbers(scores.unflatten(1, (self.groups, -1)))
            added = weights.flatten(1) @ bank.value_rows().float()
            neural[rows] += w[rows, number, None].float() * added
            for name, column in of_groups.items():
                numbers[name][rows] += column.mean(dim=1)
        n_reached = (w != 0).sum(dim=1).clamp(min=1)
        return neural, {name: column / n_reached for name, column in numbers.items()}

    def row(self, layer: int) -> Row:
        """Return the means of one layer."""
        by_name = {name: column[:, layer] for name, column in self.found.items()}
        # The distance is relative to the layer's output: undefined where that is 0.
        some = np.isfinite(by_name["distance"])
        spreads = {name: spread(column[some]) for name, column in by_name.items()}
        return {
            "layer": layer,
            **{name: spreads[name]["mean"] for name in self.columns},
            "cosine_q1": spreads["cosine"]["q1"],
            "cosine_q3": spreads["cosine"]["q3"],
            "n": int(some.sum()),
        }


def softmax_numbers(scores: Any) -> tuple[Any, dict[str, Any]]:
    """Return softmax over the last axis, and how concentrated it is."""
    import torch

    logs = scores - scores.logsumexp(dim=-1, keepdim=True)
    weights = logs.exp()
    entropy = -torch.linalg.vecdot(weights, logs)
    top1_mass = weights.amax(dim=-1)
    return weights, {"entropy": entropy, "top1_mass": top1_mass, "effective": entropy.exp()}


def measure(context: ExperimentContext) -> tuple[list[Row], Row]:
    """Measure how the feed-forward layer differs from a softmax over its keys."""
    compared, layout = context.measured(SoftmaxComparison), context.memories.layout
    largest = max(bank.size for layer in layout.memory_layers for bank in layout.banks(layer))
    also = {
        "keys": "gate" if context.memories.gated else "keys",
        # Of a softmax that is the same for all memories that it runs over.
        "max_entropy": float(np.log(largest / compared.groups)),
    }
    return [compared.row(layer) for layer in layout.memory_layers], also


def chart(result: ExperimentResult) -> charts.Chart:
    """Draw how close the outputs are, and how concentrated the softmax is."""
    names = ["cosine", "cosine_q1", "cosine_q3", "entropy", "top1_mass"]
    rows, same_axis = charts.figure_rows(result.rows, [], names), charts.same_axis
    inner, bottom = charts.layer_axis(result.n_layers, None), charts.layer_axis(result.n_layers)

    def panel(y: alt.Y, x: alt.X) -> alt.LayerChart:
        base = charts.plot(rows, 72).encode(x=x, y=y)
        return charts.layered(base.mark_line(style="ink"), base.mark_point(style="ink"))

    cosine = charts.quantity("cosine", "cosine", tickCount=4)
    entropy = charts.quantity("entropy", "entropy (nats)", tickCount=4)
    top1_mass = charts.quantity("top1_mass", "top-1 mass", (0, 1), tickCount=4)
    quartiles = charts.plot(rows_with(rows, "cosine_q1", "cosine_q3"), 72).mark_bar(style="box")
    quartiles = quartiles.encode(x=inner, y=same_axis(cosine, "cosine_q1"), y2="cosine_q3:Q")
    highest = charts.plot([{"at": result.also.get("max_entropy") or 0.0}], 72)
    even = highest.mark_rule(style="soft", strokeDash=[3, 3]).encode(y=same_axis(entropy, "at"))
    return charts.panels(
        [
            charts.layered(quartiles, panel(cosine, inner)),
            charts.layered(even, panel(entropy, inner)),
            panel(top1_mass, bottom),
        ]
    )


def summary(result: ExperimentResult) -> str:
    """Say how far the softmax memory is from the layer."""
    rows = result.rows_with("cosine", "entropy", "top1_mass")
    if not rows:
        return NOTHING

    def ends(field: str) -> str:
        low, high = min(rows, key=lambda row: row[field]), max(rows, key=lambda row: row[field])
        return (
            f"{format_number(low[field])} ({layer_of(low)}) to"
            f" {format_number(high[field])} ({layer_of(high)})"
        )

    masses = [row["slot_mass"] for row in rows_with(rows, "slot_mass")]
    slots = f" Slots get {format_share(mean(masses))} of the attention." if masses else ""
    return (
        f"The softmax memory's output has a mean cosine of {ends('cosine')} with the layer's own."
        f" Its entropy is {format_number(mean([row['entropy'] for row in rows]))} nats of at most"
        f" {format_number(result.also.get('max_entropy'))} on average over layers, and its largest"
        f" weight {ends('top1_mass')}.{slots}"
    )


EXPERIMENT = Experiment(
    name="neural-memory",
    paper="Eq. 1, 2",
    title="The layer compared with a softmax memory",
    description="FF(x) = f(x·Kᵀ)·V compared with MN(x) = softmax(x·Kᵀ)·V for the same keys K and"
    " values V: cosine of the outputs, entropy of the softmax, and its largest weight.",
    finding="The paper notes that the two formulas differ only in the normalization of the"
    " coefficients, but does not measure it.",
    measure=measure,
    chart=chart,
    summary=summary,
    metrics=(SoftmaxComparison,),
    needs_values=True,
    panels=(
        Panel(title="cosine of FF(x) and MN(x) (mean)", value="cosine", percent=False),
        Panel(title="largest weight of the softmax (mean)", value="top1_mass"),
    ),
    notes={
        "softmax": "This memory is itself a neural memory, FF(x) = MN(x): a cosine of 1 and a"
        " distance of 0 follow from the definition.",
        "experts": "MN has a separate softmax in each expert, and keeps the router's weights:"
        " keys of experts that a prefix does not reach do not compete. Entropy, largest weight and"
        " effective number are means over the experts that a prefix reaches, including the shared"
        " one.",
        "persistent": "FF(x) is what the slots add. MN is the softmax over the slots of each head"
        " alone, without the tokens; entropy, largest weight and effective number are means over"
        " heads. slot_mass is the share of attention on slots rather than tokens.",
    },
)
