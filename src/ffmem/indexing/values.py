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

from ffmem.indexing.tables import fixed, write_parquet
from ffmem.models.memories import Memories

ENDS = 50
"""Tokens kept at each end; all of them in a smaller vocabulary."""

BUDGET = 48 << 20
"""Bytes of logits at a time. Measured for 49,152 tokens: with 256 rows the product runs at 93 % of
peak GEMM, with 128 at 89 %; with 512 nothing more is gained."""

BLOCK = 64
"""Tokens whose largest logit is looked at first."""


class Ends(NamedTuple):
    """The first or last tokens of some distributions, the outermost first, ties to the lower id."""

    ids: Int32[ndarray, "memory token"]
    logits: Float32[ndarray, "memory token"]
    probabilities: Float32[ndarray, "memory token"]


def write_values(path: Path, memories: Memories, layer: int) -> None:
    """Write the ends of a layer's values as one Parquet file; the caller commits it."""
    parts = list(_parts(memories, layer))
    tops, bottoms = ([part[side] for part in parts] for side in (0, 1))
    columns: dict[str, pa.Array] = {
        "memory": pa.array(range(memories.layout.widths[layer]), pa.int32())
    }
    for name, side in (("top", tops), ("bottom", bottoms)):
        for field in Ends._fields:
            rows = np.concatenate([getattr(ends, field) for ends in side])
            columns[f"{name}_{field}"] = fixed(rows)
    write_parquet(path, pa.table(columns))


@torch.inference_mode()
def _parts(memories: Memories, layer: int) -> Iterator[tuple[Ends, Ends]]:
    """Yield both ends of the layer's values, a few rows at a time."""
    head, tokenizer = memories.head, memories.tokenizer
    width = memories.layout.widths[layer]
    rows = min(max(1, BUDGET // (4 * memories.vocabulary)), max(1, width))
    unlisted = torch.tensor(sorted(tokenizer.unlisted), dtype=torch.long)
    # Reuse memory: fresh pages cost as much as the arithmetic in them.
    buffers = torch.empty(2, rows, memories.vocabulary)
    banks = memories.direction_parts(layer) if width else [memories.output_directions(layer)]
    for part in (part for bank in banks for part in bank.split(rows)):
        logits, scratch = buffers[:, : len(part)]
        logits = head.folded(part, out=logits)
        log_total = _log_total(logits, scratch)
        top = _ends(logits, log_total, unlisted, 1)
        if memories.gated and head.adaptive:
            # A negative m promotes the top of −v. An adaptive softmax is not linear, so the least
            # likely tokens of v are not the top of −v: project −v. Store −folded(−v), which for a
            # linear head is folded(v); the probabilities are those of −v.
            opposite = head.folded(-part, out=logits)
            ends = _ends(opposite, _log_total(opposite, scratch), unlisted, 1)
            yield top, ends._replace(logits=-ends.logits)
        else:
            yield top, _ends(logits, log_total, unlisted, -1)


def _log_total(
    logits: Float[Tensor, "row vocab"], scratch: Float[Tensor, "row vocab"]
) -> Float[Tensor, "row 1"]:
    """Return log Σ exp(z) of each row; overwrites `scratch`.

    One fused kernel: log Σ exp(z) = z − log softmax(z) at any token; the largest of a few rounds
    least.
    """
    torch.log_softmax(logits, 1, out=scratch)
    return logits[:, :BLOCK].amax(1, keepdim=True) - scratch[:, :BLOCK].amax(1, keepdim=True)


def _ends(
    logits: Float[Tensor, "row vocab"],
    log_total: Float[Tensor, "row 1"],
    unlisted: Int64[Tensor, " token"],
    sign: int,
) -> Ends:
    """Return the largest (sign 1) or smallest (sign −1) logits of each row; ties to the lower id.

    Leaves out `unlisted` tokens, and overwrites their logits.
    """
    logits[:, unlisted] = -sign * torch.inf
    n = min(ENDS, logits.shape[1] - len(unlisted))
    found, ids = (x.numpy() for x in _outermost(logits, min(n + 1, logits.shape[1]), sign))
    if found.shape[1] > n:
        # `topk` picks any of several equal logits. If the cut separates equals, sort the row.
        for row in np.flatnonzero(found[:, n] == found[:, n - 1]):
            every = logits[row].numpy()
            ids[row] = np.lexsort((np.arange(len(every)), -sign * every))[: n + 1]
            found[row] = every[ids[row]]
    order = np.lexsort((ids, -sign * found), axis=-1)[:, :n]
    ids, found = (np.take_along_axis(x, order, axis=1) for x in (ids, found))
    return Ends(ids.astype(np.int32), found, np.exp(found - log_total.numpy()))


def _outermost(
    logits: Float[Tensor, "row vocab"], k: int, sign: int
) -> tuple[Float[Tensor, "row k"], Int64[Tensor, "row k"]]:
    """Return the k largest (sign 1) or smallest (sign −1) logits of each row, and their ids.

    They lie in the k blocks of largest maximum: any other block's maximum is below k logits. So
    `topk` reads k blocks instead of the vocabulary.
    """
    largest = sign > 0
    n_blocks = logits.shape[1] // BLOCK
    if n_blocks <= k:
        return logits.topk(k, dim=1, largest=largest)
    size = n_blocks * BLOCK
    blocks = logits[:, :size].unflatten(1, (n_blocks, BLOCK))
    extremes = blocks.amax(2) if largest else blocks.amin(2)
    outer = extremes.topk(k, dim=1, largest=largest, sorted=False).indices
    candidates = blocks.gather(1, outer[:, :, None].expand(-1, -1, BLOCK)).flatten(1)
    if size < logits.shape[1]:  # less than a block is left
        candidates = torch.cat([candidates, logits[:, size:]], 1)
    found, place = candidates.topk(k, dim=1, largest=largest)
    block = outer.gather(1, (place // BLOCK).clamp(max=k - 1))
    ids = torch.where(place < k * BLOCK, block * BLOCK + place % BLOCK, place - k * BLOCK + size)
    return found, ids
