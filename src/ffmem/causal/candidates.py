"""Which memories are worth an exact measurement, and how well estimates rank them.

The largest |estimate| of each kind, taken in turn: the first of every kind, then the second, …,
until there are enough. The rank correlation is Spearman's: Pearson's of the ranks, ties averaged.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from jaxtyping import Float

from ffmem.causal.edits import cells_of
from ffmem.causal.estimates import Estimates
from ffmem.cells import Cell, Layout
from ffmem.errors import FfmemError
from ffmem.models.memories import Memories


def candidates(
    layout: Layout, estimates: Estimates, n: int, named: Iterable[Cell] = ()
) -> list[Cell]:
    """Return n memories of large estimates, and behind them those named that are not among them."""
    orders = []
    for estimate in estimates:
        if estimate is None:
            continue
        best = np.argsort(-np.abs(estimate.numpy()), kind="stable")[:n].tolist()
        orders.append([layout.at(number) for number in best])
    in_turn = list(dict.fromkeys(chain.from_iterable(zip(*orders, strict=True))))[:n]
    return list(dict.fromkeys([*in_turn, *named]))


def named_cells(memories: Memories, names: object, n: int) -> list[Cell]:
    """Return the memories that were asked for by name; with no others, there must be one."""
    cells = [memories.layout.resolve(cell) for cell in cells_of("cells", names)]
    if n < 0 or not (n or cells):
        raise FfmemError(
            f"{n} candidates and {len(cells)} named memories were asked for: nothing to measure."
            " Give at least one candidate or one cell."
        )
    return cells


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; None where one side does not vary."""
    first, second = _ranks(np.asarray(one, float)), _ranks(np.asarray(other, float))
    first, second = first - first.mean(), second - second.mean()
    size = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return float((first * second).sum()) / size if size > 0 else None


def _ranks(numbers: Float[np.ndarray, " number"]) -> Float[np.ndarray, " number"]:
    """Return the place of each number in order, from 0; equal numbers share their mean place."""
    _, group, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    last = np.cumsum(counts) - 1
    return (last - (counts - 1) / 2)[group]
