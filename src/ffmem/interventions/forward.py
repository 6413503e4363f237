"""A loaded model, a prompt, and forward passes with changed coefficients.

`change_coefficients` is the one hook: every intervention replaces the coefficients of a layer
through it, bank by bank. `apply_edits` uses it to edit every pass of a model, m → a · m + c, and
changes routes to experts; a redirected memory adds m · (v′ − v). Weights are never touched. Where
coefficients are weights of a softmax, the others stay as they are: the softmax is not computed
again.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import Cache

from ffmem.errors import CorpusError, ModelError
from ffmem.hub import is_hub_address
from ffmem.indexing.start import choose_start
from ffmem.indexing.store import Index, as_index, check_weights, recover
from ffmem.interventions.edits import Edit, Edits, MemoryWeights
from ffmem.models.arguments import adapter_of_index, check_loaded, index_model_errors
from ffmem.models.banks import Bank, ExpertBank
from ffmem.models.chat import as_messages
from ffmem.models.head import Norm
from ffmem.models.load import load
from ffmem.models.memories import Memories
from ffmem.models.modules import first_tensor, get_module
from ffmem.models.routes import change_routes, switch_off
from ffmem.models.tokenizer import AS_IN_TRAINING
from ffmem.models.trace import LayerTrace
from ffmem.progress import Progress

BATCH_TOKENS = 1024
"""Tokens to run at once: enough to keep the processor busy, with little memory."""

UNKNOWN_SHOWN = 10
"""Unknown words of a prompt to name."""

HEAD_ROWS = 64
"""Vectors whose logits are held at once."""

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
    progress: Progress = field(
        default_factory=lambda: Progress(quiet=True), repr=False, compare=False
    )
    """Where a start token is reported that ffmem chooses."""

    @cached_property
    def start(self) -> int | None:
        """The token in front of every prompt; measured when it is first needed."""
        if self.index is not None and self.requested_start is None:
            return self.index.manifest.start.id
        requested = self.requested_start or "auto"
        texts = list(START_SENTENCES) if requested == "auto" else []
        sentences = [encoding.ids for encoding in self.memories.tokenizer.encode(texts)]
        chosen, _ = choose_start(self.memories, sentences, requested)
        if requested == "auto":
            token = "none" if chosen.token is None else chosen.token
            how = chosen.chosen_by
            if len(chosen.losses) > 1:
                how = f"{how} of {len(chosen.losses)} on {len(texts)} English sentences"
            self.progress.say(f"Start token: {token} ({how}). Choose another with --start.")
        return chosen.id


def find_index(model_or_index: object) -> Index | None:
    """Return the index that MODEL_OR_DIR is; None if it is a model. Raise if it is unfinished."""
    if isinstance(model_or_index, LoadedModel):
        return model_or_index.index
    if isinstance(model_or_index, str | Path):
        if is_hub_address(model_or_index):
            return as_index(str(model_or_index))  # which says to pull it
        recover(Path(model_or_index))
        if any((Path(model_or_index) / name).exists() for name in ("manifest.json", "partials")):
            return Index(model_or_index)
    return model_or_index if isinstance(model_or_index, Index) else None


def open_model(
    model_or_index: "LoadedModel | Memories | Index | str | Path",
    start: str | None = None,
    model: Memories | str | Path | None = None,
    adapter: str | Path | None = None,
    dtype: str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
    option: str = "--model",
) -> LoadedModel:
    """Load MODEL_OR_DIR; `model` and `adapter` say where those of an index are now.

    A `LoadedModel` is returned as it is. `option` is the one that errors name for `model`.
    """
    if isinstance(model_or_index, LoadedModel):
        return model_or_index
    index = find_index(model_or_index)
    if index is None and model is not None:
        raise ModelError("Pass either a model, or an index with the model that it was built from.")
    source: Any = model or (model_or_index if index is None else index.manifest.model.source)
    if isinstance(source, Memories):
        check_loaded(source, adapter, dtype)
    else:
        recorded = None if index is None else index.manifest.model.adapter
        merged = adapter_of_index(recorded, model, adapter)
        stored = "float32" if index is None else index.manifest.dtype
        errors: AbstractContextManager[None] = nullcontext()
        if index is not None and model is None:
            errors = index_model_errors(source, index.folder, option, recorded)
        with errors, (progress or Progress(quiet=True)).waiting(f"Loading {source}"):
            source = load(source, adapter=merged, dtype=dtype or stored, device=device)
    if index is not None:
        check_weights(index, source.fingerprint())
    return LoadedModel(source, index, start, progress or Progress(quiet=True))


@dataclass(frozen=True)
class Prompt:
    """A text as the model reads it; the start token, if there is one, comes first."""

    text: str
    ids: list[int]
    tokens: list[str]
    """As they are shown."""
    stops: frozenset[int]
    """Tokens that end a continuation."""
    answer: int | None = None
    """In a conversation: the position that predicts the first token of the answer."""
    unknown: tuple[str, ...] = ()
    """Words that the tokenizer does not know."""


def note_unknown(words: Iterable[str]) -> list[str]:
    """Return what to say about unknown words in prompts: one line, or none."""
    different = list(dict.fromkeys(words))
    if not different:
        return []
    more = f" and {len(different) - UNKNOWN_SHOWN} more" if len(different) > UNKNOWN_SHOWN else ""
    named = ", ".join(map(repr, different[:UNKNOWN_SHOWN]))
    return [f"Not in the model's vocabulary, so read as unknown: {named}{more}. {AS_IN_TRAINING}"]


def read_prompt(loaded: LoadedModel, prompt: object, chat: bool = False) -> Prompt:
    """Return the tokens of a prompt; raise if the model cannot read it as a whole.

    With `chat`, the prompt is a conversation (`models.chat`), and the model is to answer. The
    template brings its own start token; one that is requested is not doubled.
    """
    memories, answer = loaded.memories, None
    unknown: list[str] = []
    ends = {memories.tokenizer.eos}
    if chat:
        template = memories.tokenizer.chat
        if isinstance(prompt, str) and not prompt.strip():
            raise CorpusError("The prompt is empty. Use a text of at least one token.")
        found = template.encode(as_messages(prompt), ask=True)
        text, tokens, answer = found.text, found.ids, found.answer - 1
        ends.add(template.end_of_turn)
        start = None if loaded.requested_start in (None, "auto") else loaded.start
        start = None if start == tokens[0] else start
    else:
        text, tokens, unknown = _read_text(memories, prompt)
        start = loaded.start
    ids = [*([] if start is None else [start]), *tokens]
    if answer is not None and start is not None:
        answer += 1
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
    stops = frozenset(id for id in ends if id is not None)
    return Prompt(text, ids, [shown[id] for id in ids], stops, answer, tuple(unknown))


def _read_text(memories: Memories, text: object) -> tuple[str, list[int], list[str]]:
    """Return a plain prompt, its tokens, and the words that the tokenizer does not know."""
    if not isinstance(text, str):
        raise CorpusError(
            f"A prompt must be a string; got {type(text).__name__}. Messages need --chat."
        )
    if not text:
        raise CorpusError("The prompt is empty. Use a text of at least one token.")
    (encoding,) = memories.tokenizer.encode([text])
    if not encoding.ids:
        raise CorpusError(f"The prompt {text!r} has no token for this model's tokenizer.")
    return text, encoding.ids, memories.tokenizer.unknown_words(text, *encoding)


def find_target(memories: Memories, target: object) -> int:
    """Return the id of a target token, given as in the vocabulary, as shown, or as text."""
    if not isinstance(target, str) or not target:
        raise ModelError(f"The target {target!r} is not a token. Pass one as text.")
    try:
        id = memories.tokenizer.id_of(target)
    except ModelError:
        (encoding,) = memories.tokenizer.encode([target])
        if len(encoding.ids) != 1:
            shown = memories.tokenizer.token_texts(memories.vocabulary)
            pieces = ", ".join(repr(shown[id]) for id in encoding.ids) or "none"
            raise ModelError(
                f"The target {target!r} is not one token: the tokenizer gives {pieces}. Use a"
                " single token, with its leading space if it has one."
            ) from None
        id = encoding.ids[0]
        if id == memories.tokenizer.unk:
            raise ModelError(
                f"The model does not know the target {target!r}, which it reads as"
                f" {memories.tokenizer.unk_text!r}. Use a token of its vocabulary."
            ) from None
    if id >= memories.vocabulary:
        raise ModelError(
            f"The target {target!r} is token {id}; the model has {memories.vocabulary} tokens."
        )
    return id


# Changed coefficients


class Place(NamedTuple):
    """One memory at one position, by the numbers of layer, memory and position."""

    layer: int
    memory: int
    position: int


class BankRows(NamedTuple):
    """The coefficients of one bank in one forward pass; a row is a token that reaches the bank."""

    coefficients: Float[Tensor, "row memory"]
    tokens: Int64[Tensor, " row"]
    """The token of each row, counted through the sentences of the batch."""
    memories: range
    """The numbers of the bank's memories in the layer."""


