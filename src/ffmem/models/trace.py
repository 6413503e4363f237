"""What the layers of a model compute, layer by layer, while it runs.

    o = r + y,    y = m · V + b,    m = f(x · Kᵀ)

A reader is called as soon as a layer is done, with the tensors of that layer alone, so that a
pass may look at everything and hold next to nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ffmem.errors import SelfCheckFailed
from ffmem.models.families import Family
from ffmem.models.modules import first, module


class LayerTrace(NamedTuple):
    """Everything that one layer computed, in the paper's letters.

    `*place` is (batch, position), or one axis where only some places are traced.
    """

    block_input: Float[Tensor, "*place hidden"]
    ff_input: Float[Tensor, "*place hidden"]
    """x"""
    coefficients: Float[Tensor, "*place memory"]
    """m"""
    gate: Float[Tensor, "*place memory"] | None
    """The gate's pre-activation; None in models without one."""
    value_output: Float[Tensor, "*place hidden"]
    """m · V + b, as the model computed it."""
    ff_output: Float[Tensor, "*place hidden"]
    """y"""
    residual: Float[Tensor, "*place hidden"]
    """r, read independently of y."""
    layer_output: Float[Tensor, "*place hidden"]
    """o"""


ReadLayer = Callable[[int, LayerTrace], None]
Pick = Callable[[Tensor], Tensor]
"""Copies what is to be traced of a tensor; copies, for Falcon changes outputs in place."""


class Tracer:
    """Reads what the blocks of a model compute, as the row of its family says."""

    def __init__(
        self,
        row: Family,
        blocks: list[nn.Module],
        widths: list[int],
        multiplier: float,
        family: str,
    ) -> None:
        self.row = row
        self.blocks = blocks
        self.widths = widths
        self.multiplier = multiplier
        self.family = family

    @contextmanager
    def reading(self, read: ReadLayer, pick: Pick) -> Iterator[None]:
        """Call `read` with each layer's trace, in layer order, in every forward pass."""
        with ExitStack() as hooks:
            for layer, block in enumerate(self.blocks):
                seen: dict[str, Tensor] = {}
                for handle in self._watch(layer, block, seen, pick):
                    hooks.callback(handle.remove)
                hooks.callback(block.register_forward_hook(self._give(layer, seen, read)).remove)
            yield

    def _give(self, layer: int, seen: dict[str, Tensor], read: ReadLayer) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            found = self._put_together(layer, seen)
            seen.clear()
            read(layer, found)

        return hook

    def _watch(
        self, layer: int, block: nn.Module, seen: dict[str, Tensor], pick: Pick
    ) -> Iterator[RemovableHandle]:
        """Hook everything that a trace shows."""

        def keep(name: str, tensor: Tensor) -> None:
            seen[name] = pick(tensor)

        def input_of(name: str, path: str) -> RemovableHandle:
            return module(block, path).register_forward_pre_hook(
                lambda _, args, kwargs: keep(name, first(args, kwargs)), with_kwargs=True
            )

        def output_of(name: str, path: str) -> RemovableHandle:
            return module(block, path).register_forward_hook(
                lambda _, args, output: keep(name, first(output, {}))
            )

        row = self.row
        yield input_of("block_input", "")
        yield output_of("layer_output", "")
        if not self.widths[layer]:
            return
        yield input_of("ff_input", row.keys)
        if row.up is not None:
            yield output_of("gate", row.keys)
        yield input_of("coefficients", row.values)
        yield output_of("value_output", row.values)
        if row.post_norm is not None:
            yield output_of("post_norm", row.post_norm)
        if row.attention is not None:
            yield output_of("attention", row.attention)
        elif row.residual is not None:
            yield input_of("residual", row.residual)

    def _put_together(self, layer: int, seen: dict[str, Tensor]) -> LayerTrace:
        """Return a layer's trace from what its hooks saw."""
        row = self.row
        if not self.widths[layer]:
            return _without_memories(seen["block_input"], seen["layer_output"], row.up is not None)
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
                gate=None if row.up is None else seen["gate"][..., : self.widths[layer]],
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


def _without_memories(block_input: Tensor, layer_output: Tensor, gated: bool) -> LayerTrace:
    """Return the trace of a layer without a feed-forward part: r = o, y = 0."""
    nothing = layer_output.new_zeros(*layer_output.shape[:-1], 0)
    return LayerTrace(
        block_input=block_input,
        ff_input=layer_output,
        coefficients=nothing,
        gate=nothing if gated else None,
        value_output=torch.zeros_like(layer_output),
        ff_output=torch.zeros_like(layer_output),
        residual=layer_output,
        layer_output=layer_output,
    )
