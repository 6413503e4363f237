"""What layers pass on where it is not one residual stream, or not to the next layer.

Several streams:

    S = (s₁ … sₙ)        C(S) = what the model's own head reads of all streams: one vector
    o = C(S),    r = C(S without the layer's memories),    y = o − r

A layer with hyper-connections or AltUp mixes its streams anew and writes m · V + b to each of them
with a weight that depends on the token, so no vector of the stream is r. But the model ends with a
map C from its streams to the one vector that its head reads. Read through C, every layer has an r
and an o, and y is all that its memories change. r needs a second run of the layer, with a
feed-forward part that gives zeros (`trace.py`). With one stream, C(s) = s.

Layers that run several times on a text have other coefficients in each run. Each run counts as a
layer of its own, with the same keys and values.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffmem.models.families import ALTUP, Family
from ffmem.models.modules import device_of, get_module


class Streams(NamedTuple):
    """What layers pass on, and how the head reads it."""

    collapse: Callable[[Tensor], Float[Tensor, "batch position hidden"]]
    """C: from what a layer passes on to one vector for each position."""
    batch_axis: int = 0
    """The axis of sentences; positions follow. It is 1 where streams come first."""

    def shape(self, streams: Tensor) -> torch.Size:
        """Return the numbers of sentences and positions."""
        return streams.shape[self.batch_axis : self.batch_axis + 2]

    def by_token(self, streams: Tensor) -> Float[Tensor, "batch position *rest"]:
        """Return a view with the axes of sentences and positions first."""
        return streams.movedim((self.batch_axis, self.batch_axis + 1), (0, 1))


def find_streams(model: nn.Module, row: Family) -> Streams:
    """Return how a model with this row carries its streams."""
    if row.streams is None:
        return Streams(lambda stream: stream)
    if row.streams == ALTUP:
        trunk = get_module(model, row.blocks.rpartition(".")[0])
        projections = trunk.get_submodule("altup_unembed_projections")
        return Streams(lambda streams: _altup_mean(list(projections.children()), streams), 1)
    module = get_module(model, row.streams)

    def collapse(streams: Tensor) -> Tensor:
        found: Tensor = module(streams.to(device_of(module)))
        return found

    return Streams(collapse)


def _altup_mean(
    projections: list[nn.Module], streams: Float[Tensor, "stream batch position hidden"]
) -> Float[Tensor, "batch position hidden"]:
    """Return the mean of Gemma 3n's streams, projected and scaled to the size of the first one."""
    first, *others = streams
    size = first.square().mean(dim=-1, keepdim=True).sqrt()
    found = [first]
    for projection, stream in zip(projections, others, strict=True):
        projected = projection(stream.to(device_of(projection))).to(first)
        least = torch.tensor(1e-5, device=first.device)
        own_size = torch.maximum(projected.square().mean(dim=-1, keepdim=True), least).sqrt()
        found.append(projected * size / own_size)
    return torch.stack(found).mean(dim=0)


# Layers that run several times


def unroll(model: Any) -> None:
    """Make a model with a low and a high stack run a layer of `unrolled` in place of each run.

    The list is in the order of runs. Its layers are modules of their own, so that a hook sees one
    run, but their weights are those of the stacks. It is no part of the model's state.
    """
    trunk, config = model.model, model.config
    if "unrolled" in vars(trunk):
        return
    stacks = ([trunk.L_module] * config.L_cycles + [trunk.H_module]) * config.H_cycles
    layers = [_copy_with_same_weights(layer) for stack in stacks for layer in stack.layers]
    vars(trunk)["unrolled"] = nn.ModuleList(layers)
    trunk.L_bp_cycles_padded = [config.L_cycles] * config.H_cycles  # no run without gradients
    for stack in (trunk.L_module, trunk.H_module):
        stack.forward = partial(_run_unrolled, trunk, stack)


def _copy_with_same_weights(layer: nn.Module) -> nn.Module:
    weights: dict[int, Any] = {id(one): one for one in (*layer.parameters(), *layer.buffers())}
    return copy.deepcopy(layer, weights)


def _run_unrolled(trunk: Any, stack: Any, stream: Tensor, cycle_offset: int, **kwargs: Any) -> Any:
    """Run the layers of one run of a stack, as the stack's own forward does."""
    for layer in trunk.unrolled[cycle_offset : cycle_offset + len(stack.layers)]:
        stream = layer(stream, cycle_offset=cycle_offset, **kwargs)
    return stack.final_norm(stream)
