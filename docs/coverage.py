"""Which causal language models of the installed transformers ffmem reads: writes docs/coverage.md.

    PYTHONPATH=. .venv/bin/python docs/coverage.py               every type, about two minutes
    PYTHONPATH=. .venv/bin/python docs/coverage.py doge bitnet   some types; writes no table

Every type is built tiny and random from its config alone. Every weight, gain, bias, scalar and
multiplier is random too, so that no equation holds because a factor is 1 or an offset 0. The
self-check of `ffmem.load` decides. A type runs in a forked process, with limits on time and memory.
"""

import argparse
import json
import multiprocessing
import re
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from ffmem.cells import BankRecord
from ffmem.errors import ModelError
from ffmem.models.families import FAMILIES
from ffmem.models.load import load
from ffmem.models.memories import Memories

MULTIMODAL = [
    kind
    for kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
]
SECONDS, GIGABYTES = 120, 8
VOCABULARY, HIDDEN, HEADS, LAYERS, MEMORIES = 64, 32, 4, 4, 40

SIZES: list[tuple[str, int | None]] = [
    (r"vocab_size(_per_layer_input)?", VOCABULARY),
    (r"(hidden_size|d_model|n_embd|emb_dim|dim|word_embed_proj_dim)", HIDDEN),
    (r"(attention_hidden_size|lru_width|embedding_size|d_embed|input_embedding_size)", HIDDEN),
    (r"(hidden_dim|dim_ff|dim_model_base)", HIDDEN),
    (r".*rope_head_dim|rotary_dim", 4),
    (r".*(head_dim|head_size|dim_head|headdim|d_kv|hidden_size_per_head)", HIDDEN // HEADS),
    (r"(\w+_)?num_(hidden_)?layers|n_layers?|(encoder|decoder)_layers|num_blocks", LAYERS),
    (r".*(num_key_value_heads|num_kv_heads|n_kv_heads|multi_query_group_num)", 2),
    (r"(\w+_)?(n_heads?|num_(\w+_)?heads|(encoder|decoder)_attention_heads)", HEADS),
    (r"attention_heads", HEADS),
    (r"(\w+_)?n_groups?|mamba_n_groups|(n|num)_(expert_)?groups?|topk_groups?", 1),
    (
        r".*(intermediate_size|intermediate_dim|ffn_dim|ffn_hidden_size|n_inner|dff|d_ff)\w*",
        MEMORIES,
    ),
    (r"(n|num)_shared_experts", 1),
    (r"(n|num)_(\w+_)?experts", 8),
    (r".*(experts_per_tok(en)?|top_?k\w*|num_experts_per_\w+)", 2),
    (r".*(lora_rank|low_rank_dim|adapter_rank|latent_size)", 8),
    (r".*(state_size|d_state|ssm_state)", 4),
    (r".*(d_conv|conv_kernel\w*|conv_size|conv1d_width|conv_L_cache)", 4),
    (r".*chunk_size", 8),
    (r"sliding_window\w*|window_size|local_attention|attention_window_size", 4),
    (r"\w*max_position_embeddings|n_positions|n_ctx|max_seq_len|max_source_positions", 64),
    (r"max_target_positions|context_length|seq_length", 64),
    (r"num_kv_shared_layers", 1),
    (r"laurel_rank|hidden_size_per_layer_input", 8),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"bos_token_id", 0),
    (r"(eos_token_id|decoder_start_token_id|forced_\w+_token_id)", 1),
    (r"pad_token_id", None),
    (r"image_size", 16),
    (r"patch_size", 4),
]
"""Sizes of a tiny model, by the names of config fields (the first that matches the whole name)."""

