"""Causal self-attention in batches with padding and a cache.

    visible[q, k] = k is not after q, and k is not padding or k is q itself

A padding position attends to itself, so that no softmax is empty; no other position sees it.
"""

from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache

from ffmem.networks.config import AdaptiveConfig


class AttentionContext:
    """Positions, causal mask and key-value cache of one forward pass, shared by all layers.

    `length` counts the new tokens; "total" counts the cached ones too.
    """

    def __init__(
        self,
        length: int,
        mask: Shaped[Tensor, "batch total"] | None = None,
        cache: Cache | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.length = length
        self.mask = mask
        self.cache = cache
        self.device = device if mask is None else mask.device
        self.n_cached = 0 if cache is None else int(cache.get_seq_length())
        self.is_causal = mask is None and self.n_cached == 0
        """Whether each position sees exactly itself and everything before it."""

    @cached_property
    def positions(self) -> Int[Tensor, "batch position"] | Int[Tensor, "1 position"]:
        """The position of each new token in its text, not counting padding."""
        return self._all_positions[:, -self.length :]

    @cached_property
    def _all_positions(self) -> Int[Tensor, "batch total"] | Int[Tensor, "1 total"]:
        if self.mask is None:
            return torch.arange(self.n_cached + self.length, device=self.device)[None]
        return (self.mask.long().cumsum(dim=1) - 1).clamp_min(0)

    @cached_property
    def column_distance(self) -> Int[Tensor, "position total"]:
        """How many columns of the batch each token is before a position; negative if after it."""
        columns = torch.arange(self.n_cached + self.length, device=self.device)
        return columns[self.n_cached :, None] - columns[None]

    @cached_property
    def token_distance(
        self,
    ) -> Int[Tensor, "batch position total"] | Int[Tensor, "1 position total"]:
        """How many tokens each token is before a position; −1 if not visible."""
        distance = self.positions[:, :, None] - self._all_positions[:, None]
        return torch.where(self.visible, distance, -1)

    @cached_property
    def visible(self) -> Bool[Tensor, "position total"] | Bool[Tensor, "batch position total"]:
        """Which tokens each position attends to."""
        causal = self.column_distance >= 0
        if self.mask is None:
            return causal
        return (causal & self.mask.bool()[:, None]) | (self.column_distance == 0)

    @property
    def visible_to_heads(
        self,
    ) -> Bool[Tensor, "position total"] | Bool[Tensor, "batch 1 position total"]:
        """The same mask, shaped for "batch head position total"."""
        return self.visible if self.visible.ndim == 2 else self.visible[:, None]

    def update_cache(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values "batch head total width": those of cached tokens come first."""
        if self.cache is None:
            return key, value
        all_keys, all_values = self.cache.update(key, value, layer)
        return all_keys, all_values


class OutProj(nn.Linear):
    """`nn.Linear` that writes to the residual stream; deep models initialize it smaller."""

    def merge_heads(
        self, heads: Float[Tensor, "batch head position width"]
    ) -> Float[Tensor, "batch position hidden"]:
        """Concatenate the heads and project them to the residual stream."""
        output: Tensor = self(heads.transpose(1, 2).flatten(2))
        return output


def split_heads(
    x: Float[Tensor, "batch position hidden"], n_heads: int
) -> Float[Tensor, "batch head position width"]:
    """Split the last axis into heads, and put these before the positions."""
    heads: Tensor = x.unflatten(-1, (n_heads, -1))
    return heads.transpose(1, 2)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: AdaptiveConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.n_heads = config.num_attention_heads
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.out_proj = OutProj(config.hidden_size, config.hidden_size)

    def forward(
        self, x: Float[Tensor, "batch position hidden"], context: AttentionContext
    ) -> Float[Tensor, "batch position hidden"]:
        """Return the output of all heads."""
        query, key, value = (
            split_heads(project(x), self.n_heads)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        key, value = context.update_cache(self.layer, key, value)
        heads = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if context.is_causal else context.visible_to_heads,
            is_causal=context.is_causal,
        )
        return self.out_proj.merge_heads(heads)