Change = Callable[[BankRows], Tensor]
"""Returns the coefficients that replace those of a bank."""


@contextmanager
def change_coefficients(memories: Memories, layer: int, change: Change) -> Iterator[None]:
    """Replace the coefficients of a layer in every forward pass: the one hook of interventions.

    An expert's coefficients are replaced for the tokens that are routed to it.
    """

    def edit(bank: Bank, coefficients: Tensor, tokens: Tensor) -> Tensor:
        return change(BankRows(coefficients, tokens, range(bank.offset, bank.offset + bank.size)))

    with memories.banks[layer].editing(edit):
        yield


@contextmanager
def apply_edits(memories: Memories, edits: Edits) -> Iterator[None]:
    """Run every forward pass of a model with edited coefficients and routes.

    Positions count from the first token of the text, also if earlier tokens are in a cache.
    """
    by_layer = edits.by_layer(memories.layout)
    past, length = 0, 0

    def save_past(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal past
        # Our own model passes its cache on as a positional argument.
        given = (kwargs.get("past_key_values"), *(one for one in args if isinstance(one, Cache)))
        cache = next((one for one in given if one is not None), None)
        past = 0 if cache is None else int(cache.get_seq_length())

    def save_length(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal length
        length = memories.streams.shape(first_tensor(args, kwargs))[1]

    def where(tokens: Tensor) -> Tensor:
        if edits.positions is None:
            return torch.ones_like(tokens, dtype=torch.bool)
        positions = torch.tensor(edits.positions, device=tokens.device)
        return torch.isin(tokens % length + past, positions)

    def edit(of_layer: list[tuple[int, Edit]], rows: BankRows) -> Tensor:
        here = [(number, edit) for number, edit in of_layer if number in rows.memories]
        edited = rows.coefficients.clone()
        device, dtype = edited.device, edited.dtype
        row = where(rows.tokens).nonzero()[:, 0]
        memory = torch.tensor([n - rows.memories.start for n, _ in here], device=device).long()
        # In float32 at least, so that a half-precision model rounds once.
        exact = torch.promote_types(dtype, torch.float32)
        factor = torch.tensor([edit.factor for _, edit in here], dtype=exact, device=device)
        constant = torch.tensor([edit.constant for _, edit in here], dtype=exact, device=device)
        place = (row[:, None], memory)
        edited[place] = (edited[place].to(exact) * factor + constant).to(dtype)
        return edited

    def add(of_layer: list[tuple[int, Edit]], bank: Bank, m: Tensor, tokens: Tensor) -> Tensor:
        values = bank.stored_values()
        exact = torch.promote_types(m.dtype, torch.float32)
        total = torch.zeros(len(m), values.shape[1], dtype=exact, device=m.device)
        for number, edit in of_layer:
            own = number - bank.offset
            if edit.weights is not None and 0 <= own < bank.size:
                change = torch.tensor(edit.weights.value).to(total) - values[own].to(total)
                total += (m[:, own] * where(tokens)).to(total)[:, None] * change
        return total

    if any(edit.how == "write" for edit in edits):
        raise ModelError("A written memory needs new weights. Use edit, then trace the new model.")
    with ExitStack() as hooks:
        if edits.positions is not None:
            # OPT's language model calls its decoder past its own trunk, so both are hooked.
            for module, hook in (
                (memories.model, save_past),
                (memories.model.base_model, save_past),
                (memories.blocks[0], save_length),
            ):
                handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                hooks.callback(handle.remove)
        for layer, of_layer in by_layer.items():
            hooks.enter_context(change_coefficients(memories, layer, partial(edit, of_layer)))
            if any(edit.weights is not None for _, edit in of_layer):
                hooks.enter_context(memories.banks[layer].adding(partial(add, of_layer)))
        for layer, of_experts in edits.experts().items():
            banks = memories.banks[layer]
            routes: dict[str, list[int]] = {"forbid": [], "force": []}
            for expert, change in of_experts:
                bank = banks.at(memories.layout.memories_of(expert).start)
                if change.how == "off":
                    hooks.enter_context(switch_off(bank, where))
                elif isinstance(bank, ExpertBank):
                    routes[change.how].append(bank.number)
            if any(routes.values()):
                hooks.enter_context(change_routes(banks, **routes, where=where))
        yield


# The vectors that coefficients multiply


@contextmanager
def record_values(
    memories: Memories, edits: Edits | None = None
) -> Iterator[Callable[[int], Iterable[Tensor]]]:
    """Give a function from a layer to its values, bank by bank, as they reach the stream.

    Static values are in the weights, those of redirected memories in the edits. Those of a lambda
    layer are computed from a prompt: they are the ones that act at its last token, after it has run
    inside this block.
    """
    inputs: dict[int, Tensor] = {}

    def keep(layer: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs[layer] = first_tensor(args, kwargs)[0].detach()

    by_layer = {} if edits is None else edits.by_layer(memories.layout)

    def values(layer: int) -> Iterable[Float[Tensor, "memory hidden"]]:
        if memories.has_values:
            new = [(n, edit.weights) for n, edit in by_layer.get(layer, []) if edit.weights]
            return _redirected(memories, layer, new) if new else memories.direction_parts(layer)
        return [memories.values_at(layer, inputs[layer], len(inputs[layer]) - 1)]

    with ExitStack() as hooks:
        if not memories.has_values:
            for bank in (bank for banks in memories.banks for bank in banks.dense):
                hook = partial(keep, bank.layer)
                handle = bank.keys.register_forward_pre_hook(hook, with_kwargs=True)
                hooks.callback(handle.remove)
        yield values


def _redirected(
    memories: Memories, layer: int, new: list[tuple[int, MemoryWeights]]
) -> Iterator[Float[Tensor, "memory hidden"]]:
    """Yield the output directions of a layer, with new values of some memories."""
    to_directions = memories.to_directions(layer)
    for bank in memories.banks[layer]:
        rows = bank.stored_values()
        own = [(n - bank.offset, w) for n, w in new if 0 <= n - bank.offset < bank.size]
        if own:
            rows = rows.clone()
        for number, weights in own:
            rows[number] = torch.tensor(weights.value).to(rows)
        yield to_directions(bank.from_stored(rows))


def post_norm_sigma(memories: Memories, layer: int, trace: LayerTrace) -> float:
    """Return what the post-norm divides y by at a traced position; 1 if there is none."""
    path = memories.rows[layer].post_norm
    if path is None or not memories.banks[layer]:
        return 1.0
    norm = Norm(get_module(memories.blocks[layer], path), memories.hidden)
    return float(norm.denominator(trace.value_output)[0])


@torch.no_grad()
def promoted_tokens(
    memories: Memories,
    values: Float[Tensor, "memory hidden"],
    coefficients: Float[Tensor, " memory"],
    n: int = 5,
) -> list[list[str]]:
    """Return the tokens that each m · v promotes most; if m = 0, those of v.

    A value of zeros promotes nothing; in a lambda layer, distances beyond the prompt have one.
    """
    shown = memories.tokenizer.token_texts(memories.vocabulary)
    factors = torch.where(coefficients == 0, 1.0, coefficients).to(values.device)
    found = []
    for rows in (values.float() * factors[:, None]).split(HEAD_ROWS):
        best = memories.head.folded(rows).topk(min(n, memories.vocabulary), dim=1).indices
        for ids, row in zip(best.tolist(), rows, strict=True):
            found.append([shown[id] for id in ids] if row.any() else [])
    return found
