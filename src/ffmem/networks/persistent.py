"""All-attention with persistent memory (Sukhbaatar 2019): one softmax over tokens and slots.

    a = softmax over c ≤ t and i of [ q_t · k_c , q_t · m^k_i ] / √d_h          head by head
    o_t = h_t + W_o · Σ_c a_tc · v_c  +  W_o · Σ_i a_ti · m^v_i
          └──────────── r ───────────┘  └──────────── y ────────┘

There is no feed-forward layer: y is what the slots add. The memory (head, slot) has the attention
weight a_ti as its coefficient, W_qᵀ · m^k / √d_h as its key and W_o · m^v as its value.
Slots are stored as m^k = √d_h · weight and m^v = √N · weight, and have no position.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffmem.networks.config import AdaptiveConfig
from ffmem.networks.memory import Memory
from ffmem.networks.seen import Seen
from ffmem.networks.slots import Slots
from ffmem.networks.stream import IntoStream


class PersistentKeys(Slots):
    """The keys of the slots, and the queries that meet them."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.n_heads, self.n_slots = config.num_attention_heads, config.intermediate_size
        width = config.hidden_size // self.n_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.weight = nn.Parameter(torch.empty(self.n_heads * self.n_slots, width))
        self.deviation = 1 / math.sqrt(width)
        # m^k = √d_h · weight meets the 1 / √d_h of the scores: they cancel.

    @property
    def size(self) -> tuple[int, int]:
        """How many numbers it gives and takes."""
        return len(self.weight), self.query.in_features

    def matrix(self) -> Float[Tensor, "memory hidden"]:
        """Return K: x · Kᵀ are the scores of all heads' slots."""
        slots: Tensor = self.weight.unflatten(0, (self.n_heads, self.n_slots))
        query: Tensor = self.query.weight.unflatten(0, (self.n_heads, -1))
        return (slots @ query).flatten(0, 1)

    def forward(
        self, x: Float[Tensor, "batch position hidden"]
    ) -> tuple[Float[Tensor, "batch head position width"], Float[Tensor, "batch head position _"]]:
        """Return the queries, and their scores with the slots of their head."""
        query = self.query(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        slots = self.weight.unflatten(0, (self.n_heads, self.n_slots))
        return query, query @ slots.transpose(1, 2)


class PersistentValues(Slots):
    """The values of the slots, and the way of all heads to the residual stream."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.n_heads, self.n_slots = config.num_attention_heads, config.intermediate_size
        width = config.hidden_size // self.n_heads
        self.out = IntoStream(config.hidden_size, config.hidden_size, bias=False)
        self.weight = nn.Parameter(torch.empty(self.n_heads * self.n_slots, width))
        self.scale = math.sqrt(self.n_slots)
        self.deviation = 1 / self.scale

    @property
    def size(self) -> tuple[int, int]:
        """How many numbers it gives and takes."""
        return self.out.out_features, len(self.weight)

    def matrix(self) -> Float[Tensor, "hidden memory"]:
        """Return Vᵀ: W_o · m^v, head by head."""
        slots: Tensor = self.scale * self.weight.unflatten(0, (self.n_heads, self.n_slots))
        out: Tensor = self.out.weight.unflatten(1, (self.n_heads, -1)).movedim(1, 0)
        return (slots @ out.transpose(1, 2)).flatten(0, 1).T

    def forward(
        self, coefficients: Float[Tensor, "batch position memory"]
    ) -> Float[Tensor, "batch position hidden"]:
        """Return W_o · Σ a · m^v."""
        by_head = coefficients.unflatten(-1, (self.n_heads, self.n_slots)).transpose(1, 2)
        slots = self.weight.unflatten(0, (self.n_heads, self.n_slots))
        return self.out.from_heads((self.scale * by_head) @ slots)


class PersistentMemory(Memory):
    """Attention over tokens and slots at once."""

    keys: PersistentKeys
    values: PersistentValues

    def __init__(self, config: AdaptiveConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.keys = PersistentKeys(config)
        self.values = PersistentValues(config)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self, x: Float[Tensor, "batch position hidden"], seen: Seen
    ) -> tuple[Float[Tensor, "batch position hidden"], Float[Tensor, "batch position hidden"]]:
        """Return what is read from the tokens, and y."""
        tokens, slots, values = self._weights(x, seen)
        return self.values.out.from_heads(tokens @ values), self.values(slots)

    def coefficients(
        self, x: Float[Tensor, "batch position hidden"], seen: Seen | None = None
    ) -> Float[Tensor, "batch position memory"]:
        """Return the attention on every slot; a head's sum to what it leaves to the tokens."""
        return self._weights(x, seen or Seen(x.shape[1], device=x.device))[1]

    def _weights(
        self, x: Float[Tensor, "batch position hidden"], seen: Seen
    ) -> tuple[
        Float[Tensor, "batch head position seen"],
        Float[Tensor, "batch position memory"],
        Float[Tensor, "batch head seen width"],
    ]:
        """Return the attention on tokens and on slots, and the tokens' values."""
        query, slots = self.keys(x)
        key, value = (
            project(x).unflatten(-1, (self.keys.n_heads, -1)).transpose(1, 2)
            for project in (self.k_proj, self.v_proj)
        )
        key, value = seen.extended(self.layer, key, value)
        tokens = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])
        visible = seen.visible
        hidden = ~(visible if visible.ndim == 2 else visible[:, None])
        tokens = tokens.masked_fill(hidden, -torch.inf)
        weights = torch.cat([tokens, slots], dim=-1).softmax(dim=-1)
        on_tokens, on_slots = weights.split([tokens.shape[-1], slots.shape[-1]], dim=-1)
        return on_tokens, on_slots.transpose(1, 2).flatten(2), value
