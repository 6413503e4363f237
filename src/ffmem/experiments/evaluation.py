"""A model at work on a sample of prefixes: everything Section 5 measures, in one pass.

A prefix runs up to its last token, for nothing behind it reaches it. Prefixes of similar length
run together; what they computed at their drawn places is kept until a few hundred of them are
read at once: `HELD` bytes of it, and one batch more, at most, in the same buffers for all groups.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float32, Int, Int64, Shaped
from numpy import ndarray
from torch import Tensor

from ffmem.errors import FfmemError
from ffmem.experiments.activity import Activity, Work
from ffmem.experiments.predictions import Predictions
from ffmem.experiments.projector import Projector
from ffmem.experiments.prompt_sample import PromptSample
from ffmem.experiments.softmax_memory import SoftmaxMemory
from ffmem.experiments.token_hits import TokenHits
from ffmem.experiments.value_tops import ValueTops
from ffmem.indexing.chunks import Batch, pad
from ffmem.models.memories import Memories
from ffmem.models.trace import LayerTrace

HELD = 1 << 29
"""Bytes of what layers computed that are held at a time."""

TOGETHER = 512
"""Prefixes that are projected together, if `HELD` allows so many."""

FULL = 512
"""Tokens that fill a batch well enough."""

COUNTED = 64
"""Prefixes whose memories are counted at a time: as many as the cache holds."""

T = TypeVar("T")

PARTS = ("activity", "predictions", "details", "token_hits", "softmax")
"""What a pass can measure; `token_hits` and `details` need `predictions`."""

VALUE_PARTS = ("token_hits", "softmax")
"""Those that read static values."""


class SampleMetrics(NamedTuple):
    """What the pass measured; None where it was not asked for."""

    activity: Activity | None
    predictions: Predictions | None
    token_hits: TokenHits | None
    softmax: SoftmaxMemory | None

    @classmethod
    def empty(
        cls,
        memories: Memories,
        n_examples: int,
        parts: Collection[str],
        frequencies: Int64[ndarray, " vocab"],
    ) -> "SampleMetrics":
        """Return empty tables for some examples."""
        n_layers = memories.n_layers
        return cls(
            Activity(memories, n_examples) if "activity" in parts else None,
            Predictions.empty(n_examples, n_layers) if "predictions" in parts else None,
            TokenHits(n_examples, n_layers, frequencies) if "token_hits" in parts else None,
            SoftmaxMemory(memories, n_examples) if "softmax" in parts else None,
        )

    def tables(self) -> dict[str, Shaped[ndarray, "example ..."]]:
        """Return every table by name; what is written to one is written here."""
        found: dict[str, ndarray] = {}
        if self.activity is not None:
            found |= {f"activity {name}": table for name, table in self.activity.shares.items()}
        if self.predictions is not None:
            found |= self.predictions._asdict()
        if self.token_hits is not None:
            found |= {
                name: getattr(self.token_hits, name) for name in ("agreeing", "carried", "chance")
            }
        if self.softmax is not None:
            found |= {f"softmax {name}": table for name, table in self.softmax.found.items()}
        return found


def measured(part: T | None, name: str) -> T:
    """Return a part of what the pass measured, which must have been asked for."""
    if part is None:
        raise FfmemError(f"The pass over the sample did not measure {name}: add it to its parts.")
    return part


class Places(NamedTuple):
    """A batch, and where its drawn prefixes end in it."""

    tokens: Int[Tensor, "batch position"]
    at: Int[Tensor, "row 2"]
    """(sentence of the batch, position) of each."""
    examples: Int64[ndarray, " row"]
    """The number of each among all drawn prefixes."""


def places(
    sample: PromptSample, start: int | None, memories: Memories, batch_tokens: int = 2048
) -> Iterator[Places]:
    """Return the batches of a sample, none with more prefixes than `HELD` has room for.

    One sentence with so many is a batch by itself. The trunk is about as fast on `FULL` tokens as
    on more: so many of one length run without the longer ones, and need no padding.
    """
    most = max(1, HELD // held_by(memories))
    first = np.cumsum([0, *(len(example.lengths) for example in sample.examples)])
    extra = 0 if start is None else 1
    ordered = sorted(range(len(first) - 1), key=lambda number: sample.examples[number].lengths[-1])
    some: list[tuple[int, list[int]]] = []
    shorter = n_drawn = 0
    for number in ordered:
        example = sample.examples[number]
        length = example.lengths[-1] + extra
        full = length > shorter and shorter * len(some) >= FULL
        large = length * (len(some) + 1) > batch_tokens or n_drawn + len(example.lengths) > most
        if some and (full or large):
            yield _places(pad(some, start), sample, first, extra - 1)
            some, n_drawn = [], 0
        some.append((number, example.sentence.ids[: example.lengths[-1]]))
        n_drawn += len(example.lengths)
        shorter = length
    if some:
        yield _places(pad(some, start), sample, first, extra - 1)


def _places(batch: Batch, sample: PromptSample, first: Int64[ndarray, " _"], shift: int) -> Places:
    at, examples = [], []
    for row, number in enumerate(batch.offsets):
        for rank, length in enumerate(sample.examples[number].lengths):
            at.append((row, length + shift))
            examples.append(int(first[number]) + rank)
    return Places(batch.tokens, torch.tensor(at), np.array(examples))


def groups(sample: PromptSample, start: int | None, memories: Memories) -> Iterator[list[Places]]:
    """Return the batches of a sample as they are read together: which they are decides the bits.

    Long prefixes come few to a batch, and a projection of few rows wastes its time on reading the
    output embedding: several batches are read at once.
    """
    enough = min(TOGETHER, HELD // held_by(memories))
    waiting: list[Places] = []
    for some in places(sample, start, memories):
        waiting.append(some)
        if sum(len(one.examples) for one in waiting) >= enough:
            yield waiting
            waiting = []
    if waiting:
        yield waiting


def held_by(memories: Memories) -> int:
    """Return the bytes of one prefix's traces of all layers."""
    return 4 * (6 * memories.hidden * memories.n_layers + 2 * len(memories.layout))


