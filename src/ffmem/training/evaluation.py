"""Perplexity of a model over a whole stream, block by block.

    perplexity = exp(−1/T · Σ log p(token | those before it in its block)),   T = tokens in all

Every token counts, the start tokens that open sentences too. The first one, which has nothing
before it, is taken as what follows the last. In float32, whatever the training ran in.
"""

import math

import numpy as np
import torch
from jaxtyping import Int
from numpy import ndarray

from ffmem.networks.model import AdaptiveLM

NOT_COUNTED = -100


@torch.no_grad()
def perplexity(
    model: AdaptiveLM, stream: Int[ndarray, " token"], context: int, n_blocks: int
) -> float:
    """Return the perplexity of a model, some blocks at a time; it stays in training if it was."""
    was_training = model.training
    model.train(False)
    n_rows = -(-len(stream) // context)
    tokens = np.zeros(n_rows * context, np.int64)
    targets = np.full(n_rows * context, NOT_COUNTED, np.int64)
    tokens[: len(stream)] = stream
    targets[: len(stream)] = np.roll(stream, -1)
    total = 0.0
    for first in range(0, n_rows, n_blocks):
        part = slice(first * context, (first + n_blocks) * context)
        inputs, following = (
            torch.from_numpy(ids[part]).view(-1, context).to(model.device)
            for ids in (tokens, targets)
        )
        n_counted = int((following >= 0).sum())
        total += float(model.loss(inputs, following)) * n_counted
    model.train(was_training)
    mean = total / len(stream)
    return math.exp(mean) if mean < 700 else math.inf
