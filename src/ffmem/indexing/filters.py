"""Filters of a search: which matches count, and of which memories.

A filter is a mask over all memories, or a condition on the postings that a query has found, so that
it costs little however many match.
"""

from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from ffmem.errors import FfmemError
from ffmem.indexing.store import Index

PATTERN_KINDS = ("shallow", "semantic")


@dataclass(frozen=True)
class Filters:
    """What a search keeps; None keeps everything."""

    layer: int | None = None
    bank: str | None = None
    """dense, S (S0, S1 …) or E12."""
    sign: int | None = None
    """1: tops of values, and what triggers with m > 0. −1: bottoms, and m < 0."""
    rank: int | None = None
    """Matches at this rank or better: of a token, a trigger, or a pattern in its list."""
    kind: str | None = None
    """Patterns of this kind; values and triggers of memories that have one."""
    min_active: float | None = None
    """Least share of prefixes on which the memory is active."""
    max_active: float | None = None

    def check(self, index: Index) -> None:
        """Raise if a filter makes no sense for an index."""
        if self.layer is not None:
            index.layout.check_layer(self.layer)
        if self.bank is not None and not self._bank_ranges(index):
            layers = range(index.n_layers) if self.layer is None else [self.layer]
            names = dict.fromkeys(
                bank.name or "dense" for layer in layers for bank in index.layout.banks(layer)
            )
            shown = ", ".join(list(names)[:8]) + (", …" if len(names) > 8 else "")
            where = "this index" if self.layer is None else f"layer {self.layer}"
            raise FfmemError(f"There is no bank {self.bank!r} in {where}. There are: {shown}.")
        if self.sign not in (None, 1, -1):
            raise FfmemError(f"sign is {self.sign!r}. Use 1 or -1.")
        if self.rank is not None and self.rank < 1:
            raise FfmemError(f"rank is {self.rank}. Ranks start at 1.")
        if self.kind is not None and self.kind not in PATTERN_KINDS:
            kinds = " or ".join(PATTERN_KINDS)
            raise FfmemError(f"There are no {self.kind!r} patterns. Use {kinds}.")
        for name in ("min_active", "max_active"):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise FfmemError(f"{name} is {share}. It is a share of prefixes: use 0 to 1.")
        least, most = self.min_active, self.max_active
        if least is not None and most is not None and least > most:
            raise FfmemError(f"min_active {least} is above max_active {most}. Swap them.")

    def memories(self, index: Index) -> ndarray | None:
        """Return which memories may be found, by layer, bank and activity; None for all."""
        if all(one is None for one in (self.layer, self.bank, self.min_active, self.max_active)):
            return None
        kept = np.ones(len(index), bool)
        if self.layer is not None:
            kept[: index.layout.starts[self.layer]] = False
            kept[index.layout.starts[self.layer + 1] :] = False
        if self.bank is not None:
            inside = np.zeros(len(index), bool)
            for memories in self._bank_ranges(index):
                inside[memories] = True
            kept &= inside
        if self.min_active is not None:
            kept &= index.active_shares >= self.min_active
        if self.max_active is not None:
            kept &= index.active_shares <= self.max_active
        return kept

    def keep(self, postings: ndarray) -> ndarray:
        """Return which postings count, by sign and rank."""
        kept = np.ones(len(postings), bool)
        if self.sign is not None:
            kept &= postings["side"] == self.sign
        if self.rank is not None:
            kept &= postings["rank"] <= self.rank
        return kept

    def _bank_ranges(self, index: Index) -> list[slice]:
        """Return where the memories of the bank are, in each layer that has it."""
        layers = range(index.n_layers) if self.layer is None else [self.layer]
        return [
            slice(start + bank.offset, start + bank.offset + bank.size)
            for layer in layers
            for start in [index.layout.starts[layer]]
            for bank in index.layout.banks(layer)
            if (bank.name or "dense") == self.bank
        ]


NO_FILTERS = Filters()
