"""The families table: where each family of models has its memories.

    FF(x) = m · V + b,    m = f(x · Kᵀ)    or, gated,    m = f(x · Kᵀ) ⊙ (x · Uᵀ)
    o = r + y,            y = FF(x), after the block's post-norm or multiplier if it has one

A row names the modules that hold V, K and U, and where to read r independently of y. Experts are
found by their weights: the row of a mixture of experts names the maps of its dense layers, if it
has some. No other file knows names of a family. To support a family, add a row; the self-check
tests it on every model that is loaded.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ffmem.errors import ModelError

FUSED = "FUSED"
"""`up` of a family with both keys in one map: first the gate's rows, then the others."""

NOTHING = "NOTHING"
"""`values` of a layer without memories; no module has this name."""

RERUN = "RERUN"
"""`residual` of layers that do more than add y: r is what they give without their memories, in a
second run, and y all that these change."""

CLAMPED = "clamped SwiGLU"
"""`activation` of families whose gate is clamped: `modules.clamped_glu`."""

ALTUP = "ALTUP"
"""`streams` of Gemma 3n, which has no module for it."""


Factor = Any
"""A name, a number, a tensor of gains, or None."""


class Variant(NamedTuple):
    """Changes to a family's row for models whose config has `flag` = `value`."""

    flag: str
    value: bool | str
    changes: dict[str, str | bool | None]

    def matches(self, config: Any) -> bool:
        """Return whether a config has `flag` = `value`; for a bool, truth alone counts."""
        found = getattr(config, self.flag)
        return bool((bool(found) if isinstance(self.value, bool) else found) == self.value)


@dataclass(frozen=True)
class Family:
    """Dotted paths into a Hugging Face causal language model, and names in its config."""

    blocks: str
    """Path from the model to its list of layers. The other paths start at a layer, unless they say
    that they start at the model."""
    values: str
    """The linear map whose weights are the values."""
    keys: str
    """The linear map whose weights are the keys; in gated models, the gate's."""
    up: str | None = None
    """Gated models: the linear map whose output multiplies the gate, or FUSED."""

    residual: str | None = None
    """The module whose input is r: the norm before the feed-forward part, or else its first
    map; or RERUN."""
    attention: str | None = None
    """Instead of `residual`, in parallel blocks: r is the block's input + this module's output."""
    post_norm: str | None = None
    """The norm whose output is y."""
    output_norm: str | None = None
    """The norm whose output, given r + y, is o."""
    added: str | None = None
    """The module whose output the block adds besides y; it counts as a part of r."""

    # Factors: names of numbers in the config, or of numbers and gains of a layer's modules. The
    # search for memories may also measure numbers and gains that have no name.
    multiplier: Factor = None
    """The factor that the feed-forward part is multiplied with."""
    residual_scale: Factor = None
    """The factor that what `residual` names is multiplied with to give r."""
    offset: Any = None
    """What the block adds to every sum r + y, measured; it counts as a part of r."""
    layer_scale: Factor = None
    """The factor that the sum r + y is multiplied with; it counts as a part of both."""
    key_scale: Factor = None
    """The factor of x · Kᵀ before the activation."""
    adapters: str | None = None
    """A list of pairs of linear maps that layers add to the output of keys which they share."""
    behind: str | None = None
    """The linear map through which the feed-forward part goes on."""
    sparse: str | None = None
    """The module that keeps only the largest x · Kᵀ of a token before the activation."""
    inner_norm: str | None = None
    """The norm between activation and value map: its output are the coefficients."""

    repeats: bool = False
    """Whether stacks of layers run several times on a text; each run counts as a layer."""
    streams: str | None = None
    """Path from the model to the module that makes one vector of its residual streams, if there are
    several, as the final norm reads it; or ALTUP."""
    final_norm: str | None = None
    """Path from the model to the norm before the output embedding; a model may not have it."""
    project_out: str | None = None
    """Path from the model to the projection between that norm and the output embedding, if any."""
    head_transform: str | None = None
    """Path from the model to a small network instead of that projection, if any."""
    scale: str | None = None
    """Config name of the factor that logits are multiplied with."""
    divisor: str | None = None
    """Config name of the number that logits are divided by."""
    cap: str | None = None
    """Config name of the soft-cap: cap · tanh(logits / cap)."""

    activation: str = "hidden_act"
    """Config name of the activation f; or f itself, or a layer's module, if the config does not
    name it."""
    softmax_groups: str | None = None
    """If f is a softmax: config name of the number of groups that it normalizes separately."""
    input_values: bool = False
    """Whether values come from the input, as in lambda layers, so that none are static."""
    context: str | None = "max_position_embeddings"
    """Config name of the longest input; None if positions are unlimited."""

    bias_flag: str | None = None
    """Config name of the switch that gives the value map, and perhaps other maps, a bias."""

    variants: tuple[Variant, ...] = ()
    unsupported: dict[str, str] = field(default_factory=dict)
    """Config flags with which the equations do not hold, and what to do about each."""

    def for_config(self, config: Any) -> "Family":
        """Return the row for models with this config; raise if it is unsupported."""
        for flag, advice in self.unsupported.items():
            if getattr(config, flag, False):
                raise ModelError(
                    f"ffmem cannot read a {config.model_type!r} model with {flag} ="
                    f" {getattr(config, flag)!r}. {advice}"
                )
        row = self
        for variant in self.variants:
            if variant.matches(config):
                row = replace(row, **variant.changes)  # type: ignore[arg-type]
        return replace(row, variants=(), unsupported={})


