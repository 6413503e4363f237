"""Where each family of models keeps its memories: the only file that knows their names for them.

    FF(x) = m · V + b,    m = f(x · Kᵀ)    or, gated,    m = f(x · Kᵀ) ⊙ (x · Uᵀ)
    o = r + y,            y = FF(x), after the block's post-norm or multiplier if it has one

A row says which module holds V, K and U, and from where r is read without reading y. To support
a family, add a row; the self-check then proves it on every model that is loaded.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ffmem.errors import ModelError

FUSED = "FUSED"
"""`up` of a model that keeps both keys in one map: the gate's rows first, then the others."""


class Variant(NamedTuple):
    """How models differ from their family's row whose config says `flag` = `value`."""

    flag: str
    value: bool | str
    changes: dict[str, str | bool | None]

    def fits(self, config: Any) -> bool:
        """Return whether a config says so; any value counts as the switch that it stands for."""
        found = getattr(config, self.flag)
        return bool((bool(found) if isinstance(self.value, bool) else found) == self.value)


@dataclass(frozen=True)
class Family:
    """Dotted paths into a Hugging Face causal language model, and names in its config."""

    blocks: str
    """From the model to the list of its layers. The other paths but `final_norm` and
    `project_out` start at a layer."""
    values: str
    """The linear map whose weights are the values."""
    keys: str
    """The linear map whose weights are the keys; in gated models the gate's."""
    up: str | None = None
    """Gated models: the linear map whose output multiplies the gate, or FUSED."""

    residual: str | None = None
    """The module whose input is r: the norm before the feed-forward part, or, where it has none,
    its first map."""
    attention: str | None = None
    """Parallel blocks, instead of `residual`: r is the block's input plus this module's output."""
    post_norm: str | None = None
    """The norm whose output is y."""
    output_norm: str | None = None
    """The norm whose output, given r + y, is o."""
    multiplier: str | None = None
    """In the config: what the feed-forward part is multiplied by on its way to o."""

    final_norm: str | None = None
    """From the model to the norm before the output embedding; a model may set it to None."""
    project_out: str | None = None
    """From the model to the map between that norm and the output embedding; may be None."""
    scale: str | None = None
    """In the config: what logits are multiplied by."""
    divisor: str | None = None
    """In the config: what logits are divided by."""
    cap: str | None = None
    """In the config: logits are capped as cap · tanh(logits / cap)."""

    activation: str = "hidden_act"
    """In the config: the name of f; or, where no config says it, the name itself."""
    softmax_groups: str | None = None
    """In the config, where f is a softmax: over how many groups of a layer's memories it runs."""
    input_values: bool = False
    """Whether values come from the input (lambda layers): there is nothing static to read."""
    context: str | None = "max_position_embeddings"
    """In the config: the longest input. None where positions have no end."""

    bias_flag: str | None = None
    """In the config: the switch that gives the value map a bias, where it may be without one.
    Other maps may get one by the same switch."""

    variants: tuple[Variant, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    """Flags of the config under which the equations do not hold, and what to do instead."""

    def of(self, config: Any) -> "Family":
        """Return the row for a model with this config: variants applied, refusals raised."""
        for flag, advice in self.refused.items():
            if getattr(config, flag, False):
                raise ModelError(
                    f"This {config.model_type!r} model has {flag} = {getattr(config, flag)!r},"
                    f" under which its values cannot be read. {advice}"
                )
        row = self
        for variant in self.variants:
            if variant.fits(config):
                row = replace(row, **variant.changes)  # type: ignore[arg-type]
        return replace(row, variants=(), refused={})


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
    refused={
        "slow_but_exact": "Load it with slow_but_exact=False: the results differ by rounding only."
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

FAMILIES = {
    "arcee": _UNGATED_LLAMA,
    "biogpt": replace(_FAIRSEQ, blocks="biogpt.layers", final_norm="biogpt.layer_norm"),
    "bloom": _BLOOM,
    "codegen": _GPTJ,
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "cwm": _LLAMA_WITH_SWITCH,
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
        cap=None,  # the model that also sees pictures does not cap
    ),
    "gemma3_text": _GEMMA2,
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
    "helium": _LLAMA_WITH_SWITCH,
    "hunyuan_v1_dense": _LLAMA,
    "jais2": _UNGATED_LLAMA,
    "llama": _LLAMA_WITH_SWITCH,
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
    "nemotron_h": Family(  # a layer is a feed-forward part, attention or Mamba
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
}
"""One row per `config.model_type`."""
