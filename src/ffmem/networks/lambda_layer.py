"""A lambda layer (Bello 2021): static keys, values that come from the input.

    y_n = q_n · (λᶜ_n + λᵖ_n)
    λᶜ_n = Σ_{m ≤ n} softmax_m(k_m)ᵀ · v_m         what the tokens say
    λᵖ_n = Σ_{m ≤ n} E_{n−m}ᵀ · v_m                where they stand

It stands in attention's place. The memory (head, distance δ) has the static key E_δ, stored as
√distances times what it is, and the coefficient q_n · E_δ. It multiplies v_{n−δ}, another vector at
every position: there is no static value to read, and no coefficient where no token is.

    o_n = h_n + W_o · q_n · λᶜ_n  +  W_o · Σ_δ (q_n · E_δ) · v_{n−δ}
          └────────── r ───────┘    └──────────── y ─────────────┘
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ffmem.networks.config import AdaptiveConfig
from ffmem.networks.drawn import DrawnLinear
from ffmem.networks.memory import Memory
from ffmem.networks.seen import Seen
from ffmem.networks.slots import Slots
from ffmem.networks.stream import IntoStream

LIMIT = 30.0
"""Keys of tokens are cut here, so that their softmax needs no maximum: that of later tokens must
not be looked at. exp(±30) leaves float32 room for any text."""


class StaticKeys(Slots):
    """E, a key for each head and distance, and the queries that meet them."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.n_heads, self.n_distances = config.num_attention_heads, config.distances
        # y sums over the numbers of a query: they start so small that the sum has unit size.
        deviation = 1 / math.sqrt(config.hidden_size * config.key_width)
        n_queries = self.n_heads * config.key_width
        self.query = DrawnLinear(config.hidden_size, n_queries, deviation)
        self.weight = nn.Parameter(torch.empty(self.n_heads * self.n_distances, config.key_width))
        self.scale = 1 / math.sqrt(self.n_distances)
        self.deviation = 1.0

    @property
    def size(self) -> tuple[int, int]:
        """How many numbers it gives and takes."""
        return len(self.weight), self.query.in_features

    def matrix(self) -> Float[Tensor, "memory hidden"]:
        """Return the static keys as x meets them: W_qᵀ · E, head by head."""
        static: Tensor = self.scale * self.weight.unflatten(0, (self.n_heads, self.n_distances))
        query: Tensor = self.query.weight.unflatten(0, (self.n_heads, -1))
        return (static @ query).flatten(0, 1)

    def forward(
        self, x: Float[Tensor, "batch position hidden"]
    ) -> tuple[Float[Tensor, "batch head position key"], Float[Tensor, "batch position memory"]]:
        """Return the queries, and their products with the static keys."""
        query = self.query(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        static = self.scale * self.weight.unflatten(0, (self.n_heads, self.n_distances))
        return query, (query @ static.transpose(1, 2)).transpose(1, 2).flatten(2)


class InputValues(nn.Module):
    """Multiplies coefficients with vectors of the tokens that lie so far in front."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.n_heads, self.n_distances = config.num_attention_heads, config.distances
        self.out = IntoStream(config.hidden_size, config.hidden_size, bias=False)

    @property
    def size(self) -> tuple[int, int]:
        """How many numbers it gives and takes."""
        return self.out.out_features, self.n_heads * self.n_distances

    def forward(
        self,
        coefficients: Float[Tensor, "batch position memory"],
        vectors: Float[Tensor, "batch seen width"],
        seen: Seen,
    ) -> Float[Tensor, "batch position hidden"]:
        """Return W_o · Σ_δ m_δ · v_{n−δ}."""
        by_head = coefficients.unflatten(-1, (self.n_heads, self.n_distances)).transpose(1, 2)
        distance = seen.apart[:, None]
        near = (distance >= 0) & (distance < self.n_distances)
        place = distance.clamp(0, self.n_distances - 1).expand(*by_head.shape[:2], -1, -1)
        weights = by_head.gather(-1, place) * near
        return self.out.from_heads(weights @ vectors[:, None])


class LambdaLayer(Memory):
    """Each position's tokens become a linear function, which its queries are given to."""

    keys: StaticKeys
    values: InputValues

    def __init__(self, config: AdaptiveConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.keys = StaticKeys(config)
        self.values = InputValues(config)
        self.k_proj = nn.Linear(config.hidden_size, config.key_width, bias=False)
        width = config.hidden_size // config.num_attention_heads
        self.v_proj = nn.Linear(config.hidden_size, width, bias=False)

    def forward(
        self, x: Float[Tensor, "batch position hidden"], seen: Seen
    ) -> tuple[Float[Tensor, "batch position hidden"], Float[Tensor, "batch position hidden"]]:
        """Return what the tokens say, and y: where they stand."""
        query, scores = self.keys(x)
        key, vectors = self._tokens(x, seen)
        content = self._content(query, key, vectors, seen)
        coefficients = scores * self._is_there(seen).repeat(1, 1, self.keys.n_heads)
        return self.values.out.from_heads(content), self.values(coefficients, vectors, seen)

    def coefficients(
        self, x: Float[Tensor, "batch position hidden"], seen: Seen | None = None
    ) -> Float[Tensor, "batch position memory"]:
        """Return q · E for every head and distance at which there is a token."""
        there = self._is_there(seen or Seen(x.shape[1], device=x.device))
        scores: Tensor = self.keys(x)[1]
        return scores * there.repeat(1, 1, self.keys.n_heads)

    def read(
        self,
        coefficients: Float[Tensor, "batch position memory"],
        x: Float[Tensor, "batch position hidden"],
        seen: Seen | None = None,
    ) -> Float[Tensor, "batch position hidden"]:
        """Return y: the values are made of x."""
        seen = seen or Seen(x.shape[1], device=x.device)
        output: Tensor = self.values(coefficients, self._tokens(x, seen)[1], seen)
        return output

    def values_at(
        self, x: Float[Tensor, "position hidden"], place: int
    ) -> Float[Tensor, "memory hidden"]:
        """Return what the coefficients of one position multiply: W_o · v_{n−δ}, head by head.

        Law: m · values_at = y. Zeros where there is no token so far in front.
        """
        heads, distances = self.keys.n_heads, self.keys.n_distances
        vectors = self.v_proj(x[: place + 1]).flip(0)[:distances]
        padded = torch.cat([vectors, vectors.new_zeros(distances - len(vectors), vectors.shape[1])])
        out: Tensor = self.values.out.weight.unflatten(1, (heads, -1)).movedim(1, 0)
        return (padded @ out.transpose(1, 2)).flatten(0, 1)

    def _tokens(
        self, x: Float[Tensor, "batch position hidden"], seen: Seen
    ) -> tuple[Float[Tensor, "batch seen key"], Float[Tensor, "batch seen width"]]:
        """Return keys and values of the tokens seen so far."""
        own = self.k_proj(x)[:, None], self.v_proj(x)[:, None]
        key, vectors = seen.extended(self.layer, *own)
        return key[:, 0], vectors[:, 0]

    def _content(
        self,
        query: Float[Tensor, "batch head position key"],
        key: Float[Tensor, "batch seen key"],
        vectors: Float[Tensor, "batch seen width"],
        seen: Seen,
    ) -> Float[Tensor, "batch head position width"]:
        """Return q_n · λᶜ_n: the softmax over tokens is taken for each number of a key alone."""
        wide = torch.promote_types(key.dtype, torch.float32)
        weights = key.to(wide).clamp(-LIMIT, LIMIT).exp()
        visible = seen.visible.to(weights)
        totals = (visible @ weights)[:, None]  # (batch, 1, position, key)
        mixed = (query / totals) @ weights[:, None].transpose(2, 3)
        mixed = mixed * (visible if visible.ndim == 2 else visible[:, None])
        return mixed.to(vectors.dtype) @ vectors[:, None]

    def _is_there(self, seen: Seen) -> Bool[Tensor, "_ position distance"]:
        """Return whether a token that may be seen lies at each distance in front."""
        distances = torch.arange(self.keys.n_distances, device=seen.device)
        there = seen.places[..., None] >= distances
        if seen.mask is None:
            return there
        is_token = seen.mask[:, -seen.length :, None].bool()
        return there & (is_token | (distances == 0))  # padding sees itself alone
