"""Six kinds of memory; `experts` has the seventh.

    y = Σᵢ mᵢ · vᵢ + b,    m = the coefficients, computed from x and the keys

Every memory has two modules, `keys` and `values`. In a forward pass, `keys` gets x as its first
argument and `values` gets m; ffmem reads and edits memories with hooks on these two.

Feed-forward kinds (relu, gelu, swiglu, softmax) use one position alone and return y. Persistent
memory and lambda layers also read from other tokens; they return that part and y separately.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from ffmem.networks.adaptive import InitLinear
from ffmem.networks.attention import AttentionContext, OutProj, split_heads
from ffmem.networks.config import AdaptiveConfig


class FactoredLinear(nn.Module, ABC):
    """A linear map whose matrix is computed from one stored row per memory.

    Some kinds of memory store keys or values in the space of a head, or scaled. `matrix` converts
    them to the space of the residual stream. It is linear in each row of `weight`, and training and
    edits change rows: scaling a row scales the memory's key or value.
    """

    weight: nn.Parameter
    """Stored rows, "memory width"."""
    in_features: int
    out_features: int
    init_std: float
    """Standard deviation of the initial rows."""

    @abstractmethod
    def matrix(self) -> Float[Tensor, "out in"]:
        """Return the matrix of the map, laid out like the weight of `nn.Linear`."""


# Feed-forward kinds


class FeedForward(nn.Module):
    """m = f(x · Kᵀ + b_K),  y = m · V + b  with ReLU or GELU: the paper's feed-forward layer."""

    FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {  # noqa: RUF012
        "relu": functional.relu,
        "gelu": functional.gelu,
    }

    def __init__(self, config: AdaptiveConfig, activation: str) -> None:
        super().__init__()
        self.keys = nn.Linear(config.hidden_size, config.intermediate_size)
        self.values = OutProj(config.intermediate_size, config.hidden_size)
        self.activation = self.FUNCTIONS[activation]

    def forward(
        self, x: Float[Tensor, "batch position hidden"]
    ) -> Float[Tensor, "batch position hidden"]:
        """Return y."""
        output: Tensor = self.values(self.activation(self.keys(x)))
        return output


class GatedMemory(nn.Module):
    """SwiGLU, m = silu(x · Kᵀ) ⊙ (x · Uᵀ),  y = m · V:  two keys per memory."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.keys = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.values = OutProj(config.intermediate_size, config.hidden_size, bias=False)

    def forward(
        self, x: Float[Tensor, "batch position hidden"]
    ) -> Float[Tensor, "batch position hidden"]:
        """Return y."""
        output: Tensor = self.values(functional.silu(self.keys(x)) * self.up(x))
        return output


class SoftmaxValues(FactoredLinear):
    """V = √N · weight: a softmax over N memories averages, and unit values outweigh that."""

    def __init__(self, n_memories: int, hidden: int) -> None:
        super().__init__()
        self.in_features, self.out_features = n_memories, hidden
        self.weight = nn.Parameter(torch.empty(n_memories, hidden))
        self.scale = math.sqrt(n_memories)
        self.init_std = 1 / self.scale

    def matrix(self) -> Float[Tensor, "hidden memory"]:
        """Return Vᵀ."""
        return self.scale * self.weight.T

    def forward(
        self, coefficients: Float[Tensor, "batch position memory"]
    ) -> Float[Tensor, "batch position hidden"]:
        """Return m · V."""
        return (self.scale * coefficients) @ self.weight


class SoftmaxMemory(nn.Module):
    """m = softmax(x · Kᵀ),  y = m · V:  key-value neural memory (Sukhbaatar et al. 2015)."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.keys = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.values = SoftmaxValues(config.intermediate_size, config.hidden_size)

    def forward(
        self, x: Float[Tensor, "batch position hidden"]
    ) -> Float[Tensor, "batch position hidden"]:
        """Return y."""
        output: Tensor = self.values(self.keys(x).softmax(dim=-1))
        return output


# Persistent memory


