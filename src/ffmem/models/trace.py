"""Traces: what each layer computes during a forward pass.

    o = r + y,    y = m · V + b,    m = f(x · Kᵀ)        with experts, y = Σ w · (m · V + b)

Hooks collect the tensors of one layer and pass them on as soon as the layer is done, so that a pass
can look at everything while it holds only one layer.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffmem.errors import SelfCheckFailed
from ffmem.models.banks import DenseBank, ExpertBank, LayerBanks
from ffmem.models.experts import ExpertRows, RoutedExperts
from ffmem.models.families import RERUN
from ffmem.models.modules import align_input, first_tensor, get_module

if TYPE_CHECKING:
    from ffmem.models.memories import Memories


class LayerTrace(NamedTuple):
    """Everything that one layer computed, with the paper's letters.

    `*place` is (batch, position), or a single axis if only some positions are traced.
    """

    block_input: Float[Tensor, "*place hidden"]
    ff_input: Float[Tensor, "*place hidden"]
    """x"""
    coefficients: Float[Tensor, "*place memory"]
    """m; in layers with experts w · m, through all banks, and 0 where a token is not routed."""
    gate: Float[Tensor, "*place memory"] | None
    """The gate's pre-activation; None if the model is not gated. 0 where it is not computed."""
    value_output: Float[Tensor, "*place hidden"]
    """m · V + b, as the model computed it."""
    ff_output: Float[Tensor, "*place hidden"]
    """y"""
    residual: Float[Tensor, "*place hidden"]
    """r, read independently of y."""
    layer_output: Float[Tensor, "*place hidden"]
    """o"""
    weights: Float[Tensor, "*place bank"] | None = None
    """w of each bank, 0 where a token is not routed; None in layers without experts."""


ReadLayer = Callable[[int, LayerTrace], None]
"""Called with a layer's number and trace."""

Pick = Callable[[Tensor], Tensor]
"""Copies the traced positions of a tensor. It must copy: Falcon changes outputs in place."""


@contextmanager
def hook_layers(memories: "Memories", read: ReadLayer, pick: Pick) -> Iterator[None]:
    """Call `read` with each layer's trace, in layer order, in every forward pass.

    A layer that text alone does not run, such as one that reads images, leaves the stream as it is.
    """
    n_read = 0

    def read_next(layer: int, trace: LayerTrace) -> None:
        nonlocal n_read
        for skipped in range(n_read, layer):
            stream = trace.block_input
            read(skipped, _trace_without_memories(stream, stream, memories.gated))
        read(layer, trace)
        n_read = (layer + 1) % memories.n_layers

    with ExitStack() as hooks:
        for layer, block in enumerate(memories.blocks):
            # This handle goes first, so that the other hooks see the input where it is used.
            handle = align_input(block)
            if handle is not None:
                hooks.callback(handle.remove)
            _hook_layer(memories, layer, block, read_next, pick, hooks)
        yield