_GPT2 = Family(
    blocks="transformer.h",
    values="mlp.c_proj",
    keys="mlp.c_fc",
    residual="ln_2",
    final_norm="transformer.ln_f",
    activation="activation_function",
)
_GPTJ = Family(
    blocks="transformer.h",
    values="mlp.fc_out",
    keys="mlp.fc_in",
    attention="attn",
    final_norm="transformer.ln_f",
    activation="activation_function",
)
_GPT_NEOX = Family(
    blocks="gpt_neox.layers",
    values="mlp.dense_4h_to_h",
    keys="mlp.dense_h_to_4h",
    attention="attention",
    final_norm="gpt_neox.final_layer_norm",
    variants=(
        Variant(
            "use_parallel_residual",
            False,
            {"attention": None, "residual": "post_attention_layernorm"},
        ),
    ),
)
_OPT = Family(
    blocks="model.decoder.layers",
    values="fc2",
    keys="fc1",
    residual="final_layer_norm",
    final_norm="model.decoder.final_layer_norm",
    project_out="model.decoder.project_out",
    activation="activation_function",
    bias_flag="enable_bias",
    variants=(
        Variant(
            "do_layer_norm_before", False, {"residual": "fc1", "output_norm": "final_layer_norm"}
        ),
    ),
)
_BLOOM = Family(
    blocks="transformer.h",
    values="mlp.dense_4h_to_h",
    keys="mlp.dense_h_to_4h",
    residual="post_attention_layernorm",
    final_norm="transformer.ln_f",
    activation="gelu_new",
    context=None,
    variants=(Variant("apply_residual_connection_post_layernorm", True, {"residual": "mlp"}),),
    unsupported={
        "slow_but_exact": "Load it with slow_but_exact=False; results differ only by rounding."
    },
)
_FALCON = Family(
    blocks="transformer.h",
    values="mlp.dense_4h_to_h",
    keys="mlp.dense_h_to_4h",
    attention="self_attention",
    final_norm="transformer.ln_f",
    activation="activation",
    bias_flag="bias",
    variants=(
        Variant(
            "parallel_attn", False, {"attention": None, "residual": "post_attention_layernorm"}
        ),
        Variant("alibi", True, {"context": None}),
    ),
)
_LLAMA = Family(
    blocks="model.layers",
    values="mlp.down_proj",
    keys="mlp.gate_proj",
    up="mlp.up_proj",
    residual="post_attention_layernorm",
    final_norm="model.norm",
)
_LLAMA_WITH_SWITCH = replace(_LLAMA, bias_flag="mlp_bias")
_UNGATED_LLAMA = replace(_LLAMA_WITH_SWITCH, keys="mlp.up_proj", up=None)
_OLMO2 = replace(_LLAMA, residual="mlp", post_norm="post_feedforward_layernorm")
_GEMMA2 = replace(
    _LLAMA,
    residual="pre_feedforward_layernorm",
    post_norm="post_feedforward_layernorm",
    cap="final_logit_softcapping",
    activation="hidden_activation",
)
_GRANITE_WITH_EXPERTS = replace(_LLAMA, multiplier="residual_multiplier", divisor="logits_scaling")
_LLAMA4 = replace(
    _LLAMA,
    values="feed_forward.down_proj",
    keys="feed_forward.gate_proj",
    up="feed_forward.up_proj",
)
_HYPER_CONNECTIONS = replace(_LLAMA, residual=RERUN, streams="model.hc_head")
_QWEN4 = replace(_LLAMA, residual=RERUN, streams="model.hyper_connection_mixer", final_norm=None)
_GEMMA3N = replace(_GEMMA2, residual=RERUN, streams=ALTUP, sparse="mlp")
# What the feed-forward part gives goes to a Mamba layer alone, and only from there to the stream.
_ZAMBA2 = Family(
    blocks="model.layers",
    values="shared_transformer.feed_forward.down_proj",
    keys="shared_transformer.feed_forward.gate_up_proj",
    up=FUSED,
    adapters="shared_transformer.feed_forward.gate_up_proj_adapter_list",
    behind="linear",
    residual=RERUN,
    final_norm="model.final_layernorm",
)
_COHERE = replace(_LLAMA, residual=None, attention="self_attn", scale="logit_scale")
_GLM = replace(_LLAMA, keys="mlp.gate_up_proj", up=FUSED)
_PHI = Family(
    blocks="model.layers",
    values="mlp.fc2",
    keys="mlp.fc1",
    attention="self_attn",
    final_norm="model.final_layernorm",
)
_FAIRSEQ = Family(
    blocks="model.layers",
    values="fc2",
    keys="fc1",
    residual="final_layer_norm",
    final_norm="model.layer_norm",
)

