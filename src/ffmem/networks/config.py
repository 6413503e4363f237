"""Configuration of an `ffmem_adaptive` model: its sizes and its kind of memory.

| kind       | memories per layer             | coefficient m                                    |
|------------|--------------------------------|--------------------------------------------------|
| relu, gelu | `intermediate_size`            | f(x · Kᵀ + b)                                    |
| swiglu     | `intermediate_size`            | silu(x · Kᵀ) ⊙ (x · Uᵀ)                          |
| softmax    | `intermediate_size`            | softmax(x · Kᵀ)                                  |
| persistent | `intermediate_size` per head   | attention weight on a slot, next to the tokens   |
| lambda     | `distances` per head           | q · E; the values come from the input            |
| moe        | `intermediate_size` per expert | w · relu(x · Kᵀ + b), w: the router's weight     |
"""

from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

from ffmem.errors import ModelError

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "swiglu": "silu",
    "softmax": "softmax",
    "persistent": "softmax",
    "lambda": "linear",
    "moe": "relu",
}
"""The function from scores x · Kᵀ to coefficients, by kind of memory."""

KINDS = tuple(ACTIVATIONS)


class AdaptiveConfig(PretrainedConfig):
    """Sizes of a model with adaptive input and adaptive softmax.

    The defaults are those of the paper's model. `band_sizes` and `band_widths` are the number of
    words and the embedding width of each cluster of the vocabulary, most frequent words first.
    `hidden_act`, `softmax_groups` and `vocab_size` follow from the other fields.
    """

    model_type = "ffmem_adaptive"

    def __init__(
        self,
        band_sizes: Sequence[int] = (20_000, 40_000, 207_744),
        band_widths: Sequence[int] = (1024, 256, 64),
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        num_hidden_layers: int = 16,
        num_attention_heads: int = 8,
        max_position_embeddings: int = 3072,
        memory: str = "relu",
        key_width: int = 16,
        distances: int = 64,
        num_experts: int = 8,
        num_experts_per_tok: int = 2,
        shared_expert: bool = False,
        final_norm: bool = False,
        scale_embedding: bool = True,
        dropout: float = 0.0,
        layer_norm_eps: float = 1e-5,
        initializer_range: float | None = None,
        **kwargs: Any,
    ) -> None:
        self.band_sizes = list(band_sizes)
        self.band_widths = list(band_widths)
        self.vocab_size = sum(band_sizes)
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.memory = memory
        self.key_width = key_width
        self.distances = distances
        is_moe = memory == "moe"  # elsewhere, a number of experts would mislead readers
        self.num_experts = num_experts if is_moe else 0
        self.num_experts_per_tok = num_experts_per_tok if is_moe else 0
        self.shared_expert = shared_expert and is_moe
        self.final_norm = final_norm
        self.scale_embedding = scale_embedding
        self.dropout = dropout
        self.layer_norm_eps = layer_norm_eps
        self.initializer_range = initializer_range
        self._check(kwargs.get("hidden_act"))
        self.hidden_act = ACTIVATIONS[memory]
        groups = {"softmax": 1, "persistent": num_attention_heads}
        self.softmax_groups = groups.get(memory, 0)
        self.use_cache = True
        for derived in ("vocab_size", "hidden_act", "softmax_groups"):
            kwargs.pop(derived, None)
        # fairseq's special tokens: <pad> is 1, and </s> (2) opens and closes a text.
        defaults = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2}
        super().__init__(**({"tie_word_embeddings": True} | defaults | kwargs))

    def _check(self, activation: str | None) -> None:
        """Raise unless the sizes fit each other, and the activation fits the kind of memory."""
        if self.memory not in KINDS:
            raise ModelError(
                f"Unknown kind of memory {self.memory!r}. Known kinds: {', '.join(KINDS)}."
            )
        if activation not in (None, ACTIVATIONS[self.memory]):
            raise ModelError(
                f"The config has memory = {self.memory!r} and hidden_act = {activation!r}, but"
                f" {self.memory} memories use {ACTIVATIONS[self.memory]!r}. Correct one of them."
            )
        if self.hidden_size % self.num_attention_heads:
            raise ModelError(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads"
                f" {self.num_attention_heads}."
            )
        if self.memory == "moe" and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ModelError(
                f"num_experts_per_tok {self.num_experts_per_tok} does not fit num_experts"
                f" {self.num_experts}. A token reaches at least one expert, and at most all."
            )
        if len(self.band_sizes) != len(self.band_widths) or self.band_widths[0] != self.hidden_size:
            raise ModelError(
                f"band_sizes {self.band_sizes} and band_widths {self.band_widths} do not fit"
                f" hidden_size {self.hidden_size}. Give every cluster of the vocabulary one width;"
                " the first must equal hidden_size."
            )
