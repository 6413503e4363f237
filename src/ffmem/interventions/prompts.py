"""What every intervention starts from: a loaded model, a prompt, a target token."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ffmem.cells import Cell
from ffmem.errors import CorpusError, ModelError
from ffmem.indexing.start import choose_start
from ffmem.indexing.store import Index, check_weights, recover
from ffmem.models.arguments import index_model_errors
from ffmem.models.load import load
from ffmem.models.memories import Bank, Memories
from ffmem.progress import Progress

START_SENTENCES = (
    "The town lies on the eastern bank of the river, about forty miles from the coast.",
    "She opened the window, looked down at the street and waved to the children below.",
    "In the second half of the century the price of wheat fell by more than a third.",
    "He had not expected an answer, but the letter came back within a week.",
    "Most of these birds build their nests in old trees and feed on insects and seeds.",
    "The committee will meet again in September to decide how the money should be spent.",
)
"""The start token is measured on these if no index has measured it."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run prompts, with its index if there is one."""

    memories: Memories
    index: Index | None = None
    requested_start: str | None = None
    """How prompts start, as `--start` takes it. None: as the index, or `auto`."""

    @cached_property
    def start(self) -> int | None:
        """The token in front of every prompt; measured when it is first needed."""
        if self.index is not None and self.requested_start is None:
            return self.index.manifest.start.id
        requested = self.requested_start or "auto"
        texts = list(START_SENTENCES) if requested == "auto" else []
        sentences = [encoding.ids for encoding in self.memories.tokenizer.encode(texts)]
        return choose_start(self.memories, sentences, requested)[0].id


def open_model(
    place: Memories | Index | str | Path,
    *,
    start: str | None = None,
    model: Memories | str | Path | None = None,
    dtype: str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> LoadedModel:
    """Load MODEL_OR_DIR; `model` says where the model of an index is now."""
    index: Index | None = None
    source: Memories | str | Path
    if isinstance(place, Index):
        index = place
    elif isinstance(place, str | Path):
        recover(Path(place))
        if (Path(place) / "manifest.json").exists():
            index = Index(place)
    if index is not None:
        source = model or index.manifest.model.source
    elif model is None:
        assert not isinstance(place, Index)
        source = place
    else:
        raise ModelError("Pass either a model, or an index with the model that it was made from.")
    if not isinstance(source, Memories):
        from_index = index is not None and model is None
        errors = (
            index_model_errors(str(source), index.folder) if index and from_index else nullcontext()
        )
        with errors:
            (progress or Progress(quiet=True)).say(f"Loading {source}.")
            stored = "float32" if index is None else index.manifest.dtype
            source = load(source, dtype=dtype or stored, device=device)
    if index is not None:
        check_weights(index, source.fingerprint())
    return LoadedModel(source, index, start)


class Prompt(NamedTuple):
    """A text as the model reads it; the start token, if there is one, comes first."""

    text: str
    ids: list[int]
    tokens: list[str]
    """As they are shown."""


def read_prompt(loaded: LoadedModel, text: object) -> Prompt:
    """Return the tokens of a prompt; raise if the model cannot read it as a whole."""
    memories = loaded.memories
    if not isinstance(text, str):
        raise CorpusError(f"A prompt must be a string; got {type(text).__name__}.")
    if not text:
        raise CorpusError("The prompt is empty. Give a text of at least one token.")
    (encoding,) = memories.tokenizer.encode([text])
    if not encoding.ids:
        raise CorpusError(f"The prompt {text!r} has no token for this model's tokenizer.")
    start = loaded.start
    ids = [*([] if start is None else [start]), *encoding.ids]
    if memories.context is not None and len(ids) > memories.context:
        included = "" if start is None else ", including the start token"
        raise CorpusError(
            f"The prompt has {len(ids):,} tokens{included}; the model reads"
            f" {memories.context:,}. Shorten it."
        )
    if max(ids) >= memories.vocabulary:
        raise ModelError(
            f"The tokenizer gives the id {max(ids)}, but the model has {memories.vocabulary}"
            " tokens. Use the tokenizer of this model."
        )
    shown = memories.tokenizer.token_texts(memories.vocabulary)
    return Prompt(text, ids, [shown[id] for id in ids])


def find_target(memories: Memories, target: object) -> int:
    """Return the id of a target token, given as in the vocabulary, as shown, or as text."""
    if not isinstance(target, str) or not target:
        raise ModelError(f"The target {target!r} is not a token. Give one as text.")
    try:
        id = memories.tokenizer.id_of(target)
    except ModelError:
        (encoding,) = memories.tokenizer.encode([target])
        if len(encoding.ids) != 1:
            shown = memories.tokenizer.token_texts(memories.vocabulary)
            pieces = ", ".join(repr(shown[id]) for id in encoding.ids) or "none"
            raise ModelError(
                f"The target {target!r} is not one token: the tokenizer gives {pieces}. Give a"
                " single token, with its leading space if it has one."
            ) from None
        id = encoding.ids[0]
    if id >= memories.vocabulary:
        raise ModelError(
            f"The target {target!r} is token {id}; the model has {memories.vocabulary} tokens."
        )
    return id


@torch.inference_mode()
def coefficients_along(
    memories: Memories, cell: Cell, texts: Sequence[Sequence[int]], start: int | None
) -> list[list[float]]:
    """Return the coefficient of one memory at every token of some texts, given as ids.

    Each text is read after the start token, whose own coefficient is left out, and is run by
    itself up to the layer of the memory.
    """
    cell = memories.layout.resolve(cell)
    before = [] if start is None else [start]
    found: list[list[float]] = []

    def read(bank: Bank, coefficients: Tensor, _: Tensor | None) -> None:
        if bank.layer == cell.layer:
            found.append(coefficients[0, len(before) :, cell.memory].float().cpu().tolist())

    with memories.read_coefficients(read):
        for ids in texts:
            memories.forward(torch.tensor([[*before, *ids]]), layers=cell.layer + 1)
    return found
