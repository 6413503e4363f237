"""Classes of memories by the cosines of their weights, as they act on the residual stream.

A gated memory reads the directions g (gate) and u (up) and writes the direction v (value):
m · v with m = f(g · x) · (u · x). Flipping u and v together changes nothing, so what matters is the
sign of cos(u, v), and the size alone of cos(g, v). With 0.5 as the bound between near and far:

    cos(u, v) ≥ 0.5     v adds to what u reads         strengthening
    cos(u, v) ≤ −0.5    v takes away what u reads      weakening
    otherwise           |cos(g, v)| ≥ 0.5              proportional change: v changes what the gate
                                                       reads, by as much as u says
                        |cos(g, v)| < 0.5              orthogonal output: v is a new direction

Strengthening and weakening are conditional where |cos(g, v)| < 0.5: the gate then reads something
else, the condition. An ungated memory has one key, so it strengthens, weakens, or writes an
orthogonal output. The names follow arXiv 2505.17936; our
thresholds have not been compared with its own.
"""

from collections.abc import Mapping

import numpy as np
from numpy import ndarray

NEAR = 0.5
"""|cos| from which two directions count as near."""

COSINES = ("cos_gate_up", "cos_gate_value", "cos_up_value", "cos_key_value")

CLASSES = (
    "strengthening",
    "conditional strengthening",
    "proportional change",
    "conditional weakening",
    "weakening",
    "orthogonal output",
)


def weight_classes(cosines: Mapping[str, ndarray]) -> ndarray | None:
    """Return the class of each memory, as its number in `CLASSES`; None without values."""
    if "cos_up_value" in cosines:
        read, gate = cosines["cos_up_value"], np.abs(cosines["cos_gate_value"]) >= NEAR
    elif "cos_key_value" in cosines:
        read = cosines["cos_key_value"]
        gate = np.abs(read) >= NEAR
    else:
        return None
    otherwise = np.where(gate, 2, 5)
    strengthens, weakens = np.where(gate, 0, 1), np.where(gate, 4, 3)
    return np.where(read >= NEAR, strengthens, np.where(read <= -NEAR, weakens, otherwise))
