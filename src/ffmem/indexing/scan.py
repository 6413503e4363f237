"""The pass: one forward pass per batch, all layers at once.

Hooks read the coefficients m while the model runs, and reduce them while they are in the cache:

    hi = max of m over a sentence's prefixes      one number per sentence and memory
    hi ≥ threshold                                few survive; only they are examined further
    Σ m, count, max, min                          the statistics

So the pass costs little more than the forward pass, and never holds more than one batch of
coefficients of one layer.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from numpy import ndarray
from torch import Tensor

from ffmem.errors import ForwardError
from ffmem.indexing.chunks import Batch, Chunk, PrefixRange
from ffmem.indexing.results import UNIT, LayerResult, LayerStats
from ffmem.indexing.topk import TopK
from ffmem.models.memories import Bank, Memories

REDUCED_POSITIONS = 1024
"""Positions to reduce at a time on a CPU, so that they stay in the cache meanwhile."""


class Scan:
    """Each memory's triggers and statistics over the committed chunks.

    A chunk that has been read joins the result with `commit`. The next `read` drops one that has
    not been committed.
    """

    def __init__(
        self, memories: Memories, t: int, every_prefix: bool, prefix_range: PrefixRange
    ) -> None:
        self.memories = memories
        self.t = t
        self.every_prefix = every_prefix
        self.prefix_range = prefix_range
        self.n_prefixes = 0
        signs = (1, -1) if memories.gated else (1,)
        widths = memories.layout.widths
        self.topks = [[TopK(width, t, sign) for sign in signs] for width in widths]
        self.stats = [LayerStats.empty(width) for width in widths]
        self._pending: tuple[int, list[LayerStats]] | None = None

    def read(
        self,
        chunk: Chunk,
        batches: Iterable[Batch],
        sampled: Int64[ndarray, " prefix"],
    ) -> list[Float32[ndarray, "_ prefix"]]:
        """Read a chunk, and return every layer's coefficients on the sampled prefixes."""
        self.rollback()
        reader = _ChunkReader(self, sampled)
        with self.memories.read_coefficients(reader.read), torch.inference_mode():
            for batch in batches:
                reader.begin(batch)
                self.memories.forward(batch.tokens)
        self._pending = reader.n_prefixes, reader.stats(chunk)
        return reader.sample

    def commit(self) -> None:
        """Add the chunk that was read last to the result.

        If this is interrupted, some layers have the chunk and others do not: drop the scan then.
        """
        assert self._pending is not None, "a chunk has been read"
        n_prefixes, stats = self._pending
        self._pending = None
        self.n_prefixes += n_prefixes
        for layer, layer_topks in enumerate(self.topks):
            self.stats[layer] = self.stats[layer].merge(stats[layer])
            for topk in layer_topks:
                topk.commit()

    def rollback(self) -> None:
        """Drop what has been read since the last commit."""
        self._pending = None
        for layer_topks in self.topks:
            for topk in layer_topks:
                topk.rollback()

    def result(self, layer: int) -> LayerResult:
        """Return the result of all committed chunks in a layer."""
        lists = [topk.triggers(self.memories.gated) for topk in self.topks[layer]]
        return LayerResult(lists[0], lists[1] if len(lists) > 1 else None, self.stats[layer])


