"""The sizes of a language model of ours, and the kind of its memories.

| kind       | memories of a layer                  | coefficient m                          |
|------------|--------------------------------------|----------------------------------------|
| relu, gelu | `intermediate_size`                  | f(x · Kᵀ + b)                          |
| swiglu     | `intermediate_size`                  | silu(x · Kᵀ) ⊙ (x · Uᵀ)                |
| softmax    | `intermediate_size`                  | softmax(x · Kᵀ)                        |
| persistent | `intermediate_size` for each head    | attention on a slot, beside the tokens |
| lambda     | `distances` for each head            | q · E, values come from the input      |
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
}
"""The function from scores x · Kᵀ to coefficients, by kind of memory."""

KINDS = tuple(ACTIVATIONS)

SETTINGS = {
    "pad_token_id": 1,
    "bos_token_id": 2,  # `</s>` opens a text
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
"""What fairseq fixes for every model, in the words of transformers."""


def _kind(activation: str | None) -> str:
    """Return the kind of memory of a config that was saved before there was `memory`."""
    if activation in (None, "relu", "gelu"):
        return activation or "relu"
    raise ModelError(
        f"The config lacks memory, and hidden_act = {activation!r} does not tell which kind it is."
        f" Give memory as one of {', '.join(KINDS)}."
    )


class AdaptiveConfig(PretrainedConfig):
    """The sizes of an adaptive model; the defaults are those of the paper's.

    Configs that were saved before there was `memory` name their kind as `hidden_act`.
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
        memory: str | None = None,
        key_width: int = 16,
        distances: int = 64,
        final_norm: bool = False,
        scale_embedding: bool = True,
        dropout: float = 0.0,
        layer_norm_eps: float = 1e-5,
        initializer_range: float | None = None,
        **others: Any,
    ) -> None:
        self.band_sizes = list(band_sizes)
        self.band_widths = list(band_widths)
        self.vocab_size = sum(band_sizes)
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.memory = memory or _kind(others.get("hidden_act"))
        self.key_width = key_width
        self.distances = distances
        self.final_norm = final_norm
        self.scale_embedding = scale_embedding
        self.dropout = dropout
        self.layer_norm_eps = layer_norm_eps
        self.initializer_range = initializer_range
        self.refuse_misfits(others.get("hidden_act"))
        self.hidden_act = ACTIVATIONS[self.memory]
        groups = {"softmax": 1, "persistent": num_attention_heads}
        self.softmax_groups = groups.get(self.memory, 0)
        self.use_cache = True
        for follows in ("vocab_size", "hidden_act", "softmax_groups"):
            others.pop(follows, None)  # in a saved config; it follows from what is above
        super().__init__(**(SETTINGS | others))

    def refuse_misfits(self, activation: str | None) -> None:
        """Raise unless the sizes fit each other, and the activation the kind of memory."""
        if self.memory not in KINDS:
            raise ModelError(
                f"Unknown kind of memory {self.memory!r}. Known kinds: {', '.join(KINDS)}."
            )
        if activation not in (None, ACTIVATIONS[self.memory]):
            raise ModelError(
                f"The config says memory = {self.memory!r} and hidden_act = {activation!r}, where"
                f" that kind of memory has {ACTIVATIONS[self.memory]!r}. One of the two is wrong:"
                " correct it. training.json, where there is one, says what was trained."
            )
        if self.hidden_size % self.num_attention_heads:
            raise ModelError(
                f"{self.num_attention_heads} attention heads do not divide the model's"
                f" width of {self.hidden_size}."
            )
        if len(self.band_sizes) != len(self.band_widths) or self.band_widths[0] != self.hidden_size:
            raise ModelError(
                f"The vocabulary has bands of {self.band_sizes} words and widths of"
                f" {self.band_widths}, in a model of width {self.hidden_size}."
                " Every band needs one width, and the first must be the model's."
            )
