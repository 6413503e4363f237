"""What the softmax view loses of every feed-forward layer of a model, on some text.

    loss = min over s, τ of  ‖y − b − s · MN_τ(x)‖² / ‖y − b‖²

Where `softmax_memory` compares the layer with MN as it stands (s = τ = 1), this gives MN its best
temperature and scale in each layer, so that what is left is lost by the softmax itself. Gated
models have two keys per memory: MN takes the gate's. Beside it stand what the best constant vector
misses (`constant`) and how much of ‖y − b‖² the longest hundredth of the places has (`longest`):
where a few places have most of it, the loss speaks of them.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Int
from torch import Tensor

from ffmem.errors import CorpusError
from ffmem.experiments.result import Row
from ffmem.models.memories import Memories
from ffmem.models.trace import LayerTrace
from ffmem.networks.exact_view import SoftmaxFit, constant_loss, fit_softmax_view, longest_share


def softmax_loss(memories: Memories, batches: Iterable[Int[Tensor, "_ _"]]) -> list[Row]:
    """Return a row per layer: the best softmax view over all places but each text's first.

    A batch is "batch position", without padding; batches may differ in both. The first position
    sees itself alone; in many models it is an attention sink, so long that the squares of all
    other places would not count beside it. Inputs and outputs of all layers are held:
    8 · layers · hidden bytes per token.
    """
    inputs: list[list[Tensor]] = [[] for _ in range(memories.n_layers)]
    outputs: list[list[Tensor]] = [[] for _ in range(memories.n_layers)]

    def read(layer: int, trace: LayerTrace) -> None:
        inputs[layer].append(trace.ff_input[:, 1:].flatten(0, 1).float())
        outputs[layer].append(trace.value_output[:, 1:].flatten(0, 1).float())

    for tokens in batches:
        with memories.tracing(read, tokens):
            memories.forward(tokens)
    if not any(map(len, inputs[0])):
        raise CorpusError("No text has a second token to look at. Give longer texts.")
    return [
        _row(memories, layer, torch.cat(inputs[layer]), torch.cat(outputs[layer]))
        for layer in range(memories.n_layers)
    ]


@torch.inference_mode()
def _row(memories: Memories, layer: int, x: Tensor, output: Tensor) -> Row:
    """Return how near a softmax comes to one layer."""
    read = output - memories.bias(layer).float()
    row: Row = {"layer": layer, "n": len(x)}
    if not (read != 0).any():  # no memory is active: nothing can be lost
        return row | dict.fromkeys((*SoftmaxFit._fields, "constant", "longest"))
    keys, values = memories.keys(layer).float(), memories.values(layer).float()
    fit = fit_softmax_view(x, keys, memories.key_bias(layer).float(), values, read)
    beside = {"constant": constant_loss(read), "longest": longest_share(read)}
    return row | fit._asdict() | beside
