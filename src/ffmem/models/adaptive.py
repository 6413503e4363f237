"""The paper's own model: a transformer with adaptive input and adaptive softmax.

The vocabulary is cut into bands, frequent words first; band b has embeddings E_b of its own width
and a projection P_b to the width of the model. The way in and the way out share them:

    input:    x = s · P_b · E_b[w] + PE(position)
    output:   log p(w) = h·E₀[w] − Z                                          w in band 0
              log p(w) = h·C_b − Z + (h·P_b)·E_b[w] − LSE((h·P_b)·E_bᵀ)       w in band b
              Z = LSE(h·[E₀ ; C]ᵀ)

Two traps. The way out uses E₀ itself, without P₀, so frequent words have other directions on the
way out than on the way in. And the order of words under log p(· | c·h) depends on c across bands.

Names of modules are fairseq's: `final_layer_norm` is the norm before the feed-forward layer. There
is no dropout, for ffmem only reads.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from ffmem.errors import ModelError

FIRST_POSITION = 2
"""fairseq counts positions from the id of its padding token, plus one."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
}


SETTINGS = {
    "pad_token_id": 1,
    "bos_token_id": 2,  # `</s>` opens a text
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
"""What fairseq fixes for every model, in the words of transformers."""


class AdaptiveConfig(PretrainedConfig):
    """The sizes of an adaptive model; the defaults are those of the paper's."""

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
        hidden_act: str = "relu",
        final_norm: bool = False,
        scale_embedding: bool = True,
        layer_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
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
        self.hidden_act = hidden_act
        self.final_norm = final_norm
        self.scale_embedding = scale_embedding
        self.layer_norm_eps = layer_norm_eps
        self.initializer_range = initializer_range
        self.use_cache = False
        self.refuse_misfits()
        others.pop("vocab_size", None)  # in a saved config; it follows from the bands
        super().__init__(**(SETTINGS | others))

    def refuse_misfits(self) -> None:
        """Raise unless the sizes fit each other."""
        if self.hidden_act not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ModelError(f"Unknown activation {self.hidden_act!r}. Known activations: {known}.")
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


class Band(nn.Module):
    """A range of the vocabulary: E_b and P_b."""

    def __init__(self, size: int, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, width)
        self.projection = nn.Linear(width, hidden, bias=False)

    def forward(self, words: Int[Tensor, " word"]) -> Float[Tensor, "word hidden"]:
        """Return the input vectors of words, counted from the start of the band."""
        vectors: Tensor = self.projection(self.embedding(words))
        return vectors


class AdaptiveInput(nn.Module):
    """From tokens to vectors, each band at its own width."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.hidden = config.hidden_size
        self.bands = nn.ModuleList(
            Band(size, width, config.hidden_size)
            for size, width in zip(config.band_sizes, config.band_widths, strict=True)
        )
        self.ranges = list(pairwise(accumulate(config.band_sizes, initial=0)))

    def forward(
        self, tokens: Int[Tensor, "batch position"]
    ) -> Float[Tensor, "batch position hidden"]:
        """Return the unscaled vector of every token."""
        flat = tokens.flatten()
        weight = self.bands[0].get_parameter("projection.weight")
        vectors, n_found = weight.new_zeros(len(flat), self.hidden), 0
        for band, (start, end) in zip(self.bands, self.ranges, strict=True):
            (places,) = torch.where((start <= flat) & (flat < end))
            vectors = vectors.index_copy(0, places, band(flat[places] - start))
            n_found += len(places)
        if n_found < len(flat):
            raise IndexError(f"A token is outside the vocabulary of {self.ranges[-1][1]} words.")
        return vectors.view(*tokens.shape, self.hidden)


class AdaptiveSoftmax(nn.Module):
    """From vectors to log-probabilities; its bands are those of the adaptive input."""

    def __init__(self, config: AdaptiveConfig, bands: nn.ModuleList) -> None:
        super().__init__()
        self.bands = bands
        self.class_proj = nn.Linear(config.hidden_size, len(bands) - 1, bias=False)

    def forward(
        self, hidden: Float[Tensor, "batch position hidden"]
    ) -> Float[Tensor, "batch position vocab"]:
        """Return the log-probability of every word at every position."""
        rows = self.log_probabilities(hidden.flatten(0, 1))
        return rows.view(*hidden.shape[:2], -1)

    def log_probabilities(self, hidden: Float[Tensor, "row hidden"]) -> Float[Tensor, "row vocab"]:
        """Return the log-probability of every word, given vectors of the last layer's space."""
        return self.normalised(self.band_logits(hidden))

    def band_logits(self, hidden: Float[Tensor, "row hidden"]) -> list[Float[Tensor, "row _"]]:
        """Return the part that is linear in the vectors: h·[E₀ ; C]ᵀ, then (h·P_b)·E_bᵀ."""
        head, *tails = self.bands
        words = hidden @ head.get_parameter("embedding.weight").T  # E₀, not P₀·E₀
        logits = [torch.cat([words, self.class_proj(hidden)], dim=1)]
        for band in tails:
            narrow = hidden @ band.get_parameter("projection.weight")
            logits.append(narrow @ band.get_parameter("embedding.weight").T)
        return logits

    def normalised(self, band_logits: list[Float[Tensor, "row _"]]) -> Float[Tensor, "row vocab"]:
        """Return the log-probabilities that belong to the logits of each band."""
        head, *tails = [logits.log_softmax(dim=-1) for logits in band_logits]
        n_words = head.shape[1] - len(tails)
        words, classes = head[:, :n_words], head[:, n_words:]
        return torch.cat(
            [words, *(tail + classes[:, [band]] for band, tail in enumerate(tails))], dim=1
        )


class Attention(nn.Module):
    """Causal self-attention; what follows a position never reaches it, padding included."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.n_heads = config.num_attention_heads
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, hidden: Float[Tensor, "batch position hidden"]
    ) -> Float[Tensor, "batch position hidden"]:
        """Return what the heads read from the positions so far."""
        query, key, value = (
            project(hidden).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )  # (batch, head, position, hidden / heads)
        read = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.out_proj(read.transpose(1, 2).flatten(2))
        return output


class Layer(nn.Module):
    """r = h + attention(norm(h)), then o = r + FF(norm(r))."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.layer_norm_eps
        self.self_attn_layer_norm = nn.LayerNorm(hidden, eps=eps)
        self.self_attn = Attention(config)
        self.final_layer_norm = nn.LayerNorm(hidden, eps=eps)
        self.fc1 = nn.Linear(hidden, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, hidden)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(
        self, hidden: Float[Tensor, "batch position hidden"]
    ) -> Float[Tensor, "batch position hidden"]:
        """Return the layer's output o."""
        residual = hidden + self.self_attn(self.self_attn_layer_norm(hidden))
        coefficients = self.activation(self.fc1(self.final_layer_norm(residual)))
        output: Tensor = residual + self.fc2(coefficients)
        return output


class AdaptivePreTrained(PreTrainedModel):
    """What trunk and language model share."""

    config_class = AdaptiveConfig
    base_model_prefix = "model"
    _no_split_modules = ["Layer"]  # noqa: RUF012


class AdaptiveModel(AdaptivePreTrained):
    """The trunk: from tokens to the last layer's output, through the final norm if there is one."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__(config)
        self.embed_tokens = AdaptiveInput(config)
        self.scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.layer_norm = (
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
            if config.final_norm
            else None
        )
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Int[Tensor, "batch position"],
        attention_mask: Shaped[Tensor, "batch position"] | None = None,
        use_cache: bool | None = None,  # there is none; `generate` asks nevertheless
        return_dict: bool | None = None,
    ) -> BaseModelOutput:
        """Return the vectors that the adaptive softmax reads."""
        refuse_left_padding(attention_mask)
        hidden = self.scale * self.embed_tokens(input_ids)
        hidden = hidden + positions(input_ids.shape[1], hidden.shape[2]).to(hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        if self.layer_norm is not None:
            hidden = self.layer_norm(hidden)
        return BaseModelOutput(last_hidden_state=hidden)


class AdaptiveLM(AdaptivePreTrained, GenerationMixin):
    """The language model; what it calls logits are log-probabilities."""

    _tied_weights_keys = {"lm_head.bands": "model.embed_tokens.bands"}  # noqa: RUF012

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__(config)
        self.model = AdaptiveModel(config)
        self.lm_head = AdaptiveSoftmax(config, self.model.embed_tokens.bands)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Int[Tensor, "batch position"],
        attention_mask: Shaped[Tensor, "batch position"] | None = None,
        logits_to_keep: int = 0,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutput:
        """Return the log-probabilities of the next word, of the last positions only if told."""
        hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden[:, -logits_to_keep:]))


def positions(length: int, width: int) -> Float[Tensor, "position hidden"]:
    """Return the sinusoidal position vectors: all sines, then all cosines."""
    half = width // 2
    frequencies = torch.exp(torch.arange(half) * (-math.log(10_000) / (half - 1)))
    places = torch.arange(FIRST_POSITION, FIRST_POSITION + length)
    angles = places[:, None] * frequencies
    table = torch.cat([angles.sin(), angles.cos()], dim=1)
    return functional.pad(table, (0, width % 2))


def refuse_left_padding(attention_mask: Tensor | None) -> None:
    """Raise unless the mask hides nothing but the ends of texts, which need no mask."""
    if attention_mask is not None and (attention_mask.int().diff(dim=1) > 0).any():
        raise ModelError(
            "The attention mask hides positions in front of visible ones."
            " This model takes texts padded on the right only."
        )


AutoConfig.register(AdaptiveConfig.model_type, AdaptiveConfig)
AutoModel.register(AdaptiveConfig, AdaptiveModel)
AutoModelForCausalLM.register(AdaptiveConfig, AdaptiveLM)