_MIXED = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
_GEMMA4 = {
    "global_head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "pad_token_id": 0,
}
_GEMMA3N = {
    "intermediate_size": [MEMORIES, MEMORIES, 2 * MEMORIES, MEMORIES],
    "activation_sparsity_pattern": [0.8, 0.5, 0.0, 0.0],
}
_SECTIONS = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
_BY_SECTIONS = (
    *("glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_5_omni_thinker"),
    *("qwen2_5_vl", "qwen2_vl"),
)
OWN_SIZES: dict[str, dict[str, Any]] = {
    **{kind: {"text_config": {"rope_parameters": _SECTIONS}} for kind in _BY_SECTIONS},
    "blt": {"encoder_hash_byte_group_vocab": 32},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": MEMORIES, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma4_assistant": {
        "backbone_hidden_size": HIDDEN,
        "text_config": _GEMMA4
        | {
            "hidden_size": HIDDEN,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": MEMORIES,
            "num_attention_heads": HEADS,
            "num_hidden_layers": LAYERS,
            "num_kv_shared_layers": LAYERS,
            "vocab_size": VOCABULARY,
            "vocab_size_per_layer_input": 0,
        },
    },
    "emu3": {"pad_token_id": 0},
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"text_config": _GEMMA4},
    "gemma4_unified_text": _GEMMA4,
    "gemma3n": {"text_config": _GEMMA3N},
    "gemma3n_text": _GEMMA3N,
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "longcat_flash": {"qk_head_dim": 12, "head_dim": 4},
    "mamba2": {"num_heads": 8},
    "mllama": {"text_config": {"cross_attention_layers": [1], "pad_token_id": 0}},
    "modernbert-decoder": {"pad_token_id": 0},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local"] * LAYERS,
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [HIDDEN // 2, HIDDEN // 2],
    },
    "zamba": {
        "layers_block_type": _MIXED,
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 2 * HIDDEN // HEADS,
    },
    "zamba2": {"layers_block_type": _MIXED},
    "zaya": {"num_experts_per_tok": 1},
}
"""Settings that a type needs besides, because its sizes depend on each other in its own way."""

FACTORS = re.compile(r"multiplier|scal|softcap|soft_cap|residual_weight")
"""Numbers of a config that multiply something."""


PARTS = {"emu3", "musicgen", "musicgen_melody"}
"""Types whose causal language model has the config of a part."""


def tiny_config(kind: str, random: torch.Generator) -> PretrainedConfig:
    """Return the config of a tiny model of a type, with random multipliers."""
    config_class = config_class_of(kind)
    return config_class(**merge(tiny_settings(config_class, random), OWN_SIZES.get(kind, {})))


def config_class_of(kind: str) -> type[PretrainedConfig]:
    """Return the class of a type's config."""
    if kind not in PARTS:
        return CONFIG_MAPPING[kind]
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    return model_class.config_class


