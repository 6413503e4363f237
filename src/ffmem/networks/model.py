"""A language model with adaptive input and softmax, and memories of any kind.

    x = s · input(w) + PE(position),    layers,    a final norm if there is one,    adaptive softmax

With ReLU and no final norm it is the paper's own model, and loads fairseq's checkpoints of it.
Names of modules are fairseq's where fairseq has the module.
"""

import math

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GenerationMixin,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from ffmem.errors import ModelError
from ffmem.networks.bands import AdaptiveInput, AdaptiveSoftmax
from ffmem.networks.config import AdaptiveConfig
from ffmem.networks.layer import layer_of
from ffmem.networks.seen import Seen
from ffmem.networks.stream import IntoStream

FIRST_POSITION = 2
"""fairseq counts positions from the id of its padding token, plus one."""


class AdaptivePreTrained(PreTrainedModel):
    """What trunk and language model share."""

    config_class = AdaptiveConfig
    base_model_prefix = "model"
    _no_split_modules = ["Layer", "PersistentLayer", "LambdaBlock"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw weights so that numbers keep their size, and every word is about as probable.

        With an `initializer_range`, every weight is drawn with that deviation instead.
        """
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or isinstance(module, nn.LayerNorm):
            super()._init_weights(module)  # type: ignore[no-untyped-call]
            return
        if getattr(module, "bias", None) is not None:
            init.zeros_(module.bias)  # type: ignore[arg-type]
        deviation = self.config.initializer_range
        if deviation is None:
            deviation = self._deviation(module, weight)
        init.normal_(weight, mean=0.0, std=deviation)

    def _deviation(self, module: nn.Module, weight: Tensor) -> float:
        """Return a weight's own deviation, or that of unit numbers in, unit numbers out."""
        own = getattr(module, "deviation", None)
        if isinstance(own, float):
            return own
        deviation = math.sqrt(2 / sum(weight.shape))
        if isinstance(module, IntoStream):
            deviation /= math.sqrt(2 * self.config.num_hidden_layers)
        return deviation


class AdaptiveModel(AdaptivePreTrained):
    """The trunk: from tokens to the last layer's output, through the final norm if there is one."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__(config)
        self.embed_tokens = AdaptiveInput(config)
        self.scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            layer_of(config, number) for number in range(config.num_hidden_layers)
        )
        self.layer_norm = (
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
            if config.final_norm
            else None
        )
        self.post_init()  # type: ignore[no-untyped-call]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Int[Tensor, "batch position"],
        attention_mask: Shaped[Tensor, "batch seen"] | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> BaseModelOutputWithPast:
        """Return the vectors that the adaptive softmax reads; if told, those of every layer too."""
        if output_attentions or self.config.output_attentions:
            raise ModelError(
                "Attention weights were asked for (output_attentions), and this model keeps none."
                " `ffmem trace` shows the coefficients of its memories; leave that out."
            )
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        if attention_mask is not None and bool(attention_mask.bool().all()):
            attention_mask = None  # it hides nothing
        seen = Seen(input_ids.shape[1], attention_mask, past_key_values, input_ids.device)
        hidden = self.scale * self.embed_tokens(input_ids)
        hidden = self.dropout(hidden + sinusoids(seen.places, hidden.shape[2]).to(hidden))
        states = [hidden]
        for layer in self.layers:
            hidden = layer(hidden, seen)
            if output_hidden_states:
                states.append(hidden)
        if self.layer_norm is not None:
            hidden = states[-1] = self.layer_norm(hidden)  # as in every model of transformers
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=past_key_values,
            hidden_states=tuple(states) if output_hidden_states else None,
        )


class AdaptiveLM(AdaptivePreTrained, GenerationMixin):
    """The language model; what it calls logits are log-probabilities."""

    _tied_weights_keys = {"lm_head.bands": "model.embed_tokens.bands"}  # noqa: RUF012

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__(config)
        self.model = AdaptiveModel(config)
        self.lm_head = AdaptiveSoftmax(config, self.model.embed_tokens.bands)
        self.post_init()  # type: ignore[no-untyped-call]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Int[Tensor, "batch position"],
        attention_mask: Shaped[Tensor, "batch seen"] | None = None,
        past_key_values: Cache | None = None,
        labels: Int[Tensor, "batch position"] | None = None,
        logits_to_keep: int = 0,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> CausalLMOutputWithPast:
        """Return the log-probabilities of the next word, of the last positions only if told.

        With `labels`, as in all models of transformers: the mean of −log p of each next label;
        those below zero do not count.
        """
        trunk = self.model(
            input_ids,
            attention_mask,
            past_key_values,
            use_cache,
            output_hidden_states,
            output_attentions,
            return_dict=True,
        )
        hidden = trunk.last_hidden_state
        loss = None
        if labels is not None:
            loss = self.lm_head.loss(hidden[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(
            loss=loss,
            logits=self.lm_head(hidden[:, -logits_to_keep:]),
            past_key_values=trunk.past_key_values,
            hidden_states=trunk.hidden_states,
        )

    def loss(
        self, input_ids: Int[Tensor, "batch position"], targets: Int[Tensor, "batch position"]
    ) -> Float[Tensor, ""]:
        """Return the mean of −log p of the targets that are not negative."""
        hidden = self.model(input_ids, use_cache=False, return_dict=True).last_hidden_state
        mean: Tensor = self.lm_head.loss(hidden.flatten(0, 1), targets.flatten())
        return mean


def sinusoids(
    places: Int[Tensor, "batch position"], width: int
) -> Float[Tensor, "batch position hidden"]:
    """Return the vectors of positions, counted from 0: all sines, then all cosines."""
    half = width // 2
    steps = torch.arange(half, device=places.device)
    frequencies = torch.exp(steps * (-math.log(10_000) / (half - 1)))
    angles = (places[..., None] + FIRST_POSITION) * frequencies
    table = torch.cat([angles.sin(), angles.cos()], dim=-1)
    return functional.pad(table, (0, width % 2))


AutoConfig.register(AdaptiveConfig.model_type, AdaptiveConfig)
AutoModel.register(AdaptiveConfig, AdaptiveModel)
AutoModelForCausalLM.register(AdaptiveConfig, AdaptiveLM)
