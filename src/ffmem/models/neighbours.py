"""Memories that resemble one: by the direction of their values, or of their keys.

    cosine(v, v′) = v · v′ / (‖v‖ ‖v′‖)

Layer by layer, so that nothing larger than one layer's weights is held. Values are those that
reach the residual stream (`readable_values`); in gated models the keys are the gate's.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.cells import Cell
from ffmem.errors import FfmemError
from ffmem.models.memories import Memories

SIDES = ("value", "key")


class Neighbour(NamedTuple):
    """A memory, and how alike the two directions are: 1 the same, −1 opposite."""

    cell: Cell
    cosine: float


@torch.inference_mode()
def neighbours(memories: Memories, cell: Cell, by: str = "value", n: int = 10) -> list[Neighbour]:
    """Return the memories of largest |cosine| to one, in any layer; ties to the lower cell.

    A memory of zeros has no direction, and no neighbours.
    """
    if by not in SIDES:
        raise FfmemError(f"Neighbours by {by!r} were asked for. Ask by {' or '.join(SIDES)}.")
    if n < 1:
        raise FfmemError(f"{n} neighbours were asked for. Give 1 or more.")
    cell.within(memories.n_layers, memories.n_memories)
    own = _directions(memories, cell.layer, by)[cell.memory]
    if not own.any():
        return []
    found: list[Neighbour] = []
    for layer in range(memories.n_layers):
        cosines = (_directions(memories, layer, by) @ own.to(memories.values(layer).device)).cpu()
        if layer == cell.layer:
            cosines[cell.memory] = 0.0  # itself
        # A stable sort, so that equals stay in the order of their cells.
        best = cosines.abs().sort(descending=True, stable=True).indices[:n].tolist()
        found += [Neighbour(Cell(layer, memory), float(cosines[memory])) for memory in best]
    found = [one for one in found if one.cell != cell and not math.isclose(one.cosine, 0.0)]
    return sorted(found, key=lambda one: (-abs(one.cosine), one.cell))[:n]


def _directions(memories: Memories, layer: int, by: str) -> Float[Tensor, "memory hidden"]:
    """Return unit vectors; zeros stay zeros."""
    vectors = memories.readable_values(layer) if by == "value" else memories.keys(layer)
    return torch.nn.functional.normalize(vectors.float(), dim=1)
