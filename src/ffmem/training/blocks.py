"""A stream cut into blocks of equal length, in another order and from another place every epoch.

    block b of epoch e = stream[o + b·L … o + b·L + L]  (round the end),  o drawn from (seed, e)

The stream is a ring: behind its last token comes the start token it begins with, as behind every
sentence. So an epoch has ⌈tokens / L⌉ blocks and leaves no token out; fewer than L are read twice.
Blocks of all epochs stand in one row, and step n takes the n-th handful: what a step reads follows
from its number alone.
"""

from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Int, Int64
from numpy import ndarray
from torch import Tensor


class Blocks:
    """The blocks of a stream."""

    def __init__(self, stream: Int[ndarray, " token"], context: int, seed: int) -> None:
        self.stream = torch.from_numpy(np.asarray(stream, np.int64))
        self.context = context
        self.seed = seed
        self.of_an_epoch = -(-len(stream) // context)
        self._order = lru_cache(maxsize=2)(self._drawn)

    def steps(self, epochs: int, size: int) -> int:
        """Return how many steps of `size` blocks read the stream so many times at least."""
        return -(-epochs * self.of_an_epoch // size)

    def batch(
        self, step: int, size: int
    ) -> tuple[Int[Tensor, "block position"], Int[Tensor, "block position"]]:
        """Return the tokens that a step reads, and those that follow them."""
        starts = [self._start(number) for number in range(step * size, (step + 1) * size)]
        places = torch.tensor(starts)[:, None] + torch.arange(self.context + 1)
        tokens = self.stream[places % len(self.stream)]
        return tokens[:, :-1], tokens[:, 1:]

    def _start(self, number: int) -> int:
        """Return the place where a block begins, the blocks of all epochs counted in one row."""
        epoch, place = divmod(number, self.of_an_epoch)
        offset, order = self._order(epoch)
        return offset + int(order[place]) * self.context

    def _drawn(self, epoch: int) -> tuple[int, Int64[ndarray, " block"]]:
        """Return where an epoch begins in the stream, and the order of its blocks."""
        random = np.random.default_rng([self.seed, epoch])
        return int(random.integers(len(self.stream))), random.permutation(self.of_an_epoch)