class PersistentKeys(FactoredLinear):
    """The slots' keys m^k = √d_h · weight, and the queries for them."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.n_heads, self.n_slots = config.num_attention_heads, config.intermediate_size
        self.in_features, self.out_features = config.hidden_size, self.n_heads * self.n_slots
        width = config.hidden_size // self.n_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.weight = nn.Parameter(torch.empty(self.n_heads * self.n_slots, width))
        self.init_std = 1 / math.sqrt(width)

    def matrix(self) -> Float[Tensor, "memory hidden"]:
        """Return K: x · Kᵀ are the scores of all slots of all heads."""
        slots: Tensor = self.weight.unflatten(0, (self.n_heads, self.n_slots))
        query: Tensor = self.query.weight.unflatten(0, (self.n_heads, -1))
        return (slots @ query).flatten(0, 1)

    def forward(
        self, x: Float[Tensor, "batch position hidden"]
    ) -> tuple[Float[Tensor, "batch head position width"], Float[Tensor, "batch head position _"]]:
        """Return the queries, and their scores with the slots of their head."""
        query = split_heads(self.query(x), self.n_heads)
        slots = self.weight.unflatten(0, (self.n_heads, self.n_slots))
        return query, query @ slots.transpose(1, 2)  # √d_h of m^k cancels 1 / √d_h of the scores


class PersistentValues(FactoredLinear):
    """The slots' values m^v = √N · weight, and the output projection of all heads."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.n_heads, self.n_slots = config.num_attention_heads, config.intermediate_size
        self.in_features, self.out_features = self.n_heads * self.n_slots, config.hidden_size
        width = config.hidden_size // self.n_heads
        self.out = OutProj(config.hidden_size, config.hidden_size, bias=False)
        self.weight = nn.Parameter(torch.empty(self.n_heads * self.n_slots, width))
        self.scale = math.sqrt(self.n_slots)
        self.init_std = 1 / self.scale

    def matrix(self) -> Float[Tensor, "hidden memory"]:
        """Return Vᵀ: W_o · m^v, head by head."""
        slots: Tensor = self.scale * self.weight.unflatten(0, (self.n_heads, self.n_slots))
        out: Tensor = self.out.weight.unflatten(1, (self.n_heads, -1)).movedim(1, 0)
        return (slots @ out.transpose(1, 2)).flatten(0, 1).T

    def forward(
        self, coefficients: Float[Tensor, "batch position memory"]
    ) -> Float[Tensor, "batch position hidden"]:
        """Return W_o · Σ a · m^v."""
        by_head = split_heads(coefficients, self.n_heads)
        slots = self.weight.unflatten(0, (self.n_heads, self.n_slots))
        return self.out.merge_heads((self.scale * by_head) @ slots)


class PersistentMemory(nn.Module):
    """All-attention with persistent memory (Sukhbaatar et al. 2019).

    One softmax per head over tokens and slots, without a feed-forward layer:

        a = softmax over c ≤ t and i of [ q_t · k_c , q_t · m^k_i ] / √d_h
        o_t = h_t + W_o · Σ_c a_tc · v_c  +  W_o · Σ_i a_ti · m^v_i
              └──────────── r ───────────┘  └──────────── y ────────┘

    The memory (head, slot) has the attention weight a_ti as its coefficient, W_qᵀ · m^k / √d_h as
    its key and W_o · m^v as its value. Slots have no position.
    """

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
        self, x: Float[Tensor, "batch position hidden"], context: AttentionContext
    ) -> tuple[Float[Tensor, "batch position hidden"], Float[Tensor, "batch position hidden"]]:
        """Return the part read from the tokens, and y."""
        on_tokens, on_slots, values = self.attention_weights(x, context)
        return self.values.out.merge_heads(on_tokens @ values), self.values(on_slots)

    def attention_weights(
        self, x: Float[Tensor, "batch position hidden"], context: AttentionContext
    ) -> tuple[
        Float[Tensor, "batch head position total"],
        Float[Tensor, "batch position memory"],
        Float[Tensor, "batch head total width"],
    ]:
        """Return the attention on tokens and on slots, and the tokens' values."""
        query, slots = self.keys(x)
        key, value = (
            split_heads(project(x), self.keys.n_heads) for project in (self.k_proj, self.v_proj)
        )
        key, value = context.update_cache(self.layer, key, value)
        tokens = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])
        tokens = tokens.masked_fill(~context.visible_to_heads, -torch.inf)
        weights = torch.cat([tokens, slots], dim=-1).softmax(dim=-1)
        on_tokens, on_slots = weights.split([tokens.shape[-1], slots.shape[-1]], dim=-1)
        return on_tokens, on_slots.transpose(1, 2).flatten(2), value


# Lambda layers


class StaticKeys(FactoredLinear):
    """E = weight / √distances, one key per head and distance, and the queries for them."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.n_heads, self.n_distances = config.num_attention_heads, config.distances
        self.in_features = config.hidden_size
        self.out_features = self.n_heads * self.n_distances
        # y sums over the entries of a query: small initial queries give the sum unit size.
        query_std = 1 / math.sqrt(config.hidden_size * config.key_width)
        self.query = InitLinear(config.hidden_size, self.n_heads * config.key_width, query_std)
        self.weight = nn.Parameter(torch.empty(self.n_heads * self.n_distances, config.key_width))
        self.scale = 1 / math.sqrt(self.n_distances)
        self.init_std = 1.0

    def matrix(self) -> Float[Tensor, "memory hidden"]:
        """Return W_qᵀ · E, head by head: the static keys in the space of x."""
        static: Tensor = self.scale * self.weight.unflatten(0, (self.n_heads, self.n_distances))
        query: Tensor = self.query.weight.unflatten(0, (self.n_heads, -1))
        return (static @ query).flatten(0, 1)

    def forward(
        self, x: Float[Tensor, "batch position hidden"]
    ) -> tuple[Float[Tensor, "batch head position key"], Float[Tensor, "batch position memory"]]:
        """Return the queries, and their products with the static keys."""
        query = split_heads(self.query(x), self.n_heads)
        static = self.scale * self.weight.unflatten(0, (self.n_heads, self.n_distances))
        return query, (query @ static.transpose(1, 2)).transpose(1, 2).flatten(2)


class InputValues(nn.Module):
    """Multiplies the coefficient of distance δ with the vector of the token δ positions before."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.n_heads, self.n_distances = config.num_attention_heads, config.distances
        self.in_features = self.n_heads * self.n_distances
        self.out_features = config.hidden_size
        self.out = OutProj(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self,
        coefficients: Float[Tensor, "batch position memory"],
        vectors: Float[Tensor, "batch total width"],
        context: AttentionContext,
    ) -> Float[Tensor, "batch position hidden"]:
        """Return W_o · Σ_δ m_δ · v_{n−δ}."""
        by_head = split_heads(coefficients, self.n_heads)
        distance = context.token_distance[:, None]
        in_reach = (distance >= 0) & (distance < self.n_distances)
        column = distance.clamp(0, self.n_distances - 1).expand(*by_head.shape[:2], -1, -1)
        weights = by_head.gather(-1, column) * in_reach
        return self.out.merge_heads(weights @ vectors[:, None])


