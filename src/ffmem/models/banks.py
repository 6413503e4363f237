"""Banks: memories of a layer that share their maps.

    dense     the feed-forward part of a layer             y = m · V + b
    shared    an expert that every token reaches           y = w · (m · V + b)
    expert    an expert that the router sends tokens to    y = w · (m · V + b), 0 elsewhere

A layer has zero, one or many banks, and its feed-forward part adds them up. w is 1 unless a gate of
its own scales the shared expert, or the layer multiplies the output of its experts. The coefficient
is what multiplies the value: w · m.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ffmem.cells import BankRecord
from ffmem.errors import ModelError
from ffmem.models.experts import ExpertRows, RoutedExperts, check_experts, find_experts
from ffmem.models.families import FUSED, Family
from ffmem.models.modules import (
    find_module,
    first_tensor,
    get_module,
    keep_largest,
    linear_bias,
    linear_shape,
    linear_weight,
)


class Routing(NamedTuple):
    """Which tokens of a batch reach a bank, and with which weights w."""

    weights: Float[Tensor, " row"]
    """w of each row of the coefficients; in a bank that all tokens reach, of each token."""
    tokens: Int64[Tensor, " row"] | None = None
    """The token of each row, counted through the sentences of the batch; None if all reach it."""
    length: int = 0
    """Tokens of a sentence, padding included."""

    @property
    def sentences(self) -> Int64[Tensor, " row"]:
        """The sentence in the batch of each row."""
        assert self.tokens is not None
        return self.tokens // self.length

    @property
    def positions(self) -> Int64[Tensor, " row"]:
        """The position in its sentence of each row."""
        assert self.tokens is not None
        return self.tokens % self.length


@dataclass(frozen=True, eq=False)
class _Bank:
    """Memories of a layer that share their maps."""

    layer: int
    size: int
    offset: int
    """Number of its first memory in the layer."""
    kind: str
    """dense, shared or expert."""
    factor: float
    """What the layer multiplies the output of the bank with."""

    @property
    def memories(self) -> slice:
        """The numbers of its memories in the layer."""
        return slice(self.offset, self.offset + self.size)


@dataclass(frozen=True, eq=False)
class DenseBank(_Bank):
    """Memories that every token reaches, in linear maps of their own."""

    values: nn.Module
    """The linear map whose weights are the values."""
    keys: nn.Module
    """The linear map whose weights are the keys; in gated models, the gate's."""
    up: nn.Module | None
    """Gated models: the linear map whose output multiplies the gate."""
    gate: nn.Module | None = None
    """The linear map whose sigmoid scales the bank."""
    sparse: nn.Module | None = None
    """The module that keeps only the largest scores of a token before the activation."""
    adapter: nn.Sequential | None = None
    """Two linear maps whose output is added to that of the keys."""

    @property
    def gated(self) -> bool:
        """Whether a gate multiplies the other product of x, so that there are two keys."""
        return self.up is not None

    @property
    def hidden(self) -> int:
        """The width of the residual stream."""
        return linear_shape(self.values)[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return next(self.values.parameters()).dtype

    def value_rows(self) -> Float[Tensor, "memory hidden"]:
        """Return V, one value per row; a view of the weights unless latent."""
        return linear_weight(self.values).T

    def stored_values(self) -> Float[Tensor, "memory hidden"]:
        """Return the values as the weights hold them."""
        return self.value_rows()

    def from_stored(self, rows: Float[Tensor, "memory hidden"]) -> Float[Tensor, "memory hidden"]:
        """Return stored values in the space of the stream."""
        return rows

    def value_bias(self) -> Float[Tensor, " hidden"]:
        """Return b; zeros if there is none."""
        return linear_bias(self.values)

    def key_rows(self) -> Float[Tensor, "memory hidden"]:
        """Return K, one key per row; in gated models, the gate's."""
        return self._input_rows(self.keys)[: self.size]

    def key_bias(self) -> Float[Tensor, " memory"]:
        """Return the bias added to x · Kᵀ; zeros if there is none."""
        return linear_bias(self.keys)[: self.size]

    def up_rows(self) -> Float[Tensor, "memory hidden"]:
        """Return U, whose product with x multiplies the gate; gated models only."""
        return self._input_rows(self._up_map)[-self.size :]

    def _input_rows(self, linear: nn.Module) -> Float[Tensor, "_ hidden"]:
        rows = linear_weight(linear)
        if self.adapter is None:
            return rows
        down, up = self.adapter
        return rows + linear_weight(up) @ linear_weight(down)

    def up_bias(self) -> Float[Tensor, " memory"]:
        """Return the bias added to x · Uᵀ; gated models only."""
        return linear_bias(self._up_map)[-self.size :]

    @property
    def _up_map(self) -> nn.Module:
        if self.up is None:
            raise ModelError("This model is not gated: it has one key per memory.")
        return self.up

    @property
    def is_weighted(self) -> bool:
        """Whether w can differ from 1."""
        return self.gate is not None or self.factor != 1

    def weights(self, x: Float[Tensor, "*place hidden"]) -> Float[Tensor, "*place 1"]:
        """Return w at every position, given the input of the bank."""
        if self.gate is None:
            return x.new_full((*x.shape[:-1], 1), self.factor)
        return torch.sigmoid(self.gate(x)) * self.factor


@dataclass(frozen=True, eq=False)
class ExpertBank(_Bank):
    """The memories of one routed expert."""

    experts: RoutedExperts
    number: int
    """Which of the layer's experts."""
    to_latent: nn.Module | None = None
    """The linear map before the experts, if they work in a latent space."""
    from_latent: nn.Module | None = None
    """The linear map behind them."""

    @property
    def gated(self) -> bool:
        """Whether a gate multiplies the other product of x, so that there are two keys."""
        return self.experts.gated

    @property
    def hidden(self) -> int:
        """The width of the residual stream."""
        behind = self.from_latent
        return self.experts.width if behind is None else linear_shape(behind)[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.experts.value_weight(self.number).dtype

    def value_rows(self) -> Float[Tensor, "memory hidden"]:
        """Return V, one value per row; a view of the weights unless latent."""
        return self.from_stored(self.stored_values())

    def stored_values(self) -> Float[Tensor, "memory width"]:
        """Return the values as the weights hold them; experts may work in a latent space."""
        return self.experts.values(self.number)

    def from_stored(self, rows: Float[Tensor, "memory width"]) -> Float[Tensor, "memory hidden"]:
        """Return stored values in the space of the stream."""
        behind = self.from_latent
        return rows if behind is None else rows @ linear_weight(behind).to(rows.dtype).T

    def value_bias(self) -> Float[Tensor, " hidden"]:
        """Return b; zeros if there is none."""
        bias = self.experts.bias(self.number)
        return bias if self.from_latent is None else bias @ linear_weight(self.from_latent).T

    def key_rows(self) -> Float[Tensor, "memory hidden"]:
        """Return K, one key per row; in gated models, the gate's."""
        return self._from_input(self.experts.keys(self.number))

    def key_bias(self) -> Float[Tensor, " memory"]:
        """Return the bias added to x · Kᵀ; zeros if there is none."""
        return self._with_latent_bias(
            self.experts.keys(self.number), self.experts.key_bias(self.number)
        )

    def up_rows(self) -> Float[Tensor, "memory hidden"]:
        """Return U, whose product with x multiplies the gate; gated models only."""
        self._check_gated()
        return self._from_input(self.experts.up_keys(self.number))

    def up_bias(self) -> Float[Tensor, " memory"]:
        """Return the bias added to x · Uᵀ; gated models only."""
        self._check_gated()
        return self._with_latent_bias(
            self.experts.up_keys(self.number), self.experts.up_bias(self.number)
        )

    def _check_gated(self) -> None:
        if not self.experts.gated:
            raise ModelError("This model is not gated: it has one key per memory.")

    def _from_input(self, rows: Tensor) -> Tensor:
        return rows if self.to_latent is None else rows @ linear_weight(self.to_latent)

    def _with_latent_bias(self, rows: Tensor, bias: Tensor) -> Tensor:
        return bias if self.to_latent is None else bias + rows @ linear_bias(self.to_latent)


Bank = DenseBank | ExpertBank

ReadDense = Callable[[DenseBank, Tensor, Tensor | None, Tensor | None], None]
"""Called with (bank, coefficients, gate, weights)."""

ReadRouted = Callable[[ExpertBank, ExpertRows], None]

EditBank = Callable[[Bank, Float[Tensor, "row memory"], Int64[Tensor, " row"]], Tensor]
"""Maps (bank, coefficients, tokens) to the coefficients that replace them.

A row is a token that reaches the bank, counted through the sentences of the batch."""

AddToBank = Callable[[Bank, Float[Tensor, "row memory"], Int64[Tensor, " row"]], Tensor]
"""Maps (bank, coefficients, tokens) to what is added to m · V + b of each row."""


@dataclass
class LayerBanks:
    """The banks of one layer, and the modules whose outputs add up to what they write."""

    banks: list[Bank] = field(default_factory=list)
    input: nn.Module | None = None
    """Its input is x."""
    outputs: list[nn.Module] = field(default_factory=list)
    """Their outputs sum to Σ w · (m · V + b)."""
    constant: Tensor | None = None
    """What the layer adds to every token beyond its banks."""

    def __iter__(self) -> Iterator[Bank]:
        return iter(self.banks)

    def __len__(self) -> int:
        return len(self.banks)

    @cached_property
    def dense(self) -> list[DenseBank]:
        """The banks that every token reaches."""
        return [bank for bank in self.banks if isinstance(bank, DenseBank)]

    @cached_property
    def routed(self) -> list[ExpertBank]:
        """The banks of routed experts, in the order of experts."""
        return [bank for bank in self.banks if isinstance(bank, ExpertBank)]

    def at(self, memory: int) -> Bank:
        """Return the bank that has a memory of the layer."""
        return next(one for one in self.banks if one.offset <= memory < one.offset + one.size)

    @property
    def experts(self) -> RoutedExperts | None:
        """What runs the routed experts."""
        return self.routed[0].experts if self.routed else None

    @contextmanager
    def reading(self, read_dense: ReadDense, read_expert: ReadRouted) -> Iterator[None]:
        """Call these with the coefficients w · m of each bank in every forward pass."""
        with ExitStack() as hooks:
            for bank in self.dense:
                hooks.enter_context(_reading_dense(bank, read_dense))
            if self.experts is not None:
                hooks.enter_context(self.experts.reading(partial(self._weigh, read_expert)))
            yield

    def _weigh(self, read: ReadRouted, rows: ExpertRows) -> None:
        """Pass on what an expert computes, times what the layer multiplies it with."""
        bank = self.routed[rows.expert]
        if bank.factor != 1:
            rows = rows._replace(
                weights=rows.weights * bank.factor, coefficients=rows.coefficients * bank.factor
            )
        read(bank, rows)

    @contextmanager
    def editing(self, edit: EditBank) -> Iterator[None]:
        """Run every forward pass with the coefficients w · m that `edit` returns, bank by bank.

        An expert is edited where it runs: a token that is not routed to it stays as it is.
        """
        with ExitStack() as hooks:
            for bank in self.dense:
                hooks.enter_context(_editing_dense(bank, edit))
            if self.experts is not None:
                hooks.enter_context(self.experts.editing(partial(self._edit_expert, edit)))
            yield

    def _edit_expert(self, edit: EditBank, rows: ExpertRows) -> Tensor:
        """Return the changed coefficients of an expert, before the layer multiplies them."""
        bank = self.routed[rows.expert]
        return edit(bank, rows.coefficients * bank.factor, rows.tokens) / bank.factor

    @contextmanager
    def adding(self, add: AddToBank) -> Iterator[None]:
        """Add to what each bank writes in every forward pass, given its coefficients.

        The sum is then treated as the bank's own: weights, latent maps and norms come later.
        """

        def add_dense(bank: DenseBank, _: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor:
            m = args[0].reshape(-1, bank.size)
            added = add(bank, m, torch.arange(len(m), device=m.device))
            total: Tensor = output + added.reshape(output.shape).to(output.dtype)
            return total

        def add_expert(rows: ExpertRows) -> Tensor:
            return add(self.routed[rows.expert], rows.coefficients, rows.tokens)

        with ExitStack() as hooks:
            for bank in self.dense:
                hook = partial(add_dense, bank)
                hooks.callback(bank.values.register_forward_hook(hook).remove)
            if self.experts is not None:
                hooks.enter_context(self.experts.adding(add_expert))
            yield

    def records(self) -> list[BankRecord]:
        """Return the layer's banks for a `Layout`: like banks are counted."""
        found: list[tuple[str, int, int]] = []
        for bank in self.banks:
            if found and found[-1][:2] == (bank.kind, bank.size):
                found[-1] = (bank.kind, bank.size, found[-1][2] + 1)
            else:
                found.append((bank.kind, bank.size, 1))
        return [BankRecord(kind=kind, size=size, count=count) for kind, size, count in found]


@contextmanager
def _reading_dense(bank: DenseBank, read: ReadDense) -> Iterator[None]:
    """Call `read` with w · m, the gate and w (None if it is 1) of a bank in every forward pass."""
    kept: dict[str, Tensor] = {}

    def save_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept["weights"] = bank.weights(first_tensor(args, kwargs))

    def save_gate(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if bank.adapter is not None:
            output = output + bank.adapter(args[0])
        kept["gate"] = output if bank.sparse is None else keep_largest(bank.sparse, output)

    def read_bank(_: nn.Module, args: tuple[Any, ...]) -> None:
        coefficients: Tensor = args[0]
        gate, weights = kept.pop("gate", None), kept.pop("weights", None)
        if weights is not None:
            coefficients = coefficients * weights
        read(bank, coefficients, None if gate is None else gate[..., : bank.size], weights)

    with ExitStack() as hooks:
        if bank.is_weighted:
            handle = bank.keys.register_forward_pre_hook(save_input, with_kwargs=True)
            hooks.callback(handle.remove)
        if bank.gated:
            hooks.callback(bank.keys.register_forward_hook(save_gate).remove)
        hooks.callback(bank.values.register_forward_pre_hook(read_bank).remove)
        yield


@contextmanager
def _editing_dense(bank: DenseBank, edit: EditBank) -> Iterator[None]:
    """Run every forward pass with the coefficients w · m of a bank that `edit` returns."""
    kept: list[Tensor] = []

    def save_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept.append(bank.weights(first_tensor(args, kwargs)).reshape(-1, 1))

    def replace(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        m = args[0].reshape(-1, bank.size)  # some families flatten batch and position themselves
        tokens = torch.arange(len(m), device=m.device)
        if bank.is_weighted:
            weights = kept.pop()
            # Where w is 0, whatever the coefficient becomes is multiplied by 0 again.
            divisor = torch.where(weights == 0, torch.ones_like(weights), weights)
            edited = edit(bank, m * weights, tokens) / divisor
        else:
            edited = edit(bank, m, tokens)
        return (edited.reshape(args[0].shape), *args[1:])

    with ExitStack() as hooks:
        if bank.is_weighted:
            handle = bank.keys.register_forward_pre_hook(save_input, with_kwargs=True)
            hooks.callback(handle.remove)
        hooks.callback(bank.values.register_forward_pre_hook(replace).remove)
        yield


def find_banks(family: str, row: Family, layer: int, block: nn.Module, hidden: int) -> LayerBanks:
    """Return the banks of a layer: its experts if it has some, else what the row says."""
    found = find_experts(block)
    if found is not None:
        path, experts = found
        check_experts(family, path, experts)
        return _expert_banks(row, layer, block, hidden, path, experts)
    values = find_module(block, row.values)
    if values is None:
        return LayerBanks()
    keys = get_module(block, row.keys)
    up = keys if row.up == FUSED else find_module(block, row.up)
    sparse = find_module(block, row.sparse)
    adapter = None
    if row.adapters is not None:
        owner: Any = get_module(block, row.adapters.rpartition(".")[0])
        adapter = get_module(block, row.adapters)[owner.layer_dic[layer]]  # type: ignore[index]
    size = linear_shape(values)[1]
    bank = DenseBank(layer, size, 0, "dense", 1.0, values, keys, up, None, sparse, adapter)
    return LayerBanks([bank], keys, [values])


def _expert_banks(
    row: Family, layer: int, block: nn.Module, hidden: int, path: str, experts: RoutedExperts
) -> LayerBanks:
    """Return the banks of a layer with routed experts: dense ones first, then shared ones."""
    parent_path = path if experts.runs_router else path.rpartition(".")[0] or path
    parent: Any = get_module(block, parent_path)
    half = getattr(parent, "shared_expert_combination_strategy", "sum") == "average"
    factor = 0.5 if half else 1.0
    # A norm inside the module comes after the sum of its experts.
    is_normed = row.post_norm is not None and row.post_norm.startswith(f"{parent_path}.")
    found = LayerBanks(input=parent, outputs=[experts.module if is_normed else parent])
    offset = 0
    values = find_module(block, row.values)
    if values is not None:
        keys, up = get_module(block, row.keys), find_module(block, row.up)
        offset = linear_shape(values)[1]
        found.banks.append(DenseBank(layer, offset, 0, "dense", 1.0, values, keys, up))
        found.outputs.append(values)
    for shared_path, keys, up, values in _shared_experts(row, block, parent_path, path, hidden):
        size = linear_shape(values)[1]
        gate = find_module(block, f"{shared_path}_gate")
        bank = DenseBank(layer, size, offset, "shared", factor, values, keys, up, gate)
        found.banks.append(bank)
        if is_normed or not shared_path.startswith(f"{parent_path}."):
            found.outputs.append(get_module(block, shared_path))
        offset += size
    factor *= float(getattr(parent, "routed_scaling_factor", 1.0))
    to_latent, from_latent = _latent_maps(parent, experts.width, hidden)
    for number in range(experts.n_experts):
        found.banks.append(
            ExpertBank(
                *(layer, experts.size, offset, "expert", factor, experts, number),
                to_latent=to_latent,
                from_latent=from_latent,
            )
        )
        offset += experts.size
    found.constant = experts.constant
    if from_latent is not None and getattr(from_latent, "bias", None) is not None:
        found.constant = linear_bias(from_latent)
    return found


def _shared_experts(
    row: Family, block: nn.Module, parent: str, experts: str, hidden: int
) -> Iterator[tuple[str, nn.Module, nn.Module | None, nn.Module]]:
    """Yield path, keys, up and values of every expert that all tokens reach.

    It is a module with two or three linear maps in the module that has the routed experts, or
    elsewhere in the layer if its name says that it is shared.
    """
    for path, module in block.named_modules():
        inside = path.startswith(f"{parent}.")
        if not (inside or "shared" in path) or path == experts:
            continue
        maps = {
            name: child for name, child in module.named_children() if isinstance(child, nn.Linear)
        }
        matched = _match_maps(row, maps, hidden)
        if matched is not None:
            yield path, *matched


def _match_maps(
    row: Family, maps: dict[str, nn.Linear], hidden: int
) -> tuple[nn.Module, nn.Module | None, nn.Module] | None:
    """Return keys, up and values among the linear maps of a module; None if they do not fit."""
    if not 2 <= len(maps) <= 3:
        return None
    leaf = row.values.rpartition(".")[2]
    *_, last = maps
    name = leaf if leaf in maps else next((one for one in maps if "down" in one), last)
    values = maps[name]
    others = {other: one for other, one in maps.items() if other != name}
    size = values.in_features
    widths = {one.out_features for one in others.values()}
    if values.out_features != hidden or any(one.in_features != hidden for one in others.values()):
        return None
    if len(others) == 1:
        (keys,) = others.values()
        if widths == {2 * size}:
            return keys, keys, values
        return (keys, None, values) if widths == {size} else None
    gate = next((other for other in others if "gate" in other), next(iter(others)))
    (up,) = (one for other, one in others.items() if other != gate)
    return (others[gate], up, values) if widths == {size} else None


def _latent_maps(
    parent: nn.Module, width: int, hidden: int
) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the linear maps before and behind experts that work in a latent space."""
    if width == hidden:
        return None, None
    maps = [child for child in parent.children() if isinstance(child, nn.Linear)]
    before = [one for one in maps if (one.in_features, one.out_features) == (hidden, width)]
    behind = [one for one in maps if (one.in_features, one.out_features) == (width, hidden)]
    if len(before) != 1 or len(behind) != 1:
        raise ModelError(
            f"The experts have an input of width {width}, but the residual stream has {hidden}, and"
            " no linear maps lie between them."
        )
    return before[0], behind[0]
