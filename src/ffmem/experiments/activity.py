"""How many memories of a layer are at work on an example (Figure 7).

    positive   m > 0
    gate       the gate's pre-activation > 0, in gated models
    effect     the smallest set of memories that carries 90 % of Σ |m|·‖v‖

The first is the paper's. In a gated model a coefficient's sign means nothing by itself, and no
coefficient is ever quite zero, hence the others. Weights of a softmax are all positive: there, only
the last tells memories apart. It needs static values, and is left out where there are none.
"""

import numpy as np
from jaxtyping import Float, Float32
from numpy import ndarray
from torch import Tensor

from ffmem.experiments.result import Row
from ffmem.experiments.spread import spread
from ffmem.models.memories import Memories
from ffmem.models.trace import LayerTrace

CARRIED = 0.9
"""The share of the layer's contributions that the `effect` set carries."""


class Activity:
    """Shares of active memories, by definition, example and layer."""

    def __init__(self, memories: Memories, n_examples: int) -> None:
        gate, effect = ("gate",) * memories.gated, ("effect",) * memories.has_values
        self.shares: dict[str, Float32[ndarray, "example layer"]] = {
            name: np.zeros((n_examples, memories.n_layers), np.float32)
            for name in ("positive", *gate, *effect)
        }

    def read(
        self,
        examples: slice | ndarray,
        layer: int,
        trace: LayerTrace,
        contributions: Float32[ndarray, "row memory"] | None,
    ) -> None:
        """Count one layer's active memories on some examples; without values, not the effect."""
        found = {"positive": _positive(trace.coefficients)}
        if contributions is not None:
            found["effect"] = carrying(contributions)
        if trace.gate is not None:
            found["gate"] = _positive(trace.gate)
        for name, share in found.items():
            self.shares[name][examples, layer] = share

    def rows(self) -> list[Row]:
        """Return the rows of `active-memories`."""
        n_layers = self.shares["positive"].shape[1]
        return [
            {"layer": layer, "definition": name, **spread(shares[:, layer])}
            for layer in range(n_layers)
            for name, shares in self.shares.items()
        ]


def contributions(
    coefficients: Float[Tensor, "row memory"], lengths: Float32[ndarray, " memory"]
) -> Float32[ndarray, "row memory"]:
    """Return |m|·‖v‖ of every memory.

    In output-normed blocks all of a row's are divided by one number, which no share notices.
    """
    return np.asarray(np.abs(coefficients.float().cpu().numpy()) * lengths)


def carrying(contributions: Float32[ndarray, "row memory"]) -> Float32[ndarray, " row"]:
    """Return the share of memories in the smallest set that carries `CARRIED` of the sum."""
    ordered = -np.sort(-contributions, axis=1)
    sums = np.cumsum(ordered, axis=1, dtype=np.float64)
    reached = sums < CARRIED * sums[:, -1:]
    size = np.where(sums[:, -1] > 0, reached.sum(axis=1) + 1, 0)
    return np.asarray(size / contributions.shape[1], np.float32)


def _positive(numbers: Float[Tensor, "row memory"]) -> Float32[ndarray, " row"]:
    above = numbers.float().cpu().numpy() > 0
    return np.asarray(above.mean(axis=1, dtype=np.float64), np.float32)
