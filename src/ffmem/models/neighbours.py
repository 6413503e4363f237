"""Memories that resemble one: by the direction of their values, or of their keys.

    cosine(v, v′) = v · v′ / (‖v‖ ‖v′‖)

Layer by layer, the nearest first, so that nothing larger than one layer's weights is held and a
search can end when its time is over. Values are those that
reach the residual stream (`readable_values`); in gated models the keys are the gate's.
"""

import math
import time
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.cells import Cell
from ffmem.errors import FfmemError, NoStaticValues
from ffmem.models.memories import Memories

SIDES = ("value", "key")


class Neighbour(NamedTuple):
    """A memory, and how alike the two directions are: 1 the same, −1 opposite."""

    cell: Cell
    cosine: float


class Neighbourhood(NamedTuple):
    """The neighbours of a memory, and the layers in which they were looked for."""

    found: list[Neighbour]
    layers: list[int]
    """All of the model's, unless the time was over before."""


def neighbours(memories: Memories, cell: Cell, by: str = "value", n: int = 10) -> list[Neighbour]:
    """Return the memories of largest |cosine| to one, in any layer; ties to the lower cell.

    A memory of zeros has no direction, and no neighbours.
    """
    return neighbourhood(memories, cell, by, n).found


@torch.inference_mode()
def neighbourhood(
    memories: Memories,
    cell: Cell,
    by: str = "value",
    n: int = 10,
    seconds: float | None = None,
) -> Neighbourhood:
    """Return the neighbours in as many layers as can be searched in a time, at least its own."""
    if by not in SIDES:
        raise FfmemError(f"Neighbours by {by!r} were asked for. Ask by {' or '.join(SIDES)}.")
    if by == "value" and not memories.has_values:
        raise NoStaticValues("Neighbours by value were asked for; by key there are some.")
    if n < 1:
        raise FfmemError(f"{n} neighbours were asked for. Give 1 or more.")
    cell = memories.layout.resolve(cell)
    own = _directions(memories, cell.layer, by)[cell.memory]
    searched: list[int] = []
    found: list[Neighbour] = []
    until = math.inf if seconds is None else time.monotonic() + seconds
    for layer in _outwards(cell.layer, memories.n_layers):
        if searched and time.monotonic() > until:
            break
        searched.append(layer)
        if not own.any():
            continue
        directions = _directions(memories, layer, by)
        cosines = (directions @ own.to(directions.device)).cpu()
        if layer == cell.layer:
            cosines[cell.memory] = 0.0  # itself
        # A stable sort, so that equals stay in the order of their cells.
        best = cosines.abs().sort(descending=True, stable=True).indices[:n].tolist()
        found += [
            Neighbour(memories.layout.cell(layer, memory), float(cosines[memory]))
            for memory in best
        ]
    found = [one for one in found if one.cell != cell and not math.isclose(one.cosine, 0.0)]
    best_first = sorted(found, key=lambda one: (-abs(one.cosine), one.cell))
    return Neighbourhood(best_first[:n], sorted(searched))


def _outwards(layer: int, n_layers: int) -> list[int]:
    """Return all layers, those near to one first."""
    return sorted(range(n_layers), key=lambda other: (abs(other - layer), other))


def _directions(memories: Memories, layer: int, by: str) -> Float[Tensor, "memory hidden"]:
    """Return unit vectors; zeros stay zeros."""
    vectors = memories.readable_values(layer) if by == "value" else memories.keys(layer)
    return torch.nn.functional.normalize(vectors.float(), dim=1)