class SampleEvaluator:
    """Runs prefixes through the model once, and measures what was asked for."""

    def __init__(
        self,
        memories: Memories,
        parts: Collection[str],
        tops: Callable[[int], ValueTops],
        frequencies: Int64[ndarray, " vocab"],
    ) -> None:
        n_layers = memories.n_layers
        self.memories = memories
        self.parts = parts
        self.frequencies = frequencies
        self.projector = None
        if "predictions" in parts:
            self.projector = Projector(memories, details="details" in parts)
        self.buffers: dict[tuple[int, str], Tensor] = {}
        """Of a group's traces, used again for the next: fresh memory is slow."""
        self.tops = [tops(layer) for layer in range(n_layers)] if "token_hits" in parts else []
        self.lengths: list[Float32[ndarray, " memory"] | None] = [
            memories.output_directions(layer).float().norm(dim=1).cpu().numpy()
            if memories.has_values
            else None
            for layer in range(n_layers)
        ]

    @torch.inference_mode()
    def read(self, group: Sequence[Places]) -> SampleMetrics:
        """Return what some batches show together, prefix by prefix in their order."""
        n = sum(len(some.examples) for some in group)
        found = SampleMetrics.empty(self.memories, n, self.parts, self.frequencies)
        traces = self._traces(group, n)
        final = self.projector.final(traces[-1]) if self.projector else None
        for layer, trace in enumerate(traces):
            self._layer(found, layer, trace, final)
        return found

    def _traces(self, group: Sequence[Places], n: int) -> list[LayerTrace]:
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
            begin += len(some.examples)
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
        found: SampleMetrics,
        layer: int,
        trace: LayerTrace,
        final: Int64[ndarray, " row"] | None,
    ) -> None:
        predicted = None
        if found.predictions is not None and self.projector is not None and final is not None:
            predicted = self.projector.read(trace, final)
            for table, column in zip(found.predictions, predicted, strict=True):
                table[:, layer] = column[:, 0]
        if not self.memories.layout.widths[layer]:
            return
        if found.softmax is not None:
            found.softmax.read(slice(None), layer, trace)
        for begin in range(0, len(trace.coefficients), COUNTED):
            rows = slice(begin, begin + COUNTED)
            work = _work(trace, rows, self.lengths[layer])
            if found.activity is not None:
                found.activity.read(rows, layer, work)
            if found.token_hits is not None and predicted is not None:
                targets = (predicted.ff_top[rows, 0], predicted.output_top[rows, 0])
                found.token_hits.read(rows, layer, self.tops[layer], work, targets)


def _work(trace: LayerTrace, rows: slice, lengths: Float32[ndarray, " memory"] | None) -> Work:
    """Return what memories do on some examples."""
    coefficients = trace.coefficients[rows].float().cpu().numpy()
    gate = None if trace.gate is None else trace.gate[rows].float().cpu().numpy()
    # In output-normed blocks all of a row's are divided by one number, which no share notices.
    contributions = None if lengths is None else np.abs(coefficients) * lengths
    return Work(coefficients, gate, contributions)