def merge(settings: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return settings with others over them, nested ones too."""
    nested = {
        name: merge(settings.get(name, {}), value)
        for name, value in own.items()
        if isinstance(value, dict)
    }
    return settings | own | nested


def tiny_settings(config_class: type[PretrainedConfig], random: torch.Generator) -> dict[str, Any]:
    """Return small sizes for the fields that a config class has, nested configs included."""
    try:
        default = config_class()
    except Exception:  # its own default is not valid; OWN_SIZES has what it needs
        return {}
    nested = getattr(default, "sub_configs", {}) or {}
    declared = getattr(config_class, "__dataclass_fields__", default.to_dict())
    settings: dict[str, Any] = {}
    for name, value in default.to_dict().items():
        if name in nested:
            sub_config = getattr(default, name, None)
            if isinstance(sub_config, PretrainedConfig):
                settings[name] = tiny_settings(type(sub_config), random)
        elif isinstance(value, bool) or name not in declared:
            continue
        elif FACTORS.search(name) and isinstance(value, float):
            settings[name] = value * draw(random)
        elif name == "swiglu_limit":
            settings[name] = 0.5  # so that some numbers are beyond it
        elif FACTORS.search(name) and isinstance(value, list | tuple):
            if all(isinstance(one, float) for one in value):
                settings[name] = [one * draw(random) for one in value]
        elif isinstance(value, int | None) and name not in default.attribute_map:
            size = next((size for rule, size in SIZES if re.fullmatch(rule, name)), -1)
            is_needed = value is not None or re.fullmatch(r"head_dim|num_key_value_heads", name)
            if size != -1 and is_needed:
                settings[name] = size
    if "kv_lora_rank" in settings:  # latent attention has keys for every head
        settings["num_key_value_heads"] = HEADS
    return settings


def draw(random: torch.Generator) -> float:
    """Return a random factor that is not near 1."""
    number = float(torch.rand((), generator=random))
    return 0.5 + 0.4 * number if number < 0.5 else 1.0 + 0.5 * number


def tiny_model(kind: str, seed: int = 0) -> PreTrainedModel:
    """Return a random model of a type; raise if transformers cannot build it from a config."""
    random = torch.Generator().manual_seed(seed)
    config = tiny_config(kind, random)
    if kind in DECODERS:
        config.is_decoder, config.is_encoder_decoder = True, False
    torch.manual_seed(seed)
    if kind in PARTS:
        return randomize(getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])(config))
    if kind in TOWERS:
        with towers_left_out():
            return randomize(AutoModelForCausalLM.from_config(config))
    is_multimodal = kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    auto_class = AutoModelForImageTextToText if is_multimodal else AutoModelForCausalLM
    return randomize(auto_class.from_config(config))


TOWERS = {"gemma3n"}
"""Types with towers that need packages which are not installed."""


@contextmanager
def towers_left_out() -> Iterator[None]:
    """Build models with empty modules in place of their towers for images and sound."""
    own = AutoModel.from_config

    def build(config: PretrainedConfig, **options: Any) -> nn.Module:
        is_text = "Text" in type(config).__name__
        return own(config, **options) if is_text else nn.Module()

    AutoModel.from_config = build
    try:
        yield
    finally:
        AutoModel.from_config = own


DECODERS = {
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp"),
    *("pegasus", "plbart", "prophetnet", "trocr", "whisper"),
}
"""Encoder-decoders whose decoder transformers builds as a causal language model."""


def randomize(model: PreTrainedModel) -> PreTrainedModel:
    """Add noise to every weight, and to every gain or bias that is kept as a buffer.

    A table of experts by token gets different experts in a row, as in a trained model.
    """
    kept = set(model.state_dict())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        is_parameter = isinstance(tensor, nn.Parameter)
        is_learned = is_parameter or (name in kept and tensor.dim() < 2)
        if name.endswith("tid2eid"):
            tensor.copy_(torch.rand(len(tensor), 8).argsort(dim=1)[:, : tensor.shape[1]])
        if tensor.is_floating_point() and is_learned:
            spread = 0.3 if tensor.dim() > 1 else 0.5
            tensor.data.add_(spread * torch.rand_like(tensor.float()).sub(0.5).mul(2).to(tensor))
    return model.float().eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words."""
    words = {"<s>": 0, "</s>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def examine(kind: str) -> dict[str, Any]:
    """Return what ffmem makes of a tiny model of a type."""
    try:
        model = tiny_model(kind)
    except Exception as error:
        return {"status": "not built", "reason": last_line(error)}
    weights = sum(weight.numel() for weight in model.parameters())
    found = {"class": type(model).__name__, "weights": weights}
    try:
        memories = load(model, tiny_tokenizer())
    except ModelError as error:
        return found | {"status": "refused", "reason": " ".join(str(error).split())}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{last_line(error)} ({Path(where.filename).name}:{where.lineno})"
        return found | {"status": "crashed", "reason": reason}
    return found | {"status": "read", **facts(memories)}


def facts(memories: Memories) -> dict[str, Any]:
    """Return the numbers of the table for a model that was read."""
    return {
        "by": "row" if memories.family in FAMILIES else "search",
        "layers": [show_layer(banks.records()) for banks in memories.banks],
        "errors": memories.check._asdict() | {"expert_error": expert_error(memories)},
    }


TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])


