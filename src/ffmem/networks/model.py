"""A language model with adaptive input and softmax, and memories of any kind.

    x = s · input(w) + PE(position),    layers,    optional final norm,    adaptive softmax

A layer is attention and a memory, in the order its kind needs. Always o = r + y, where y is what
the memories add:

    feed-forward, moe    r = h + attention(norm(h))                         o = r + memory(norm(r))
    persistent           r = h + tokens(norm(h))                            o = r + slots(norm(h))
    lambda               s = h + FF(norm(h)),  r = s + content(norm(s))     o = r + position

The lambda layer replaces attention. It comes after the feed-forward layer, so that its static keys
write to the residual stream last.

With ReLU and no final norm, this is the paper's own model; its fairseq checkpoints load.
Modules have the names that fairseq gives them: `final_layer_norm` is the norm before the
feed-forward layer.
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
from ffmem.networks.adaptive import AdaptiveInput, AdaptiveSoftmax
from ffmem.networks.attention import Attention, AttentionContext, OutProj
from ffmem.networks.config import AdaptiveConfig
from ffmem.networks.experts import ExpertMemory, Experts
from ffmem.networks.memories import (
    FeedForward,
    GatedMemory,
    LambdaLayer,
    PersistentMemory,
    SoftmaxMemory,
)

FIRST_POSITION = 2
"""fairseq counts positions from the id of its padding token, plus one."""


class Layer(nn.Module):
    """r = h + attention(norm(h)), then o = r + memory(norm(r))."""

    def __init__(self, config: AdaptiveConfig, number: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.layer_norm_eps
        self.self_attn_layer_norm = nn.LayerNorm(hidden, eps=eps)
        self.self_attn = Attention(config, number)
        self.final_layer_norm = nn.LayerNorm(hidden, eps=eps)
        self.memory: nn.Module
        if config.memory == "swiglu":
            self.memory = GatedMemory(config)
        elif config.memory == "softmax":
            self.memory = SoftmaxMemory(config)
        elif config.memory == "moe":
            self.memory = ExpertMemory(config)
        else:
            self.memory = FeedForward(config, config.memory)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, hidden: Float[Tensor, "batch position hidden"], context: AttentionContext
    ) -> Float[Tensor, "batch position hidden"]:
        """Return the layer's output o."""
        attention = self.self_attn(self.self_attn_layer_norm(hidden), context)
        residual = hidden + self.dropout(attention)
        output: Tensor = residual + self.dropout(self.memory(self.final_layer_norm(residual)))
        return output


class PersistentLayer(nn.Module):
    """One softmax over tokens and slots; no feed-forward layer."""

    def __init__(self, config: AdaptiveConfig, number: int) -> None:
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.memory = PersistentMemory(config, number)
        self.residual = nn.Identity()  # a hook reads r here
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, hidden: Float[Tensor, "batch position hidden"], context: AttentionContext
    ) -> Float[Tensor, "batch position hidden"]:
        """Return the layer's output o."""
        tokens, slots = self.memory(self.self_attn_layer_norm(hidden), context)
        output: Tensor = self.residual(hidden + self.dropout(tokens)) + self.dropout(slots)
        return output


class LambdaBlock(nn.Module):
    """A feed-forward layer, then a lambda layer instead of attention."""

    def __init__(self, config: AdaptiveConfig, number: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.layer_norm_eps
        self.final_layer_norm = nn.LayerNorm(hidden, eps=eps)
        self.feed_forward = FeedForward(config, "relu")
        self.self_attn_layer_norm = nn.LayerNorm(hidden, eps=eps)
        self.memory = LambdaLayer(config, number)
        self.residual = nn.Identity()  # a hook reads r here
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, hidden: Float[Tensor, "batch position hidden"], context: AttentionContext
    ) -> Float[Tensor, "batch position hidden"]:
        """Return the layer's output o."""
        hidden = hidden + self.dropout(self.feed_forward(self.final_layer_norm(hidden)))
        content, static = self.memory(self.self_attn_layer_norm(hidden), context)
        output: Tensor = self.residual(hidden + self.dropout(content)) + self.dropout(static)
        return output


def make_layer(config: AdaptiveConfig, number: int) -> nn.Module:
    """Return a layer with the config's kind of memory."""
    kinds = {"persistent": PersistentLayer, "lambda": LambdaBlock}
    return kinds.get(config.memory, Layer)(config, number)


