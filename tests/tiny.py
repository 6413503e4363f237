"""Tiny random models of every family, for tests: nothing is downloaded, nothing hidden by zeros."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from ffmem.models.load import load
from ffmem.models.memories import Memories, fingerprint
from ffmem.models.tokenizer import SubwordTokenizer
from ffmem.networks.config import AdaptiveConfig

HIDDEN, MEMORIES, LAYERS, VOCABULARY, HEADS = 16, 24, 2, 64, 2

_GPT = {
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_inner": MEMORIES,
    "n_positions": 64,
}
_COMMON = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "intermediate_size": MEMORIES,
    "max_position_embeddings": 64,
}
_SLIDING = {"num_hidden_layers": 3, "head_dim": 8, "sliding_window": 4}
_ALTERNATING = _SLIDING | {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]
}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_FAIRSEQ = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "ffn_dim": MEMORIES,
    "max_position_embeddings": 64,
}
_FALCON = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "ffn_hidden_size": MEMORIES,
    "max_position_embeddings": 64,
}
_BLOOM = {"hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS}


def _config(model_type: str, **settings: object) -> PretrainedConfig:
    """Return a config with a vocabulary of 64 tokens, none of them special."""
    plain = {
        "vocab_size": VOCABULARY,
        "pad_token_id": None,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return AutoConfig.for_model(model_type, **(plain | settings))


def _llama_like(model_type: str, **settings: object) -> PretrainedConfig:
    return _config(model_type, **(_COMMON | settings))


def _adaptive(memory: str) -> AdaptiveConfig:
    """Return a config of our own model; a layer of any kind has as many memories as the others."""
    sizes = {"persistent": MEMORIES // HEADS, "moe": MEMORIES // 6}  # five experts, a shared one
    return AdaptiveConfig(
        memory=memory,
        band_sizes=[32, 16, 16],
        band_widths=[HIDDEN, 8, 4],
        hidden_size=HIDDEN,
        intermediate_size=sizes.get(memory, MEMORIES),
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=64,
        key_width=4,
        distances=MEMORIES // HEADS,
        num_experts=5,
        shared_expert=True,
    )


TINY: dict[str, PretrainedConfig] = {
    "arcee": _llama_like("arcee", mlp_bias=True),
    "biogpt": _llama_like("biogpt", pad_token_id=1),
    "bloom": _config("bloom", **_BLOOM),
    "bloom residual after norm": _config(
        "bloom", **_BLOOM, apply_residual_connection_post_layernorm=True
    ),
    "codegen": _config("codegen", **(_GPT | {"n_head": 4}), n_ctx=64, rotary_dim=4),
    "cohere": _llama_like("cohere", logit_scale=0.25),
    "cohere with normed queries": _llama_like("cohere", logit_scale=0.25, use_qk_norm=True),
    "cohere2": _llama_like("cohere2", logit_scale=0.25, **_ALTERNATING),
    "cwm": _llama_like("cwm", **_ALTERNATING, rope_parameters=_ROPE),
    "ernie4_5": _llama_like("ernie4_5", use_bias=True, head_dim=8),
    "exaone4": _llama_like("exaone4", **_ALTERNATING),
    "falcon": _config("falcon", **_FALCON, bias=True),
    "falcon sequential": _config("falcon", **_FALCON, parallel_attn=False, alibi=True),
    "falcon new": _config("falcon", **_FALCON, new_decoder_architecture=True, num_kv_heads=1),
    "falcon new with one norm": _config(
        "falcon", **_FALCON, new_decoder_architecture=True, num_ln_in_parallel_attn=1
    ),
    "ffmem_adaptive": _adaptive("relu"),
    "ffmem_adaptive gelu": _adaptive("gelu"),
    "ffmem_adaptive lambda": _adaptive("lambda"),
    "ffmem_adaptive persistent": _adaptive("persistent"),
    "ffmem_adaptive softmax": _adaptive("softmax"),
    "ffmem_adaptive swiglu": _adaptive("swiglu"),
    "gemma": _llama_like("gemma", head_dim=8),
    "gemma2": _llama_like("gemma2", final_logit_softcapping=2.0, **_ALTERNATING),
    "gemma3": AutoConfig.for_model(
        "gemma3",
        text_config=_llama_like("gemma3_text", **_ALTERNATING).to_dict(),
        vision_config={
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "intermediate_size": MEMORIES,
            "image_size": 8,
            "patch_size": 4,
        },
        mm_tokens_per_image=4,
    ),
    "gemma3_text": _llama_like("gemma3_text", **_ALTERNATING),
    "glm": _llama_like("glm", head_dim=8),
    "glm4": _llama_like("glm4", head_dim=8),
    "gpt2": _config("gpt2", **_GPT),
    "gpt2 untied": _config("gpt2", **_GPT, tie_word_embeddings=False),
    "gpt_bigcode": _config("gpt_bigcode", **_GPT),
    "gpt_neo": _config(
        "gpt_neo",
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        num_heads=HEADS,
        intermediate_size=MEMORIES,
        max_position_embeddings=64,
        window_size=4,
        attention_types=[[["global", "local"], 1]],
    ),
    "gpt_neox": _llama_like("gpt_neox"),
    "gpt_neox sequential": _llama_like("gpt_neox", use_parallel_residual=False),
    "gpt_neox_japanese": _llama_like("gpt_neox_japanese", intermediate_multiple_size=2),
    "gptj": _config("gptj", **_GPT, rotary_dim=4),
    "granite": _llama_like(
        "granite", residual_multiplier=0.22, logits_scaling=8.0, embedding_multiplier=12.0
    ),
    "helium": _llama_like("helium", head_dim=8),
    "hunyuan_v1_dense": _llama_like("hunyuan_v1_dense", head_dim=8),
    "jais2": _llama_like("jais2", head_dim=8),
    "llama": _llama_like("llama"),
    "llama with biases": _llama_like("llama", mlp_bias=True, tie_word_embeddings=True),
    "ministral": _llama_like("ministral", **_ALTERNATING),
    "ministral3": _llama_like(
        "ministral3",
        head_dim=8,
        rope_parameters=_ROPE
        | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16},
    ),
    "mistral": _llama_like("mistral", **_SLIDING),
    "mpt": _config("mpt", d_model=HIDDEN, n_layers=LAYERS, n_heads=HEADS, max_seq_len=64),
    "nanochat": _llama_like("nanochat", final_logit_softcapping=2.0),
    "nemotron": _llama_like("nemotron", head_dim=8, mlp_bias=True),
    "nemotron_h": _config(
        "nemotron_h",
        hidden_size=HIDDEN,
        layers_block_type=["mlp", "mlp", "linear_attention", "full_attention", "mlp"],
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=8,
        intermediate_size=MEMORIES,
        mlp_bias=True,
        max_position_embeddings=64,
        ssm_state_size=4,
        mamba_num_heads=HEADS,
        mamba_head_dim=8,
        n_groups=1,
        chunk_size=8,
    ),
    "olmo": _llama_like("olmo"),
    "olmo2": _llama_like("olmo2"),
    "olmo3": _llama_like("olmo3", **_ALTERNATING),
    "openai-gpt": _config(
        "openai-gpt", n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=64
    ),
    "opt": _config("opt", **_FAIRSEQ, word_embed_proj_dim=HIDDEN),
    "opt post-norm": _config("opt", **_FAIRSEQ, word_embed_proj_dim=8, do_layer_norm_before=False),
    "persimmon": _llama_like("persimmon"),
    "phi": _llama_like("phi"),
    "phi3": _llama_like("phi3"),
    "qwen2": _llama_like("qwen2"),
    "qwen3": _llama_like("qwen3", head_dim=8, tie_word_embeddings=True),
    "seed_oss": _llama_like("seed_oss", head_dim=8),
    "smollm3": _llama_like("smollm3", head_dim=8),
    "stablelm": _llama_like("stablelm", use_qkv_bias=True),
    "stablelm parallel": _llama_like("stablelm", use_parallel_residual=True),
    "starcoder2": _llama_like("starcoder2", sliding_window=4),
    "vaultgemma": _llama_like("vaultgemma", final_logit_softcapping=2.0, **_ALTERNATING),
    "xglm": _config(
        "xglm",
        d_model=HIDDEN,
        num_layers=LAYERS,
        attention_heads=HEADS,
        ffn_dim=MEMORIES,
        max_position_embeddings=64,
    ),
}
"""A config of every family, and of every way to differ within one: `family with a difference`."""


N_EXPERTS, EXPERT = 5, 12
"""Routed experts of a layer, and the memories of each."""

_ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": EXPERT}
_GROUPS = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
_LATENT_ATTENTION = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
_GRANITE = {"residual_multiplier": 0.22, "logits_scaling": 8.0, "embedding_multiplier": 12.0}
_EXPERTS_ALONE = {
    "num_local_experts": N_EXPERTS,
    "num_experts_per_tok": 2,
    "intermediate_size": EXPERT,
}


def _nemotron(**settings: object) -> PretrainedConfig:
    config = TINY["nemotron_h"].to_dict() | {
        "layers_block_type": ["mlp", "moe", "full_attention", "moe"],
        "n_routed_experts": N_EXPERTS,
        "moe_shared_expert_intermediate_size": 20,
        "n_group": 1,
        "topk_group": 1,
    }
    return TINY["nemotron_h"].__class__.from_dict(config | _ROUTED | settings)


EXPERTS: dict[str, PretrainedConfig] = {
    "dbrx": _config(
        "dbrx",
        d_model=HIDDEN,
        n_layers=LAYERS,
        n_heads=HEADS,
        max_seq_len=64,
        ffn_config={
            "ffn_hidden_size": EXPERT,
            "hidden_size": HIDDEN,
            "moe_num_experts": N_EXPERTS,
            "moe_top_k": 2,
        },
        attn_config={"kv_n_heads": HEADS, "rope_theta": 10_000.0, "clip_qkv": 8.0},
    ),
    "deepseek_v3": _llama_like(
        "deepseek_v3",
        n_routed_experts=N_EXPERTS,
        routed_scaling_factor=1.7,
        **(_ROUTED | _GROUPS | _LATENT_ATTENTION),
    ),
    "deepseek_v4": _llama_like(
        "deepseek_v4",
        n_routed_experts=N_EXPERTS,
        n_shared_experts=1,
        head_dim=8,
        q_lora_rank=8,
        o_lora_rank=8,
        o_groups=2,
        index_n_heads=2,
        index_head_dim=8,
        index_topk=2,
        sliding_window=4,
        hc_mult=3,
        swiglu_limit=0.8,
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
        mlp_layer_types=["hash_moe", "moe"],
        **(_ROUTED | {"intermediate_size": EXPERT}),
    ),
    "ernie4_5_moe": _llama_like(
        "ernie4_5_moe",
        moe_num_experts=N_EXPERTS,
        moe_k=2,
        moe_intermediate_size=EXPERT,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
        moe_layer_end_index=1,
        moe_layer_interval=1,
        head_dim=8,
    ),
    "ffmem_adaptive moe": _adaptive("moe"),
    "glm4_moe": _llama_like(
        "glm4_moe", n_routed_experts=N_EXPERTS, head_dim=8, **(_ROUTED | _GROUPS)
    ),
    "gpt_oss": _llama_like(
        "gpt_oss", **(_EXPERTS_ALONE | _ALTERNATING), swiglu_limit=2.0, rope_parameters=_ROPE
    ),
    "granitemoe": _llama_like("granitemoe", **_EXPERTS_ALONE, **_GRANITE),
    "granitemoeshared": _llama_like(
        "granitemoeshared", **_EXPERTS_ALONE, **_GRANITE, shared_intermediate_size=20
    ),
    "hy_v4": _llama_like(
        "hy_v4",
        n_routed_experts=N_EXPERTS,
        routed_scaling_factor=1.7,
        mlp_layer_types=["dense", "sparse"],
        head_dim=8,
        index_n_heads=2,
        index_head_dim=8,
        index_topk=2,
        hc_mult=3,
        swiglu_limit=0.8,
        **(_ROUTED | _GROUPS | _LATENT_ATTENTION),
    ),
    "jetmoe": _llama_like("jetmoe", **_EXPERTS_ALONE, kv_channels=8),
    "llama4_text": _llama_like(
        "llama4_text",
        **_EXPERTS_ALONE,
        head_dim=8,
        intermediate_size_mlp=20,
        moe_layers=[1],
        attention_chunk_size=8,
        layer_types=["chunked_attention", "full_attention"],
    ),
    "longcat_flash": _llama_like(
        "longcat_flash",
        n_routed_experts=N_EXPERTS,
        num_layers=LAYERS,
        num_hidden_layers=2 * LAYERS,  # its layers are two blocks each
        zero_expert_num=2,
        expert_ffn_hidden_size=EXPERT,
        ffn_hidden_size=MEMORIES,
        moe_topk=3,
        head_dim=4,
        **_LATENT_ATTENTION,
    ),
    "minimax": _llama_like(
        "minimax",
        **_EXPERTS_ALONE,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        block_size=4,
        mlp_alpha_factor=1.3,
        mlp_beta_factor=0.7,
    ),
    "mixtral": _llama_like("mixtral", **_EXPERTS_ALONE),
    "nemotron_h with experts": _nemotron(),
    "nemotron_h in a latent space": _nemotron(moe_latent_size=8),
    "olmoe": _llama_like("olmoe", num_experts=N_EXPERTS, num_experts_per_tok=2),
    "qwen2_moe": _llama_like(
        "qwen2_moe", num_experts=N_EXPERTS, shared_expert_intermediate_size=20, **_ROUTED
    ),
    "qwen3_moe": _llama_like(
        "qwen3_moe", num_experts=N_EXPERTS, head_dim=8, mlp_only_layers=[0], **_ROUTED
    ),
    "qwen4_exp_text": _llama_like(
        "qwen4_exp_text",
        num_experts=N_EXPERTS,
        shared_expert_intermediate_size=20,
        layer_types=["linear_attention", "indexed_attention"],
        head_dim=8,
        hc_count=3,
        hc_lowrank=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=8,
        indexer_compress_ratio=2,
        **_ROUTED,
    ),
}
"""A config of every family with experts."""

_MAMBA = {"mamba_d_state": 4, "n_mamba_heads": 2, "mamba_headdim": 16, "chunk_size": 8}
_INTO_MAMBA = {
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    "num_hidden_layers": 4,
    "attention_hidden_size": 2 * HIDDEN,
    "attention_head_dim": HIDDEN,
}

UNUSUAL: dict[str, PretrainedConfig] = {
    "gemma3n_text": _llama_like(
        "gemma3n_text",
        **_ALTERNATING,
        intermediate_size=[24, 32, 24],
        activation_sparsity_pattern=[0.8, 0.5, 0.0],
        num_kv_shared_layers=1,
        laurel_rank=4,
        hidden_size_per_layer_input=4,
        vocab_size_per_layer_input=VOCABULARY,
        altup_num_inputs=3,
        final_logit_softcapping=2.0,
    ),
    "hrm_text": _llama_like(
        "hrm_text",
        num_hidden_layers=12,  # two stacks of two, the lower one run twice, all twice
        num_layers_per_stack=2,
        H_cycles=2,
        L_cycles=2,
        head_dim=8,
    ),
    "zamba": _llama_like("zamba", **(_COMMON | _MAMBA | _INTO_MAMBA)),
    "zamba2": _llama_like("zamba2", **_INTO_MAMBA, adapter_rank=4, num_mem_blocks=1),
}
"""Families without experts whose layers do more than add y to one stream, or run repeatedly."""


def tiny(name: str, seed: int = 0) -> PreTrainedModel:
    """Return a random model whose every weight is random, biases and norms too."""
    torch.manual_seed(seed)
    config = (TINY | EXPERTS | UNUSUAL)[name]
    return shaken(AutoModelForCausalLM.from_config(config.__class__.from_dict(config.to_dict())))


def shaken(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with noise added to every weight."""
    for parameter in model.parameters():
        spread = 0.3 if parameter.dim() > 1 else 0.5
        parameter.data = parameter.data + spread * torch.randn_like(parameter)
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):  # the experts of each token, in DeepSeek V4
            table.copy_(torch.rand(len(table), N_EXPERTS).argsort(dim=1)[:, : table.shape[1]])
    return model.eval()


