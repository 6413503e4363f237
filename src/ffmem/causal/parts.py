"""One memory's part of what a layer adds: m · v as it reaches the residual stream.

    y = Σ mᵢ · vᵢ + b        behind a post-norm: y = Σ mᵢ · vᵢ / σ + …

Values are `PromptValues`: with the post-norm's gain or the multiplier folded in.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.models.head import Norm
from ffmem.models.memories import Memories
from ffmem.models.modules import get_module
from ffmem.models.trace import LayerTrace

VALUE_TOKENS = 5


def divisor(memories: Memories, layer: int, trace: LayerTrace) -> float:
    """Return what the post-norm divides the parts by at a traced place; 1 where there is none."""
    path = memories.row.post_norm
    if path is None or memories.banks[layer] is None:
        return 1.0
    norm = Norm(get_module(memories.blocks[layer], path), memories.hidden)
    return float(norm.denominator(trace.value_output)[0])


@torch.no_grad()
def promoted(
    memories: Memories,
    values: Float[Tensor, "memory hidden"],
    coefficients: Float[Tensor, " memory"],
    shown: list[str],
) -> list[list[str]]:
    """Return the tokens that each m · v promotes most; a memory that rests is read as v.

    None where v is all zeros, such as that of a token which is not there in a lambda layer.
    """
    at_work = torch.where(coefficients == 0, 1.0, coefficients).to(values.device)
    logits = memories.head.folded(values.float() * at_work[:, None])
    ids = logits.topk(min(VALUE_TOKENS, logits.shape[1]), dim=1).indices.tolist()
    there = values.any(dim=1).tolist()
    return [
        [shown[id] for id in row] if is_there else []
        for row, is_there in zip(ids, there, strict=True)
    ]
