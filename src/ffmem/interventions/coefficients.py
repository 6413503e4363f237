"""The coefficients of every memory on texts, as tensors.

    found = ffmem.coefficients(model, "The press said")
    found.tokens                    # the start token first, if there is one
    found.layers[5]                 # [position, memory]
    found["L5N1234"]                # [position]

Texts run in batches, padded on the right: no position sees what follows it. A routed expert runs on
few positions, so its coefficients are stored for those alone; elsewhere they are 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from ffmem.cells import Cell, Layout
from ffmem.errors import CorpusError, FfmemError
from ffmem.indexing.chunks import Batch, batches
from ffmem.indexing.store import Index
from ffmem.interventions.forward import BATCH_TOKENS, LoadedModel, Prompt, open_model, read_prompt
from ffmem.models.banks import Bank, DenseBank, Routing
from ffmem.models.memories import Memories
from ffmem.progress import Progress, Step
from ffmem.signatures import check_arguments

MAX_BYTES = 8 << 30
"""Size of the tensors of one call; more would fill the memory of most machines."""


@dataclass(frozen=True)
class ExpertCoefficients:
    """The coefficients w · m of one routed expert, on the positions that are routed to it."""

    memories: range
    """The numbers of its memories in the layer."""
    positions: Int64[Tensor, " row"]
    """Ascending."""
    values: Float32[Tensor, "row memory"]


@dataclass(frozen=True)
class TextCoefficients:
    """The coefficients of all memories at every position of a text."""

    text: str
    ids: list[int]
    tokens: list[str]
    """As displayed; the start token comes first, if there is one."""
    layers: dict[int, Float32[Tensor, "position memory"]]
    """The memories that every token reaches, by layer: columns are memory numbers."""
    layout: Layout = field(repr=False)
    experts: dict[int, dict[str, ExpertCoefficients]] = field(default_factory=dict)
    """The experts that some position is routed to, by layer and name (E12)."""

    def __repr__(self) -> str:
        return f"TextCoefficients({self.text!r}: {len(self.ids)} tokens, {len(self.layers)} layers)"

    def __getitem__(self, cell: str | tuple[int, int] | Cell) -> Float32[Tensor, " position"]:
        """Return the coefficients of one memory at every position."""
        found = self.layout.resolve(cell)
        layer = self._require(found.layer)
        if found.memory < layer.shape[1]:
            return layer[:, found.memory]
        expert = self.experts.get(found.layer, {}).get(found.bank)
        column = torch.zeros(len(self.ids))
        if expert is not None:
            column[expert.positions] = expert.values[:, found.memory - expert.memories.start]
        return column

    def dense(self, layer: int) -> Float32[Tensor, "position memory"]:
        """Return all coefficients of a layer, with zeros where an expert does not run."""
        shared = self._require(layer)
        every = torch.zeros(len(self.ids), self.layout.widths[layer])
        every[:, : shared.shape[1]] = shared
        for expert in self.experts.get(layer, {}).values():
            memories = slice(expert.memories.start, expert.memories.stop)
            every[expert.positions, memories] = expert.values
        return every

    def _require(self, layer: int) -> Float32[Tensor, "position memory"]:
        self.layout.check_layer(layer)
        if layer not in self.layers:
            raise FfmemError(f"Layer {layer} was not requested. Add it to `layers`.")
        return self.layers[layer]


@check_arguments
@torch.inference_mode()
def coefficients(
    model_or_index: LoadedModel | Memories | Index | str | Path,
    texts: str | Sequence[str],
    *,
    layers: Sequence[int] | None = None,
    start: str | None = None,
    model: Memories | str | Path | None = None,
    adapter: str | Path | None = None,
    dtype: str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> TextCoefficients | list[TextCoefficients]:
    """Return the coefficients of every memory at every position of texts, as tensors.

    A text gives one `TextCoefficients`, several give a list: `.tokens`, `.layers[5]` with the
    axes (position, memory), `["L5N1234"]`. Experts are in `.experts`, for the positions that reach
    them.

    Args:
        model_or_index: A model, or an index.
        texts: The text, or a list of texts.
        layers: Only these layers.
        start: "auto", "none", "bos", "eos", or a token. Default: as the index, or "auto".
        model: The model of an index, or where it is now. Default: the one that the index names.
        adapter: Adapter to merge into the model, or where that of an index is now.
        dtype: Number format of the model. Default: as the index, or "float32".
        device: Where the model runs.
        progress: Where progress is shown. Default: nowhere.
    """
    several: Any = texts if isinstance(texts, list | tuple) else [texts]
    loaded = open_model(model_or_index, start, model, adapter, dtype, device, progress)
    layout = loaded.memories.layout
    wanted = list(range(layout.n_layers) if layers is None else layers)
    for layer in wanted:
        layout.check_layer(layer)
    prompts = []
    for number, text in enumerate(several, start=1):
        try:
            prompts.append(read_prompt(loaded, text))
        except CorpusError as error:
            raise CorpusError(f"Text {number} of {len(several)}: {error}") from None
    _check_size(loaded, prompts, wanted)
    found = [TextCoefficients(one.text, one.ids, one.tokens, {}, layout) for one in prompts]
    n_tokens = sum(len(prompt.ids) for prompt in prompts)
    with (progress or Progress(quiet=True)).bar("Coefficients", n_tokens, "tokens") as step:
        _read(loaded.memories, found, wanted, step)
    return found if several is texts else found[0]


@torch.inference_mode()
def coefficients_along(
    memories: Memories, cell: Cell, texts: Sequence[Sequence[int]], start: int | None
) -> list[list[float]]:
    """Return the coefficient of one memory at every token of some texts, given as ids.

    Each text is read after the start token, whose own coefficient is left out.
    """
    cell = memories.layout.resolve(cell)
    front = [] if start is None else [start]
    found = [TextCoefficients("", [*front, *ids], [], {}, memories.layout) for ids in texts]
    _read(memories, found, [cell.layer])
    return [one[cell][len(front) :].tolist() for one in found]


def _check_size(loaded: LoadedModel, prompts: list[Prompt], layers: list[int]) -> None:
    """Raise if the coefficients that every token has would not fit into memory."""
    banks = (bank for layer in layers for bank in loaded.memories.banks[layer])
    width = sum(bank.size for bank in banks if isinstance(bank, DenseBank))
    size = 4 * width * sum(len(prompt.ids) for prompt in prompts)
    if size > MAX_BYTES:
        raise FfmemError(
            f"The coefficients of {len(prompts):,} texts in {len(layers)} layers would take"
            f" {size / 1e9:.0f} GB. Pass fewer texts at a time, or only the layers you need:"
            " layers=[5, 6]."
        )


def _read(
    memories: Memories,
    texts: list[TextCoefficients],
    layers: list[int],
    step: Step = lambda n: None,
) -> None:
    """Run texts in batches of similar length, and fill in their coefficients."""
    sentences = [(number, one.ids) for number, one in enumerate(texts)]
    for batch in batches(sentences, None, BATCH_TOKENS):
        _read_batch(memories, [texts[number] for number in batch.offsets], layers, batch)
        step(sum(batch.lengths))


def _read_batch(
    memories: Memories, texts: list[TextCoefficients], layers: list[int], batch: Batch
) -> None:
    for one in texts:
        for layer in layers:
            dense = [bank for bank in memories.banks[layer] if isinstance(bank, DenseBank)]
            width = sum(bank.size for bank in dense)
            one.layers[layer] = torch.zeros(len(one.ids), width)
    wanted = set(layers)

    def read(
        bank: Bank,
        coefficients: Float[Tensor, "batch position memory"] | Float[Tensor, "row memory"],
        gate: Tensor | None,
        routing: Routing | None,
    ) -> None:
        if bank.layer not in wanted:
            return
        if routing is None or routing.tokens is None:
            for row, one in enumerate(texts):
                here = coefficients[row, : len(one.ids)].float().cpu()
                one.layers[bank.layer][:, bank.memories] = here
            return
        owners, positions = routing.sentences.cpu(), routing.positions.cpu()
        name = memories.layout.cell(bank.layer, bank.offset).bank
        for row, one in enumerate(texts):
            mine = ((owners == row) & (positions < len(one.ids))).nonzero()[:, 0]
            if len(mine):
                values = coefficients[mine.to(coefficients.device)].float().cpu()
                numbers = range(bank.offset, bank.offset + bank.size)
                one.experts.setdefault(bank.layer, {})[name] = ExpertCoefficients(
                    numbers, positions[mine], values
                )

    last = max(layers, default=-1) + 1
    with memories.read_coefficients(read), memories.skip_padding(batch.is_token):
        memories.forward(batch.tokens, last)
