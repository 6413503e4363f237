"""A language model, seen as layers of key-value memories.

    FF(x) = m · V + b,    m = f(x · Kᵀ)        memory i = key kᵢ, value vᵢ, coefficient mᵢ

m, the memory coefficients, are whatever multiplies the values V. So one hook, on the input of
the value map, reads them in every family: ReLU, GELU or gated. A self-check proves the paper's
equations on each model before anything is read from it.

Axes: layer, memory, hidden (the width of the residual stream), vocab, batch, position.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ffmem.errors import ModelError, SelfCheckFailed, UnknownFamily
from ffmem.models.families import FAMILIES, FUSED, Family
from ffmem.models.head import Head, Norm
from ffmem.models.structure import candidates, refuse
from ffmem.models.tokenizer import Tokenizer

Read = Callable[[int, Tensor, Tensor | None], None]
"""What `Memories.reading` calls: (layer, coefficients, gate), both "batch position memory"."""


class LayerTrace(NamedTuple):
    """Everything that one layer computed on a batch, in the paper's letters."""

    block_input: Float[Tensor, "batch position hidden"]
    ff_input: Float[Tensor, "batch position hidden"]
    """x"""
    coefficients: Float[Tensor, "batch position memory"]
    """m"""
    gate: Float[Tensor, "batch position memory"] | None
    """The gate's pre-activation; None in models without one."""
    value_output: Float[Tensor, "batch position hidden"]
    """m · V + b, as the model computed it."""
    ff_output: Float[Tensor, "batch position hidden"]
    """y"""
    residual: Float[Tensor, "batch position hidden"]
    """r, read independently of y."""
    layer_output: Float[Tensor, "batch position hidden"]
    """o"""