WIDTHS = [0, 24, 150, 0, 7, 0]
"""Memories of each layer of the ragged model; a group of a Parquet file has 128."""


class NoFeedForward(nn.Module):
    """Stands where a layer has no feed-forward part, and adds nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


def ragged(seed: int = 0, vocab: int = VOCABULARY) -> PreTrainedModel:
    """Return a random llama whose layers have different numbers of memories, some none."""
    torch.manual_seed(seed)
    config = _llama_like("llama", num_hidden_layers=len(WIDTHS), vocab_size=vocab)
    model = AutoModelForCausalLM.from_config(config)
    for layer, width in zip(model.model.layers, WIDTHS, strict=True):
        config.intermediate_size = width
        layer.mlp = type(layer.mlp)(config) if width else NoFeedForward()
    config.intermediate_size = max(WIDTHS)
    return shaken(model)


def tiny_tokenizer(vocab: int = VOCABULARY) -> SubwordTokenizer:
    """Return a tokenizer of whole words, w2 … and two special tokens, with ids below `vocab`."""
    words = {"<s>": 0, "</s>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return SubwordTokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        )
    )


_READ: dict[str, tuple[Memories, str]] = {}


def read(name: str) -> Memories:
    """Return the memories of a tiny model, loaded once for all who leave it as it was."""
    if name not in _READ:
        model = tiny(name)
        _READ[name] = load(model, tiny_tokenizer()), fingerprint(model)
    return _READ[name][0]


def changed_since_read() -> list[str]:
    """Return the models that somebody changed although others read them."""
    return [name for name, (found, before) in _READ.items() if fingerprint(found.model) != before]