@torch.no_grad()
def expert_error(memories: Memories) -> float:
    """Return how far the coefficients of experts are from plain loops over tokens and experts.

    The loops take weights as the module stores them, and what it got from the router. A few
    families run their experts in their own way; the tests have loops for those.
    """
    errors = [0.0]
    for layer, banks in enumerate(memories.banks):
        experts: Any = None if banks.experts is None else banks.experts.module
        if experts is None or not hasattr(experts, "is_transposed"):
            continue
        calls: list[tuple[Tensor, Tensor, Tensor]] = []
        hook = experts.register_forward_pre_hook(
            lambda _, args, kwargs, calls=calls: calls.append((*args, *kwargs.values())),
            with_kwargs=True,
        )
        found = memories.trace(TOKENS)[layer].coefficients.flatten(0, 1)
        hook.remove()
        x, chosen, weights = calls[0]
        expected = torch.zeros_like(found)
        for token in range(len(x)):
            for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
                if weight != 0 and expert < len(banks.routed):
                    bank = banks.routed[expert]
                    m = plain_coefficients(experts, expert, x[token])
                    expected[token, bank.memories] = bank.factor * weight * m
        routed = slice(banks.routed[0].offset, None)
        difference = (found - expected)[:, routed].abs().max()
        errors.append(float(difference / expected[:, routed].abs().max()))
    return max(errors)


def plain_coefficients(module: Any, expert: int, x: Tensor) -> Tensor:
    """Return m of one expert for one token, memory by memory."""
    name = "gate_up_proj" if module.has_gate else "up_proj"
    rows = getattr(module, name)[expert]
    rows = rows.T if module.is_transposed else rows
    scores = torch.stack([(x * row).sum() for row in rows])
    if module.has_bias:
        scores = scores + getattr(module, f"{name}_bias")[expert]
    m: Tensor = module._apply_gate(scores[None])[0] if module.has_gate else module.act_fn(scores)
    return m


def show_layer(records: list[BankRecord]) -> str:
    """Return the banks of a layer in a few words."""
    parts = []
    for record in records:
        sizes = f"{record.count} × {record.size}" if record.count > 1 else f"{record.size}"
        parts.append(sizes if record.kind == "dense" else f"{sizes} {record.kind}")
    return " + ".join(parts) or "none"


def show_layers(layers: list[str]) -> str:
    """Return the banks of all layers, equal neighbours together."""
    groups = [(name, len(list(group))) for name, group in groupby(layers)]
    return ", ".join(f"{count} layers: {name}" if count > 1 else name for name, count in groups)


def last_line(error: BaseException) -> str:
    """Return the type and message of an error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def examine_alone(kind: str) -> dict[str, Any]:
    """Examine a type in a process of its own, forked so that nothing is imported again."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)

    def run(sender: Connection) -> None:
        signal.alarm(SECONDS)
        resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES << 30,) * 2)
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        sender.send(examine(kind))

    start = time.monotonic()
    process = fork.Process(target=run, args=(sender,))
    process.start()
    sender.close()
    try:
        found: dict[str, Any] = receiver.recv()
    except EOFError:
        found = {"status": "crashed", "reason": "the process died"}
    process.join()
    if process.exitcode == -signal.SIGALRM:
        found = {"status": "crashed", "reason": f"took more than {SECONDS} s"}
    return found | {"seconds": round(time.monotonic() - start, 1)}


def show(kind: str, found: dict[str, Any]) -> str:
    """Return a type and what was found on one line."""
    start = f"{kind:24} {found['status']:9} {found['seconds']:5} s  "
    if found["status"] != "read":
        return start + str(found["reason"])[:400]
    return f"{start}{found['by']:9} {largest(found['errors']):.1e}  {show_layers(found['layers'])}"