_ADAPTIVE = replace(
    _FAIRSEQ,
    values="memory.values",
    keys="memory.keys",
    variants=(
        Variant("memory", "swiglu", {"up": "memory.up"}),
        Variant("memory", "softmax", {"softmax_groups": "softmax_groups"}),
        Variant(
            "memory", "persistent", {"softmax_groups": "softmax_groups", "residual": "residual"}
        ),
        Variant("memory", "lambda", {"input_values": True, "residual": "residual"}),
    ),
)

_LLAMA_WITH_EXPERTS = (
    *("deepseek_v3", "ernie4_5_moe", "glm4_moe", "gpt_oss", "jetmoe", "mixtral", "olmoe"),
    *("qwen2_moe", "qwen3_moe"),
)
"""Families whose layers are those of Llama, but for their experts."""

FAMILIES = {
    **dict.fromkeys(_LLAMA_WITH_EXPERTS, _LLAMA),
    "arcee": _UNGATED_LLAMA,
    "biogpt": replace(_FAIRSEQ, blocks="biogpt.layers", final_norm="biogpt.layer_norm"),
    "bloom": _BLOOM,
    "codegen": _GPTJ,
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "cwm": _LLAMA_WITH_SWITCH,
    "deepseek_v4": replace(_HYPER_CONNECTIONS, activation=CLAMPED),
    "dbrx": Family(
        blocks="transformer.blocks",
        values="ffn.w2",
        keys="ffn.w1",
        up="ffn.v1",
        residual="norm_attn_norm.norm_2",
        final_norm="transformer.norm_f",
        activation="silu",
        context="max_seq_len",
    ),
    "ernie4_5": replace(_LLAMA, bias_flag="use_bias"),
    "exaone4": _OLMO2,
    "falcon": _FALCON,
    "ffmem_adaptive": _ADAPTIVE,
    "gemma": _LLAMA,
    "gemma2": _GEMMA2,
    "gemma3": replace(
        _GEMMA2,
        blocks="model.language_model.layers",
        final_norm="model.language_model.norm",
        cap=None,  # the multimodal model has no soft-cap
    ),
    "gemma3_text": _GEMMA2,
    "gemma3n": replace(
        _GEMMA3N,
        blocks="model.language_model.layers",
        final_norm="model.language_model.norm",
    ),
    "gemma3n_text": _GEMMA3N,
    "glm": _GLM,
    "glm4": replace(_GLM, post_norm="post_mlp_layernorm"),
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neo": _GPT2,
    "gpt_neox": _GPT_NEOX,
    "gpt_neox_japanese": replace(
        _GPT_NEOX,
        blocks="gpt_neox_japanese.layers",
        attention=None,
        residual="post_attention_layernorm",
        final_norm="gpt_neox_japanese.final_layer_norm",
        variants=(),
    ),
    "gptj": _GPTJ,
    "granite": replace(
        _LLAMA_WITH_SWITCH, multiplier="residual_multiplier", divisor="logits_scaling"
    ),
    "granitemoe": _GRANITE_WITH_EXPERTS,
    "granitemoeshared": _GRANITE_WITH_EXPERTS,
    "helium": _LLAMA_WITH_SWITCH,
    "hrm_text": replace(
        _LLAMA_WITH_SWITCH,
        blocks="model.unrolled",
        repeats=True,
        final_norm="model.H_module.final_norm",
    ),
    "hunyuan_v1_dense": _LLAMA,
    "hy_v4": _HYPER_CONNECTIONS,
    "jais2": _UNGATED_LLAMA,
    "llama": _LLAMA_WITH_SWITCH,
    "llama4_text": _LLAMA4,
    # A layer is two blocks. Its experts read the first and write behind the second, whose dense
    # part is read with them; that of the first block is a part of r.
    "longcat_flash": replace(
        _LLAMA,
        values="mlps.1.down_proj",
        keys="mlps.1.gate_proj",
        up="mlps.1.up_proj",
        residual="post_attention_layernorm.1",
    ),
    "minimax": replace(
        _LLAMA, residual="mlp", residual_scale="mlp_alpha_factor", multiplier="mlp_beta_factor"
    ),
    "ministral": _LLAMA,
    "ministral3": _LLAMA,
    "mistral": _LLAMA,
    "mpt": Family(
        blocks="transformer.blocks",
        values="ffn.down_proj",
        keys="ffn.up_proj",
        residual="norm_2",
        final_norm="transformer.norm_f",
        activation="gelu",
        context="max_seq_len",
    ),
    "nanochat": replace(
        _PHI,
        attention=None,
        residual="post_attention_layernorm",
        final_norm="model.norm",
        cap="final_logit_softcapping",
    ),
    "nemotron": _UNGATED_LLAMA,
    "nemotron_h": Family(  # a layer is a feed-forward part, attention, or Mamba
        blocks="model.layers",
        values="mixer.down_proj",
        keys="mixer.up_proj",
        residual="norm",
        final_norm="model.norm_f",
        activation="mlp_hidden_act",
        bias_flag="mlp_bias",
    ),
    "olmo": _LLAMA,
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "openai-gpt": replace(
        _GPT2, residual="mlp", output_norm="ln_2", final_norm=None, activation="gelu_new"
    ),
    "opt": _OPT,
    "persimmon": replace(
        _GPT_NEOX,
        blocks="model.layers",
        attention=None,
        residual="post_attention_layernorm",
        final_norm="model.final_layernorm",
        variants=(),
    ),
    "phi": _PHI,
    "phi3": _GLM,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen4_exp": replace(
        _QWEN4,
        blocks="model.language_model.layers",
        streams="model.language_model.hyper_connection_mixer",
    ),
    "qwen4_exp_text": _QWEN4,
    "seed_oss": _LLAMA_WITH_SWITCH,
    "smollm3": _LLAMA_WITH_SWITCH,
    "stablelm": replace(
        _LLAMA,
        variants=(
            Variant("use_parallel_residual", True, {"attention": "self_attn", "residual": None}),
        ),
    ),
    "starcoder2": replace(
        _LLAMA, values="mlp.c_proj", keys="mlp.c_fc", up=None, bias_flag="use_bias"
    ),
    "vaultgemma": replace(_GEMMA2, post_norm=None),
    "xglm": replace(_FAIRSEQ, activation="activation_function"),
    "zamba": replace(
        _ZAMBA2,
        values="shared_transf.feed_forward.down_proj",
        keys="shared_transf.feed_forward.gate_proj",
        up="shared_transf.feed_forward.up_proj",
        adapters=None,
    ),
    "zamba2": _ZAMBA2,
}
"""One row per `config.model_type`."""

