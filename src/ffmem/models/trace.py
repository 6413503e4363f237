"""Traces: what each layer computes during a forward pass.

    o = r + y,    y = m · V + b,    m = f(x · Kᵀ)

Hooks collect the tensors of one layer and pass them on as soon as the layer is done, so that a pass
can look at everything while it holds only one layer.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffmem.errors import SelfCheckFailed
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
    """m"""
    gate: Float[Tensor, "*place memory"] | None
    """The gate's pre-activation; None if the model is not gated."""
    value_output: Float[Tensor, "*place hidden"]
    """m · V + b, as the model computed it."""
    ff_output: Float[Tensor, "*place hidden"]
    """y"""
    residual: Float[Tensor, "*place hidden"]
    """r, read independently of y."""
    layer_output: Float[Tensor, "*place hidden"]
    """o"""


ReadLayer = Callable[[int, LayerTrace], None]
"""Called with a layer's number and trace."""

Pick = Callable[[Tensor], Tensor]
"""Copies the traced positions of a tensor. It must copy: Falcon changes outputs in place."""


@contextmanager
def hook_layers(memories: "Memories", read: ReadLayer, pick: Pick) -> Iterator[None]:
    """Call `read` with each layer's trace, in layer order, in every forward pass."""
    with ExitStack() as hooks:
        for layer, block in enumerate(memories.blocks):
            # This handle goes first, so that the other hooks see the input where it is used.
            handle = align_input(block)
            if handle is not None:
                hooks.callback(handle.remove)
            _hook_layer(memories, layer, block, read, pick, hooks)
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

    def save_input(name: str, path: str) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors[name] = pick(first_tensor(args, kwargs))

        module = get_module(block, path)
        hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def save_output(name: str, path: str) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            tensors[name] = pick(first_tensor(output, {}))

        hooks.callback(get_module(block, path).register_forward_hook(hook).remove)

    def finish(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        trace = _make_trace(memories, layer, tensors)
        tensors.clear()
        read(layer, trace)

    row = memories.row
    save_input("block_input", "")
    save_output("layer_output", "")
    if memories.layout.widths[layer]:
        save_input("ff_input", row.keys)
        if row.up is not None:
            save_output("gate", row.keys)
        save_input("coefficients", row.values)
        save_output("value_output", row.values)
        if row.post_norm is not None:
            save_output("post_norm", row.post_norm)
        if row.attention is not None:
            save_output("attention", row.attention)
        elif row.residual is not None:
            save_input("residual", row.residual)
    hooks.callback(block.register_forward_hook(finish).remove)


def _make_trace(memories: "Memories", layer: int, tensors: dict[str, Tensor]) -> LayerTrace:
    """Return the trace of a layer from the tensors that its hooks saved."""
    row, n_memories = memories.row, memories.layout.widths[layer]
    if not n_memories:
        return _trace_without_memories(
            tensors["block_input"], tensors["layer_output"], memories.gated
        )
    try:
        if row.attention is None:
            residual = tensors["residual"]
        else:
            residual = tensors["block_input"] + tensors["attention"]
        ff_output = tensors["value_output" if row.post_norm is None else "post_norm"]
        if memories.multiplier != 1:
            ff_output = ff_output * memories.multiplier
        return LayerTrace(
            block_input=tensors["block_input"],
            ff_input=tensors["ff_input"],
            coefficients=tensors["coefficients"],
            gate=None if row.up is None else tensors["gate"][..., :n_memories],
            value_output=tensors["value_output"],
            ff_output=ff_output,
            residual=residual,
            layer_output=tensors["layer_output"],
        )
    except KeyError as missing:
        raise SelfCheckFailed(
            f"Layer {layer} of this {memories.family!r} model bypasses the module from which ffmem"
            f" reads its {missing.args[0]}, so ffmem cannot read the model."
        ) from None


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