def largest(errors: dict[str, float]) -> float:
    """Return the largest error of a self-check."""
    return max(value for name, value in errors.items() if name.endswith("error"))


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return docs/coverage.md."""
    causal = {kind: results[kind] for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}
    multimodal = {kind: results[kind] for kind in sorted(MULTIMODAL)}
    read, read_too = select(causal, "read"), select(multimodal, "read")
    by_row = sum(found["by"] == "row" for found in read.values())
    lines = [
        "# Which models ffmem reads",
        "",
        "Written by `docs/coverage.py`, which builds a tiny model of every type that transformers"
        f" {transformers.__version__} lists as a causal language model, with random weights,"
        " gains, biases and multipliers, and runs the self-check of `ffmem.load`.",
        "",
        f"Of {len(causal)} types, {len(read)} are read: {by_row} by a row of the families table,"
        f" {len(read) - by_row} by running the model on a few tokens. The others are rejected with"
        " a reason, or could not be built from their config. Of"
        f" {len(multimodal)} more types that read images and text, the text decoders of"
        f" {len(read_too)} are read; many others only need sizes that this script does not know.",
        "",
        "The error is the largest in the self-check: m from keys, m · V + b, r + y = o, causality,"
        " logits, folded logits. Less than 1e-4 passes; rounding gives about 1e-6. For experts, it"
        " includes a comparison of coefficients with plain loops over tokens and experts.",
        "",
        "In models with several residual streams, o is what the model's head reads from them, r is"
        " the same without the layer's memories, and y = o − r. A layer that runs several times"
        " counts once for each run. gemma3n is built without its image and audio towers, because"
        " their packages (Pillow, timm) were not installed.",
        "",
        *rows_of_read(read),
        *rows_of_others(causal),
        "",
        "## Text decoders of models that read images",
        "",
        *rows_of_read(read_too),
        *rows_of_others(multimodal, "#"),
    ]
    return "\n".join(lines) + "\n"


def select(results: dict[str, dict[str, Any]], status: str) -> dict[str, dict[str, Any]]:
    """Return the results with a status."""
    return {kind: found for kind, found in results.items() if found["status"] == status}


def rows_of_read(read: dict[str, dict[str, Any]]) -> list[str]:
    """Return the table of types that are read."""
    head = ["| type | read by | memories | largest error |", "|---|---|---|---|"]
    return head + [
        f"| {kind} | {found['by']} | {show_layers(found['layers'])}"
        f" | {largest(found['errors']):.1e} |"
        for kind, found in read.items()
    ]


def rows_of_others(results: dict[str, dict[str, Any]], level: str = "") -> list[str]:
    """Return a table for each other status."""
    lines = []
    for status in ("refused", "crashed", "not built"):
        found = select(results, status)
        if found:
            lines += ["", f"##{level} {status.capitalize()}", "", "| type | why |", "|---|---|"]
            lines += [f"| {kind} | {one['reason']} |" for kind, one in found.items()]
    return lines


def main() -> None:
    """Examine the types that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--cache", type=Path, help="JSON with results; fills what is missing")
    options = parser.parse_args()
    cache: Path | None = options.cache
    results: dict[str, dict[str, Any]] = {}
    if cache is not None and cache.exists():
        results = json.loads(cache.read_text())
    transformers.logging.set_verbosity_error()
    for kind in options.types or [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MULTIMODAL]:
        if kind not in results or options.types:
            results[kind] = examine_alone(kind)
            print(show(kind, results[kind]), flush=True)
            if cache is not None:
                cache.write_text(json.dumps(results, indent=1))
    print(Counter(found["status"] for found in results.values()), file=sys.stderr)
    if not options.types:
        Path(__file__).with_suffix(".md").write_text(table(results))


if __name__ == "__main__":
    main()
