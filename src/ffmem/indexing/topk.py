"""The running top t prefixes of every memory.

A candidate is packed into one integer, so that an integer sort ranks candidates as `Triggers` does:

    key = bits of |m| · 2³³  +  (2³² − 1 − prefix) · 2  +  [gate > 0]

Positive floats order as their bits, and an earlier prefix gives a larger key.
"""

import numpy as np
import torch
from jaxtyping import Float32, Int64, Shaped, UInt64
from numpy import ndarray
from torch import Tensor

from ffmem.indexing.results import Triggers
from ffmem.indexing.sentences import NO_PREFIX

MAX_PREFIXES = 1 << 32
"""Prefix numbers that fit into a key; larger corpora are indexed in parts and merged."""

_LAST = MAX_PREFIXES - 1


def pack_keys(
    strengths: Float32[ndarray, "*candidate"],
    prefixes: Int64[ndarray, "*#candidate"],
    gates: Shaped[ndarray, "*candidate"],
) -> UInt64[ndarray, "*candidate"]:
    """Return the keys of candidates: strengths are |m| > 0; gates are 1 where the gate is open."""
    keys = strengths.view(np.uint32).astype(np.uint64) << np.uint64(33)
    keys |= (_LAST - prefixes).astype(np.uint64) << np.uint64(1)
    keys |= gates.astype(np.uint64)
    return keys


class TopK:
    """The running list, of one sign, of every memory of a layer.

    A chunk's candidates join the list when the chunk is complete (`commit`), or are dropped
    (`rollback`). A candidate enters if it reaches the `threshold`. One equal to it must enter too:
    batches do not come in the order of prefixes, and the earlier prefix wins a tie.
    """

    def __init__(self, n_memories: int, t: int, sign: int) -> None:
        self.sign = sign
        self.t = t
        self._committed = np.zeros((n_memories, t), np.uint64)  # ascending: the weakest first
        self._keys = self._committed  # a copy once candidates of the chunk are sorted in
        self._pending: list[tuple[ndarray, ndarray]] = []
        self._n_pending = 0
        self._threshold = torch.zeros(n_memories)

    def threshold(self, device: torch.device) -> Tensor:
        """Return the |m| that each memory's candidates must reach, on a device."""
        if self._threshold.device != device:
            self._threshold = self._threshold.to(device)
        return self._threshold

    def is_filling(self) -> bool:
        """Return whether many memories still accept any coefficient."""
        empty = self._keys[:, 0] == 0
        return int(empty.sum()) * 8 > len(empty)

    def add(
        self, memories: Int64[ndarray, " candidate"], keys: UInt64[ndarray, " candidate"]
    ) -> None:
        """Add candidates."""
        self._pending.append((memories, keys))
        self._n_pending += len(keys)
        # Sorting costs time in proportion to the list, so collect about as many candidates first.
        if self._n_pending > self._keys.size // 2 or self.is_filling():
            self._sort_in()

    def add_block(self, memories: slice, keys: UInt64[ndarray, "candidate memory"]) -> None:
        """Add as many candidates for each of a few memories, at once; a key of 0 is none."""
        self._copy_committed()
        both = np.concatenate([self._keys[memories], keys.T], axis=1)
        both.sort(axis=1)
        self._keys[memories] = both[:, -self.t :]
        self._threshold[memories] = _weakest(self._keys[memories])

    def _sort_in(self) -> None:
        """Sort the pending candidates into the list, and raise the thresholds."""
        if not self._n_pending:
            return
        memories = np.concatenate([pair[0] for pair in self._pending])
        keys = np.concatenate([pair[1] for pair in self._pending])
        self._pending, self._n_pending = [], 0
        self._copy_committed()
        order = np.argsort(memories, kind="stable")
        memories, keys = memories[order], keys[order]
        starts = np.searchsorted(memories, np.arange(len(self._keys)))
        ranks = np.arange(len(memories)) - starts[memories]  # earlier candidates of the memory
        for first in range(0, int(ranks.max()) + 1, self.t):
            # At most t per memory at a time, so that one memory with many does not widen all rows.
            now = (ranks >= first) & (ranks < first + self.t)
            rows, inverse = np.unique(memories[now], return_inverse=True)
            wide = np.zeros((len(rows), int(ranks[now].max()) - first + 1), np.uint64)
            wide[inverse, ranks[now] - first] = keys[now]
            both = np.concatenate([self._keys[rows], wide], axis=1)
            both.sort(axis=1)
            self._keys[rows] = both[:, -self.t :]
        self._raise_threshold()

    def _copy_committed(self) -> None:
        """Make the list one that may change; the committed one stays as it is."""
        if self._keys is self._committed:
            self._keys = self._committed.copy()

    def _raise_threshold(self) -> None:
        self._threshold = _weakest(self._keys).to(self._threshold.device)

    def commit(self) -> None:
        """Keep the candidates since the last commit."""
        self._sort_in()
        self._committed = self._keys

    def rollback(self) -> None:
        """Drop the candidates since the last commit."""
        self._pending, self._n_pending = [], 0
        self._keys = self._committed
        self._raise_threshold()

    def triggers(self, gated: bool) -> Triggers:
        """Return the committed list, strongest first."""
        keys = self._committed[:, ::-1]
        filled = keys != 0
        strengths = (keys >> np.uint64(33)).astype(np.uint32).view(np.float32)
        prefixes = _LAST - ((keys >> np.uint64(1)) & np.uint64(_LAST)).astype(np.int64)
        gates = (keys & np.uint64(1)).astype(np.int8) * 2 - 1 if gated else np.int8(0)
        return Triggers(
            np.where(filled, strengths * np.float32(self.sign), np.float32(0)),
            np.where(filled, prefixes, np.int64(NO_PREFIX)),
            np.where(filled, gates, np.int8(0)),
        )


def _weakest(keys: UInt64[ndarray, "memory t"]) -> Float32[Tensor, " memory"]:
    """Return |m| of the first candidate of each list."""
    return torch.from_numpy((keys[:, 0] >> np.uint64(33)).astype(np.uint32).view(np.float32))
