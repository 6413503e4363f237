"""What happens to a token when memories are switched off, one at a time: exactly, many at once.

    change of a memory = log p(target | m → 0) − log p(target)        negative: it supported it

Each row of a batch is the prompt with another memory off. Rows are sorted by layer, so that a
batch starts at the lowest of its layers, and those that lie higher run clean until there. Where
to cut is a trade: rows that run clean cost their tokens, each further batch its overhead.

m → 0 alone: where coefficients are weights of a softmax (neural and persistent memory), the rest of
them are not made larger to sum to 1 again. The memory is taken out, not its room in the softmax.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.causal.likelihood import log_probability
from ffmem.causal.upward import Change, Upward
from ffmem.cells import Cell
from ffmem.progress import Step

OVERHEAD = 40
"""What a batch costs in each layer beside its tokens, in tokens. Measured on SmolLM2-135M, one
core: a prompt of 20 tokens takes 117 ms alone and 54 ms in a batch; the head comes on top."""


@torch.no_grad()
def ablation(
    upward: Upward,
    target: int,
    cells: Sequence[Cell],
    positions: Sequence[int] | None = None,
    step: Step = lambda n: None,
) -> Float[Tensor, " cell"]:
    """Return the change of log p of the target for each memory, off at every position or some."""
    head = upward.memories.head
    clean = log_probability(head, upward.output, target).cpu()
    found = torch.zeros(len(cells), dtype=torch.float64)
    order = sorted(range(len(cells)), key=lambda number: cells[number])
    layers = [cells[number].layer for number in order]
    cuts = cheapest_cuts(layers, upward.memories.n_layers, upward.n_tokens, upward.n_rows)
    for begin, end in pairwise(cuts):
        rows = order[begin:end]
        asked = [cells[number] for number in rows]
        output = upward.outputs(asked[0].layer, len(rows), _off(asked, positions))
        found[rows] = log_probability(head, output, target).cpu() - clean
        step(len(rows))
    return found


def cheapest_cuts(layers: list[int], n_layers: int, n_tokens: int, most: int) -> list[int]:
    """Return where to cut rows, sorted by layer, into batches of at most so many: 0, …, the end.

    A batch of n rows from layer ℓ upward costs (layers left + 1) · (n · tokens + OVERHEAD).
    """
    cheapest, before = [0.0], [0]
    for end in range(1, len(layers) + 1):
        costs = [
            cheapest[begin] + (n_layers - layers[begin] + 1) * ((end - begin) * n_tokens + OVERHEAD)
            for begin in range(max(0, end - most), end)
        ]
        best = min(range(len(costs)), key=costs.__getitem__)
        cheapest.append(costs[best])
        before.append(max(0, end - most) + best)
    cuts = [len(layers)]
    while cuts[-1] > 0:
        cuts.append(before[cuts[-1]])
    return cuts[::-1]


def _off(cells: Sequence[Cell], positions: Sequence[int] | None) -> dict[int, Change]:
    """Return what switches off, in row b of a batch, the b-th memory."""
    by_layer: dict[int, list[int]] = {}
    for row, cell in enumerate(cells):
        by_layer.setdefault(cell.layer, []).append(row)
    return {
        layer: _zeroed(rows, [cells[row].memory for row in rows], positions)
        for layer, rows in by_layer.items()
    }


def _zeroed(rows: list[int], memories: list[int], positions: Sequence[int] | None) -> Change:
    def change(coefficients: Tensor) -> Tensor:
        device = coefficients.device
        row, memory = torch.tensor(rows, device=device), torch.tensor(memories, device=device)
        places = range(coefficients.shape[1]) if positions is None else positions
        place = torch.tensor(list(places), device=device, dtype=torch.long)
        changed = coefficients.clone()
        changed[row[:, None], place[None], memory[:, None]] = 0
        return changed

    return change
