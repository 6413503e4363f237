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
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

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

Read = Callable[[int, Tensor, Tensor | None], None]
"""What `Memories.reading` calls: (layer, coefficients, gate), both "batch position memory"."""


class Memories:
    """The memories of one model: `n_layers` layers of `n_memories` cells each."""

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
        self.value_maps = [module(block, row.values) for block in self.blocks]
        self.key_maps = [module(block, row.keys) for block in self.blocks]
        self.gated = row.up is not None
        self.n_layers = len(self.blocks)
        self.n_memories = self._n_memories()
        self.hidden = shape(self.value_maps[0])[0]
        self._refuse_other_shapes()
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

    def _n_memories(self) -> int:
        """Return how many memories a layer has; all must have as many."""
        counts = [shape(values)[1] for values in self.value_maps]
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
            for found in map(shape, maps):
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
        return next(self.value_maps[0].parameters()).dtype

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
        return weight(self.value_maps[layer]).T

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
        return bias(self.value_maps[layer])

    def readable_values(self, layer: int) -> Float[Tensor, "memory hidden"]:
        """Return the values as they reach the residual stream: what gets projected.

        In output-normed blocks the post-norm's gain is folded in, elsewhere a multiplier if there
        is one, so that y is the sum of mᵢ times these, up to the norm's σ and a constant.
        """
        values = self.values(layer)
        if self.row.post_norm is not None:
            norm = Norm(module(self.blocks[layer], self.row.post_norm), self.hidden)
            values = norm.fold(values).to(values.dtype)
        return values if self.multiplier == 1 else values * self.multiplier

    def keys(self, layer: int) -> Float[Tensor, "memory hidden"]:
        """Return K of a layer, one key per row; in gated models the gate's."""
        return weight(self.key_maps[layer])[: self.n_memories]

    def key_bias(self, layer: int) -> Float[Tensor, " memory"]:
        """Return what is added to x · Kᵀ: zeros where the key map has no bias."""
        return bias(self.key_maps[layer])[: self.n_memories]

    def up_keys(self, layer: int) -> Float[Tensor, "memory hidden"]:
        """Return the keys whose product with x multiplies the gate; gated models only."""
        return weight(self._up_map(layer))[-self.n_memories :]

    def up_bias(self, layer: int) -> Float[Tensor, " memory"]:
        """Return what is added to the product of x and `up_keys`; gated models only."""
        return bias(self._up_map(layer))[-self.n_memories :]

    def _up_map(self, layer: int) -> nn.Module:
        if self.row.up is None:
            raise ModelError(f"A {self.family!r} model is not gated: it has one key per memory.")
        if self.row.up == FUSED:
            return self.key_maps[layer]
        return module(self.blocks[layer], self.row.up)

    @contextmanager
    def reading(self, read: Read) -> Iterator[None]:
        """Call `read` with each layer's coefficients, in layer order, in every forward pass.

        The tensors are the model's own, not copies: read them, do not change or keep them.
        """
        with ExitStack() as hooks:
            rows: list[torch.Size] = []
            gates: dict[int, Tensor] = {}

            def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                rows[:] = [first(args, kwargs).shape[:2]]

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

        tracer = Tracer(self.row, self.blocks, self.n_memories, self.multiplier, self.family)
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
