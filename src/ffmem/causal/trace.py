"""A prompt through a model, read layer by layer: what predicts, and which memories contribute.

    r → residual_top        y → ff_top        o = r + y → output_top        contribution = |m| · ‖v‖

r and o are read the model's own way, y folded (`models.head`). In output-normed blocks a value is
divided by what the norm divides y by, so that the parts add up to y.

A plain and an edited run are read apart (`Reader`), so that a plain one can be kept. All layers go
through the vocabulary together: reading its weights once costs more than a row of arithmetic.
"""

from collections.abc import Callable, Sequence
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
from ffmem.causal.prompt_values import PromptValues, source_of
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

ROOM = 1 << 22
"""How many logits are held at once."""


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
    placed = (edits or Edits()).placed(len(prompt.ids)).resolve(memories.layout)
    sample = None if index is None else index.sample
    reader = Reader(memories, prompt, at, top, sample)
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
        notes=notes(at, len(prompt.ids), placed, generate),
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


def notes(at: int, n_tokens: int, edits: Edits, generate: int) -> list[str]:
    """Return what people might otherwise wonder about."""
    found = []
    if generate and at != n_tokens - 1:
        found.append(
            f"The table is read at position {at}; the continuation follows the whole prompt."
        )
    if edits and edits.positions is not None and min(edits.positions) > at:
        found.append(
            f"Every edited position stands behind position {at}, where the table is read: nothing"
            " can change there."
        )
    return found


class Reader:
    """Runs a prompt and reads it at one position; `sample` gives percentiles, `shown` the tokens.

    Whatever edits are in force (`editing`) act on what is read.
    """

    def __init__(
        self,
        memories: Memories,
        prompt: Prompt,
        at: int,
        top: int,
        sample: Callable[[Cell], np.ndarray] | None = None,
        shown: list[str] | None = None,
    ) -> None:
        self.memories = memories
        self.tokens = torch.tensor([prompt.ids[: at + 1]])  # nothing behind it reaches it
        self.at = torch.tensor([[0, at]])
        self.top = top
        self.sample = sample
        self.shown = memories.tokenizer.token_texts(memories.vocabulary) if shown is None else shown
        self.rows = max(1, ROOM // memories.vocabulary)

    @torch.inference_mode()
    def read(self) -> Traced:
        """Return what the layers compute now, edited or not."""
        values = PromptValues(self.memories)
        with values.watching():
            found = self.memories.trace(self.tokens, self.at)
        for layer in found:
            # Norms square what they are given.
            if not float(layer.layer_output.abs().max()) < 1e18:
                raise ModelError(OVERFLOW)
        head = self.memories.head
        tops = (
            self._chances(head.logits, [layer.residual for layer in found]),
            self._chances(head.folded, [layer.ff_output for layer in found]),
            self._chances(head.logits, [layer.layer_output for layer in found]),
        )
        at_work = self._memories(found, values)
        layers = [
            _layer(layer, *of) for layer, of in enumerate(zip(found, *tops, at_work, strict=True))
        ]
        return Traced(layers, layers[-1].output_top, source_of(self.memories))

    def _chances(
        self, logits: Callable[[Tensor], Tensor], vectors: list[Float[Tensor, "1 hidden"]]
    ) -> list[list[TokenChance]]:
        """Return the likeliest tokens of each vector, ties to the lower id."""
        found = []
        rows = torch.cat([vector.to(vectors[0].device) for vector in vectors])
        for some in rows.split(self.rows):
            numbers = logits(some).double().cpu()
            shares = numbers.softmax(dim=1)
            for row, share in zip(numbers.numpy(), shares.numpy(), strict=True):
                found.append(
                    [
                        TokenChance(self.shown[id], id, float(share[id]))
                        for id in largest(row, self.top)
                    ]
                )
        return found

    def _memories(
        self, traces: Sequence[LayerTrace], of_prompt: PromptValues
    ) -> list[list[MemoryAtWork]]:
        """Return the memories of every layer that contribute most."""
        at_work, vectors, coefficients = [], [], []
        for layer, trace in enumerate(traces):
            m = trace.coefficients[0].float().cpu()
            values = of_prompt.of(layer)
            lengths = values.float().norm(dim=1).cpu()
            sizes = m.abs() * lengths / divisor(self.memories, layer, trace)
            best = largest(sizes.numpy(), self.top)
            total = max(float(sizes.double().sum()), np.finfo(np.float64).tiny)
            cells = [self.memories.layout.cell(layer, i) for i in best]
            at_work.append(
                [
                    (cell, float(m[i]), float(sizes[i]), total)
                    for cell, i in zip(cells, best, strict=True)
                ]
            )
            vectors.append(values[best].float())
            coefficients.append(m[best])
        tokens = iter(self._promoted(vectors, coefficients))
        return [
            [
                MemoryAtWork(cell, m, size, size / total, self._percentile(cell, m), next(tokens))
                for cell, m, size, total in memories
            ]
            for memories in at_work
        ]

    def _promoted(
        self,
        values: list[Float[Tensor, "_ hidden"]],
        coefficients: list[Float[Tensor, " _"]],
    ) -> list[list[str]]:
        """Return what the m · v of all layers promote."""
        rows = torch.cat([value.to(values[0].device) for value in values])
        found: list[list[str]] = []
        parts = zip(rows.split(self.rows), torch.cat(coefficients).split(self.rows), strict=True)
        for some, m in parts:
            found += promoted(self.memories, some, m, self.shown)
        return found

    def _percentile(self, cell: Cell, coefficient: float) -> float | None:
        return None if self.sample is None else percentile(self.sample(cell), coefficient)


def _layer(
    layer: int,
    trace: LayerTrace,
    residual: list[TokenChance],
    ff: list[TokenChance],
    output: list[TokenChance],
    memories: list[MemoryAtWork],
) -> TracedLayer:
    working = trace.coefficients if trace.gate is None else trace.gate
    if not working.numel():  # a layer without memories
        return TracedLayer(layer, residual, [], output, "residual", None, [])
    case = CASES[output[0].id == residual[0].id, output[0].id == ff[0].id]
    active = float((working > 0).double().mean())
    return TracedLayer(layer, residual, ff, output, case, active, memories)


def largest(numbers: Float[np.ndarray, " number"], n: int) -> list[int]:
    """Return the places of the n largest numbers, the largest first, ties to the lower place."""
    if n < len(numbers):
        least = np.partition(numbers, -n)[-n]
        places = np.flatnonzero(numbers >= least)
    else:
        places = np.arange(len(numbers))
    found: list[int] = places[np.argsort(-numbers[places], kind="stable")][:n].tolist()
    return found


def percentile(sample: Sequence[float] | np.ndarray, coefficient: float) -> float | None:
    """Return the share of sampled coefficients that are not larger."""
    numbers = np.asarray(sample)
    return float((numbers <= coefficient).mean()) if len(numbers) else None