class AdaptivePreTrainedModel(PreTrainedModel):
    """What the trunk and the language model share."""

    config_class = AdaptiveConfig
    base_model_prefix = "model"
    _no_split_modules = ["Layer", "PersistentLayer", "LambdaBlock"]  # noqa: RUF012

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Tell transformers that its table of implementations may run our experts."""
        return True

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """Return the name of an implementation: by default our own loop, as repeatable as it is."""
        name: str = super().get_correct_experts_implementation(requested_experts or "eager")
        return name

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize so that activations keep unit size and every word is about as probable.

        With an `initializer_range`, every weight has that standard deviation instead.
        """
        if isinstance(module, Experts):
            self._init_experts(module)
            return
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or isinstance(module, nn.LayerNorm):
            super()._init_weights(module)  # type: ignore[no-untyped-call]
            return
        if getattr(module, "bias", None) is not None:
            init.zeros_(module.bias)  # type: ignore[arg-type]
        std = self.config.initializer_range
        if std is None:
            std = getattr(module, "init_std", None)
        if std is None:
            std = math.sqrt(2 / sum(weight.shape))
            if isinstance(module, OutProj):
                std /= math.sqrt(2 * self.config.num_hidden_layers)
        init.normal_(weight, mean=0.0, std=std)

    def _init_experts(self, experts: Experts) -> None:
        """Initialize every expert like a feed-forward layer of its size."""
        init.zeros_(experts.up_proj_bias)
        init.zeros_(experts.down_proj_bias)
        std = self.config.initializer_range
        xavier = math.sqrt(2 / sum(experts.up_proj.shape[1:]))
        to_stream = xavier / math.sqrt(2 * self.config.num_hidden_layers)
        init.normal_(experts.up_proj, mean=0.0, std=xavier if std is None else std)
        init.normal_(experts.down_proj, mean=0.0, std=to_stream if std is None else std)


class AdaptiveModel(AdaptivePreTrainedModel):
    """The trunk: from token ids to the last layer's output, after the final norm if any."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__(config)
        self.embed_tokens = AdaptiveInput(config)
        self.scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            make_layer(config, number) for number in range(config.num_hidden_layers)
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
        attention_mask: Shaped[Tensor, "batch total"] | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> BaseModelOutputWithPast:
        """Return the input of the adaptive softmax; on request, the state after every layer too."""
        if output_attentions or self.config.output_attentions:
            raise ModelError(
                "output_attentions is not supported: this model stores no attention weights. Drop"
                " it; `ffmem trace` shows the coefficients of the memories."
            )
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        if attention_mask is not None and bool(attention_mask.bool().all()):
            attention_mask = None  # it hides nothing
        context = AttentionContext(
            input_ids.shape[1], attention_mask, past_key_values, input_ids.device
        )
        hidden = self.scale * self.embed_tokens(input_ids)
        hidden = self.dropout(hidden + sinusoids(context.positions, hidden.shape[2]).to(hidden))
        states = [hidden]
        for layer in self.layers:
            hidden = layer(hidden, context)
            if output_hidden_states:
                states.append(hidden)
        if self.layer_norm is not None:
            hidden = states[-1] = self.layer_norm(hidden)  # as in every model of transformers
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=past_key_values,
            hidden_states=tuple(states) if output_hidden_states else None,
        )


class AdaptiveLM(AdaptivePreTrainedModel, GenerationMixin):
    """The language model; its logits are log-probabilities."""

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
        attention_mask: Shaped[Tensor, "batch total"] | None = None,
        past_key_values: Cache | None = None,
        labels: Int[Tensor, "batch position"] | None = None,
        logits_to_keep: int = 0,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> CausalLMOutputWithPast:
        """Return log-probabilities of the next word at the last `logits_to_keep` positions, or all.

        With `labels`, also the loss, as in all models of transformers: the mean of −log p of each
        next label; negative labels do not count.
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
    positions: Int[Tensor, "batch position"], width: int
) -> Float[Tensor, "batch position hidden"]:
    """Return position vectors, positions counted from 0: all sines, then all cosines."""
    half = width // 2
    steps = torch.arange(half, device=positions.device)
    frequencies = torch.exp(steps * (-math.log(10_000) / (half - 1)))
    angles = (positions[..., None] + FIRST_POSITION) * frequencies
    table = torch.cat([angles.sin(), angles.cos()], dim=-1)
    return functional.pad(table, (0, width % 2))


AutoConfig.register(AdaptiveConfig.model_type, AdaptiveConfig)
AutoModel.register(AdaptiveConfig, AdaptiveModel)
AutoModelForCausalLM.register(AdaptiveConfig, AdaptiveLM)
