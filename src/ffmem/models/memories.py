"""A language model, seen as layers of key-value memories.

    FF(x) = m · V + b,    m = f(x · Kᵀ)        memory i = key kᵢ, value vᵢ, coefficient mᵢ

m, the memory coefficients, are whatever multiplies the values V. So one hook, on the input of
the value map, reads them in every family: ReLU, GELU or gated. A self-check proves the paper's
equations on each model before anything is read from it.

Axes: layer, memory, hidden (the width of the residual stream), vocab, batch, position.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from ffmem.cells import Layout
from ffmem.errors import ModelError, NoStaticValues, UnknownFamily, one_line
from ffmem.models.argument import IN_MEMORY
from ffmem.models.families import FAMILIES, FUSED, Family
from ffmem.models.head import Head, Norm
from ffmem.models.modules import bias, first, module, optional, shape, weight
from ffmem.models.split import aligned, device_of, weights
from ffmem.models.structure import candidates, refuse
from ffmem.models.tokenizer import Tokenizer
from ffmem.models.trace import LayerTrace, ReadLayer, Tracer
from ffmem.networks.memories import LambdaLayer

Read = Callable[["Bank", Tensor, Tensor | None], None]
"""What `Memories.reading` calls: (bank, coefficients, gate), both "batch position memory"."""


@dataclass(frozen=True)
class Bank:
    """Some memories of a layer that share their maps: today, its dense feed-forward part."""

    layer: int
    size: int
    values: nn.Module
    """The linear map whose weights are the values."""
    keys: nn.Module
    """The linear map whose weights are the keys; in gated models the gate's."""
    up: nn.Module | None
    """Gated models: the linear map whose output multiplies the gate."""
    offset: int = 0
    """The number of its first memory in the layer."""