class Memories:
    """The memories of one model: `n_layers` layers of `n_memories` cells each."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        source: str = "in memory",
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
        self.blocks = list(_module(self.model, row.blocks).children())
        self.value_maps = [_module(block, row.values) for block in self.blocks]
        self.key_maps = [_module(block, row.keys) for block in self.blocks]
        self.gated = row.up is not None
        self.n_layers = len(self.blocks)
        self.n_memories = self._n_memories()
        self.hidden = self.values(0).shape[1]
        self._refuse_other_shapes()
        self.multiplier = self._number(row.multiplier) or 1.0
        self.activation: str = getattr(self.config, row.activation, row.activation)
        self.context: int | None = getattr(self.config, row.context or "", None)
        self.head = self._head()
        self.vocabulary: int = (
            self.config.vocab_size if self.head.adaptive else len(self.head.embedding)
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
            else:
                return
        raise UnknownFamily(self.family, FAMILIES, reason)

    def _n_memories(self) -> int:
        """Return how many memories a layer has; all must have as many."""
        counts = [len(self.values(layer)) for layer in range(self.n_layers)]
        for layer, count in enumerate(counts):
            if count != counts[0]:
                raise ModelError(
                    f"Layers of this {self.family!r} model differ in their number of memories:"
                    f" layer 0 has {counts[0]}, layer {layer} has {count}."
                    " ffmem reads models whose layers all have as many."
                )
        return counts[0]

    def _refuse_other_shapes(self) -> None:
        """Raise unless every layer has a key, or two, for each of its values."""
        for layer in range(self.n_layers):
            rows = self.n_memories * (2 if self.row.up == FUSED else 1)
            maps = [self.key_maps[layer], *([self._up_map(layer)] if self.gated else [])]
            for found in (tuple(_weight(keys).shape) for keys in maps):
                if found != (rows, self.hidden):
                    raise ModelError(
                        f"Keys of layer {layer} of this {self.family!r} model have the shape"
                        f" {found}, where its values ask for {(rows, self.hidden)}."
                    )

    def _head(self) -> Head:
        """Return the way to the vocabulary, as the row describes it."""
        scale = (self._number(self.row.scale) or 1.0) / (self._number(self.row.divisor) or 1.0)
        return Head(
            self.model.get_output_embeddings(),
            Norm(_optional(self.model, self.row.final_norm), self.hidden),
            _optional(self.model, self.row.project_out),
            scale,
            self._number(self.row.cap),
        )

    def _number(self, name: str | None) -> float | None:
        """Return a number of the config, None if the row or the config names none."""
        return None if name is None else getattr(self.config, name)

    @property
    def device(self) -> torch.device:
        """Where tokens enter the model."""
        embeddings: nn.Module = self.model.get_input_embeddings()
        return next(embeddings.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values(0).dtype

    def fingerprint(self) -> str:
        """Return the SHA-256 of the weights as they were loaded."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.model)
        return self._fingerprint

    def values(self, layer: int) -> Float[Tensor, "memory hidden"]:
        """Return V of a layer, one value per row: a view of the weights."""
        return _weight(self.value_maps[layer]).T

    def bias(self, layer: int) -> Float[Tensor, " hidden"]:
        """Return b of a layer: zeros where its value map has none."""
        return _bias(self.value_maps[layer])

    def readable_values(self, layer: int) -> Float[Tensor, "memory hidden"]:
        """Return the values as they reach the residual stream: what gets projected.

        In output-normed blocks the post-norm's gain is folded in, elsewhere a multiplier if there
        is one, so that y is the sum of mᵢ times these, up to the norm's σ and a constant.
        """
        values = self.values(layer)
        if self.row.post_norm is not None:
            norm = Norm(_module(self.blocks[layer], self.row.post_norm), self.hidden)
            values = norm.fold(values).to(values.dtype)
        return values if self.multiplier == 1 else values * self.multiplier

    def keys(self, layer: int) -> Float[Tensor, "memory hidden"]:
        """Return K of a layer, one key per row; in gated models the gate's."""
        return _weight(self.key_maps[layer])[: self.n_memories]

    def key_bias(self, layer: int) -> Float[Tensor, " memory"]:
        """Return what is added to x · Kᵀ: zeros where the key map has no bias."""
        return _bias(self.key_maps[layer])[: self.n_memories]

    def up_keys(self, layer: int) -> Float[Tensor, "memory hidden"]:
        """Return the keys whose product with x multiplies the gate; gated models only."""
        return _weight(self._up_map(layer))[-self.n_memories :]

    def up_bias(self, layer: int) -> Float[Tensor, " memory"]:
        """Return what is added to the product of x and `up_keys`; gated models only."""
        return _bias(self._up_map(layer))[-self.n_memories :]

    def _up_map(self, layer: int) -> nn.Module:
        if self.row.up is None:
            raise ModelError(f"A {self.family!r} model is not gated: it has one key per memory.")
        if self.row.up == FUSED:
            return self.key_maps[layer]
        return _module(self.blocks[layer], self.row.up)

    @contextmanager
    def reading(self, read: Read) -> Iterator[None]:
        """Call `read` with each layer's coefficients, in layer order, in every forward pass.

        The tensors are the model's own, not copies: read them, do not change or keep them.
        """
        with ExitStack() as hooks:
            rows: list[torch.Size] = []
            gates: dict[int, Tensor] = {}

            def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                rows[:] = [_first(args, kwargs).shape[:2]]

            def keep_gate(layer: int) -> Callable[..., None]:
                def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
                    gates[layer] = output

                return hook

            def give(layer: int) -> Callable[..., None]:
                def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
                    coefficients: Tensor = args[0]
                    gate = gates.pop(layer, None)
                    if gate is not None:
                        gate = gate[..., : self.n_memories].view(*rows[0], self.n_memories)
                    read(layer, coefficients.view(*rows[0], self.n_memories), gate)

                return hook

            add = hooks.callback
            add(self.blocks[0].register_forward_pre_hook(begin, with_kwargs=True).remove)
            for layer in range(self.n_layers):
                if self.gated:
                    add(self.key_maps[layer].register_forward_hook(keep_gate(layer)).remove)
                add(self.value_maps[layer].register_forward_pre_hook(give(layer)).remove)
            yield

    @torch.no_grad()
    def forward(self, tokens: Int[Tensor, "batch position"]) -> None:
        """Run the trunk alone: neither logits nor cache; sentences are padded on the right.

        No attention mask is needed: no position ever sees the padding behind it.
        """
        self.model.base_model(tokens.to(self.device), use_cache=False)

    @torch.no_grad()
    def logits(
        self, tokens: Int[Tensor, "batch position"]
    ) -> Float[Tensor, "batch position vocab"]:
        """Return the model's own logits; log-probabilities under an adaptive softmax."""
        logits: Tensor = self.model(tokens.to(self.device), use_cache=False).logits
        return logits

    def trace(self, tokens: Int[Tensor, "batch position"]) -> list[LayerTrace]:
        """Return what every layer computed on these tokens: copies, plain and slow."""
        seen: list[dict[str, Tensor]] = [{} for _ in self.blocks]
        with ExitStack() as hooks:
            for layer, block in enumerate(self.blocks):
                for handle in self._watch(block, seen[layer], tokens.shape):
                    hooks.callback(handle.remove)
            self.forward(tokens)
        return [self._layer_trace(layer, found) for layer, found in enumerate(seen)]

    def _watch(
        self, block: nn.Module, seen: dict[str, Tensor], rows: torch.Size
    ) -> Iterator[torch.utils.hooks.RemovableHandle]:
        """Hook everything that a trace shows; copies, for Falcon changes outputs in place."""

        def keep(name: str, tensor: Tensor) -> None:
            seen[name] = tensor.detach().clone().reshape(*rows, -1)

        def input_of(name: str, path: str) -> torch.utils.hooks.RemovableHandle:
            return _module(block, path).register_forward_pre_hook(
                lambda _, args, kwargs: keep(name, _first(args, kwargs)), with_kwargs=True
            )

        def output_of(name: str, path: str) -> torch.utils.hooks.RemovableHandle:
            return _module(block, path).register_forward_hook(
                lambda _, args, output: keep(name, _first(output, {}))
            )

        row = self.row
        yield input_of("block_input", "")
        yield output_of("layer_output", "")
        yield input_of("ff_input", row.keys)
        yield output_of("gate", row.keys)
        yield input_of("coefficients", row.values)
        yield output_of("value_output", row.values)
        if row.post_norm is not None:
            yield output_of("post_norm", row.post_norm)
        if row.attention is not None:
            yield output_of("attention", row.attention)
        elif row.residual is not None:
            yield input_of("residual", row.residual)

    def _layer_trace(self, layer: int, seen: dict[str, Tensor]) -> LayerTrace:
        """Return a layer's trace, put together from what its hooks saw."""
        row = self.row
        try:
            if row.attention is None:
                residual = seen["residual"]
            else:
                residual = seen["block_input"] + seen["attention"]
            ff_output = seen["value_output" if row.post_norm is None else "post_norm"]
            return LayerTrace(
                block_input=seen["block_input"],
                ff_input=seen["ff_input"],
                coefficients=seen["coefficients"],
                gate=seen["gate"][..., : self.n_memories] if self.gated else None,
                value_output=seen["value_output"],
                ff_output=ff_output if self.multiplier == 1 else ff_output * self.multiplier,
                residual=residual,
                layer_output=seen["layer_output"],
            )
        except KeyError as missing:
            raise SelfCheckFailed(
                f"Layer {layer} of this {self.family!r} model computed without the module where"
                f" ffmem reads its {missing.args[0]}: the model takes a path past it."
            ) from None


