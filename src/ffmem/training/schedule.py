"""How the learning rate goes: up in a straight line, then down along a cosine to a tenth.

η(n) = η · (n + 1)/w                                       n < w
η(n) = η · (0.1 + 0.9 · (1 + cos(π · (n − w)/(N − w)))/2)    else
"""

import math

LOWEST = 0.1


def default_warmup(steps: int) -> int:
    """Return how many steps warm up if nothing is said."""
    return min(500, steps // 20)


def learning_rate(step: int, steps: int, warmup: int, highest: float) -> float:
    """Return the learning rate of a step, counted from 0."""
    if step < warmup:
        return highest * ((step + 1) / warmup)
    way = (step - warmup) / max(1, steps - warmup)
    return highest * (LOWEST + (1 - LOWEST) * (1 + math.cos(math.pi * way)) / 2)
