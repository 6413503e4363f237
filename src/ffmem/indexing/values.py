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
from jaxtyping import Float, Float32, Int32
from numpy import ndarray
from torch import Tensor

from ffmem.indexing.tables import fixed, write_table
from ffmem.models.memories import Memories

ENDS = 50
"""Tokens kept at each end; all of them in a smaller vocabulary."""

_BYTES = 256 << 20  # of logits at a time


class Ends(NamedTuple):
    """The first or last tokens of some distributions, the outermost first, ties to the lower id."""

    ids: Int32[ndarray, "memory token"]
    logits: Float32[ndarray, "memory token"]
    probabilities: Float32[ndarray, "memory token"]


def write_values(path: Path, memories: Memories, layer: int) -> None:
    """Write the ends of a layer's values as one Parquet file."""
    parts = list(_parts(memories, layer))
    tops, bottoms = ([part[side] for part in parts] for side in (0, 1))
    columns: dict[str, pa.Array] = {"memory": pa.array(range(memories.n_memories), pa.int32())}
    for name, side in (("top", tops), ("bottom", bottoms)):
        for field in Ends._fields:
            rows = np.concatenate([getattr(ends, field) for ends in side])
            columns[f"{name}_{field}"] = fixed(rows)
    write_table(path, pa.table(columns))


@torch.inference_mode()
def _parts(memories: Memories, layer: int) -> Iterator[tuple[Ends, Ends]]:
    """Return both ends of the layer's values, a few rows at a time."""
    values = memories.readable_values(layer)
    rows = max(1, _BYTES // (4 * memories.vocabulary))
    unlisted = torch.tensor(sorted(memories.tokenizer.unlisted), dtype=torch.long)
    for part in values.split(rows):
        logits = memories.head.folded(part).float().cpu()
        total = logits.logsumexp(1, keepdim=True)
        top = _ends(logits, total, unlisted, 1)
        if memories.gated and memories.head.adaptive:
            # What m < 0 promotes is the top of −v. An adaptive softmax does not turn with its
            # sign: the least likely tokens of v are others. A linear head's logits do turn, so
            # the other end is told as there, −folded(−v); the probabilities are those of −v.
            other = memories.head.folded(-part).float().cpu()
            ends = _ends(other, other.logsumexp(1, keepdim=True), unlisted, 1)
            yield top, ends._replace(logits=-ends.logits)
        else:
            yield top, _ends(logits, total, unlisted, -1)


def _ends(
    logits: Float[Tensor, "row vocab"],
    total: Float[Tensor, "row one"],
    unlisted: Tensor,
    sign: int,
) -> Ends:
    """Return the largest (sign 1) or smallest (sign −1) logits of each row."""
    listed = logits if sign > 0 else logits.neg()
    if len(unlisted):
        listed = listed.index_fill(1, unlisted, -torch.inf)
    ends = min(ENDS, logits.shape[1] - len(unlisted))
    strengths, ids = (part.numpy() for part in listed.topk(min(ends + 1, logits.shape[1]), dim=1))
    if strengths.shape[1] > ends:
        # `topk` picks any of several equals: where the cut falls among them, look at all.
        for row in np.flatnonzero(strengths[:, ends] == strengths[:, ends - 1]):
            every = listed[row].numpy()
            ids[row] = np.lexsort((np.arange(len(every)), -every))[: ends + 1]
            strengths[row] = every[ids[row]]
    order = np.lexsort((ids, -strengths), axis=-1)[:, :ends]
    ids = np.take_along_axis(ids, order, axis=1)
    kept = logits.gather(1, torch.from_numpy(ids))
    return Ends(ids.astype(np.int32), kept.numpy(), (kept - total).exp().numpy())
