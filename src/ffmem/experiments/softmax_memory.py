"""The feed-forward layer beside the neural memory that it resembles (Equations 1 and 2).

    FF(x) = f(x · Kᵀ) · V        MN(x) = softmax(x · Kᵀ) · V

Both read the same keys and values; neither has the output bias here. x · Kᵀ includes the keys'
bias. Gated models have two keys per memory: MN takes the gate's. In persistent memory, MN is each
head's softmax over its slots alone, without the tokens; entropy, effective number and largest
weight are then means over heads. A softmax memory is MN itself:

    softmax      FF(x) = MN(x)
    persistent   FF(x) = Σ over heads of (the head's attention on slots) · (its part of MN(x))
"""

import numpy as np
import torch
from jaxtyping import Float32
from numpy import ndarray
from torch.nn import functional

from ffmem.experiments.kinds import PERSISTENT
from ffmem.experiments.result import Row
from ffmem.models.memories import Memories
from ffmem.models.trace import LayerTrace
from ffmem.stats import spread

NAMES = ("cosine", "entropy", "top1_mass", "distance", "effective")
SLOT_MASS = "slot_mass"
"""Of persistent memory alone: the part of the attention that slots get, mean over heads."""


class SoftmaxMemory:
    """How concentrated the softmax is, and how far the two outputs lie apart."""

    def __init__(self, memories: Memories, n_examples: int) -> None:
        self.memories = memories
        groups = memories.row.softmax_groups
        self.groups: int = 1 if groups is None else getattr(memories.config, groups)
        """Heads, each with a softmax of its own; 1 where one runs over all memories."""
        is_shared = getattr(memories.config, "memory", None) == PERSISTENT
        self.names = (*NAMES, SLOT_MASS) if is_shared else NAMES
        self.found: dict[str, Float32[ndarray, "example layer"]] = {
            name: np.zeros((n_examples, memories.n_layers), np.float32) for name in self.names
        }

    @torch.inference_mode()
    def read(self, examples: slice | ndarray, layer: int, trace: LayerTrace) -> None:
        """Compare the two memories of one layer on some examples."""
        values = self.memories.values(layer).float()
        feed_forward = trace.value_output.float() - self.memories.bias(layer).float()
        if trace.gate is None:
            keys, bias = self.memories.keys(layer), self.memories.key_bias(layer)
            scores = functional.linear(trace.ff_input.float(), keys.float(), bias.float())
        else:
            scores = trace.gate.float()
        scores = scores.unflatten(1, (self.groups, -1))
        totals = scores.logsumexp(dim=2, keepdim=True)
        logs = scores - totals
        weights = logs.exp()
        neural = weights.flatten(1) @ values
        entropy = -torch.linalg.vecdot(weights, logs)
        numbers = {
            "cosine": functional.cosine_similarity(feed_forward, neural),
            "entropy": entropy.mean(dim=1),
            "top1_mass": weights.amax(dim=2).mean(dim=1),
            "distance": (feed_forward - neural).norm(dim=1) / feed_forward.norm(dim=1),
            "effective": entropy.exp().mean(dim=1),
            SLOT_MASS: trace.coefficients.float().sum(dim=1) / self.groups,
        }
        for name in self.names:
            self.found[name][examples, layer] = numbers[name].cpu().numpy()

    def rows(self) -> list[Row]:
        """Return the rows of `neural-memory`."""
        return [self._row(layer) for layer in self.memories.layout.memory_layers]

    def _row(self, layer: int) -> Row:
        by_name = {name: column[:, layer] for name, column in self.found.items()}
        # A layer that adds nothing lies at no distance that could be told in its own lengths.
        some = np.isfinite(by_name["distance"])
        spreads = {name: spread(column[some]) for name, column in by_name.items()}
        return {
            "layer": layer,
            **{name: spreads[name]["mean"] for name in self.names},
            "cosine_q1": spreads["cosine"]["q1"],
            "cosine_q3": spreads["cosine"]["q3"],
            "n": int(some.sum()),
        }
