"""Sequences that run up to a layer, and the coefficients that are read there.

They stand for themselves: whoever has them and the model can run them.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float64, Int, Int64
from numpy import ndarray
from torch import Tensor

from ffmem.indexing.chunks import batches
from ffmem.models.memories import Memories
from ffmem.models.trace import LayerTrace
from ffmem.progress import Step

BATCH_TOKENS = 1024
"""In a forward pass. A layer has few sequences, of all lengths: larger batches are mostly padding
(4,096 tokens: a fifth of them; 1,024: a twentieth)."""


class Sequences(NamedTuple):
    """What a layer's trials run, each sequence once, and where each trial reads it."""

    layer: int
    memory: Int64[ndarray, " trial"]
    ids: list[tuple[int, ...]]
    sequence: Int64[ndarray, "trial read"]
    """NONE where there is nothing to read."""
    length: Int64[ndarray, "trial read"]
    """How many tokens of the sequence have been seen where it is read."""


class Measured(NamedTuple):
    """Coefficients, and pre-activations of the same memories' keys: of reads, or trials of them."""

    coefficients: Float64[ndarray, "*trial read"]
    """NaN where there is nothing to read."""
    raw: Float64[ndarray, "*trial read"]
    """x · k + b; NaN in gated models, where a memory has two keys."""


def measure(memories: Memories, sequences: Sequences, start: int | None, step: Step) -> Measured:
    """Return the coefficients of a layer's trials, each run stopped at the layer."""
    flat, length = sequences.sequence.ravel(), sequences.length.ravel()
    memory = sequences.memory.repeat(sequences.sequence.shape[1])
    found = Measured(*(np.full(flat.shape, np.nan) for _ in Measured._fields))
    order = np.argsort(flat, kind="stable")
    bounds = np.searchsorted(flat[order], np.arange(len(sequences.ids) + 1))
    extra = 0 if start is None else 1
    runs = ((number, list(ids)) for number, ids in enumerate(sequences.ids))
    for batch in batches(runs, start, BATCH_TOKENS):
        reads = [order[bounds[number] : bounds[number + 1]] for number in batch.offsets]
        row = np.arange(len(reads)).repeat([len(part) for part in reads])
        read = np.concatenate(reads)
        at = torch.from_numpy(np.stack([row, length[read] - 1 + extra], axis=1))
        parts = _read(memories, sequences.layer, batch.tokens, at, torch.from_numpy(memory[read]))
        for into, part in zip(found, parts, strict=True):
            into[read] = part
        step((sum(batch.lengths) + len(reads) * extra) * (sequences.layer + 1))
    return Measured(*(column.reshape(sequences.sequence.shape) for column in found))


def _read(
    memories: Memories,
    layer: int,
    tokens: Int[Tensor, "batch position"],
    at: Int[Tensor, "read 2"],
    memory: Int[Tensor, " read"],
) -> Measured:
    """Return the coefficient, and x · k + b, of one memory at each (row, position)."""
    found = Measured(*(np.full(len(memory), np.nan) for _ in Measured._fields))

    def read(number: int, trace: LayerTrace) -> None:
        if number < layer:
            return
        coefficients = trace.coefficients.cpu().gather(1, memory[:, None])
        found.coefficients[:] = coefficients.squeeze(1).double().numpy()
        if not memories.gated:
            key, bias = (
                weights[memory.to(weights.device)].cpu().double()
                for weights in (memories.keys(layer), memories.key_bias(layer))
            )
            found.raw[:] = ((trace.ff_input.cpu().double() * key).sum(1) + bias).numpy()

    with memories.trace_layers(read, tokens, at):
        memories.forward(tokens, layers=layer + 1)
    return found