def _hook_layer(
    memories: "Memories",
    layer: int,
    block: nn.Module,
    read: ReadLayer,
    pick: Pick,
    hooks: ExitStack,
) -> None:
    """Collect the tensors of a layer, and call `read` when its block is done."""
    tensors: dict[str, Tensor] = {}
    row, banks = memories.rows[layer], memories.banks[layer]
    collapse = memories.streams.collapse

    def save_input(name: str, module: nn.Module) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors[name] = pick(first_tensor(args, kwargs))

        hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def save_output(name: str, module: nn.Module) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            found = pick(first_tensor(output, {}))
            tensors[name] = tensors[name] + found if name in tensors else found

        hooks.callback(module.register_forward_hook(hook).remove)

    def save_passed_on(experts: RoutedExperts) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            assert experts.passed_on is not None
            tensors["passed_on"] = pick(experts.passed_on)

        hooks.callback(experts.module.register_forward_hook(hook).remove)

    def save_stream(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors["block_input"] = pick(collapse(first_tensor(args, kwargs)))

    def finish(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        tensors["layer_output"] = pick(collapse(first_tensor(output, {})))
        saved = dict(tensors)
        if banks and row.residual == RERUN:  # its hooks save again, what nobody reads
            saved["residual"] = pick(collapse(_without_memories(banks, block, args, kwargs)))
        tensors.clear()
        read(layer, _make_trace(memories, layer, saved))

    handle = block.register_forward_pre_hook(save_stream, with_kwargs=True)
    hooks.callback(handle.remove)
    if banks:
        assert banks.input is not None
        save_input("ff_input", banks.input)
        collect = _collect_routed if banks.routed else _collect_dense
        hooks.enter_context(collect(memories, layer, pick, tensors))
        for module in banks.outputs:
            save_output("value_output", module)
        if banks.experts is not None and banks.experts.n_identities:
            save_passed_on(banks.experts)
        if row.post_norm is not None:
            save_output("post_norm", get_module(block, row.post_norm))
        if row.added is not None:
            save_output("added", get_module(block, row.added))
        if row.attention is not None:
            save_output("attention", get_module(block, row.attention))
        elif row.residual is not None and row.residual != RERUN:
            save_input("residual", get_module(block, row.residual))
    hooks.callback(block.register_forward_hook(finish, with_kwargs=True).remove)


def _without_memories(
    banks: LayerBanks, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Run a block again with a feed-forward part that gives zeros, and return its output."""

    def silence(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            return torch.zeros_like(output)
        return (torch.zeros_like(output[0]), *output[1:])

    with ExitStack() as hooks:
        for module in banks.outputs:
            hooks.callback(module.register_forward_hook(silence).remove)
        return first_tensor(block.forward(*args, **kwargs), {})


def _collect_dense(
    memories: "Memories", layer: int, pick: Pick, tensors: dict[str, Tensor]
) -> AbstractContextManager[None]:
    """Save coefficients and gate of a layer with one bank."""

    def read(_: DenseBank, coefficients: Tensor, gate: Tensor | None, __: Tensor | None) -> None:
        tensors["coefficients"] = pick(coefficients)
        if gate is not None:
            tensors["gate"] = pick(gate)

    return memories.banks[layer].reading(read, _no_experts)


def _no_experts(bank: ExpertBank, _: ExpertRows) -> None:
    raise AssertionError(f"layer {bank.layer} has no experts")


@contextmanager
def _collect_routed(
    memories: "Memories", layer: int, pick: Pick, tensors: dict[str, Tensor]
) -> Iterator[None]:
    """Save coefficients, gate and weights of a layer with experts, through all its banks."""
    banks, width = memories.banks[layer], memories.layout.widths[layer]
    numbers = {bank: number for number, bank in enumerate(banks)}
    n_tokens = 0

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal n_tokens
        x = first_tensor(args, kwargs)
        n_tokens = x.numel() // x.shape[-1]
        tokens = pick(torch.arange(n_tokens, device=x.device)[:, None])[..., 0]
        tensors["tokens"] = tokens
        tensors["coefficients"] = x.new_zeros(*tokens.shape, width)
        tensors["weights"] = x.new_zeros(*tokens.shape, len(banks))
        if memories.gated:
            tensors["gate"] = x.new_zeros(*tokens.shape, width)

    def read_dense(
        bank: DenseBank, coefficients: Tensor, gate: Tensor | None, weights: Tensor | None
    ) -> None:
        tensors["coefficients"][..., bank.memories] = pick(coefficients)
        tensors["weights"][..., numbers[bank]] = 1.0 if weights is None else pick(weights)[..., 0]
        if gate is not None:
            tensors["gate"][..., bank.memories] = pick(gate)

    def read_expert(bank: ExpertBank, rows: ExpertRows) -> None:
        # The row of the expert that each traced position is; −1 if it is not routed there.
        row_of = rows.tokens.new_full((n_tokens,), -1)
        row_of[rows.tokens] = torch.arange(len(rows.tokens), device=row_of.device)
        row = row_of[tensors["tokens"]]
        routed, row = row >= 0, row[row >= 0]
        coefficients = tensors["coefficients"][..., bank.memories]
        coefficients[routed] = rows.coefficients[row].to(coefficients.dtype)
        weights = tensors["weights"]
        weights[..., numbers[bank]][routed] = rows.weights[row, 0].to(weights.dtype)
        if rows.gate is not None:
            tensors["gate"][..., bank.memories][routed] = rows.gate[row].to(coefficients.dtype)

    assert banks.input is not None
    handle = banks.input.register_forward_pre_hook(begin, with_kwargs=True)
    try:
        with banks.reading(read_dense, read_expert):
            yield
    finally:
        handle.remove()


def _make_trace(memories: "Memories", layer: int, tensors: dict[str, Tensor]) -> LayerTrace:
    """Return the trace of a layer from the tensors that its hooks saved."""
    row = memories.rows[layer]
    if not memories.banks[layer]:
        return _trace_without_memories(
            tensors["block_input"], tensors["layer_output"], memories.gated
        )
    try:
        if row.attention is None:
            residual = tensors["residual"]
        else:
            residual = tensors["block_input"] + tensors["attention"]
        residual = _scale(residual, memories.factor(layer, row.residual_scale))
        if "passed_on" in tensors:  # experts that give their input back are no memories
            tensors["value_output"] -= tensors["passed_on"]
            residual = residual + tensors["passed_on"]
        ff_output = tensors["value_output" if row.post_norm is None else "post_norm"]
        if row.added is not None:
            residual = residual + tensors["added"]
        if row.offset is not None:
            residual = residual + row.offset
        residual = _scale(residual, memories.factor(layer, row.layer_scale))
        ff_output = _scale(ff_output, memories.output_scale(layer))
        if row.residual == RERUN:
            ff_output = tensors["layer_output"] - residual
        return LayerTrace(
            block_input=tensors["block_input"],
            ff_input=tensors["ff_input"],
            coefficients=tensors["coefficients"],
            gate=tensors["gate"] if memories.gated else None,
            value_output=tensors["value_output"],
            ff_output=ff_output,
            residual=residual,
            layer_output=tensors["layer_output"],
            weights=tensors.get("weights"),
        )
    except KeyError as missing:
        raise SelfCheckFailed(
            f"Layer {layer} of this {memories.family!r} model bypasses the module from which ffmem"
            f" reads its {missing.args[0]}, so ffmem cannot read the model."
        ) from None


def _scale(vectors: Tensor, factor: float | Tensor) -> Tensor:
    return vectors if isinstance(factor, float) and factor == 1 else vectors * factor


def _trace_without_memories(block_input: Tensor, layer_output: Tensor, gated: bool) -> LayerTrace:
    """Return the trace of a layer without a feed-forward part: r = o, y = 0."""
    empty = layer_output.new_zeros(*layer_output.shape[:-1], 0)
    return LayerTrace(
        block_input=block_input,
        ff_input=layer_output,
        coefficients=empty,
        gate=empty if gated else None,
        value_output=torch.zeros_like(layer_output),
        ff_output=torch.zeros_like(layer_output),
        residual=layer_output,
        layer_output=layer_output,
    )
