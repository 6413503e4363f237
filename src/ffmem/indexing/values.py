"""What each value promotes and suppresses, and which tokens each key matches.

    p = softmax(head.folded(v))        the ends of this distribution; no bias, coefficient 1 (§4)
    score(token) = k̃ · e / σ(e)        the first tokens by it (`models/keys.py`)

Values and keys are projected in rows, and of each row only a few tokens stay, so that nothing of
size memories × vocabulary is ever held.

    values/layer-000.parquet   memory, top_ids[50], top_logits, top_probabilities, bottom_*
    keys/layer-000.parquet     memory, ids[20], scores (gated: up_scores), cos_*
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float, Float32, Int32, Int64
from numpy import ndarray
from torch import Tensor

from ffmem.indexing.tables import fixed, write_parquet
from ffmem.models.head import TILE, Norm
from ffmem.models.keys import BankKeys, InputEmbedding, KeySide
from ffmem.models.memories import Memories

ENDS = 50
"""Tokens kept at each end; all of them in a smaller vocabulary."""

KEY_TOKENS = 20
"""Tokens kept of each key; all of them in a smaller vocabulary."""

BUDGET = 96 << 20
"""Bytes of logits at a time. Measured for 49,152 tokens: 512 rows take 4 % less time than 256."""

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
    head, n_tokens = memories.head, memories.vocabulary
    width = memories.layout.widths[layer]
    unlisted = torch.tensor(sorted(memories.tokenizer.unlisted), dtype=torch.long)
    n = min(ENDS, n_tokens - len(unlisted))
    buffer = _tiles(n_tokens, width)
    banks = memories.direction_parts(layer) if width else [memories.output_directions(layer)]
    for part in (part for bank in banks for part in bank.split(buffer.shape[1])):
        logits = _Logits(buffer, len(part), n_tokens, unlisted)
        log_total = logits.read(head.folded_tiles(part, logits.tiles), with_total=True)
        top = _ends(logits, log_total, n, 1)
        if memories.gated and head.adaptive:
            # A negative m promotes the top of −v. An adaptive softmax is not linear, so the least
            # likely tokens of v are not the top of −v: project −v. Store −folded(−v), which for a
            # linear head is folded(v); the probabilities are those of −v.
            log_total = logits.read(head.folded_tiles(-part, logits.tiles), with_total=True)
            ends = _ends(logits, log_total, n, 1)
            yield top, ends._replace(logits=-ends.logits)
        else:
            yield top, _ends(logits, log_total, n, -1)


def _ends(logits: "_Logits", log_total: Float[Tensor, " row"], n: int, sign: int) -> Ends:
    """Return the n largest (sign 1) or smallest (sign −1) logits of each row."""
    ids, found = logits.first(sign, n)
    return Ends(ids.astype(np.int32), found, np.exp(found - log_total[:, None].numpy()))


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
        self.buffer = _tiles(n_tokens, largest)
        self.denominators: dict[Norm, Tensor] = {}  # the experts of a layer share their norm

    def __call__(self, bank: BankKeys) -> Iterator[dict[str, ndarray]]:
        """Yield ids and scores of a bank's keys, a few rows at a time."""
        embedding, rows = self.embedding, self.buffer.shape[1]
        if bank.norm not in self.denominators:
            self.denominators[bank.norm] = embedding.denominators(bank.norm)
        sigma = self.denominators[bank.norm]
        for first in range(0, len(bank.keys), rows):
            part = slice(first, first + rows)
            keys = embedding.before(bank.keys[part])
            scores = _Logits(self.buffer, len(keys), len(embedding.matrix), self.unlisted)
            scores.read(embedding.score_tiles(keys, sigma, scores.tiles))
            ids, found = scores.first(1, self.n)
            tokens = {"ids": ids.astype(np.int32), "scores": found}
            if bank.up is not None:
                up = embedding.scores_at(
                    embedding.before(bank.up[part]), sigma, torch.from_numpy(ids)
                )
                tokens["up_scores"] = up.cpu().numpy()
            yield tokens


