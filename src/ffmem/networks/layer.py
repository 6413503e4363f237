"""One layer of a model of ours: attention and a memory, in the order that its kind asks for.

    feed-forward kinds   r = h + attention(norm(h))                        o = r + memory(norm(r))
    persistent           r = h + what slots leave to the tokens (norm(h))  o = r + the slots' part
    lambda               s = h + FF(norm(h)),  r = s + content(norm(s))    o = r + the static keys'

Always o = r + y, with y what the memories add. A lambda layer stands in attention's place, and
comes behind the feed-forward layer, so that what its static keys add comes last.

Names of norms are fairseq's: `final_layer_norm` is the one before the feed-forward layer.
"""

from jaxtyping import Float
from torch import Tensor, nn

from ffmem.networks.attention import Attention
from ffmem.networks.config import AdaptiveConfig
from ffmem.networks.feed_forward import FeedForward, GatedMemory, Pointwise, SoftmaxMemory
from ffmem.networks.lambda_layer import LambdaLayer
from ffmem.networks.persistent import PersistentMemory
from ffmem.networks.seen import Seen


class Layer(nn.Module):
    """r = h + attention(norm(h)), then o = r + memory(norm(r))."""

    def __init__(self, config: AdaptiveConfig, number: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.layer_norm_eps
        self.self_attn_layer_norm = nn.LayerNorm(hidden, eps=eps)
        self.self_attn = Attention(config, number)
        self.final_layer_norm = nn.LayerNorm(hidden, eps=eps)
        self.memory = pointwise(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, hidden: Float[Tensor, "batch position hidden"], seen: Seen
    ) -> Float[Tensor, "batch position hidden"]:
        """Return the layer's output o."""
        attention = self.self_attn(self.self_attn_layer_norm(hidden), seen)
        residual = hidden + self.dropout(attention)
        output: Tensor = residual + self.dropout(self.memory(self.final_layer_norm(residual)))
        return output


class PersistentLayer(nn.Module):
    """One softmax over tokens and slots; no feed-forward layer."""

    def __init__(self, config: AdaptiveConfig, number: int) -> None:
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.memory = PersistentMemory(config, number)
        self.residual = nn.Identity()  # r passes here, to be read
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, hidden: Float[Tensor, "batch position hidden"], seen: Seen
    ) -> Float[Tensor, "batch position hidden"]:
        """Return the layer's output o."""
        tokens, slots = self.memory(self.self_attn_layer_norm(hidden), seen)
        output: Tensor = self.residual(hidden + self.dropout(tokens)) + self.dropout(slots)
        return output


class LambdaBlock(nn.Module):
    """The feed-forward layer, then the lambda layer in attention's place."""

    def __init__(self, config: AdaptiveConfig, number: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.layer_norm_eps
        self.final_layer_norm = nn.LayerNorm(hidden, eps=eps)
        self.feed_forward = FeedForward(config, "relu")
        self.self_attn_layer_norm = nn.LayerNorm(hidden, eps=eps)
        self.memory = LambdaLayer(config, number)
        self.residual = nn.Identity()  # r passes here, to be read
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, hidden: Float[Tensor, "batch position hidden"], seen: Seen
    ) -> Float[Tensor, "batch position hidden"]:
        """Return the layer's output o."""
        hidden = hidden + self.dropout(self.feed_forward(self.final_layer_norm(hidden)))
        content, static = self.memory(self.self_attn_layer_norm(hidden), seen)
        output: Tensor = self.residual(hidden + self.dropout(content)) + self.dropout(static)
        return output


def pointwise(config: AdaptiveConfig) -> Pointwise:
    """Return the memory of a feed-forward kind."""
    if config.memory == "swiglu":
        return GatedMemory(config)
    if config.memory == "softmax":
        return SoftmaxMemory(config)
    return FeedForward(config, config.memory)


def layer_of(config: AdaptiveConfig, number: int) -> nn.Module:
    """Return a layer of the kind that the config names."""
    kinds = {"persistent": PersistentLayer, "lambda": LambdaBlock}
    return kinds.get(config.memory, Layer)(config, number)
