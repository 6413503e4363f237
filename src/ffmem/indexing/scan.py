"""The pass: one forward pass per batch, all layers at once, nothing kept but what triggers.

For every memory and prefix the coefficient m is read while the model runs, and leaves at once:

    hi = max over a sentence's prefixes of m      one number per sentence and memory
    hi ≥ threshold                                few survive; only their columns are looked at
    Σ m, count, max, min                          statistics of the same tensor, while it is warm

So the pass costs little more than the forward pass, and holds one batch of coefficients at most.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from numpy import ndarray
from torch import Tensor

from ffmem.errors import ModelError
from ffmem.indexing.found import Found
from ffmem.indexing.leases import Batch, Lease
from ffmem.indexing.running import Running
from ffmem.indexing.sample import Sample
from ffmem.indexing.statistics import UNIT, Statistics
from ffmem.models.memories import Memories

CHUNK = 1024
"""Positions reduced at a time on a CPU: what is read again is then still in the cache."""


class Reach(NamedTuple):
    """Which positions of a sentence are prefixes: `first` … `first` + length − 1."""

    first: int
    shortest: int
    """The length p of the prefix at position `first`."""


def reach(has_start: bool, empty_prefix: bool) -> Reach:
    """Return where prefixes stand: 1 ≤ p ≤ n, or 0 ≤ p < n with the empty prefix."""
    if empty_prefix:
        return Reach(first=0, shortest=0)
    return Reach(first=1 if has_start else 0, shortest=1)


class Scan:
    """Reads leases with one model: each memory's top t, statistics, and the sample."""

    def __init__(self, memories: Memories, t: int, prefixes: str, where: Reach) -> None:
        self.memories = memories
        self.t = t
        self.every_prefix = prefixes == "all"
        self.where = where

    def lease(
        self,
        lease: Lease,
        batches: Iterable[Batch],
        floors: list[Float32[ndarray, "layer memory"]],
        sampled: tuple[ndarray, ndarray],
    ) -> Iterator[int | Found]:
        """Read a lease: give the tokens of each batch when it is done, at the end what was found.

        `floors` are the t-th |m| of committed leases, for each sign; `sampled` the hashes and
        prefixes of the sample that may lie in this lease.
        """
        reader = _Reader(self, lease, floors, sampled)
        with self.memories.reading(reader.read):
            for batch in batches:
                reader.batch = batch
                reader.n_prefixes += sum(batch.lengths)
                with torch.inference_mode():  # not around the `yield`: it would leak to the caller
                    self.memories.forward(batch.tokens)
                yield sum(batch.lengths)
        yield reader.found()


