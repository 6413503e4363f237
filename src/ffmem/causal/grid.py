"""What every layer predicts at every position of a prompt: before its feed-forward part, and after.

    grid[layer][position] = top(r), top(o), and the case: which of top(r), top(y) is top(o)

One forward pass; as many layers as there is room for are read together, and two vocabulary
projections of them give all three vectors (`experiments.predictions`).
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ffmem.causal.tabled import TokenChance, columns
from ffmem.experiments.predictions import CASES
from ffmem.experiments.projection import Projector
from ffmem.indexing.memory import visible_token
from ffmem.models.memories import Memories
from ffmem.models.trace import LayerTrace


class Place(NamedTuple):
    """One layer at one position."""

    residual: TokenChance
    """top(r)"""
    ff: TokenChance | None
    """top(y); None where the layer has no memories"""
    output: TokenChance
    """top(o)"""
    case: str

    def to_dict(self) -> dict[str, Any]:
        """Return what `trace --grid --json` prints."""
        return {
            "residual": self.residual._asdict(),
            "ff": None if self.ff is None else self.ff._asdict(),
            "output": self.output._asdict(),
            "case": self.case,
        }


Grid = list[list[Place]]
"""By layer, then by position."""


@torch.inference_mode()
def grid(memories: Memories, ids: list[int], shown: list[str]) -> Grid:
    """Return what the layers predict at all positions, under whatever edits are in force."""
    projector = Projector(memories)
    waiting: list[LayerTrace] = []
    found: list[Place] = []

    def read_waiting() -> None:
        if waiting:
            found.extend(_places(projector, waiting, shown))
            waiting.clear()

    def read(_: int, trace: LayerTrace) -> None:
        if (len(waiting) + 1) * len(ids) > projector.rows:
            read_waiting()
        waiting.append(trace)

    tokens = torch.tensor([ids])
    places = torch.stack([torch.zeros(len(ids), dtype=torch.long), torch.arange(len(ids))], dim=1)
    with memories.trace_layers(read, tokens, places):
        memories.forward(tokens)
    read_waiting()
    return [found[first : first + len(ids)] for first in range(0, len(found), len(ids))]


def _places(projector: Projector, layers: list[LayerTrace], shown: list[str]) -> list[Place]:
    """Return what some layers predict, position by position, layer after layer."""
    device = layers[0].residual.device

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(layer, name).to(device) for layer in layers])

    rows = {name: joined(name) for name in ("residual", "ff_output", "layer_output")}
    n_rows = len(rows["residual"])
    nobody = np.zeros(n_rows, np.int64)  # no rank is asked for
    predicted = projector.read(layers[0]._replace(**rows), nobody)
    chances = [
        [
            TokenChance(shown[id], id, probability)
            for id, probability in zip(tops[:, 0].tolist(), shares[:, 0].tolist(), strict=True)
        ]
        for tops, shares in (
            (predicted.residual_top, predicted.residual_top_probability),
            (predicted.ff_top, predicted.ff_top_probability),
            (predicted.output_top, predicted.output_top_probability),
        )
    ]
    cases = predicted.cases()
    named = [next(case for case in CASES if cases[case][row, 0]) for row in range(n_rows)]
    has_memories = [layer.coefficients.shape[1] > 0 for layer in layers for _ in layer.residual]
    return [
        Place(r, y, o, case) if has else Place(r, None, o, "residual")
        for r, y, o, case, has in zip(*chances, named, has_memories, strict=True)
    ]


def lines(found: Grid, tokens: list[str]) -> list[str]:
    """Return a grid as lines of plain text: what each layer's output predicts at each position."""
    head = ["layer", *map(visible_token, tokens)]
    rows = [
        [str(layer), *(visible_token(place.output.token) for place in places)]
        for layer, places in enumerate(found)
    ]
    return columns([head, *rows])
