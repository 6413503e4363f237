"""Causal self-attention, the neighbour of the feed-forward kinds of memory."""

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ffmem.networks.config import AdaptiveConfig
from ffmem.networks.seen import Seen
from ffmem.networks.stream import IntoStream


class Attention(nn.Module):
    """Causal self-attention; what follows a position never reaches it, padding included."""

    def __init__(self, config: AdaptiveConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.n_heads = config.num_attention_heads
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.out_proj = IntoStream(config.hidden_size, config.hidden_size)

    def forward(
        self, hidden: Float[Tensor, "batch position hidden"], seen: Seen
    ) -> Float[Tensor, "batch position hidden"]:
        """Return what the heads read from the positions so far."""
        query, key, value = (
            project(hidden).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )  # (batch, head, position, hidden / heads)
        key, value = seen.extended(self.layer, key, value)
        mask = None if seen.plain else seen.visible
        read = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask if mask is None or mask.ndim == 2 else mask[:, None],
            is_causal=seen.plain,
        )
        return self.out_proj.from_heads(read)