class LambdaLayer(nn.Module):
    """A lambda layer (Bello 2021), which replaces attention: static keys, values from the input.

        y_n = q_n · (λᶜ_n + λᵖ_n)
        λᶜ_n = Σ_{m ≤ n} softmax_m(k_m)ᵀ · v_m         content
        λᵖ_n = Σ_{m ≤ n} E_{n−m}ᵀ · v_m                position

    The memory (head, distance δ) has the static key E_δ and the coefficient q_n · E_δ, which is
    zero if there is no token δ positions before. It multiplies v_{n−δ}, which depends on the
    position, so there is no static value.

        o_n = h_n + W_o · q_n · λᶜ_n  +  W_o · Σ_δ (q_n · E_δ) · v_{n−δ}
              └────────── r ───────┘    └──────────── y ─────────────┘
    """

    KEY_LIMIT = 30.0
    """Keys of tokens are clamped to ±30: then float32 holds exp(k) without subtracting a maximum,
    which would depend on later tokens."""

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
        self, x: Float[Tensor, "batch position hidden"], context: AttentionContext
    ) -> tuple[Float[Tensor, "batch position hidden"], Float[Tensor, "batch position hidden"]]:
        """Return the content part, and y: the position part."""
        query, scores = self.keys(x)
        key, vectors = self._tokens(x, context)
        content = self._content(query, key, vectors, context)
        coefficients = scores * self._has_token(context)
        return self.values.out.merge_heads(content), self.values(coefficients, vectors, context)

    def values_at(
        self, x: Float[Tensor, "position hidden"], position: int
    ) -> Float[Tensor, "memory hidden"]:
        """Return what the coefficients at one position multiply: W_o · v_{n−δ}, head by head.

        Law: m · values_at = y. Rows are zero if there is no token δ positions before.
        """
        heads, distances = self.keys.n_heads, self.keys.n_distances
        vectors = self.v_proj(x[: position + 1]).flip(0)[:distances]
        padded = torch.cat([vectors, vectors.new_zeros(distances - len(vectors), vectors.shape[1])])
        out: Tensor = self.values.out.weight.unflatten(1, (heads, -1)).movedim(1, 0)
        return (padded @ out.transpose(1, 2)).flatten(0, 1)

    def _tokens(
        self, x: Float[Tensor, "batch position hidden"], context: AttentionContext
    ) -> tuple[Float[Tensor, "batch total key"], Float[Tensor, "batch total width"]]:
        """Return keys and values of all tokens so far; heads share them."""
        new = self.k_proj(x)[:, None], self.v_proj(x)[:, None]
        key, vectors = context.update_cache(self.layer, *new)
        return key[:, 0], vectors[:, 0]

    def _content(
        self,
        query: Float[Tensor, "batch head position key"],
        key: Float[Tensor, "batch total key"],
        vectors: Float[Tensor, "batch total width"],
        context: AttentionContext,
    ) -> Float[Tensor, "batch head position width"]:
        """Return q_n · λᶜ_n; each entry of the keys has its own softmax over tokens."""
        wide = torch.promote_types(key.dtype, torch.float32)
        weights = key.to(wide).clamp(-self.KEY_LIMIT, self.KEY_LIMIT).exp()
        totals = (context.visible.to(weights) @ weights)[:, None]  # (batch, 1, position, key)
        mixed = (query / totals) @ weights[:, None].transpose(2, 3)
        mixed = mixed * context.visible_to_heads.to(weights)
        return mixed.to(vectors.dtype) @ vectors[:, None]

    def _has_token(self, context: AttentionContext) -> Bool[Tensor, "_ position memory"]:
        """Return, for every head and distance, whether there is a visible token that far back."""
        distances = torch.arange(self.keys.n_distances, device=context.device)
        has_token = context.positions[..., None] >= distances
        if context.mask is not None:
            is_token = context.mask[:, -context.length :, None].bool()
            has_token = has_token & (is_token | (distances == 0))  # padding only sees itself
        return has_token.repeat(1, 1, self.keys.n_heads)
