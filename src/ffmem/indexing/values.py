"""What each value promotes and suppresses: the ends of its distribution over the vocabulary.

    p = softmax(head.folded(v))        no bias, coefficient 1 (§4)

Values are projected in rows, and of each row only the `ENDS` tokens at both ends stay, so that
nothing of size memories × vocabulary is ever held.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float, Float32, Int32, Int64
from numpy import ndarray
from torch import Tensor

from ffmem.indexing.tables import fixed, write_table
from ffmem.models.memories import Memories

ENDS = 50
"""Tokens kept at each end; all of them in a smaller vocabulary."""

BUDGET = 24 << 20
"""Bytes of logits at a time: they stay in the cache while they are read."""


class Ends(NamedTuple):
    """The first or last tokens of some distributions, the outermost first, ties to the lower id."""

    ids: Int32[ndarray, "memory token"]
    logits: Float32[ndarray, "memory token"]
    probabilities: Float32[ndarray, "memory token"]


def write_values(path: Path, memories: Memories, layer: int) -> None:
    """Write the ends of a layer's values as one Parquet file."""
    parts = list(_parts(memories, layer))
    tops, bottoms = ([part[side] for part in parts] for side in (0, 1))
    columns: dict[str, pa.Array] = {
        "memory": pa.array(range(memories.layout.widths[layer]), pa.int32())
    }
    for name, side in (("top", tops), ("bottom", bottoms)):
        for field in Ends._fields:
            rows = np.concatenate([getattr(ends, field) for ends in side])
            columns[f"{name}_{field}"] = fixed(rows)
    write_table(path, pa.table(columns))


@torch.inference_mode()
def _parts(memories: Memories, layer: int) -> Iterator[tuple[Ends, Ends]]:
    """Return both ends of the layer's values, a few rows at a time."""
    head, tokenizer = memories.head, memories.tokenizer
    values = memories.readable_values(layer)
    rows = min(max(1, BUDGET // (4 * memories.vocabulary)), max(1, len(values)))
    unlisted = torch.tensor(sorted(tokenizer.unlisted), dtype=torch.long)
    # The same memory for all rows: fresh memory costs as much as the arithmetic in it.
    buffers = torch.empty(2, rows, memories.vocabulary)
    for part in values.split(rows):
        logits, room = buffers[:, : len(part)]
        logits = head.folded(part, out=logits)
        total = _log_total(logits, room)
        top = _ends(logits, total, unlisted, 1)
        if memories.gated and head.adaptive:
            # What m < 0 promotes is the top of −v. An adaptive softmax does not turn with its
            # sign: the least likely tokens of v are others. A linear head's logits do turn, so
            # the other end is given as there, −folded(−v); the probabilities are those of −v.
            other = head.folded(-part, out=logits)
            ends = _ends(other, _log_total(other, room), unlisted, 1)
            yield top, ends._replace(logits=-ends.logits)
        else:
            yield top, _ends(logits, total, unlisted, -1)


def _log_total(
    logits: Float[Tensor, "row vocab"], room: Float[Tensor, "row vocab"]
) -> Float[Tensor, "row 1"]:
    """Return log Σ exp(z) of each row; `room` is overwritten."""
    top = logits.amax(1, keepdim=True)
    # Below e⁻⁸⁷ float32 is denormal, five times as slow, and nothing beside the top.
    torch.sub(logits, top, out=room).clamp_(min=-87).exp_()
    return top + room.sum(1, keepdim=True).log()


def _ends(
    logits: Float[Tensor, "row vocab"],
    total: Float[Tensor, "row 1"],
    unlisted: Int64[Tensor, " token"],
    sign: int,
) -> Ends:
    """Return the largest (sign 1) or smallest (sign −1) logits of each row; ties to the lower id.

    `unlisted` tokens are left out: their logits are overwritten.
    """
    logits[:, unlisted] = -sign * torch.inf
    n = min(ENDS, logits.shape[1] - len(unlisted))
    found = logits.topk(min(n + 1, logits.shape[1]), dim=1, largest=sign > 0)
    kept, ids = (part.numpy() for part in found)
    if kept.shape[1] > n:
        # `topk` picks any of several equals: where the cut falls among them, look at all.
        for row in np.flatnonzero(kept[:, n] == kept[:, n - 1]):
            every = logits[row].numpy()
            ids[row] = np.lexsort((np.arange(len(every)), -sign * every))[: n + 1]
            kept[row] = every[ids[row]]
    order = np.lexsort((ids, -sign * kept), axis=-1)[:, :n]
    ids, kept = (np.take_along_axis(part, order, axis=1) for part in (ids, kept))
    return Ends(ids.astype(np.int32), kept, np.exp(kept - total.numpy()))
