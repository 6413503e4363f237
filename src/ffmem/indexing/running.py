"""The running top-t of one lease, fed by the pass.

A candidate is packed into one integer, so that a plain integer sort ranks as `Triggers` does:

    key = bits of |m| · 2³²  +  (2³¹ − 1 − place in the lease) · 2  +  [gate > 0]

Positive floats order as their bits, and an earlier place gives a larger key. Before anything is
packed, a threshold filter drops what cannot enter: below the lease's own t-th coefficient, or
below the t-th of leases that are committed already. It keeps `≥`, because batches do not come in
the order of prefixes, and an equal coefficient at an earlier prefix must win.
"""

import numpy as np
import torch
from jaxtyping import Float32, Int64
from numpy import ndarray
from torch import Tensor

from ffmem.indexing.sentences import VACANT
from ffmem.indexing.triggers import Triggers

_PLACES = (1 << 31) - 1


class Running:
    """One list (of one sign) of every memory, while a lease is read."""

    def __init__(self, floor: Float32[ndarray, "layer memory"], t: int, sign: int) -> None:
        n_layers, n_memories = floor.shape
        self.sign = sign
        self.t = t
        self._floor = floor
        self._keys = np.zeros((n_layers, n_memories, t), np.int64)
        self._pending: list[list[tuple[ndarray, ndarray]]] = [[] for _ in range(n_layers)]
        self._n_pending = [0] * n_layers
        self._thresholds: list[Tensor] = [torch.from_numpy(row.copy()) for row in floor]

    def threshold(self, layer: int, device: torch.device) -> Tensor:
        """Return |m| that each memory of a layer must reach, (memory), on the layer's device."""
        if self._thresholds[layer].device != device:
            self._thresholds[layer] = self._thresholds[layer].to(device)
        return self._thresholds[layer]

    def is_filling(self, layer: int) -> bool:
        """Whether many memories of the layer still take any coefficient at all."""
        vacant = (self._keys[layer, :, 0] == 0) & (self._floor[layer] == 0)
        return int(vacant.sum()) * 8 > len(vacant)

    def add(
        self,
        layer: int,
        memories: Int64[ndarray, " candidate"],
        strengths: Float32[ndarray, " candidate"],
        places: Int64[ndarray, " candidate"],
        gates: Int64[ndarray, " candidate"],
    ) -> None:
        """Take candidates of a layer: strengths are |m| > 0, gates 1 where the gate is open."""
        keys = strengths.view(np.int32).astype(np.int64) << 32
        keys |= (_PLACES - places) << 1
        keys |= gates
        self._pending[layer].append((memories, keys))
        self._n_pending[layer] += len(keys)
        # A sort of the layer costs its whole size: let candidates gather to a like number.
        if self._n_pending[layer] > self._keys.shape[1] * self.t // 2 or self.is_filling(layer):
            self._flush(layer)

    def _flush(self, layer: int) -> None:
        """Sort the gathered candidates in, and raise the thresholds."""
        if not self._n_pending[layer]:
            return
        memories = np.concatenate([pair[0] for pair in self._pending[layer]])
        keys = np.concatenate([pair[1] for pair in self._pending[layer]])
        self._pending[layer], self._n_pending[layer] = [], 0
        top = self._keys[layer]
        order = np.argsort(memories, kind="stable")
        memories, keys = memories[order], keys[order]
        starts = np.searchsorted(memories, np.arange(len(top)))
        ranks = np.arange(len(memories)) - starts[memories]  # how many came before, same memory
        for first in range(0, int(ranks.max()) + 1, self.t):
            # At most t of each memory at a time, so that one busy memory widens no other's row.
            now = (ranks >= first) & (ranks < first + self.t)
            rows, inverse = np.unique(memories[now], return_inverse=True)
            wide = np.zeros((len(rows), int(ranks[now].max()) - first + 1), np.int64)
            wide[inverse, ranks[now] - first] = keys[now]
            both = np.concatenate([top[rows], wide], axis=1)
            both.sort(axis=1)
            top[rows] = both[:, -self.t :]  # ascending: the weakest stands first
        weakest = (top[:, 0] >> 32).astype(np.int32).view(np.float32)
        raised = torch.from_numpy(np.maximum(weakest, self._floor[layer]))
        self._thresholds[layer] = raised.to(self._thresholds[layer].device)

    def triggers(self, first_prefix: int, gated: bool) -> Triggers:
        """Return what the lease leaves: its own top t, without what its floor has shut out."""
        for layer in range(len(self._keys)):
            self._flush(layer)
        keys = self._keys[..., ::-1]
        strengths = (keys >> 32).astype(np.int32).view(np.float32)
        filled = (keys != 0) & (strengths >= self._floor[..., None])
        places = _PLACES - ((keys >> 1) & _PLACES)
        gates = ((keys & 1) * 2 - 1 if gated else np.zeros_like(keys)).astype(np.int8)
        return Triggers(
            np.where(filled, strengths * np.float32(self.sign), np.float32(0)),
            np.where(filled, places + first_prefix, VACANT),
            np.where(filled, gates, np.int8(0)),
        )