def fingerprint(model: PreTrainedModel) -> str:
    """Return the SHA-256 over name, dtype, shape and bytes of every weight, tied ones once."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        flat = weight.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _module(parent: nn.Module, path: str) -> nn.Module:
    """Return the submodule at a path that must exist."""
    found = _optional(parent, path)
    if found is None:
        raise ModelError(
            f"A {type(parent).__name__} was expected to have a module {path!r}, and has none."
            " This model is built differently from others of its family."
        )
    return found


def _optional(model: nn.Module, path: str | None) -> nn.Module | None:
    """Return the submodule at a path, or None if the model or the row has none there."""
    found: Any = None if path is None else model
    for name in path.split(".") if path else ():
        found = getattr(found, name, None)
    return found if isinstance(found, nn.Module) else None


def _weight(linear: nn.Module) -> Float[Tensor, "out in"]:
    """Return the weights of a linear map, one output per row."""
    weight = linear.get_parameter("weight")
    if isinstance(linear, Conv1D):
        return weight.T  # GPT-2 keeps them the other way around
    if not isinstance(linear, nn.Linear) or weight.shape != (
        linear.out_features,
        linear.in_features,
    ):
        raise ModelError(
            f"Expected the plain weights of a linear map, found a {type(linear).__name__} of shape"
            f" {tuple(weight.shape)}. Load the model without quantisation."
        )
    return weight


def _bias(linear: nn.Module) -> Float[Tensor, " out"]:
    """Return the bias of a linear map, zeros if it has none."""
    bias: Tensor | None = getattr(linear, "bias", None)
    weight = _weight(linear)
    return weight.new_zeros(len(weight)) if bias is None else bias


def _first(values: Any, kwargs: dict[str, Any]) -> Tensor:
    """Return the tensor that a module was given or gave first, alone, in a tuple or by name."""
    if isinstance(values, Tensor):
        return values
    first: Tensor = values[0] if len(values) else next(iter(kwargs.values()))
    return first
