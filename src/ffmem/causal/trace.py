"""A prompt through a model, read layer by layer: what predicts, and which memories contribute.

    r → residual_top        y → ff_top        o = r + y → output_top        contribution = |m| · ‖v‖

r and o are read the model's own way, y folded (`models.head`). In output-normed blocks a value is
divided by what the norm divides y by, so that the parts add up to y.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.causal.editing import editing
from ffmem.causal.edits import Edits, place
from ffmem.causal.generation import OVERFLOW, continued, refuse_odd
from ffmem.causal.grid import grid as read_grid
from ffmem.causal.parts import divisor, promoted
from ffmem.causal.prompt import Prompt
from ffmem.causal.tabled import TokenChance
from ffmem.causal.traced import MemoryAtWork, Sampling, Trace, Traced, TracedLayer
from ffmem.cells import Cell
from ffmem.errors import FfmemError, ModelError
from ffmem.indexing.store import Index
from ffmem.models.memories import Memories
from ffmem.models.trace import LayerTrace

CASES = {
    (True, False): "residual",
    (True, True): "agreement",
    (False, True): "ffn",
    (False, False): "composition",
}
"""By whether the output's top token is the residual's, and whether it is the feed-forward's."""


def trace(
    memories: Memories,
    prompt: Prompt,
    edits: Edits | None = None,
    *,
    position: int = -1,
    top: int = 10,
    generate: int = 0,
    temperature: float | None = None,
    seed: int = 0,
    index: Index | None = None,
    grid: bool = False,
) -> Trace:
    """Return what every layer does at a position of a prompt, with and without edits.

    With `grid`, also what every layer predicts at every position.
    """
    for name, number, least in (("top", top, 1), ("generate", generate, 0)):
        if not isinstance(number, int) or number < least:
            raise FfmemError(f"{name} {number!r} was asked for. Give {least} or more.")
    refuse_odd(temperature, seed)
    at = place(position, len(prompt.ids))
    placed = (edits or Edits()).placed(len(prompt.ids))
    placed.within(memories.n_layers, memories.n_memories)
    reader = _Reader(memories, prompt, at, top, index)
    plain = reader.read()
    generated = continued(memories, prompt, generate, temperature, seed) if generate else None
    places = read_grid(memories, prompt.ids, reader.shown) if grid else None
    sampling = None if temperature is None else Sampling(temperature, seed)
    found = Trace(
        prompt.text,
        prompt.tokens,
        at,
        plain,
        generated=generated,
        sampling=sampling if generate else None,
        grid=places,
        notes=_notes(at, len(prompt.ids), placed, generate),
    )
    if not placed:
        return found
    with editing(memories, placed):
        edited = reader.read()
        rewritten = continued(memories, prompt, generate, temperature, seed) if generate else None
        places = read_grid(memories, prompt.ids, reader.shown) if grid else None
    return replace(
        found,
        edits=placed,
        edited=edited,
        edited_generated=rewritten,
        edited_grid=places,
    )


def _notes(at: int, n_tokens: int, edits: Edits, generate: int) -> list[str]:
    """Return what a reader might otherwise wonder about."""
    notes = []
    if generate and at != n_tokens - 1:
        notes.append(
            f"The table is read at position {at}; the continuation follows the whole prompt."
        )
    if edits and edits.positions is not None and min(edits.positions) > at:
        notes.append(
            f"Every edited position stands behind position {at}, where the table is read: nothing"
            " can change there."
        )
    return notes


class _Reader:
    """Runs a prompt and reads it at one position."""

    def __init__(
        self, memories: Memories, prompt: Prompt, at: int, top: int, index: Index | None
    ) -> None:
        self.memories = memories
        self.tokens = torch.tensor([prompt.ids[: at + 1]])  # nothing behind it reaches it
        self.at = torch.tensor([[0, at]])
        self.top = top
        self.index = index
        self.shown = memories.tokenizer.shown(memories.vocabulary)

    @torch.inference_mode()
    def read(self) -> Traced:
        """Return what the layers compute now, edited or not."""
        found = self.memories.trace(self.tokens, self.at)
        for layer in found:
            # Norms square what they are given.
            if not float(layer.layer_output.abs().max()) < 1e18:
                raise ModelError(OVERFLOW)
        layers = [self._layer(layer, trace) for layer, trace in enumerate(found)]
        return Traced(layers, layers[-1].output_top)

    def _layer(self, layer: int, trace: LayerTrace) -> TracedLayer:
        head = self.memories.head
        residual = self._chances(head.logits(trace.residual))
        ff = self._chances(head.folded(trace.ff_output))
        output = self._chances(head.logits(trace.layer_output))
        working = trace.coefficients if trace.gate is None else trace.gate
        return TracedLayer(
            layer,
            residual,
            ff,
            output,
            CASES[output[0].id == residual[0].id, output[0].id == ff[0].id],
            float((working > 0).double().mean()),
            self._memories(layer, trace),
        )

    def _chances(self, logits: Float[Tensor, "1 vocab"]) -> list[TokenChance]:
        """Return the likeliest tokens, ties to the lower id."""
        numbers = logits[0].double().cpu()
        probabilities = numbers.softmax(dim=0).numpy()
        best = np.argsort(-numbers.numpy(), kind="stable")[: self.top].tolist()
        return [TokenChance(self.shown[id], id, float(probabilities[id])) for id in best]

    def _memories(self, layer: int, trace: LayerTrace) -> list[MemoryAtWork]:
        m = trace.coefficients[0].float().cpu()
        values = self.memories.readable_values(layer).float()
        sizes = m.abs() * values.norm(dim=1).cpu() / divisor(self.memories, layer, trace)
        best = np.argsort(-sizes.numpy(), kind="stable")[: self.top].tolist()
        total = max(float(sizes.double().sum()), np.finfo(np.float64).tiny)
        tops = promoted(self.memories, values[best], m[best], self.shown)
        return [
            MemoryAtWork(
                cell := Cell(layer, memory),
                float(m[memory]),
                float(sizes[memory]),
                float(sizes[memory]) / total,
                self._percentile(cell, float(m[memory])),
                tokens,
            )
            for memory, tokens in zip(best, tops, strict=True)
        ]

    def _percentile(self, cell: Cell, coefficient: float) -> float | None:
        if self.index is None:
            return None
        return percentile(self.index.sample(cell), coefficient)


def percentile(sample: Sequence[float] | np.ndarray, coefficient: float) -> float | None:
    """Return the share of sampled coefficients that are not larger."""
    numbers = np.asarray(sample)
    return float((numbers <= coefficient).mean()) if len(numbers) else None
