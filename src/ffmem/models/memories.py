"""A language model as layers of key-value memories.

    FF(x) = m · V + b,    m = f(x · Kᵀ)        memory i = key kᵢ, value vᵢ, coefficient mᵢ

The coefficients m are whatever multiplies the values V. So one hook, on the input of the value map,
reads them in every family, with ReLU, GELU or a gate. A self-check tests the paper's equations on
each model before anything is read from it.

Axes: layer, memory, hidden (the width of the residual stream), vocab, batch, position.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from ffmem.cells import Cell, Layout
from ffmem.errors import FfmemError, ModelError, NoStaticValues, UnknownFamily, one_line
from ffmem.models.arguments import IN_MEMORY
from ffmem.models.families import FAMILIES, FUSED, Family
from ffmem.models.head import Head, Norm
from ffmem.models.modules import (
    device_of,
    find_module,
    first_tensor,
    get_module,
    linear_bias,
    linear_shape,
    linear_weight,
    sorted_weights,
)
from ffmem.models.structure import candidate_families, check_model
from ffmem.models.tokenizer import Tokenizer
from ffmem.models.trace import LayerTrace, ReadLayer, hook_layers
from ffmem.networks.memories import LambdaLayer
from ffmem.text import html_table

ReadBank = Callable[["Bank", Tensor, Tensor | None], None]
"""Called with (bank, coefficients, gate); both tensors are "batch position memory"."""


@dataclass(frozen=True)
class Bank:
    """Memories of a layer that share their maps: today, its dense feed-forward part."""

    layer: int
    size: int
    values: nn.Module
    """The linear map whose weights are the values."""
    keys: nn.Module
    """The linear map whose weights are the keys; in gated models, the gate's."""
    up: nn.Module | None
    """Gated models: the linear map whose output multiplies the gate."""
    offset: int = 0
    """Number of its first memory in the layer."""

    @property
    def memories(self) -> slice:
        """The numbers of its memories in the layer."""
        return slice(self.offset, self.offset + self.size)


