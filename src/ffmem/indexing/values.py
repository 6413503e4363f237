"""What each value promotes and suppresses, and which tokens each key matches.

    p = softmax(head.folded(v))        the ends of this distribution; no bias, coefficient 1 (§4)
    score(token) = k̃ · e / σ(e)        the first tokens by it (`models/keys.py`)

Values and keys are projected in rows, and of each row only a few tokens stay, so that nothing of
size memories × vocabulary is ever held.

    values/layer-000.parquet   memory, top_ids[50], top_logits, top_probabilities, bottom_*
    keys/layer-000.parquet     memory, ids[20], scores (gated: up_scores), cos_*
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
from ffmem.models.head import Norm
from ffmem.models.keys import BankKeys, InputEmbedding, KeySide
from ffmem.models.memories import Memories

ENDS = 50
"""Tokens kept at each end; all of them in a smaller vocabulary."""

KEY_TOKENS = 20
"""Tokens kept of each key; all of them in a smaller vocabulary."""

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
    head, width = memories.head, memories.layout.widths[layer]
    rows = _rows_at_a_time(memories.vocabulary, width)
    unlisted = torch.tensor(sorted(memories.tokenizer.unlisted), dtype=torch.long)
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


@torch.inference_mode()
def write_keys(path: Path, side: KeySide, layer: int) -> None:
    """Write the tokens that a layer's keys match, and its cosines; the caller commits the file."""
    width = side.memories.layout.widths[layer]
    tokens: list[dict[str, ndarray]] = []
    cosines: list[dict[str, ndarray]] = []
    project = None if side.embedding is None else _KeyProjection(side, side.embedding, layer)
    for bank in side.banks(layer):
        cosines.append({name: column.cpu().numpy() for name, column in bank.cosines.items()})
        if project is not None:
            tokens += project(bank)
    columns: dict[str, pa.Array] = {"memory": pa.array(range(width), pa.int32())}
    for name in tokens[0] if tokens else ():
        columns[name] = fixed(np.concatenate([part[name] for part in tokens]))
    for name in cosines[0] if cosines else ():
        columns[name] = pa.array(np.concatenate([part[name] for part in cosines]))
    write_parquet(path, pa.table(columns))


class _KeyProjection:
    """Finds the first tokens of the keys of a layer, bank by bank."""

    def __init__(self, side: KeySide, embedding: InputEmbedding, layer: int) -> None:
        self.embedding = embedding
        n_tokens = len(embedding.matrix)
        unlisted = sorted(id for id in side.memories.tokenizer.unlisted if id < n_tokens)
        self.unlisted = torch.tensor(unlisted, dtype=torch.long)
        self.n = min(KEY_TOKENS, n_tokens - len(unlisted))
        largest = max((bank.size for bank in side.memories.banks[layer]), default=1)
        self.buffer = torch.empty(_rows_at_a_time(n_tokens, largest), n_tokens)
        self.denominators: dict[Norm, Tensor] = {}  # the experts of a layer share their norm

    def __call__(self, bank: BankKeys) -> Iterator[dict[str, ndarray]]:
        """Yield ids and scores of a bank's keys, a few rows at a time."""
        embedding, rows = self.embedding, len(self.buffer)
        if bank.norm not in self.denominators:
            self.denominators[bank.norm] = embedding.denominators(bank.norm)
        sigma = self.denominators[bank.norm]
        for first in range(0, len(bank.keys), rows):
            part = slice(first, first + rows)
            keys = embedding.before(bank.keys[part])
            scores = embedding.scores(keys, sigma, self.buffer[: len(keys)])
            ids, found = _first_tokens(scores, self.unlisted, 1, self.n)
            tokens = {"ids": ids.astype(np.int32), "scores": found}
            if bank.up is not None:
                up = embedding.scores_at(
                    embedding.before(bank.up[part]), sigma, torch.from_numpy(ids)
                )
                tokens["up_scores"] = up.cpu().numpy()
            yield tokens


def _rows_at_a_time(vocabulary: int, n_rows: int) -> int:
    """Return how many rows of logits the budget allows."""
    return min(max(1, BUDGET // (4 * vocabulary)), max(1, n_rows))


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
    """Return the largest (sign 1) or smallest (sign −1) logits of each row, as `_first_tokens`."""
    n = min(ENDS, logits.shape[1] - len(unlisted))
    ids, found = _first_tokens(logits, unlisted, sign, n)
    return Ends(ids.astype(np.int32), found, np.exp(found - log_total.numpy()))


def _first_tokens(
    logits: Float[Tensor, "row vocab"], unlisted: Int64[Tensor, " token"], sign: int, n: int
) -> tuple[Int64[ndarray, "row n"], Float32[ndarray, "row n"]]:
    """Return the n tokens of largest (sign 1) or smallest logits of each row, and these logits.

    Ties go to the lower id. Leaves out `unlisted` tokens, and overwrites their logits.
    """
    logits[:, unlisted] = -sign * torch.inf
    found, ids = (x.numpy() for x in _outermost(logits, min(n + 1, logits.shape[1]), sign))
    if found.shape[1] > n:
        # `topk` picks any of several equal logits. If the cut separates equals, sort the row.
        for row in np.flatnonzero(found[:, n] == found[:, n - 1]):
            every = logits[row].numpy()
            ids[row] = np.lexsort((np.arange(len(every)), -sign * every))[: n + 1]
            found[row] = every[ids[row]]
    order = np.lexsort((ids, -sign * found), axis=-1)[:, :n]
    ids, found = (np.take_along_axis(x, order, axis=1) for x in (ids, found))
    return ids, found


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