class Memories:
    """The memories of one model; `layout` says how many each layer has."""

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
        refuse(model)
        if self.family in FAMILIES:
            self._adopt(FAMILIES[self.family].of(self.config))
        else:
            self._search()

    def _adopt(self, row: Family) -> None:
        """Read the model as a row says, and prove that it may be read so."""
        from ffmem.models.selfcheck import check  # it reads Memories: a circle at import

        self.row = row
        self.blocks = list(module(self.model, row.blocks).children())
        self.gated = row.up is not None
        self.n_layers = len(self.blocks)
        self.banks = [self._bank(layer, block) for layer, block in enumerate(self.blocks)]
        """The dense bank of each layer; None where a layer has no feed-forward part."""
        some = next((bank for bank in self.banks if bank is not None), None)
        if some is None:
            raise ModelError(
                f"No layer of this {self.family!r} model has a feed-forward part where others of"
                f" its family have one ({row.values})."
            )
        self.layout = Layout.dense([0 if bank is None else bank.size for bank in self.banks])
        self.hidden = shape(some.values)[0]
        self._check_shapes()
        self.multiplier = self._number(row.multiplier) or 1.0
        self.activation: str = getattr(self.config, row.activation, row.activation)
        self.context: int | None = getattr(self.config, row.context or "", None)
        self.head = self._head()
        self.vocabulary: int = (
            self.config.vocab_size if self.head.adaptive else self.head.vocabulary
        )
        self.check = check(self)

    def _search(self) -> None:
        """Adopt the structure that passes the self-check, of a model of unknown family."""
        reason = "nothing in it looks like one feed-forward part per layer"
        for row in candidates(self.model):
            try:
                self._adopt(row)
            except ModelError as error:
                reason = str(error).rstrip(".")
            except Exception as error:  # a forward pass that is read wrongly may break anywhere
                reason = f"it does not run as its structure suggests ({one_line(error)})"
            else:
                return
        raise UnknownFamily(self.family, FAMILIES, reason)

    def _bank(self, layer: int, block: nn.Module) -> Bank | None:
        """Return the dense bank of a layer; None if the layer has no feed-forward part."""
        values = optional(block, self.row.values)
        if values is None:
            return None
        keys = module(block, self.row.keys)
        up = keys if self.row.up == FUSED else optional(block, self.row.up)
        return Bank(layer, shape(values)[1], values, keys, up)

    def _check_shapes(self) -> None:
        """Raise unless every bank has a key, or two, for each of its values."""
        for bank in self.banks:
            if bank is None:
                continue
            rows = bank.size * (2 if self.row.up == FUSED else 1)
            for found in (shape(one) for one in (bank.keys, bank.up) if one is not None):
                if found != (rows, self.hidden):
                    raise ModelError(
                        f"Keys of layer {bank.layer} of this {self.family!r} model have the shape"
                        f" {found}, where its values ask for {(rows, self.hidden)}."
                    )

    def _head(self) -> Head:
        """Return the way to the vocabulary, as the row describes it."""
        scale = (self._number(self.row.scale) or 1.0) / (self._number(self.row.divisor) or 1.0)
        return Head(
            self.model.get_output_embeddings(),
            Norm(optional(self.model, self.row.final_norm), self.hidden),
            optional(self.model, self.row.project_out),
            scale,
            self._number(self.row.cap),
        )

    def _number(self, name: str | None) -> float | None:
        """Return a number of the config, None if the row or the config names none."""
        return None if name is None else getattr(self.config, name)

    @property
    def device(self) -> torch.device:
        """Where tokens enter the model."""
        return device_of(self.model.get_input_embeddings())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return next(self.bank(self.layout.memory_layers[0]).values.parameters()).dtype

    def bank(self, layer: int) -> Bank:
        """Return the bank of a layer; raise if the layer has none."""
        bank = self.banks[layer]
        if bank is None:
            raise ModelError(f"Layer {layer} of this {self.family!r} model has no memories.")
        return bank

    def fingerprint(self) -> str:
        """Return the SHA-256 of the weights as they were loaded."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.model)
        return self._fingerprint

    @property
    def has_values(self) -> bool:
        """Whether memories have static values; in a lambda layer they come from the input."""
        return not self.row.input_values

    def values(self, layer: int) -> Float[Tensor, "memory hidden"]:
        """Return V of a layer, one value per row: a view of the weights if they are here."""
        if not self.has_values:
            raise NoStaticValues("The values of this model's memories were asked for.")
        bank = self.banks[layer]
        return self._nothing(0) if bank is None else weight(bank.values).T

    def _nothing(self, *size: int) -> Tensor:
        """Return zeros, of one row per memory where there are none."""
        return torch.zeros(*size, self.hidden, dtype=self.dtype, device=self.device)

    def values_at(
        self, layer: int, x: Float[Tensor, "position hidden"], place: int
    ) -> Float[Tensor, "memory hidden"]:
        """Return what the coefficients of one position multiply, given x up to there.

        The values of the layer, the same at every place, but where they come from the input.
        """
        if self.has_values:
            return self.values(layer)
        owner = module(self.blocks[layer], self.row.values.rpartition(".")[0])
        assert isinstance(owner, LambdaLayer)
        return owner.values_at(x, place)

    def bias(self, layer: int) -> Float[Tensor, " hidden"]:
        """Return b of a layer: zeros where its value map has none."""
        bank = self.banks[layer]
        return self._nothing() if bank is None else bias(bank.values)

    def readable_values(self, layer: int) -> Float[Tensor, "memory hidden"]:
        """Return the values as they reach the residual stream: what gets projected.

        In output-normed blocks the post-norm's gain is folded in, elsewhere a multiplier if there
        is one, so that y is the sum of mᵢ times these, up to the norm's σ and a constant.
        """
        values = self.values(layer)
        if self.row.post_norm is not None and len(values):
            norm = Norm(module(self.blocks[layer], self.row.post_norm), self.hidden)
            values = norm.fold(values).to(values.dtype)
        return values if self.multiplier == 1 else values * self.multiplier

    def keys(self, layer: int) -> Float[Tensor, "memory hidden"]:
        """Return K of a layer, one key per row; in gated models the gate's."""
        bank = self.banks[layer]
        return self._nothing(0) if bank is None else weight(bank.keys)[: bank.size]

    def key_bias(self, layer: int) -> Float[Tensor, " memory"]:
        """Return what is added to x · Kᵀ: zeros where the key map has no bias."""
        bank = self.bank(layer)
        return bias(bank.keys)[: bank.size]

    def up_keys(self, layer: int) -> Float[Tensor, "memory hidden"]:
        """Return the keys whose product with x multiplies the gate; gated models only."""
        bank = self.bank(layer)
        return weight(self._up_map(bank))[-bank.size :]

    def up_bias(self, layer: int) -> Float[Tensor, " memory"]:
        """Return what is added to the product of x and `up_keys`; gated models only."""
        bank = self.bank(layer)
        return bias(self._up_map(bank))[-bank.size :]

    def _up_map(self, bank: Bank) -> nn.Module:
        if bank.up is None:
            raise ModelError(f"A {self.family!r} model is not gated: it has one key per memory.")
        return bank.up

    @contextmanager
    def reading(self, read: Read) -> Iterator[None]:
        """Call `read` with each bank's coefficients, in layer order, in every forward pass.

        The tensors are the model's own, not copies: read them, do not change or keep them.
        """
        with ExitStack() as hooks:
            rows: list[torch.Size] = []
            gates: dict[int, Tensor] = {}

            def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                rows[:] = [first(args, kwargs).shape[:2]]

            def keep_gate(bank: Bank) -> Callable[..., None]:
                def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
                    gates[bank.layer] = output

                return hook

            def give(bank: Bank) -> Callable[..., None]:
                def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
                    coefficients: Tensor = args[0]
                    gate = gates.pop(bank.layer, None)
                    if gate is not None:
                        gate = gate[..., : bank.size].view(*rows[0], bank.size)
                    read(bank, coefficients.view(*rows[0], bank.size), gate)

                return hook

            add = hooks.callback
            add(self.blocks[0].register_forward_pre_hook(begin, with_kwargs=True).remove)
            for bank in self.banks:
                if bank is None:
                    continue
                if self.gated:
                    add(bank.keys.register_forward_hook(keep_gate(bank)).remove)
                add(bank.values.register_forward_pre_hook(give(bank)).remove)
            yield

    @torch.no_grad()
    def forward(self, tokens: Int[Tensor, "batch position"], layers: int | None = None) -> None:
        """Run the trunk alone, or its first layers: neither logits nor cache.

        Sentences are padded on the right. No attention mask is needed: no position ever sees the
        padding behind it.
        """

        def stop(*_: Any) -> None:
            raise _EnoughError

        with ExitStack() as hooks, suppress(_EnoughError):
            if layers is not None and layers < self.n_layers:
                hooks.callback(self.blocks[layers - 1].register_forward_hook(stop).remove)
            self.model.base_model(tokens.to(self.device), use_cache=False)

    @torch.no_grad()
    def logits(
        self, tokens: Int[Tensor, "batch position"]
    ) -> Float[Tensor, "batch position vocab"]:
        """Return the model's own logits; log-probabilities under an adaptive softmax."""
        logits: Tensor = self.model(tokens.to(self.device), use_cache=False).logits
        return logits

    def trace(
        self,
        tokens: Int[Tensor, "batch position"],
        at: Int[Tensor, "row 2"] | None = None,
        layers: int | None = None,
    ) -> list[LayerTrace]:
        """Return what every layer computed on these tokens, everywhere or at (row, position)s."""
        found: list[LayerTrace] = []
        with self.tracing(lambda layer, trace: found.append(trace), tokens, at):
            self.forward(tokens, layers)
        return found

    @contextmanager
    def tracing(
        self,
        read: ReadLayer,
        tokens: Int[Tensor, "batch position"],
        at: Int[Tensor, "row 2"] | None = None,
    ) -> Iterator[None]:
        """Call `read` with each layer's trace, in layer order, while these tokens run."""
        shape = tokens.shape

        def pick(tensor: Tensor) -> Tensor:
            if at is None:
                return tensor.detach().clone().reshape(*shape, -1)
            row, position = at.to(tensor.device).unbind(1)
            return tensor.detach().reshape(*shape, -1)[row, position]

        tracer = Tracer(self.row, self.blocks, self.layout.widths, self.multiplier, self.family)
        with ExitStack() as hooks:
            for block in self.blocks:
                for handle in aligned(block):
                    hooks.callback(handle.remove)
            hooks.enter_context(tracer.reading(read, pick))
            yield


class _EnoughError(Exception):
    """Ends a forward pass above the last layer that is wanted."""


def fingerprint(model: PreTrainedModel) -> str:
    """Return the SHA-256 over name, dtype, shape and bytes of every weight, tied ones once."""
    digest = hashlib.sha256()
    for name, tensor in weights(model):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