_STATE_SPACE = (
    "it is a state-space model without feed-forward layers, so it has no key-value memories"
)
_STACKED_SHARED = (
    "its shared experts run as stacks in one product, weighted by the router and followed by a"
    " convolution over the last tokens"
)
_DRAFTS = "it drafts tokens from the states of another model and does not run on text alone"
_SOUNDS = "it predicts several audio codes at each position, not the next token of a text"

UNREADABLE = {
    "blt": "it turns bytes into patches, and its stacks of layers do not share positions",
    "cpmant": "it prepends prompt vectors to a text, so positions are not tokens",
    "falcon_mamba": _STATE_SPACE,
    "gemma4_assistant": _DRAFTS,
    "gemma4_unified_assistant": _DRAFTS,
    "inkling_mm_model": _STACKED_SHARED,
    "inkling_text": _STACKED_SHARED,
    "mamba": _STATE_SPACE,
    "mamba2": _STATE_SPACE,
    "musicgen_decoder": _SOUNDS,
    "musicgen_melody_decoder": _SOUNDS,
    "prophetnet": "it runs one stream per future token through the same layers, so each position"
    " has several sets of coefficients",
    "reformer": "its reversible layers carry two residual streams, and its head reads both",
    "rwkv": "its feed-forward layer mixes in the previous token and gates the sum of values, so not"
    " only coefficients multiply the values",
    "xlnet": "it predicts tokens in any order, and its text stream sees both sides of a token",
    "xlstm": "it is a recurrent network, and ffmem only reads transformers",
}
"""Types of causal language models that ffmem cannot read, and why."""

ENCODERS = {"bert-generation"}
"""Encoders that transformers does not list as such; they can be built as decoders."""
