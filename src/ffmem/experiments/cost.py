"""What an experiment will take, said before it starts.

    FLOP = 2 · weights of the layers · tokens  +  2 · |V| · width · (2 · layers + 1) · prefixes

and the speed of this machine from a matrix product of a tenth of a second.
"""

import time
from collections.abc import Collection

import torch

from ffmem.experiments.drawn import Drawn
from ffmem.models.memories import Memories

SHARE = 0.7
"""Of the speed of a plain matrix product: what a pass reaches."""


def inference_cost(memories: Memories, drawn: Drawn, parts: Collection[str]) -> str:
    """Return what the pass over a sample costs, in words."""
    n_prefixes = len(drawn.lengths)
    tokens = sum(example.lengths[-1] + 1 for example in drawn.examples)
    trunk = trunk_flop(memories) * tokens
    heads = projection_flop(memories) * n_prefixes if "predictions" in parts else 0.0
    return f"{n_prefixes:,} prefixes, {tokens:,} tokens. {estimate(memories, trunk + heads)}"


def trunk_flop(memories: Memories) -> float:
    """Return the floating-point operations of all layers' linear maps, for one token."""
    weights = {id(w): w.numel() for block in memories.blocks for w in block.parameters()}
    return 2.0 * sum(weights.values())


def projection_flop(memories: Memories) -> float:
    """Return those of the projections of one prefix: two per layer, one for the prediction."""
    output = sum(weight.numel() for weight in memories.head.output.parameters())
    return 2.0 * output * (2 * memories.n_layers + 1)


def estimate(memories: Memories, flop: float) -> str:
    """Return how long so many operations take here, in words."""
    speed = gemm_speed(memories)
    return (
        f"{flop / 1e12:,.3g} TFLOP, {_duration(flop / (SHARE * speed))}"
        f" at {SHARE:.0%} of {speed / 1e9:,.0f} GFLOP/s, measured now."
    )


def gemm_speed(memories: Memories, seconds: float = 0.1) -> float:
    """Return the operations per second of a matrix product in the model's dtype and place."""
    size = 512
    left = torch.ones(size, size, dtype=memories.dtype, device=memories.device)
    left @ left
    done, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        float((left @ left)[0, 0])  # waits for an accelerator
        done += 1
    return done * 2.0 * size**3 / (time.perf_counter() - begin)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {round(seconds / 60)} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"
