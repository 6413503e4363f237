"""A memory's coefficient along a text: one number per token, not only where a prefix ends.

m(t₀ … tₚ)  for every p,  of texts that are read behind their start token
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ffmem.cells import Cell
from ffmem.models.memories import Bank, Memories


@torch.inference_mode()
def along(
    memories: Memories, cell: Cell, texts: Sequence[Sequence[int]], start: int | None
) -> list[list[float]]:
    """Return the coefficient of one memory at every token of some texts; the start's is left out.

    Each text is run by itself, and stopped at the memory's layer.
    """
    cell = memories.layout.resolve(cell)
    before = [] if start is None else [start]
    found: list[list[float]] = []

    def read(bank: Bank, coefficients: Tensor, _: Tensor | None) -> None:
        if bank.layer == cell.layer:
            found.append(coefficients[0, len(before) :, cell.memory].float().cpu().tolist())

    with memories.read_coefficients(read):
        for ids in texts:
            memories.forward(torch.tensor([[*before, *ids]]), layers=cell.layer + 1)
    return found
