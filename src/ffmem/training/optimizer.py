"""AdamW for a model: matrices decay; norms, biases and embeddings do not.

The fused form does a whole step in one call per group, on the CPU as well.
"""

import torch
from torch import nn

BETAS = (0.9, 0.98)
EPSILON = 1e-8


def adamw(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """Return the optimizer of a model, at rest."""
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for weight in model.parameters():
        (free if weight.ndim < 2 or id(weight) in embeddings else decayed).append(weight)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPSILON, fused=True)