class _Reader:
    """Takes the coefficients of one lease, layer by layer, batch by batch."""

    def __init__(
        self,
        scan: Scan,
        lease: Lease,
        floors: list[Float32[ndarray, "layer memory"]],
        sampled: tuple[ndarray, ndarray],
    ) -> None:
        shape = (scan.memories.n_layers, scan.memories.n_memories)
        self.scan = scan
        self.lease = lease
        self.lists = [
            Running(floor, scan.t, sign) for floor, sign in zip(floors, (1, -1), strict=False)
        ]
        self.batch: Batch
        self.n_prefixes = 0
        self.active = np.zeros(shape, np.int64)
        self.sums = np.zeros(shape, np.float64)
        self.maximum = np.full(shape, -np.inf, np.float32)
        self.minimum = np.full(shape, np.inf, np.float32)
        last = lease.first_prefix + lease.n_tokens + lease.n_sentences
        inside = (sampled[1] >= lease.first_prefix) & (sampled[1] < last)
        self.hashes, self.sampled = sampled[0][inside], sampled[1][inside]
        self.sample = np.zeros((*shape, len(self.sampled)), np.float32)

    def read(
        self,
        layer: int,
        coefficients: Float[Tensor, "batch position memory"],
        gate: Float[Tensor, "batch position memory"] | None,
    ) -> None:
        """Take what one layer did on the present batch."""
        hi, lo = self._reduce(layer, coefficients, gate)
        for running, extreme in zip(self.lists, (hi, lo), strict=False):
            strength = extreme if running.sign > 0 else extreme.neg()
            threshold = self._threshold(running, layer, strength)
            pairs = ((strength >= threshold) & (strength > 0)).nonzero()
            if len(pairs):
                self._add(running, layer, pairs, threshold, coefficients, gate)
        self._keep_sample(layer, coefficients)

    def _reduce(
        self, layer: int, coefficients: Tensor, gate: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return each sentence's maximum and minimum, and count and sum on the way."""
        first = self.scan.where.first
        n, width = len(self.batch.lengths), coefficients.shape[-1]
        like = coefficients.new_empty
        hi, lo = like((n, width)), like((n, width))
        sums = torch.empty((n, width), device=coefficients.device)
        counts = torch.empty_like(sums)
        asked = coefficients if gate is None else gate
        for begin, end, length in self._chunks(coefficients.is_cpu):
            view = coefficients[begin:end, first : first + length]
            torch.amax(view, 1, out=hi[begin:end])
            torch.amin(view, 1, out=lo[begin:end])
            torch.sum(view, 1, dtype=torch.float32, out=sums[begin:end])
            # `gt` into a float tensor: summing booleans takes five times as long.
            is_active = torch.empty(view.shape, device=view.device)
            torch.gt(asked[begin:end, first : first + length], 0, out=is_active)
            torch.sum(is_active, 1, out=counts[begin:end])
        self.active[layer] += counts.sum(0).to(torch.int64).cpu().numpy()
        self.sums[layer] += sums.sum(0, dtype=torch.float64).cpu().numpy()
        highest, lowest = hi.amax(0).float().cpu().numpy(), lo.amin(0).float().cpu().numpy()
        np.maximum(self.maximum[layer], highest, out=self.maximum[layer])
        np.minimum(self.minimum[layer], lowest, out=self.minimum[layer])
        return hi, lo

    def _chunks(self, on_cpu: bool) -> Iterator[tuple[int, int, int]]:
        """Return (begin, end, length) of runs of sentences of one length: no padding within."""
        lengths = self.batch.lengths
        begin = 0
        while begin < len(lengths):
            length = lengths[begin]
            most = begin + (max(1, CHUNK // length) if on_cpu else len(lengths))
            end = begin + 1
            while end < min(most, len(lengths)) and lengths[end] == length:
                end += 1
            yield begin, end, length
            begin = end

    def _threshold(
        self, running: Running, layer: int, strength: Float[Tensor, "batch memory"]
    ) -> Float32[Tensor, " memory"]:
        """Return what a prefix must reach to enter each memory's list."""
        threshold = running.threshold(layer, strength.device)
        if running.is_filling(layer) and len(strength) > self.scan.t:
            # At the start anything would pass. The batch alone already has t prefixes this strong.
            batch_weakest = strength.topk(self.scan.t, dim=0).values[-1].float()
            threshold = torch.maximum(threshold, batch_weakest)
        return threshold

    def _add(
        self,
        running: Running,
        layer: int,
        pairs: Int64[Tensor, "pair two"],
        threshold: Float32[Tensor, " memory"],
        coefficients: Tensor,
        gate: Tensor | None,
    ) -> None:
        """Look at the surviving (sentence, memory) columns, and add the prefixes that count."""
        sentence, memory = pairs.unbind(1)
        lengths = torch.tensor(self.batch.lengths, device=pairs.device)[sentence]
        first, shortest = self.scan.where
        columns = coefficients[:, first : first + self.batch.lengths[-1]][sentence, :, memory]
        columns = columns.float() * running.sign
        step = torch.arange(columns.shape[1], device=pairs.device)
        columns.masked_fill_(step >= lengths[:, None], -torch.inf)
        if self.scan.every_prefix:
            enters = (columns >= threshold[memory][:, None]) & (columns > 0)
            column, position = enters.nonzero().unbind(1)
            strength = columns[column, position]
            sentence, memory = sentence[column], memory[column]
        else:
            strength, position = columns.max(1)  # the first maximum: ties to the earlier prefix
        offsets = torch.tensor(self.batch.offsets, device=pairs.device)[sentence]
        places = offsets + position + (shortest - self.lease.first_prefix)
        is_open = torch.zeros_like(memory)
        if gate is not None:
            is_open = (gate[sentence, position + first, memory] > 0).long()
        taken = (memory, strength, places, is_open)
        running.add(layer, *(part.cpu().numpy() for part in taken))

    def _keep_sample(self, layer: int, coefficients: Tensor) -> None:
        if not len(self.sampled):
            return
        first, shortest = self.scan.where
        offsets = np.asarray(self.batch.offsets)
        ordered = np.argsort(offsets)
        owner = ordered[np.searchsorted(offsets[ordered], self.sampled, side="right") - 1]
        position = self.sampled - offsets[owner] - shortest
        inside = (position >= 0) & (position < np.asarray(self.batch.lengths)[owner])
        rows = coefficients[
            torch.from_numpy(owner[inside]), torch.from_numpy(position[inside] + first)
        ]
        self.sample[layer][:, inside] = rows.float().cpu().numpy().T

    def found(self) -> Found:
        """Return what the lease came to, if every coefficient was a number."""
        self._refuse_non_finite()
        gated = self.scan.memories.gated
        lists = [running.triggers(self.lease.first_prefix, gated) for running in self.lists]
        statistics = Statistics(
            self.n_prefixes,
            self.active,
            np.rint(self.sums / UNIT).astype(np.int64),
            self.maximum,
            self.minimum,
        )
        sample = Sample(self.hashes, self.sampled, self.sample)
        return Found(lists[0], lists[1] if len(lists) > 1 else None, statistics, sample)

    def _refuse_non_finite(self) -> None:
        bad = ~(np.isfinite(self.sums) & np.isfinite(self.maximum) & np.isfinite(self.minimum))
        if bad.any():
            layer, memory = np.argwhere(bad)[0]
            last = self.lease.first_sentence + self.lease.n_sentences - 1
            raise ModelError(
                f"The coefficients of L{layer}N{memory} (and {int(bad.sum()) - 1} other memories)"
                f" are not finite somewhere in sentences {self.lease.first_sentence} to {last}."
                " The model overflows there: use --dtype float32, or check its weights."
            )
