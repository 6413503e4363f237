"""The pass: one forward pass per batch, all layers at once.

Hooks read the coefficients m while the model runs, and reduce them while they are in the cache:

    hi = max of m over a sentence's prefixes      one number per sentence and memory
    hi ≥ threshold                                few survive; only they are examined further
    Σ m, count, max, min                          the statistics

So the pass costs little more than the forward pass, and never holds more than one batch of
coefficients of one layer.

A routed expert computes few rows, those of its tokens, so that they are compared with the threshold
one by one. A prefix that is not routed to it has the coefficient 0 there: it counts in the
statistics, and is never a trigger.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from numpy import ndarray
from torch import Tensor

from ffmem.errors import ForwardError
from ffmem.indexing.chunks import Batch, Chunk, PrefixRange
from ffmem.indexing.results import LayerResult, LayerStats
from ffmem.indexing.tables import UNIT
from ffmem.indexing.topk import TopK, pack_keys
from ffmem.models.banks import Bank, Routing
from ffmem.models.memories import Memories
from ffmem.progress import Step

REDUCED_POSITIONS = 256
"""Positions to reduce at a time on a CPU, so that they stay in the cache meanwhile. Measured for
1,536 gated memories: the pass takes 1 % longer with 1,024, 2 % with 128."""

DENSE_SHARE = 16
"""If more than one in so many coefficients of an expert enter a list, all its rows are sorted."""


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
        self.has_experts = memories.layout.has_experts
        self.stats = [LayerStats.empty(width, memories.gated, self.has_experts) for width in widths]
        self._pending: tuple[int, list[LayerStats]] | None = None

    def read(
        self,
        chunk: Chunk,
        batches: Iterable[Batch],
        sampled: Int64[ndarray, " prefix"],
        contents: Mapping[int, list[bool]] | None = None,
        done: Step | None = None,
    ) -> list[Float32[ndarray, "_ prefix"]]:
        """Read a chunk, and return every layer's coefficients on the sampled prefixes.

        `contents` says, by the offset of a sentence, at which of its tokens a prefix ends; in
        sentences that it does not name, at every token. `done` is called with the tokens of each
        batch that has been read.
        """
        self.rollback()
        reader = _ChunkReader(self, sampled, contents or {})
        with self.memories.read_coefficients(reader.read), torch.inference_mode():
            for batch in batches:
                reader.begin(batch)
                with self.memories.skip_padding(batch.is_token):
                    self.memories.forward(batch.tokens)
                if done is not None:
                    done(sum(batch.lengths))
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

    def __init__(
        self,
        scan: Scan,
        sampled: Int64[ndarray, " prefix"],
        contents: Mapping[int, list[bool]],
    ) -> None:
        self.scan = scan
        self.sampled = sampled
        self.contents = contents
        self.n_prefixes = 0
        self.batch: Batch
        widths = [len(stats.active) for stats in scan.stats]
        n_cases = 3 if scan.memories.gated else 1
        self.counts = [np.zeros((n_cases, width), np.int64) for width in widths]
        """Prefixes that are active; in gated models also those with m > 0, and those with both."""
        self.sums = [np.zeros(width, np.float64) for width in widths]
        self.maximum = [np.full(width, -np.inf, np.float32) for width in widths]
        self.minimum = [np.full(width, np.inf, np.float32) for width in widths]
        self.sample = [np.zeros((width, len(sampled)), np.float32) for width in widths]
        self.routed = [np.zeros(width, np.int64) for width in widths if scan.has_experts]
        self.weights = [np.zeros(width, np.float64) for width in widths if scan.has_experts]
        self._masks = torch.empty(0)
        """Memory for comparisons."""
        self._candidates: dict[TopK, list[tuple[ndarray, ...]]] = {}

    def begin(self, batch: Batch) -> None:
        """Start a batch: the coefficients that follow belong to it."""
        self._add_candidates()
        self.batch = batch
        self._lengths = torch.tensor(batch.lengths)
        self._offsets = torch.tensor(batch.offsets)
        self._kept, self._counts = self._find_kept()
        self.n_prefixes += sum(self._counts)
        if len(self.sampled):
            self._rows, self._positions, self._columns = self._find_sampled()
        if self.scan.has_experts:
            self._prefix_of, self._column_of = self._number_tokens()

    def read(
        self,
        bank: Bank,
        coefficients: Float[Tensor, "batch position memory"] | Float[Tensor, "row memory"],
        gate: Tensor | None,
        routing: Routing | None,
    ) -> None:
        """Receive the coefficients of one bank on the current batch."""
        if routing is not None and routing.tokens is not None:
            self._read_expert(bank, coefficients, gate, routing)
            return
        if self.scan.has_experts:
            weights = torch.ones(self.batch.tokens.numel()) if routing is None else routing.weights
            is_prefix = self._prefix_of.to(weights.device) >= 0
            self._count_routed(bank, weights[is_prefix])
        if len(self.sampled) and len(self._rows):
            rows = coefficients[self._rows, self._positions]
            self.sample[bank.layer][bank.memories, self._columns] = rows.float().cpu().numpy().T
        if self._kept is not None:
            kept = self._kept.to(coefficients.device)
            row = torch.arange(len(kept), device=kept.device)[:, None]
            coefficients, gate = coefficients[row, kept], None if gate is None else gate[row, kept]
        highest, lowest = self._reduce(bank, coefficients, gate)
        for topk in self.scan.topks[bank.layer]:
            strength = highest if topk.sign > 0 else lowest.neg()
            threshold = self._threshold(topk, bank, strength)
            pairs = ((strength >= threshold) & (strength > 0)).nonzero()
            if len(pairs):
                self._add(topk, bank, pairs, threshold, coefficients, gate)

    def _find_kept(self) -> tuple[Int64[Tensor, "batch kept"] | None, list[int]]:
        """Return the positions at which prefixes end, and how many each sentence has.

        The positions are None if prefixes end at every token of every sentence.
        """
        batch, first = self.batch, self.scan.prefix_range.first
        if not any(offset in self.contents for offset in batch.offsets):
            return None, batch.lengths
        kept = []
        for offset, length in zip(batch.offsets, batch.lengths, strict=True):
            content = self.contents.get(offset)
            kept.append([first + i for i in range(length) if content is None or content[i]])
        counts = [len(positions) for positions in kept]
        rows = [positions + [0] * (max(counts) - len(positions)) for positions in kept]
        return torch.tensor(rows, dtype=torch.long), counts

    def _reduce(
        self, bank: Bank, coefficients: Tensor, gate: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return each sentence's maximum and minimum; add counts and sums to the statistics."""
        first = self.scan.prefix_range.first if self._kept is None else 0
        shape = (len(self._counts), coefficients.shape[-1])
        highest, lowest = coefficients.new_empty(shape), coefficients.new_empty(shape)
        sums = torch.empty(shape, device=coefficients.device)
        counts = []
        for begin, end, length in self._runs_of_equal_length(coefficients.is_cpu):
            part = slice(begin, end), slice(first, first + length)
            view = coefficients[part]
            torch.amax(view, 1, out=highest[begin:end])
            torch.amin(view, 1, out=lowest[begin:end])
            torch.sum(view, 1, dtype=torch.float32, out=sums[begin:end])
            counts.append(self._count(view, None if gate is None else gate[part]))
        layer, memories = bank.layer, bank.memories
        self._add_counts(bank, torch.stack(counts).sum(0))
        self.sums[layer][memories] += sums.sum(0, dtype=torch.float64).cpu().numpy()
        top, bottom = highest.amax(0).float().cpu().numpy(), lowest.amin(0).float().cpu().numpy()
        maximum, minimum = self.maximum[layer][memories], self.minimum[layer][memories]
        np.maximum(maximum, top, out=maximum)
        np.minimum(minimum, bottom, out=minimum)
        return highest, lowest

    def _count(
        self, coefficients: Float[Tensor, "*row memory"], gate: Float[Tensor, "*row memory"] | None
    ) -> Float32[Tensor, "case memory"]:
        """Count the prefixes that are active, and in gated models those with m > 0, and both.

        Comparisons write 0 and 1 in the dtype of the coefficients into memory that is reused: on a
        CPU that takes a quarter of the time of booleans.
        """
        n_cases = 1 if gate is None else 3
        n = n_cases * coefficients.numel()
        masks = self._masks
        is_alike = masks.dtype == coefficients.dtype and masks.device == coefficients.device
        if len(masks) < n or not is_alike:
            self._masks = coefficients.new_empty(n)
        masks = self._masks[:n].view(n_cases, *coefficients.shape)
        torch.gt(coefficients if gate is None else gate, 0, out=masks[0])
        if gate is not None:
            torch.gt(coefficients, 0, out=masks[1])
            torch.mul(masks[0], masks[1], out=masks[2])
        return masks.flatten(1, -2).sum(1, dtype=torch.float32)

    def _add_counts(self, bank: Bank, counts: Float32[Tensor, "case memory"]) -> None:
        """Add what `_count` returned to the statistics."""
        added = counts.cpu().numpy().astype(np.int64)
        self.counts[bank.layer][: len(added), bank.memories] += added

    def _runs_of_equal_length(self, on_cpu: bool) -> Iterator[tuple[int, int, int]]:
        """Yield (begin, end, length) of runs of sentences of one length, which have no padding."""
        lengths = self._counts
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
        lengths = torch.tensor(self._counts, device=pairs.device)[sentence]
        first, shortest = self.scan.prefix_range
        skipped = first if self._kept is None else 0
        most = max(self._counts)
        columns = coefficients[:, skipped : skipped + most][sentence, :, memory]
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
        is_open = torch.zeros_like(memory)
        if gate is not None:
            is_open = (gate[sentence, position + skipped, memory] > 0).long()
        if self._kept is not None:
            position = self._kept.to(pairs.device)[sentence, position] - first
        prefixes = self._offsets.to(pairs.device)[sentence] + position + shortest
        keys = pack_keys(*(part.cpu().numpy() for part in (strength, prefixes, is_open)))
        topk.add((memory + bank.offset).cpu().numpy(), keys)

    # Routed experts

    def _read_expert(
        self,
        bank: Bank,
        coefficients: Float[Tensor, "row memory"],
        gate: Float[Tensor, "row memory"] | None,
        routing: Routing,
    ) -> None:
        """Receive the coefficients of a routed expert on its tokens of the current batch."""
        assert routing.tokens is not None
        prefixes = self._prefix_of.to(routing.tokens.device)[routing.tokens]
        tokens, weights = routing.tokens, routing.weights
        is_prefix = prefixes >= 0  # not padding, nor a start token
        if not is_prefix.all():
            coefficients, tokens = coefficients[is_prefix], tokens[is_prefix]
            prefixes, weights = prefixes[is_prefix], weights[is_prefix]
            gate = None if gate is None else gate[is_prefix]
        if not len(tokens):
            return
        self._count_routed(bank, weights)
        self._reduce_expert(bank, coefficients, gate)
        sentences = tokens // self.batch.tokens.shape[1]
        is_open = torch.zeros_like(coefficients, dtype=torch.bool) if gate is None else gate > 0
        for topk in self.scan.topks[bank.layer]:
            strength = coefficients.float() if topk.sign > 0 else coefficients.float().neg()
            enters = (strength >= topk.threshold(strength.device)[bank.memories]) & (strength > 0)
            found = enters.flatten().nonzero()[:, 0]
            if len(found) > enters.numel() // DENSE_SHARE:
                self._add_rows(topk, bank, strength, prefixes, is_open, sentences)
            elif len(found):
                row, memory = found // bank.size, found % bank.size
                parts = (strength.flatten()[found], prefixes[row], is_open.flatten()[found])
                self._candidates.setdefault(topk, []).append(
                    (
                        (memory + bank.offset).cpu().numpy(),
                        pack_keys(*(part.cpu().numpy() for part in parts)),
                        sentences[row].cpu().numpy(),
                    )
                )
        columns_of = self._column_of.to(tokens.device)[tokens]
        if len(self.sampled) and (columns_of >= 0).any():
            rows = (columns_of >= 0).nonzero()[:, 0]
            places = columns_of[rows].cpu().numpy()
            values = coefficients[rows].float().cpu().numpy().T
            self.sample[bank.layer][bank.memories, places] = values

    def _count_routed(self, bank: Bank, weights: Float[Tensor, " prefix"]) -> None:
        """Count the prefixes that reach a bank, and add up their weights."""
        self.routed[bank.layer][bank.memories] += len(weights)
        self.weights[bank.layer][bank.memories] += float(weights.sum(dtype=torch.float64))

    def _reduce_expert(self, bank: Bank, coefficients: Tensor, gate: Tensor | None) -> None:
        """Add the coefficients of an expert to the statistics."""
        self._add_counts(bank, self._count(coefficients, gate))
        layer, memories = bank.layer, bank.memories
        sums = coefficients.sum(0, dtype=torch.float32)
        self.sums[layer][memories] += sums.double().cpu().numpy()
        maximum, minimum = self.maximum[layer][memories], self.minimum[layer][memories]
        np.maximum(maximum, coefficients.amax(0).float().cpu().numpy(), out=maximum)
        np.minimum(minimum, coefficients.amin(0).float().cpu().numpy(), out=minimum)

    def _add_rows(
        self,
        topk: TopK,
        bank: Bank,
        strength: Float32[Tensor, "row memory"],
        prefixes: Int64[Tensor, " row"],
        is_open: Bool[Tensor, "row memory"],
        sentences: Int64[Tensor, " row"],
    ) -> None:
        """Add all rows of an expert to the lists; at first, most would enter."""
        parts = (strength, prefixes[:, None], is_open)
        keys = pack_keys(*(part.cpu().numpy() for part in parts))
        keys *= (strength > 0).cpu().numpy()
        if not self.scan.every_prefix:
            # The strongest of each sentence. Rows are in the order of tokens.
            starts = np.flatnonzero(np.diff(sentences.cpu().numpy(), prepend=-1))
            keys = np.maximum.reduceat(keys, starts, axis=0)
        topk.add_block(bank.memories, keys)

    def _add_candidates(self) -> None:
        """Add the candidates of all experts in the last batch to the lists."""
        for topk, parts in self._candidates.items():
            memory, keys, sentence = (np.concatenate(part) for part in zip(*parts, strict=True))
            if not self.scan.every_prefix:
                # The strongest of each sentence and memory; ties to the earlier prefix.
                pairs = memory * len(self.batch.lengths) + sentence
                order = np.argsort(pairs)
                starts = np.flatnonzero(np.diff(pairs[order], prepend=-1))
                memory, keys = memory[order[starts]], np.maximum.reduceat(keys[order], starts)
            topk.add(memory, keys)
        self._candidates.clear()

    def _number_tokens(self) -> tuple[Int64[Tensor, " token"], Int64[Tensor, " token"]]:
        """Return the prefix number, and the column of `sample`, of every token; −1 if none."""
        first, shortest = self.scan.prefix_range
        shape = self.batch.tokens.shape
        step = torch.arange(shape[1]) - first
        prefixes = self._offsets[:, None] + step + shortest
        prefixes[(step < 0) | (step >= self._lengths[:, None])] = -1
        if self._kept is not None:
            is_kept = torch.zeros(shape, dtype=torch.bool)
            for row, n in enumerate(self._counts):
                is_kept[row, self._kept[row, :n]] = True
            prefixes[~is_kept] = -1
        columns = torch.full(shape, -1)
        if len(self.sampled):
            columns[self._rows, self._positions] = torch.from_numpy(self._columns)
        return prefixes.flatten(), columns.flatten()

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
        self._add_candidates()
        gated, experts = self.scan.memories.gated, self.scan.has_experts
        if not self.n_prefixes:
            return [LayerStats.empty(counts.shape[1], gated, experts) for counts in self.counts]
        for layer, routed in enumerate(self.routed):  # a prefix that is not routed has m = 0
            elsewhere = routed < self.n_prefixes
            self.maximum[layer][elsewhere] = np.maximum(self.maximum[layer][elsewhere], 0)
            self.minimum[layer][elsewhere] = np.minimum(self.minimum[layer][elsewhere], 0)
        bad = [
            ~(np.isfinite(total) & np.isfinite(high) & np.isfinite(low))
            for total, high, low in zip(self.sums, self.maximum, self.minimum, strict=True)
        ]
        for layer, memories in enumerate(bad):
            if memories.any():
                others = sum(int(one.sum()) for one in bad) - 1
                cell = self.scan.memories.layout.cell(layer, int(memories.argmax()))
                raise ForwardError(
                    f"The coefficients of {cell} (and {others} other memories) are not finite"
                    f" somewhere in {chunk.name}: the model overflows. Use --dtype float32, or"
                    " check its weights."
                )
        return [
            LayerStats(
                active=self.counts[layer][0],
                sums=np.rint(self.sums[layer] / UNIT).astype(np.int64),
                maximum=self.maximum[layer],
                minimum=self.minimum[layer],
                routed=self.routed[layer] if self.routed else None,
                weight_sums=(
                    np.rint(self.weights[layer] / UNIT).astype(np.int64) if self.weights else None
                ),
                positive=self.counts[layer][1] if gated else None,
                open_positive=self.counts[layer][2] if gated else None,
            )
            for layer in range(len(self.counts))
        ]
