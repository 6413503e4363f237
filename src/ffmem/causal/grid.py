"""What every layer predicts at every position of a prompt: before its feed-forward part, and after.

    grid[layer][position] = top(r), top(o), and the case: which of top(r), top(y) is top(o)

One forward pass; each layer is read as soon as it is done, and two vocabulary projections of it
give all three vectors (`experiments.predictions`).
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from ffmem.causal.tabled import TokenChance, columns
from ffmem.experiments.predictions import CASES, Projector
from ffmem.indexing.memory import visible_token
from ffmem.models.memories import Memories
from ffmem.models.trace import LayerTrace


class Place(NamedTuple):
    """One layer at one position."""

    residual: TokenChance
    """top(r)"""
    ff: TokenChance
    """top(y)"""
    output: TokenChance
    """top(o)"""
    case: str

    def to_dict(self) -> dict[str, Any]:
        """Return what `trace --grid --json` prints."""
        tops = {name: getattr(self, name)._asdict() for name in ("residual", "ff", "output")}
        return {**tops, "case": self.case}


Grid = list[list[Place]]
"""By layer, then by position."""


@torch.inference_mode()
def grid(memories: Memories, ids: list[int], shown: list[str]) -> Grid:
    """Return what the layers predict at all positions, under whatever edits are in force."""
    projector = Projector(memories)
    nobody = np.zeros(len(ids), np.int64)  # no rank is asked for
    found: Grid = []

    def read(_: int, trace: LayerTrace) -> None:
        predicted = projector.read(trace, nobody)
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
        named = [next(case for case in CASES if cases[case][row, 0]) for row in range(len(ids))]
        found.append([Place(*place) for place in zip(*chances, named, strict=True)])

    tokens = torch.tensor([ids])
    places = torch.stack([torch.zeros(len(ids), dtype=torch.long), torch.arange(len(ids))], dim=1)
    with memories.tracing(read, tokens, places):
        memories.forward(tokens)
    return found


def lines(found: Grid, tokens: list[str]) -> list[str]:
    """Return a grid as lines of plain text: what each layer's output predicts at each position."""
    head = ["layer", *map(visible_token, tokens)]
    rows = [
        [str(layer), *(visible_token(place.output.token) for place in places)]
        for layer, places in enumerate(found)
    ]
    return columns([head, *rows])
