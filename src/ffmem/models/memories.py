"""A language model as layers of key-value memories.

    FF(x) = m · V + b,    m = f(x · Kᵀ)        memory i = key kᵢ, value vᵢ, coefficient mᵢ

The coefficients m are whatever multiplies the values V. So one hook, on the input of the value map,
reads them in every family, with ReLU, GELU or a gate. Mixtures of experts have many banks in a
layer, and there the coefficient is w · m, with the router's weight w (`experts.py`). A self-check
tests the paper's equations on each model before anything is read from it.

Axes: layer, memory, hidden (the width of the residual stream), vocab, batch, position.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from ffmem.cells import ByLayer, Cell, Layout
from ffmem.errors import (
    FfmemError,
    MixtureOfExperts,
    ModelError,
    NoStaticValues,
    SelfCheckFailed,
    UnknownFamily,
    one_line,
)
from ffmem.models.arguments import IN_MEMORY, AdapterRecord
from ffmem.models.banks import Bank, DenseBank, ExpertBank, Routing, find_banks
from ffmem.models.experts import ExpertRows, install
from ffmem.models.families import CLAMPED, FAMILIES, Factor, Family
from ffmem.models.find_family import find_rows
from ffmem.models.head import Head, Norm
from ffmem.models.modules import (
    clamped_glu,
    device_of,
    find_module,
    first_tensor,
    get_module,
    keep_largest,
    linear_shape,
    linear_weight,
    sorted_weights,
)
from ffmem.models.streams import find_streams, unroll
from ffmem.models.structure import check_model, expert_weights
from ffmem.models.tokenizer import Tokenizer
from ffmem.models.trace import LayerTrace, ReadLayer, hook_layers
from ffmem.networks.memories import LambdaLayer
from ffmem.text import html_table

ReadBank = Callable[[Bank, Tensor, Tensor | None, Routing | None], None]
"""Called with (bank, coefficients, gate, routing). Both tensors are "batch position memory"; in an
expert, "row memory", and `routing` says which token each row is."""


class Memories:
    """The memories of one model; `layout` has the number in each layer."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        source: str = IN_MEMORY,
        revision: str | None = None,
        fingerprint: str | None = None,
        adapter: AdapterRecord | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)  # ffmem only reads
        self.tokenizer = tokenizer
        self.source = source
        self.revision = revision
        self.adapter = adapter
        """The adapter that was merged into the weights."""
        self.config: Any = model.config.get_text_config()
        self.family: str = model.config.model_type
        self._fingerprint = fingerprint
        check_model(model)
        if self.family in FAMILIES:
            self._set_rows([FAMILIES[self.family].for_config(self.config)])
        else:
            self._find_rows()

    def __repr__(self) -> str:
        return f"Memories({', '.join(f'{name}: {fact}' for name, fact in self._facts())})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return html_table(self._facts())

    def _facts(self) -> list[tuple[str, str]]:
        dtype = str(self.dtype).removeprefix("torch.")
        return [
            ("model", self.source),
            *([("adapter", self.adapter.source)] if self.adapter else []),
            ("family", self.family),
            ("memories", self.layout.shown),
            ("activation", f"{self.activation}, gated" if self.gated else self.activation),
            ("weights", f"{dtype} on {self.device}"),
        ]

    def _set_rows(self, rows: list[Family]) -> None:
        """Read the model as rows of the families table say, one for all layers or one for each.

        Raises if that is wrong.
        """
        from ffmem.models.selfcheck import self_check  # it imports this module

        self.row = row = rows[0]
        if row.repeats:
            unroll(self.model)
        self.blocks = list(get_module(self.model, row.blocks).children())
        self.rows = ByLayer(rows if len(rows) == len(self.blocks) else [row] * len(self.blocks))
        """The row of each layer; they differ only in models of unknown family."""
        self.n_layers = len(self.blocks)
        self.streams = find_streams(self.model, row)
        """How the layers carry their residual stream, or several."""
        install(self.model)
        width: int = getattr(self.config, "hidden_size", 0)
        self.banks = ByLayer(
            find_banks(self.family, self.rows[layer], layer, block, width)
            for layer, block in enumerate(self.blocks)
        )
        """The banks of each layer: none, one or many."""
        self._check_experts_found()
        some = next((bank for banks in self.banks for bank in banks), None)
        if some is None:
            raise ModelError(
                f"No layer of this {self.family!r} model has a feed-forward part ({row.values}),"
                " unlike other models of its family."
            )
        self.gated = some.gated
        self.layout = Layout([banks.records() for banks in self.banks])
        self.hidden = some.hidden
        self._check_shapes()
        own_activation = find_module(self.blocks[some.layer], row.activation)
        self.activation: str = getattr(self.config, row.activation, row.activation)
        if own_activation is not None:
            self.activation = type(own_activation).__name__
        self.context: int | None = getattr(self.config, row.context or "", None)
        self.head = Head(
            self.model.get_output_embeddings(),
            Norm(find_module(self.model, row.final_norm), self.hidden),
            find_module(self.model, row.project_out),
            (self._config_number(row.scale) or 1.0) / (self._config_number(row.divisor) or 1.0),
            self._config_number(row.cap),
            find_module(self.model, row.head_transform),
        )
        self.vocabulary: int = (
            self.config.vocab_size if self.head.adaptive else len(self.head.embedding)
        )
        self.check = self_check(self)

    def _find_rows(self) -> None:
        """Read a model of unknown family by what its modules do on a few tokens."""
        try:
            self._set_rows(find_rows(self.model))
        except SelfCheckFailed:
            raise
        except ModelError as error:
            raise UnknownFamily(self.family, str(error).rstrip(".")) from None
        except Exception as error:  # the forward pass of a model can break anywhere
            reason = f"it does not run ({one_line(error)})"
            raise UnknownFamily(self.family, reason) from error

    def factor(self, layer: int, name: Factor) -> float | Tensor:
        """Return a factor of a layer's row: a number of the config, or one of its modules' own."""
        if not isinstance(name, str):
            return 1.0 if name is None else name
        found: Any = self.blocks[layer]
        for part in name.split("."):
            found = getattr(found, part, None)
        found = getattr(self.config, name) if found is None else found
        return found.detach() if isinstance(found, Tensor) else float(found)

    def output_scale(self, layer: int) -> float | Tensor:
        """Return the factor that turns a layer's feed-forward output into y."""
        row = self.rows[layer]
        return self.factor(layer, row.multiplier) * self.factor(layer, row.layer_scale)

    def activate(self, layer: int, scores: Tensor, up: Tensor | None) -> Tensor:
        """Return m from x · Kᵀ and, in gated models, x · Uᵀ, by the layer's own activation."""
        row = self.rows[layer]
        if row.activation == CLAMPED and up is not None:
            return clamped_glu(self.config, scores, up)
        scores = scores * self.factor(layer, row.key_scale)
        sparse = find_module(self.blocks[layer], row.sparse)
        if sparse is not None:
            scores = keep_largest(sparse, scores)
        module = find_module(self.blocks[layer], row.activation)
        name = getattr(self.config, row.activation, row.activation)
        m: Tensor = ACT2FN[name](scores) if module is None else module(scores)
        if up is not None:
            m = m * up
        inner_norm = find_module(self.blocks[layer], row.inner_norm)
        return m if inner_norm is None else inner_norm(m)

    def _check_experts_found(self) -> None:
        """Raise if a layer has experts that ffmem does not find, such as quantized ones.

        A stack of matrices beside a dense bank is none: r + y = o would not hold.
        """
        for banks, block in zip(self.banks, self.blocks, strict=True):
            if not banks.routed:
                for found in expert_weights(block):
                    if not banks or "expert" in found:
                        raise MixtureOfExperts(self.family, found)

    def _check_shapes(self) -> None:
        """Raise unless every bank has one key per value, two if gated."""
        for bank in (bank for banks in self.banks for bank in banks):
            if bank.gated != self.gated:
                raise ModelError(
                    f"Some memories of this {self.family!r} model are gated, others are not, so"
                    " ffmem cannot read it."
                )
            if not isinstance(bank, DenseBank):
                continue
            expected = (bank.size * (2 if bank.up is bank.keys else 1), self.hidden)
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
        return next(iter(self.banks[self.layout.memory_layers[0]])).dtype

    def fingerprint(self) -> str:
        """Return the SHA-256 of the weights as they were loaded."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.model)
        return self._fingerprint

    # Keys and values

    def bank(self, layer: int) -> DenseBank:
        """Return the dense bank of a layer; raise if the layer has none, or has experts."""
        banks = self.banks[layer]
        if not banks:
            raise ModelError(f"Layer {layer} of this {self.family!r} model has no memories.")
        if banks.routed:
            raise ModelError(
                f"Layer {layer} of this {self.family!r} model has experts, so it has no single"
                " feed-forward part."
            )
        return banks.dense[0]

    @property
    def has_values(self) -> bool:
        """Whether memories have static values; in a lambda layer, values come from the input."""
        return not self.row.input_values

    def value_parts(self, layer: int) -> Iterator[Float[Tensor, "memory hidden"]]:
        """Yield V of a layer, bank by bank: views of the weights."""
        if not self.has_values:
            raise NoStaticValues("This model's memories have no static values.")
        for bank in self.banks[layer]:
            yield bank.value_rows()

    def values(self, layer: int) -> Float[Tensor, "memory hidden"]:
        """Return V of a layer, one value per row; of one bank, a view of the weights."""
        return self._join(self.value_parts(layer))

    def _join(self, parts: Iterable[Tensor], *empty: int) -> Tensor:
        """Return the rows of all banks of a layer; of one bank, as they are."""
        found = list(parts)
        if not found:
            return self._zeros(*(empty or (0, self.hidden)))
        return found[0] if len(found) == 1 else torch.cat(found)

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
        """Return b of a layer, which it adds for any coefficients; zeros if there is none.

        It excludes biases of experts, which depend on the routing: see `bias_at`.
        """
        banks = self.banks[layer]
        parts = [bank.value_bias() for bank in banks.dense if not bank.is_weighted]
        parts += [] if banks.constant is None else [banks.constant]
        return torch.stack(parts).sum(0) if parts else self._zeros(self.hidden)

    def bias_at(self, layer: int, trace: LayerTrace) -> Float[Tensor, "*place hidden"]:
        """Return Σ w · b of a layer where it was traced: m · V plus this is its output."""
        bias = self.bias(layer)
        if trace.weights is None:
            return bias.expand(trace.value_output.shape)
        total = bias + torch.zeros_like(trace.value_output)
        for number, bank in enumerate(self.banks[layer]):
            if isinstance(bank, ExpertBank) or bank.is_weighted:
                total += trace.weights[..., number, None].to(total.dtype) * bank.value_bias()
        return total

    def direction_parts(self, layer: int) -> Iterator[Float[Tensor, "memory hidden"]]:
        """Yield the output directions of a layer, bank by bank."""
        to_directions = self.to_directions(layer)
        for values in self.value_parts(layer):
            yield to_directions(values)

    def to_directions(self, layer: int) -> Callable[[Tensor], Tensor]:
        """Return the map from values of a layer to output directions; it is linear."""
        norm, post_norm = None, self.rows[layer].post_norm
        if post_norm is not None and self.banks[layer]:
            norm = Norm(get_module(self.blocks[layer], post_norm), self.hidden)
        scale = self.output_scale(layer)
        behind = find_module(self.blocks[layer], self.rows[layer].behind)

        def convert(values: Float[Tensor, "memory hidden"]) -> Float[Tensor, "memory hidden"]:
            if behind is not None:
                values = values @ linear_weight(behind).T
            if norm is not None and len(values):
                values = norm.fold(values).to(values.dtype)
            return values if isinstance(scale, float) and scale == 1 else values * scale

        return convert

    def output_directions(self, layer: int) -> Float[Tensor, "memory hidden"]:
        """Return the values as they reach the residual stream; these are projected to tokens.

        They include the multiplier and the gain of the post-norm, if any, so that y is the sum of
        mᵢ times these, up to the norm's σ and a constant.
        """
        return self._join(self.direction_parts(layer))

    def keys(self, layer: int) -> Float[Tensor, "memory hidden"]:
        """Return K of a layer, one key per row; in gated models, the gate's."""
        return self._join(bank.key_rows() for bank in self.banks[layer])

    def key_bias(self, layer: int) -> Float[Tensor, " memory"]:
        """Return the bias added to x · Kᵀ; zeros if there is none."""
        return self._join((bank.key_bias() for bank in self.banks[layer]), 0)

    def up_keys(self, layer: int) -> Float[Tensor, "memory hidden"]:
        """Return U of a layer, whose product with x multiplies the gate; gated models only."""
        self._check_gated()
        return self._join(bank.up_rows() for bank in self.banks[layer])

    def up_bias(self, layer: int) -> Float[Tensor, " memory"]:
        """Return the bias added to x · Uᵀ; gated models only."""
        self._check_gated()
        return self._join((bank.up_bias() for bank in self.banks[layer]), 0)

    def _check_gated(self) -> None:
        if not self.gated:
            raise ModelError(f"A {self.family!r} model is not gated: it has one key per memory.")

    def _zeros(self, *size: int) -> Tensor:
        return torch.zeros(*size, dtype=self.dtype, device=self.device)

    # Forward passes

    @torch.no_grad()
    def forward(self, tokens: Int[Tensor, "batch position"], layers: int | None = None) -> None:
        """Run all layers, or the first few, without logits and cache.

        Pad sentences on the right. They need no attention mask: no position sees the padding
        after it.
        """
        with self.stop_after(self.n_layers if layers is None else layers):
            self.trunk(tokens.to(self.device), use_cache=False)

    @contextmanager
    def stop_after(self, layers: int) -> Iterator[None]:
        """End the forward pass inside this block after this many layers."""

        def stop(*_: Any) -> None:
            raise _StopForwardError

        with suppress(_StopForwardError), ExitStack() as hooks:
            for block in self.blocks[layers:]:
                hooks.callback(block.register_forward_pre_hook(stop).remove)
            yield

    @property
    def trunk(self) -> nn.Module:
        """The model without its head; some models do not name it, so that it has the layers."""
        trunk: nn.Module = self.model.base_model
        if trunk is self.model:
            return get_module(self.model, self.row.blocks.rpartition(".")[0])
        return trunk

    @torch.no_grad()
    def logits(
        self, tokens: Int[Tensor, "batch position"]
    ) -> Float[Tensor, "batch position vocab"]:
        """Return the model's own logits; log-probabilities with an adaptive softmax."""
        logits: Tensor = self.model(tokens.to(self.device), use_cache=False).logits
        return logits

    @contextmanager
    def read_coefficients(self, read: ReadBank) -> Iterator[None]:
        """Call `read` with each bank's coefficients, layer by layer, in every forward pass.

        An expert is called only if a token of the batch is routed to it. The tensors are the
        model's own, not copies: do not change or keep them.
        """
        # (batch, position) of the current pass. OPT's layers flatten both into one axis before
        # their linear maps; the input of the first block has them in every family.
        shape = torch.Size()

        def save_shape(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal shape
            shape = self.streams.shape(first_tensor(args, kwargs))

        def read_dense(
            bank: DenseBank, coefficients: Tensor, gate: Tensor | None, weights: Tensor | None
        ) -> None:
            if gate is not None:
                gate = gate.view(*shape, bank.size)
            routing = None if weights is None else Routing(weights.flatten())
            read(bank, coefficients.view(*shape, bank.size), gate, routing)

        def read_expert(bank: ExpertBank, rows: ExpertRows) -> None:
            routing = Routing(rows.weights[:, 0], rows.tokens, shape[1])
            read(bank, rows.coefficients, rows.gate, routing)

        with ExitStack() as hooks:
            handle = self.blocks[0].register_forward_pre_hook(save_shape, with_kwargs=True)
            hooks.callback(handle.remove)
            for banks in self.banks:
                hooks.enter_context(banks.reading(read_dense, read_expert))
            yield

    @contextmanager
    def skip_padding(self, is_token: Bool[Tensor, "batch position"]) -> Iterator[None]:
        """Leave padding out of the experts; dense banks run on it all the same."""
        experts = [banks.experts for banks in self.banks if banks.experts is not None]
        for one in experts:
            one.needed = is_token.flatten()
        try:
            yield
        finally:
            for one in experts:
                one.needed = None

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
