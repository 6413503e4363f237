"""The trigger examples of every memory: its t prefixes of strongest coefficient.

A prefix is one integer. A list ranks by |m|, ties to the earlier prefix; all coefficients of a
list have one sign, so ungated models have one list and gated models two. `Triggers` obeys one
law, and everything else rests on it: for any split of a corpus into parts,

    merge(triggers(part 1), …, triggers(part n)) == triggers(corpus)

whatever the order of the parts and the shape of the tree. So it never grows with the corpus, a
stopped pass resumes, an index is extended, and a cluster runs the same code as a laptop.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int8, Int64
from numpy import ndarray

from ffmem.indexing.sentences import VACANT


class Triggers(NamedTuple):
    """The top t of each memory, strongest first, vacant slots last."""

    coefficients: Float32[ndarray, "layer memory top"]
    prefixes: Int64[ndarray, "layer memory top"]
    gates: Int8[ndarray, "layer memory top"]
    """Sign of the gate's pre-activation at the prefix; 0 in ungated models."""

    @classmethod
    def empty(cls, n_layers: int, n_memories: int, t: int) -> "Triggers":
        """Return the triggers of an empty corpus."""
        shape = (n_layers, n_memories, t)
        return cls(
            np.zeros(shape, np.float32), np.full(shape, VACANT, np.int64), np.zeros(shape, np.int8)
        )

    def weakest(self) -> Float32[ndarray, "layer memory"]:
        """Return |m| of each memory's last slot: what a further prefix must reach to enter."""
        weakest: ndarray = np.abs(self.coefficients[..., -1])
        return weakest

    def shifted(self, places: int) -> "Triggers":
        """Return the same triggers in a corpus that has `places` more prefixes in front."""
        moved = np.where(self.prefixes == VACANT, VACANT, self.prefixes + places)
        return self._replace(prefixes=moved)

    def merge(self, other: "Triggers") -> "Triggers":
        """Return the triggers of two disjoint parts of a corpus taken together."""
        n_layers, n_memories, t = self.coefficients.shape
        merged = Triggers.empty(n_layers, n_memories, t)
        for layer in range(n_layers):  # one layer at a time: no second copy of the whole
            both = [
                np.concatenate(pair, axis=-1)
                for pair in zip(self.layer(layer), other.layer(layer), strict=True)
            ]
            order = _ranking(both[0], both[1])[:, :t]
            for into, column in zip(merged.layer(layer), both, strict=True):
                into[:] = np.take_along_axis(column, order, axis=-1)
        return merged

    def layer(self, layer: int) -> tuple[ndarray, ndarray, ndarray]:
        """Return one layer's coefficients, prefixes and gates, each (memory, top)."""
        return self.coefficients[layer], self.prefixes[layer], self.gates[layer]


def _ranking(
    coefficients: Float32[ndarray, "memory slot"], prefixes: Int64[ndarray, "memory slot"]
) -> Int64[ndarray, "memory slot"]:
    """Return the order of each row by (|m| descending, prefix ascending)."""
    weakness = -np.abs(coefficients)
    # Two ranked lists in a row are two runs, which a stable sort merges in linear time. Ties
    # between them are rare, so only rows that have one pay for the second key.
    order = np.argsort(weakness, axis=-1, kind="stable")
    ranked = np.take_along_axis(weakness, order, axis=-1)
    tied = ((ranked[:, 1:] == ranked[:, :-1]) & (ranked[:, 1:] != 0)).any(axis=-1).nonzero()[0]
    if len(tied):
        order[tied] = np.lexsort((prefixes[tied], weakness[tied]), axis=-1)
    return order
