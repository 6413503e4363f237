"""One forward pass over a sample of prefixes: everything that Section 5 measures.

A prefix runs up to its last token; later tokens cannot change it. Prefixes of similar length share
a batch. Batches are traced one after the other, and a group of them is read at once, a few hundred
prefixes: at most `MAX_TRACE_BYTES` of traces and one batch more, in buffers that all groups share.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Int, Int64
from numpy import ndarray
from torch import Tensor

from ffmem.experiments.context import ExperimentContext
from ffmem.experiments.metrics import LayerActivity, Predictions, SampleMetric
from ffmem.experiments.projection import Projector
from ffmem.experiments.sample import PromptSample
from ffmem.indexing.chunks import Batch, pad
from ffmem.models.memories import Memories
from ffmem.models.trace import LayerTrace

MAX_TRACE_BYTES = 1 << 29
"""Bytes of traces held at a time."""

PROJECTED_PREFIXES = 512
"""Prefixes to project at once, within `MAX_TRACE_BYTES`."""

MIN_BATCH_TOKENS = 512
"""Tokens that fill a batch well enough."""

METRIC_ROWS = 64
"""Prefixes whose memories are counted at a time: as many as fit in the cache."""


class PrefixBatch(NamedTuple):
    """A batch, and where its drawn prefixes end in it."""

    tokens: Int[Tensor, "batch position"]
    at: Int[Tensor, "row 2"]
    """(sentence of the batch, position) of each."""
    prefixes: Int64[ndarray, " row"]
    """The number of each in the sample."""


def prefix_batches(
    sample: PromptSample, start: int | None, memories: Memories, batch_tokens: int = 2048
) -> Iterator[PrefixBatch]:
    """Return the batches of a sample, with no more prefixes each than fit in `MAX_TRACE_BYTES`.

    A single sentence with more of them is a batch of its own. The trunk is about as fast on
    `MIN_BATCH_TOKENS` as on more, so that many of one length run without longer ones, unpadded.
    """
    most = max(1, MAX_TRACE_BYTES // trace_bytes(memories))
    first = np.cumsum([0, *(len(one.lengths) for one in sample.sentences)])
    extra = 0 if start is None else 1
    ordered = sorted(range(len(first) - 1), key=lambda place: sample.sentences[place].lengths[-1])
    some: list[tuple[int, list[int]]] = []
    shorter = n_drawn = 0
    for place in ordered:
        one = sample.sentences[place]
        length = one.lengths[-1] + extra
        full = length > shorter and shorter * len(some) >= MIN_BATCH_TOKENS
        large = length * (len(some) + 1) > batch_tokens or n_drawn + len(one.lengths) > most
        if some and (full or large):
            yield _prefix_batch(pad(some, start), sample, first, extra - 1)
            some, n_drawn = [], 0
        some.append((place, one.sentence.ids[: one.lengths[-1]]))
        n_drawn += len(one.lengths)
        shorter = length
    if some:
        yield _prefix_batch(pad(some, start), sample, first, extra - 1)


def _prefix_batch(
    batch: Batch, sample: PromptSample, first: Int64[ndarray, " _"], shift: int
) -> PrefixBatch:
    at, prefixes = [], []
    for row, place in enumerate(batch.offsets):
        for rank, length in enumerate(sample.sentences[place].lengths):
            at.append((row, length + shift))
            prefixes.append(int(first[place]) + rank)
    return PrefixBatch(batch.tokens, torch.tensor(at), np.array(prefixes))


def groups(
    sample: PromptSample, start: int | None, memories: Memories
) -> Iterator[list[PrefixBatch]]:
    """Return the batches of a sample in groups that are read together; this decides the last bits.

    A batch holds few long prefixes, and projecting few rows spends most of its time on reading the
    output embedding.
    """
    enough = min(PROJECTED_PREFIXES, MAX_TRACE_BYTES // trace_bytes(memories))
    waiting: list[PrefixBatch] = []
    for some in prefix_batches(sample, start, memories):
        waiting.append(some)
        if sum(len(one.prefixes) for one in waiting) >= enough:
            yield waiting
            waiting = []
    if waiting:
        yield waiting


def trace_bytes(memories: Memories) -> int:
    """Return the bytes of one prefix's traces of all layers."""
    return 4 * (6 * memories.hidden * memories.n_layers + 2 * len(memories.layout))