class _ChunkReader:
    """Receives the coefficients of one chunk, batch by batch and layer by layer."""

    def __init__(self, scan: Scan, sampled: Int64[ndarray, " prefix"]) -> None:
        self.scan = scan
        self.sampled = sampled
        self.n_prefixes = 0
        self.batch: Batch
        widths = [len(stats.active) for stats in scan.stats]
        self.active = [np.zeros(width, np.int64) for width in widths]
        self.sums = [np.zeros(width, np.float64) for width in widths]
        self.maximum = [np.full(width, -np.inf, np.float32) for width in widths]
        self.minimum = [np.full(width, np.inf, np.float32) for width in widths]
        self.sample = [np.zeros((width, len(sampled)), np.float32) for width in widths]

    def begin(self, batch: Batch) -> None:
        """Start a batch: the coefficients that follow belong to it."""
        self.batch = batch
        self.n_prefixes += sum(batch.lengths)
        self._lengths = torch.tensor(batch.lengths)
        self._offsets = torch.tensor(batch.offsets)
        if len(self.sampled):
            self._rows, self._positions, self._columns = self._find_sampled()

    def read(
        self,
        bank: Bank,
        coefficients: Float[Tensor, "batch position memory"],
        gate: Float[Tensor, "batch position memory"] | None,
    ) -> None:
        """Receive the coefficients of one bank on the current batch."""
        highest, lowest = self._reduce(bank, coefficients, gate)
        for topk in self.scan.topks[bank.layer]:
            strength = highest if topk.sign > 0 else lowest.neg()
            threshold = self._threshold(topk, bank, strength)
            pairs = ((strength >= threshold) & (strength > 0)).nonzero()
            if len(pairs):
                self._add(topk, bank, pairs, threshold, coefficients, gate)
        if len(self.sampled) and len(self._rows):
            rows = coefficients[self._rows, self._positions]
            self.sample[bank.layer][bank.memories, self._columns] = rows.float().cpu().numpy().T

    def _reduce(
        self, bank: Bank, coefficients: Tensor, gate: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return each sentence's maximum and minimum; add counts and sums to the statistics."""
        first = self.scan.prefix_range.first
        shape = (len(self.batch.lengths), coefficients.shape[-1])
        highest, lowest = coefficients.new_empty(shape), coefficients.new_empty(shape)
        sums = torch.empty(shape, device=coefficients.device)
        counts = torch.empty_like(sums)
        activity = coefficients if gate is None else gate
        for begin, end, length in self._runs_of_equal_length(coefficients.is_cpu):
            view = coefficients[begin:end, first : first + length]
            torch.amax(view, 1, out=highest[begin:end])
            torch.amin(view, 1, out=lowest[begin:end])
            torch.sum(view, 1, dtype=torch.float32, out=sums[begin:end])
            # `gt` into a float tensor: summing booleans takes five times as long.
            is_active = torch.empty(view.shape, device=view.device)
            torch.gt(activity[begin:end, first : first + length], 0, out=is_active)
            torch.sum(is_active, 1, out=counts[begin:end])
        layer, memories = bank.layer, bank.memories
        self.active[layer][memories] += counts.sum(0).to(torch.int64).cpu().numpy()
        self.sums[layer][memories] += sums.sum(0, dtype=torch.float64).cpu().numpy()
        top, bottom = highest.amax(0).float().cpu().numpy(), lowest.amin(0).float().cpu().numpy()
        maximum, minimum = self.maximum[layer][memories], self.minimum[layer][memories]
        np.maximum(maximum, top, out=maximum)
        np.minimum(minimum, bottom, out=minimum)
        return highest, lowest

    def _runs_of_equal_length(self, on_cpu: bool) -> Iterator[tuple[int, int, int]]:
        """Yield (begin, end, length) of runs of sentences of one length, which have no padding."""
        lengths = self.batch.lengths
        begin = 0
        while begin < len(lengths):
            length = lengths[begin]
            most = begin + (max(1, REDUCED_POSITIONS // length) if on_cpu else len(lengths))
            end = begin + 1
            while end < min(most, len(lengths)) and lengths[end] == length:
                end += 1
            yield begin, end, length
            begin = end

    def _threshold(
        self, topk: TopK, bank: Bank, strength: Float[Tensor, "batch memory"]
    ) -> Float32[Tensor, " memory"]:
        """Return the strength that a prefix needs to enter each memory's list."""
        threshold = topk.threshold(strength.device)[bank.memories]
        if len(strength) > self.scan.t and topk.is_filling():
            # At first anything would pass. But t prefixes of this batch are at least this strong.
            batch_weakest = strength.topk(self.scan.t, dim=0).values[-1].float()
            threshold = torch.maximum(threshold, batch_weakest)
        return threshold

    def _add(
        self,
        topk: TopK,
        bank: Bank,
        pairs: Int64[Tensor, "pair 2"],
        threshold: Float32[Tensor, " memory"],
        coefficients: Tensor,
        gate: Tensor | None,
    ) -> None:
        """Add the prefixes of the surviving (sentence, memory) pairs that enter a list."""
        sentence, memory = pairs.unbind(1)
        lengths = self._lengths.to(pairs.device)[sentence]
        first, shortest = self.scan.prefix_range
        columns = coefficients[:, first : first + self.batch.lengths[-1]][sentence, :, memory]
        columns = columns.float() * topk.sign
        step = torch.arange(columns.shape[1], device=pairs.device)
        columns.masked_fill_(step >= lengths[:, None], -torch.inf)
        if self.scan.every_prefix:
            enters = (columns >= threshold[memory][:, None]) & (columns > 0)
            column, position = enters.nonzero().unbind(1)
            strength = columns[column, position]
            sentence, memory = sentence[column], memory[column]
        else:
            strength, position = columns.max(1)  # the first maximum: ties to the earlier prefix
        prefixes = self._offsets.to(pairs.device)[sentence] + position + shortest
        is_open = torch.zeros_like(memory)
        if gate is not None:
            is_open = (gate[sentence, position + first, memory] > 0).long()
        candidates = (memory + bank.offset, strength, prefixes, is_open)
        topk.add(*(part.cpu().numpy() for part in candidates))

    def _find_sampled(self) -> tuple[Tensor, Tensor, ndarray]:
        """Return the rows, positions and columns of `sample` of the batch's sampled prefixes."""
        first, shortest = self.scan.prefix_range
        offsets = np.asarray(self.batch.offsets)
        ordered = np.argsort(offsets)
        owner = ordered[np.searchsorted(offsets[ordered], self.sampled, side="right") - 1]
        position = self.sampled - offsets[owner] - shortest
        inside = (position >= 0) & (position < np.asarray(self.batch.lengths)[owner])
        return (
            torch.from_numpy(owner[inside]),
            torch.from_numpy(position[inside] + first),
            inside.nonzero()[0],
        )

    def stats(self, chunk: Chunk) -> list[LayerStats]:
        """Return the chunk's statistics; raise if a coefficient is not finite."""
        if not self.n_prefixes:
            return [LayerStats.empty(len(active)) for active in self.active]
        bad = [
            ~(np.isfinite(total) & np.isfinite(high) & np.isfinite(low))
            for total, high, low in zip(self.sums, self.maximum, self.minimum, strict=True)
        ]
        for layer, memories in enumerate(bad):
            if memories.any():
                others = sum(int(one.sum()) for one in bad) - 1
                raise ForwardError(
                    f"The coefficients of L{layer}N{int(memories.argmax())} (and {others} other"
                    f" memories) are not finite somewhere in {chunk.name}: the model overflows. Use"
                    " --dtype float32, or check its weights."
                )
        return [
            LayerStats(active, np.rint(total / UNIT).astype(np.int64), high, low)
            for active, total, high, low in zip(
                self.active, self.sums, self.maximum, self.minimum, strict=True
            )
        ]