class Memories:
    """The memories of one model; `layout` has the number in each layer."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        source: str = IN_MEMORY,
        revision: str | None = None,
        fingerprint: str | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)  # ffmem only reads
        self.tokenizer = tokenizer
        self.source = source
        self.revision = revision
        self.config: Any = model.config.get_text_config()
        self.family: str = model.config.model_type
        self._fingerprint = fingerprint
        check_model(model)
        if self.family in FAMILIES:
            self._set_row(FAMILIES[self.family].for_config(self.config))
        else:
            self._find_row()

    def __repr__(self) -> str:
        return f"Memories({', '.join(f'{name}: {fact}' for name, fact in self._facts())})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return html_table(self._facts())

    def _facts(self) -> list[tuple[str, str]]:
        dtype = str(self.dtype).removeprefix("torch.")
        return [
            ("model", self.source),
            ("family", self.family),
            ("memories", self.layout.shown),
            ("activation", f"{self.activation}, gated" if self.gated else self.activation),
            ("weights", f"{dtype} on {self.device}"),
        ]

    def _set_row(self, row: Family) -> None:
        """Read the model as a row of the families table says; raise if that is wrong."""
        from ffmem.models.selfcheck import self_check  # it imports this module

        self.row = row
        self.blocks = list(get_module(self.model, row.blocks).children())
        self.gated = row.up is not None
        self.n_layers = len(self.blocks)
        self.banks = [self._make_bank(layer, block) for layer, block in enumerate(self.blocks)]
        """The dense bank of each layer; None if a layer has no feed-forward part."""
        some = next((bank for bank in self.banks if bank is not None), None)
        if some is None:
            raise ModelError(
                f"No layer of this {self.family!r} model has a feed-forward part ({row.values}),"
                " unlike other models of its family."
            )
        self.layout = Layout.dense([0 if bank is None else bank.size for bank in self.banks])
        self.hidden = linear_shape(some.values)[0]
        self._check_shapes()
        self.multiplier = self._config_number(row.multiplier) or 1.0
        self.activation: str = getattr(self.config, row.activation, row.activation)
        self.context: int | None = getattr(self.config, row.context or "", None)
        self.head = Head(
            self.model.get_output_embeddings(),
            Norm(find_module(self.model, row.final_norm), self.hidden),
            find_module(self.model, row.project_out),
            (self._config_number(row.scale) or 1.0) / (self._config_number(row.divisor) or 1.0),
            self._config_number(row.cap),
        )
        self.vocabulary: int = (
            self.config.vocab_size if self.head.adaptive else len(self.head.embedding)
        )
        self.check = self_check(self)

    def _find_row(self) -> None:
        """Read a model of unknown family by the first structure that passes the self-check."""
        reason = "its layers do not each have one recognizable feed-forward part"
        for row in candidate_families(self.model):
            try:
                self._set_row(row)
            except ModelError as error:
                reason = str(error).rstrip(".")
            except Exception as error:  # a wrong guess can break the forward pass anywhere
                reason = f"it does not run as its structure suggests ({one_line(error)})"
            else:
                return
        raise UnknownFamily(self.family, FAMILIES, reason)

    def _make_bank(self, layer: int, block: nn.Module) -> Bank | None:
        """Return the dense bank of a layer; None if the layer has no feed-forward part."""
        values = find_module(block, self.row.values)
        if values is None:
            return None
        keys = get_module(block, self.row.keys)
        up = keys if self.row.up == FUSED else find_module(block, self.row.up)
        return Bank(layer, linear_shape(values)[1], values, keys, up)

    def _check_shapes(self) -> None:
        """Raise unless every bank has one key per value, two if gated."""
        for bank in self.banks:
            if bank is None:
                continue
            expected = (bank.size * (2 if self.row.up == FUSED else 1), self.hidden)
            for found in (linear_shape(one) for one in (bank.keys, bank.up) if one is not None):
                if found != expected:
                    raise ModelError(
                        f"In layer {bank.layer} of this {self.family!r} model, the keys have shape"
                        f" {found}, but its values need keys of shape {expected}."
                    )

    def _config_number(self, name: str | None) -> float | None:
        """Return a number from the config; None if the row does not name it."""
        return None if name is None else getattr(self.config, name)

    @property
    def device(self) -> torch.device:
        """The device of the input embedding."""
        return device_of(self.model.get_input_embeddings())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return next(self.bank(self.layout.memory_layers[0]).values.parameters()).dtype

    def fingerprint(self) -> str:
        """Return the SHA-256 of the weights as they were loaded."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.model)
        return self._fingerprint

    # Keys and values

    def bank(self, layer: int) -> Bank:
        """Return the bank of a layer; raise if the layer has none."""
        bank = self.banks[layer]
        if bank is None:
            raise ModelError(f"Layer {layer} of this {self.family!r} model has no memories.")
        return bank

    @property
    def has_values(self) -> bool:
        """Whether memories have static values; in a lambda layer, values come from the input."""
        return not self.row.input_values

    def values(self, layer: int) -> Float[Tensor, "memory hidden"]:
        """Return V of a layer, one value per row: a view of the weights."""
        if not self.has_values:
            raise NoStaticValues("This model's memories have no static values.")
        bank = self.banks[layer]
        return self._zeros(0, self.hidden) if bank is None else linear_weight(bank.values).T

    def values_at(
        self, layer: int, x: Float[Tensor, "position hidden"], position: int
    ) -> Float[Tensor, "memory hidden"]:
        """Return what the coefficients at one position multiply, given x up to that position.

        Static values are the same at every position; those of lambda layers depend on x.
        """
        if self.has_values:
            return self.values(layer)
        owner = get_module(self.blocks[layer], self.row.values.rpartition(".")[0])
        assert isinstance(owner, LambdaLayer)
        return owner.values_at(x, position)

    def bias(self, layer: int) -> Float[Tensor, " hidden"]:
        """Return b of a layer; zeros if its value map has no bias."""
        bank = self.banks[layer]
        return self._zeros(self.hidden) if bank is None else linear_bias(bank.values)

    def output_directions(self, layer: int) -> Float[Tensor, "memory hidden"]:
        """Return the values as they reach the residual stream; these are projected to tokens.

        They include the multiplier and the gain of the post-norm, if any, so that y is the sum of
        mᵢ times these, up to the norm's σ and a constant.
        """
        values = self.values(layer)
        if self.row.post_norm is not None and len(values):
            norm = Norm(get_module(self.blocks[layer], self.row.post_norm), self.hidden)
            values = norm.fold(values).to(values.dtype)
        return values if self.multiplier == 1 else values * self.multiplier

    def keys(self, layer: int) -> Float[Tensor, "memory hidden"]:
        """Return K of a layer, one key per row; in gated models, the gate's."""
        bank = self.banks[layer]
        if bank is None:
            return self._zeros(0, self.hidden)
        return linear_weight(bank.keys)[: bank.size]

    def key_bias(self, layer: int) -> Float[Tensor, " memory"]:
        """Return the bias added to x · Kᵀ; zeros if there is none."""
        bank = self.banks[layer]
        return self._zeros(0) if bank is None else linear_bias(bank.keys)[: bank.size]

    def up_keys(self, layer: int) -> Float[Tensor, "memory hidden"]:
        """Return U of a layer, whose product with x multiplies the gate; gated models only."""
        return linear_weight(self._up_map(layer))[-self.bank(layer).size :]

    def up_bias(self, layer: int) -> Float[Tensor, " memory"]:
        """Return the bias added to x · Uᵀ; gated models only."""
        return linear_bias(self._up_map(layer))[-self.bank(layer).size :]

    def _up_map(self, layer: int) -> nn.Module:
        up = self.bank(layer).up
        if up is None:
            raise ModelError(f"A {self.family!r} model is not gated: it has one key per memory.")
        return up

    def _zeros(self, *size: int) -> Tensor:
        return torch.zeros(*size, dtype=self.dtype, device=self.device)

    # Forward passes

    @torch.no_grad()
    def forward(self, tokens: Int[Tensor, "batch position"], layers: int | None = None) -> None:
        """Run all layers, or the first few, without logits and cache.

        Pad sentences on the right. They need no attention mask: no position sees the padding
        after it.
        """

        def stop(*_: Any) -> None:
            raise _StopForwardError

        with ExitStack() as hooks, suppress(_StopForwardError):
            if layers is not None and layers < self.n_layers:
                hooks.callback(self.blocks[layers - 1].register_forward_hook(stop).remove)
            self.model.base_model(tokens.to(self.device), use_cache=False)

    @torch.no_grad()
    def logits(
        self, tokens: Int[Tensor, "batch position"]
    ) -> Float[Tensor, "batch position vocab"]:
        """Return the model's own logits; log-probabilities with an adaptive softmax."""
        logits: Tensor = self.model(tokens.to(self.device), use_cache=False).logits
        return logits

    @contextmanager
    def read_coefficients(self, read: ReadBank) -> Iterator[None]:
        """Call `read` with each bank's coefficients, in layer order, in every forward pass.

        The tensors are the model's own, not copies: do not change or keep them.
        """
        # (batch, position) of the current pass. OPT's layers flatten both into one axis before
        # their linear maps; the input of the first block has them in every family.
        shape = torch.Size()
        gates: dict[Bank, Tensor] = {}

        def save_shape(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal shape
            shape = first_tensor(args, kwargs).shape[:2]

        def save_gate(bank: Bank, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            gates[bank] = output

        def read_bank(bank: Bank, _: nn.Module, args: tuple[Any, ...]) -> None:
            coefficients: Tensor = args[0]
            gate = gates.pop(bank, None)
            if gate is not None:
                gate = gate[..., : bank.size].view(*shape, bank.size)
            read(bank, coefficients.view(*shape, bank.size), gate)

        with ExitStack() as hooks:
            add = hooks.callback
            add(self.blocks[0].register_forward_pre_hook(save_shape, with_kwargs=True).remove)
            for bank in self.banks:
                if bank is None:
                    continue
                if self.gated:
                    add(bank.keys.register_forward_hook(partial(save_gate, bank)).remove)
                add(bank.values.register_forward_pre_hook(partial(read_bank, bank)).remove)
            yield

    @contextmanager
    def trace_layers(
        self,
        read: ReadLayer,
        tokens: Int[Tensor, "batch position"],
        at: Int[Tensor, "row 2"] | None = None,
    ) -> Iterator[None]:
        """Call `read` with each layer's trace, in layer order, while these tokens run.

        `at` selects positions to trace, as rows (sentence, position). Default: all.
        """
        shape = tokens.shape

        def pick(tensor: Tensor) -> Tensor:
            if at is None:
                return tensor.detach().clone().reshape(*shape, -1)
            row, position = at.to(tensor.device).unbind(1)
            return tensor.detach().reshape(*shape, -1)[row, position]

        with hook_layers(self, read, pick):
            yield

    def trace(
        self,
        tokens: Int[Tensor, "batch position"],
        at: Int[Tensor, "row 2"] | None = None,
        layers: int | None = None,
    ) -> list[LayerTrace]:
        """Run these tokens through all layers, or the first few, and return a trace of each."""
        traces: list[LayerTrace] = []
        with self.trace_layers(lambda layer, trace: traces.append(trace), tokens, at):
            self.forward(tokens, layers)
        return traces


class _StopForwardError(Exception):
    """Ends a forward pass after the last layer that is needed."""


def fingerprint(model: PreTrainedModel) -> str:
    """Return the SHA-256 of name, dtype, shape and bytes of every weight; tied weights once."""
    digest = hashlib.sha256()
    for name, tensor in sorted_weights(model):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


# Neighbours: memories whose values, or keys, point in a similar direction


class Neighbour(NamedTuple):
    """A memory and its cosine: 1 for the same direction, −1 for the opposite one."""

    cell: Cell
    cosine: float


class Neighbourhood(NamedTuple):
    """The neighbours of a memory, and the layers that were searched."""

    found: list[Neighbour]
    layers: list[int]
    """All layers, unless the search ran out of time."""


def neighbours(memories: Memories, cell: Cell, by: str = "value", n: int = 10) -> list[Neighbour]:
    """Return the n memories with the largest |cosine| to one, in any layer; ties by cell.

    A memory of zeros has no direction, so no neighbours.
    """
    return neighbourhood(memories, cell, by, n).found


@torch.inference_mode()
def neighbourhood(
    memories: Memories,
    cell: Cell,
    by: str = "value",
    n: int = 10,
    seconds: float | None = None,
) -> Neighbourhood:
    """Return the neighbours found within a time limit; the memory's own layer is always searched.

    Layers are searched one at a time, nearest first, so that only one layer's weights are held.
    """
    if by not in ("value", "key"):
        raise FfmemError(f"Cannot search for neighbours by {by!r}. Use value or key.")
    if by == "value" and not memories.has_values:
        raise NoStaticValues("This model has neighbours by key, but not by value.")
    if n < 1:
        raise FfmemError(f"Cannot search for {n} neighbours. Use 1 or more.")
    cell = memories.layout.resolve(cell)
    own = _unit_directions(memories, cell.layer, by)[cell.memory]
    searched: list[int] = []
    found: list[Neighbour] = []
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    nearest_first = sorted(
        range(memories.n_layers), key=lambda other: (abs(other - cell.layer), other)
    )
    for layer in nearest_first:
        if searched and time.monotonic() > deadline:
            break
        searched.append(layer)
        if not own.any():
            continue
        directions = _unit_directions(memories, layer, by)
        cosines = (directions @ own.to(directions.device)).cpu()
        if layer == cell.layer:
            cosines[cell.memory] = 0.0  # the memory itself
        # A stable sort keeps ties in the order of cells.
        best = cosines.abs().sort(descending=True, stable=True).indices[:n].tolist()
        found += [
            Neighbour(memories.layout.cell(layer, memory), float(cosines[memory]))
            for memory in best
        ]
    found = [one for one in found if one.cell != cell and not math.isclose(one.cosine, 0.0)]
    best_first = sorted(found, key=lambda one: (-abs(one.cosine), one.cell))
    return Neighbourhood(best_first[:n], sorted(searched))


def _unit_directions(memories: Memories, layer: int, by: str) -> Float[Tensor, "memory hidden"]:
    """Return output directions or keys as unit vectors; zeros stay zeros."""
    vectors = memories.output_directions(layer) if by == "value" else memories.keys(layer)
    return torch.nn.functional.normalize(vectors.float(), dim=1)