def _tiles(n_tokens: int, n_rows: int) -> Float32[Tensor, "tile row size"]:
    """Return memory for the logits of as many rows as the budget allows, in tiles of tokens.

    Fresh pages cost as much as the arithmetic in them, so it is used again and again.
    """
    rows = min(max(1, BUDGET // (4 * n_tokens)), max(1, n_rows))
    return torch.empty(-(-n_tokens // TILE), rows, TILE)


class _Logits:
    """The logits, or scores, of some rows for all tokens, in tiles that are read as written.

    A product over the whole vocabulary is far larger than the cache, and so is any pass over it.
    A tile is not: its extremes and Σ exp(z) are taken at once, and what remains to be read are the
    few blocks of tokens that can hold one of the first.
    """

    def __init__(
        self,
        buffer: Float32[Tensor, "tile most size"],
        n_rows: int,
        n_tokens: int,
        unlisted: Int64[Tensor, " token"],
    ) -> None:
        self.tiles = buffer[:, :n_rows]
        self.n_tokens = n_tokens
        padding = torch.arange(n_tokens, len(buffer) * TILE)
        self.missing = torch.cat([unlisted, padding])
        """Tokens that are never among the first, and what the last tile has beyond them."""
        n_blocks = len(buffer) * (TILE // BLOCK)
        self.extremes = {sign: torch.empty(n_rows, n_blocks) for sign in (1, -1)}
        """The largest and the smallest logit of each block of tokens."""

    def read(self, written: Iterable[int], with_total: bool = False) -> Float32[Tensor, " row"]:
        """Read each tile when it is written, and return log Σ exp(z) of each row if asked to."""
        log_totals = []
        scratch = torch.empty_like(self.tiles[0])
        for number in written:
            tile = self.tiles[number]
            n_tokens = min(TILE, self.n_tokens - number * TILE)
            if with_total:
                log_totals.append(_log_total(tile[:, :n_tokens], scratch[:, :n_tokens]))
            blocks = slice(number * TILE // BLOCK, (number + 1) * TILE // BLOCK)
            missing = self.missing[self.missing // TILE == number] % TILE
            for sign, reduce in ((1, torch.amax), (-1, torch.amin)):
                tile[:, missing] = -sign * torch.inf
                reduce(tile.unflatten(1, (-1, BLOCK)), 2, out=self.extremes[sign][:, blocks])
        return torch.stack(log_totals).logsumexp(0) if with_total else torch.zeros(0)

    def first(self, sign: int, n: int) -> tuple[Int64[ndarray, "row n"], Float32[ndarray, "row n"]]:
        """Return the n tokens of largest (sign 1) or smallest logits of each row, and these.

        Ties go to the lower id.
        """
        self.tiles[self.missing // TILE, :, self.missing % TILE] = -sign * torch.inf
        found, ids = (x.numpy() for x in self._outermost(n + 1, sign))
        # `topk` picks any of several equal logits. If the cut separates equals, sort the row.
        for row in np.flatnonzero(found[:, n] == found[:, n - 1]):
            every = self.tiles[:, row].flatten().numpy()
            ids[row] = np.lexsort((np.arange(len(every)), -sign * every))[: n + 1]
            found[row] = every[ids[row]]
        order = np.lexsort((ids, -sign * found), axis=-1)[:, :n]
        ids, found = (np.take_along_axis(x, order, axis=1) for x in (ids, found))
        return ids, found

    def _outermost(
        self, k: int, sign: int
    ) -> tuple[Float[Tensor, "row k"], Int64[Tensor, "row k"]]:
        """Return the k largest (sign 1) or smallest (sign −1) logits of each row, and their ids.

        They lie in the k blocks of largest maximum: any other block's maximum is below k logits.
        """
        n_rows, n_blocks = self.extremes[sign].shape
        largest = sign > 0
        if n_blocks <= k:
            return self.tiles.transpose(0, 1).flatten(1).topk(k, dim=1, largest=largest)
        outer = self.extremes[sign].topk(k, dim=1, largest=largest, sorted=False).indices
        tile, block = outer // (TILE // BLOCK), outer % (TILE // BLOCK)
        row = torch.arange(n_rows)[:, None]
        candidates = self.tiles.unflatten(2, (-1, BLOCK))[tile, row, block].flatten(1)
        found, place = candidates.topk(k, dim=1, largest=largest)
        return found, outer.gather(1, place // BLOCK) * BLOCK + place % BLOCK


def _log_total(
    logits: Float[Tensor, "row token"], scratch: Float[Tensor, "row token"]
) -> Float[Tensor, " row"]:
    """Return log Σ exp(z) of each row, in a quarter of the time of `torch.logsumexp`."""
    total = torch.exp(logits, out=scratch).sum(1)
    if ((total > 1e-20) & (total < 1e30)).all():
        return total.log()
    return logits.logsumexp(1)  # exp(z) leaves the range of float32 without a shift by the maximum
