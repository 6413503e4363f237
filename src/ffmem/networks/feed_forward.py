"""The feed-forward layer as a memory, plain or gated, and the neural memory that it resembles.

FeedForward     m = f(x · Kᵀ + b_K)              y = m · V + b
GatedMemory     m = silu(x · Kᵀ) ⊙ (x · Uᵀ)      y = m · V
SoftmaxMemory   m = softmax(x · Kᵀ)              y = m · V
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ffmem.networks.config import AdaptiveConfig
from ffmem.networks.memory import Memory
from ffmem.networks.seen import Seen
from ffmem.networks.slots import Slots
from ffmem.networks.stream import IntoStream

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
}


class Pointwise(Memory):
    """A memory that looks at one position alone."""

    def forward(
        self, x: Float[Tensor, "batch position hidden"]
    ) -> Float[Tensor, "batch position hidden"]:
        """Return y."""
        return self.read(self.coefficients(x), x)


class FeedForward(Pointwise):
    """ReLU or GELU, with biases, as in the paper's model."""

    def __init__(self, config: AdaptiveConfig, activation: str) -> None:
        super().__init__()
        self.keys = nn.Linear(config.hidden_size, config.intermediate_size)
        self.values = IntoStream(config.intermediate_size, config.hidden_size)
        self.activation = ACTIVATIONS[activation]

    def coefficients(
        self, x: Float[Tensor, "batch position hidden"], seen: Seen | None = None
    ) -> Float[Tensor, "batch position memory"]:
        """Return f(x · Kᵀ + b_K)."""
        return self.activation(self.keys(x))


class GatedMemory(Pointwise):
    """SwiGLU: two keys for each memory."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.keys = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.values = IntoStream(config.intermediate_size, config.hidden_size, bias=False)

    def coefficients(
        self, x: Float[Tensor, "batch position hidden"], seen: Seen | None = None
    ) -> Float[Tensor, "batch position memory"]:
        """Return silu(x · Kᵀ) ⊙ (x · Uᵀ)."""
        gate: Tensor = self.keys(x)
        up: Tensor = self.up(x)
        return functional.silu(gate) * up


class SoftmaxValues(Slots):
    """V = √N · weight: a softmax over N memories averages, and N(0, 1) values last."""

    def __init__(self, n_memories: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_memories, hidden))
        self.scale = math.sqrt(n_memories)
        self.deviation = 1 / self.scale

    @property
    def size(self) -> tuple[int, int]:
        """How many numbers it gives and takes."""
        return self.weight.shape[1], self.weight.shape[0]

    def matrix(self) -> Float[Tensor, "hidden memory"]:
        """Return Vᵀ."""
        return self.scale * self.weight.T

    def forward(
        self, coefficients: Float[Tensor, "batch position memory"]
    ) -> Float[Tensor, "batch position hidden"]:
        """Return m · V."""
        return (self.scale * coefficients) @ self.weight


class SoftmaxMemory(Pointwise):
    """Key-value neural memory (Sukhbaatar 2015): coefficients are positive and sum to 1."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.keys = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.values = SoftmaxValues(config.intermediate_size, config.hidden_size)

    def coefficients(
        self, x: Float[Tensor, "batch position hidden"], seen: Seen | None = None
    ) -> Float[Tensor, "batch position memory"]:
        """Return softmax(x · Kᵀ)."""
        scores: Tensor = self.keys(x)
        return scores.softmax(dim=-1)