def evaluate_sample(
    context: ExperimentContext, kinds: Collection[type[Any]]
) -> dict[type[Any], Any]:
    """Run the model on the sample once, and return each kind of metric filled in."""
    memories, sample = context.memories, context.prompt_sample
    n_prefixes = len(sample.lengths)
    context.progress.say(f"Running the model on {n_prefixes:,} prefixes.")
    metrics: dict[type[Any], SampleMetric] = {
        kind: kind(context, n_prefixes) for kind in kinds if kind is not Predictions
    }
    predictions = None
    if Predictions in kinds or any(kind.needs_predictions for kind in metrics):
        predictions = Predictions.empty(n_prefixes, memories.n_layers)
    evaluator = SampleEvaluator(memories, list(metrics.values()), predictions)
    start = context.index.manifest.start.id
    with context.progress.bar("Section 5", n_prefixes, "prefixes") as step:
        for group in groups(sample, start, memories):
            evaluator.read(group)
            step(sum(len(some.prefixes) for some in group))
    return metrics if predictions is None else {**metrics, Predictions: predictions}


class SampleEvaluator:
    """Runs prefixes through the model once, and fills in metrics and predictions."""

    def __init__(
        self,
        memories: Memories,
        metrics: Sequence[SampleMetric],
        predictions: Predictions | None,
    ) -> None:
        self.memories = memories
        self.metrics = metrics
        self.predictions = predictions
        self.projector = None if predictions is None else Projector(memories)
        self.buffers: dict[tuple[int, str], Tensor] = {}
        """Traces of a group, reused for the next one: fresh memory is slow."""
        self.norms: list[Float32[ndarray, " memory"] | None] = [
            memories.output_directions(layer).float().norm(dim=1).cpu().numpy()
            if memories.has_values and metrics
            else None
            for layer in range(memories.n_layers)
        ]

    @torch.inference_mode()
    def read(self, group: Sequence[PrefixBatch]) -> None:
        """Run some batches, and read what they computed together."""
        prefixes = np.concatenate([some.prefixes for some in group])
        traces = self._traces(group, len(prefixes))
        final = self.projector.final(traces[-1]) if self.projector else None
        for layer, trace in enumerate(traces):
            self._layer(prefixes, layer, trace, final)

    def _traces(self, group: Sequence[PrefixBatch], n: int) -> list[LayerTrace]:
        """Run the batches of a group, and return what each layer computed at the drawn places."""
        kept: dict[int, LayerTrace] = {}
        begin = 0

        def keep(layer: int, trace: LayerTrace) -> None:
            kept[layer] = LayerTrace._make(
                None if part is None else self._hold(layer, name, n, begin, part)
                for name, part in trace._asdict().items()
            )

        for some in group:
            with self.memories.trace_layers(keep, some.tokens, some.at):
                self.memories.forward(some.tokens)
            begin += len(some.prefixes)
        return [kept[layer] for layer in range(self.memories.n_layers)]

    def _hold(self, layer: int, name: str, n: int, begin: int, part: Tensor) -> Tensor:
        """Copy a batch's part to its place among all of the group, and return all."""
        buffer = self.buffers.get((layer, name))
        if buffer is None or len(buffer) < n:
            buffer = self.buffers[layer, name] = part.new_empty(n, part.shape[1])
        buffer[begin : begin + len(part)] = part
        return buffer[:n]

    def _layer(
        self,
        prefixes: Int64[ndarray, " row"],
        layer: int,
        trace: LayerTrace,
        final: Int64[ndarray, " row"] | None,
    ) -> None:
        if self.predictions is not None and self.projector is not None and final is not None:
            columns = self.projector.read(trace, final)
            for table, column in zip(self.predictions, columns, strict=True):
                table[prefixes, layer] = column[:, 0]
        if not self.memories.layout.widths[layer]:
            return
        for begin in range(0, len(prefixes), METRIC_ROWS):
            rows = slice(begin, begin + METRIC_ROWS)
            activity = self._activity(prefixes[rows], layer, trace, rows)
            for metric in self.metrics:
                metric.read(prefixes[rows], layer, activity)

    def _activity(
        self, prefixes: Int64[ndarray, " row"], layer: int, trace: LayerTrace, rows: slice
    ) -> LayerActivity:
        """Return what a layer does on some prefixes."""
        part = LayerTrace._make(None if tensor is None else tensor[rows] for tensor in trace)
        coefficients = part.coefficients.float().cpu().numpy()
        gate = None if part.gate is None else part.gate.float().cpu().numpy()
        norms, tops = self.norms[layer], self.predictions
        return LayerActivity(
            coefficients,
            gate,
            # In output-normed blocks all of a row's are divided by one number: no share notices.
            None if norms is None else np.abs(coefficients) * norms,
            None if tops is None else tops.ff_top[prefixes, layer],
            None if tops is None else tops.output_top[prefixes, layer],
            part,
        )
