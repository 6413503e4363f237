"""How many memories of a layer are at work on an example (Figure 7).

    positive   m > 0
    gate       the gate's pre-activation > 0, in gated models
    effect     the smallest set of memories that carries 90 % of Σ |m|·‖v‖

The first is the paper's. In a gated model a coefficient's sign means nothing by itself, and no
coefficient is ever quite zero, hence the others. Weights of a softmax are all positive: there, only
the last tells memories apart. It needs static values, and is left out where there are none.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32
from numpy import ndarray

from ffmem.experiments.result import Row
from ffmem.models.memories import Memories
from ffmem.stats import spread

CARRIED = 0.9
"""The share of the layer's contributions that the `effect` set carries."""


class Work(NamedTuple):
    """What the memories of a layer do on some examples."""

    coefficients: Float32[ndarray, "row memory"]
    gate: Float32[ndarray, "row memory"] | None
    contributions: Float32[ndarray, "row memory"] | None
    """|m|·‖v‖; None where values are not static."""


class Activity:
    """Shares of active memories, by definition, example and layer."""

    def __init__(self, memories: Memories, n_examples: int) -> None:
        self.layers = memories.layout.memory_layers
        gate, effect = ("gate",) * memories.gated, ("effect",) * memories.has_values
        self.shares: dict[str, Float32[ndarray, "example layer"]] = {
            name: np.zeros((n_examples, memories.n_layers), np.float32)
            for name in ("positive", *gate, *effect)
        }

    def read(self, examples: slice, layer: int, work: Work) -> None:
        """Count one layer's active memories on some examples; without values, not the effect."""
        found = {"positive": _positive(work.coefficients)}
        if work.contributions is not None:
            found["effect"] = carrying(work.contributions)
        if work.gate is not None:
            found["gate"] = _positive(work.gate)
        for name, share in found.items():
            self.shares[name][examples, layer] = share

    def rows(self) -> list[Row]:
        """Return the rows of `active-memories`."""
        return [
            {"layer": layer, "definition": name, **spread(shares[:, layer])}
            for layer in self.layers
            for name, shares in self.shares.items()
        ]


def carrying(contributions: Float32[ndarray, "row memory"]) -> Float32[ndarray, " row"]:
    """Return the share of memories in the smallest set that carries `CARRIED` of the sum."""
    sums = np.cumsum(np.sort(contributions, axis=1), axis=1, dtype=np.float64)
    total = sums[:, -1:]
    spared = total - sums >= CARRIED * total  # what carries least is not needed
    size = contributions.shape[1] - spared.sum(axis=1)
    return np.asarray(np.where(total[:, 0] > 0, size, 0) / contributions.shape[1], np.float32)


def _positive(numbers: Float32[ndarray, "row memory"]) -> Float32[ndarray, " row"]:
    return np.asarray(np.count_nonzero(numbers > 0, axis=1) / numbers.shape[1], np.float32)
