"""fairseq checkpoints of the paper's kind: `model.pt`, with `dict.txt` next to it.

Law: nothing is guessed, and nothing is dropped. Sizes come from the tensors, since the name of an
architecture may be wrong. Every stored weight is used, is known to carry no information, or raises
an error that names it. Weights that are stored twice must be equal.
"""

import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ffmem.errors import ModelError
from ffmem.models.tokenizer import WordTokenizer
from ffmem.networks.config import AdaptiveConfig
from ffmem.networks.model import AdaptiveLM

REQUIRED_OPTIONS = {
    "adaptive_input": True,
    "tie_adaptive_weights": True,
    "decoder_normalize_before": True,
    "character_embeddings": False,
    "decoder_learned_pos": False,
    "no_token_positional_embeddings": False,
    "layernorm_embedding": False,
}
"""Options that must have this value if the checkpoint has them."""

ACTIVATIONS = ("relu", "gelu")
"""Supported values of `activation_fn`; our kinds of memory have the same names."""

CLUSTERS = "decoder.embed_tokens.embeddings."
LAYERS = "decoder.layers."

OLD_NAMES = {
    "layer_norms.0.": "self_attn_layer_norm.",
    "layer_norms.2.": "final_layer_norm.",
}

NOT_WEIGHTS = re.compile(r"(.*\.)?(version|_float_tensor)|decoder\.embed_positions\.weights")
"""Tensors without information; positions are computed."""

LAYER_MODULES = {
    "self_attn.q_proj": "self_attn.q_proj",
    "self_attn.k_proj": "self_attn.k_proj",
    "self_attn.v_proj": "self_attn.v_proj",
    "self_attn.out_proj": "self_attn.out_proj",
    "self_attn_layer_norm": "self_attn_layer_norm",
    "final_layer_norm": "final_layer_norm",
    "memory.keys": "fc1",
    "memory.values": "fc2",
}
"""Modules of a layer: their names in our model, and in fairseq."""


class Meter:
    """Replaces the training meters in checkpoints of 2019, whose classes are not loaded."""


METERS = [
    (Meter, f"fairseq.meters.{name}") for name in ("AverageMeter", "StopwatchMeter", "TimeMeter")
]


def load_fairseq(path: Path) -> tuple[AdaptiveLM, WordTokenizer]:
    """Return model and tokenizer of a checkpoint, given its `model.pt` or its folder."""
    checkpoint = path / "model.pt" if path.is_dir() else path
    dictionary = checkpoint.parent / "dict.txt"
    for file in (checkpoint, dictionary):
        if not file.is_file():
            raise ModelError(
                f"Cannot load {path} as a fairseq checkpoint: there is no {file}."
                " Put model.pt and dict.txt into one folder."
            )
    options, stored = _read_checkpoint(checkpoint)
    _check_options(checkpoint, options)
    stored = _rename_weights(stored)
    names = _weight_names(stored)
    _check_names(checkpoint, stored, names)
    _check_tied(checkpoint, stored)
    config = _make_config(checkpoint, options, stored)
    tokenizer = WordTokenizer.from_file(dictionary, config.vocab_size)
    weights = {name: stored[fairseq_name].float() for name, fairseq_name in names.items()}
    return _make_model(checkpoint, config, weights), tokenizer


def _read_checkpoint(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return options and tensors of a checkpoint, without running any code from it."""
    try:
        with torch.serialization.safe_globals([Namespace, *METERS]):
            content = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise anything
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        reason = (
            f"it would load {foreign[1]}, which is neither a tensor nor an option"
            if foreign
            else f"it is damaged, incomplete or another kind of file ({type(error).__name__})"
        )
        raise ModelError(
            f"Cannot read {checkpoint} as a fairseq checkpoint: {reason}."
            " Download it again, or save it with only tensors and plain options."
        ) from error
    content = content if isinstance(content, dict) else {}
    stored, options = content.get("model"), content.get("args")
    if options is None and isinstance(content.get("cfg"), dict):  # since fairseq 0.10
        options = content["cfg"].get("model")
    options = vars(options) if isinstance(options, Namespace) else options
    if not isinstance(options, dict) or not _holds_tensors(stored):
        raise ModelError(
            f"{checkpoint} is not a fairseq checkpoint: it needs `model` (tensors) and `args` or"
            f" `cfg` (options), but has {_format_names(map(str, content))}. Use fairseq's model.pt."
        )
    return options, dict(stored)


def _holds_tensors(content: object) -> TypeGuard[Mapping[str, Tensor]]:
    return isinstance(content, Mapping) and all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    )


def _check_options(checkpoint: Path, options: dict[str, Any]) -> None:
    """Raise unless the options describe a model of the paper's kind."""
    other = [
        f"{name} = {options[name]}"
        for name, required in REQUIRED_OPTIONS.items()
        if bool(options.get(name, required)) is not required
    ]
    if options.get("activation_fn", "relu") not in ACTIVATIONS:
        other.append(f"activation_fn = {options['activation_fn']}")
    if other:
        raise ModelError(
            f"{checkpoint} is an unsupported kind of fairseq model: {', '.join(other)}. ffmem reads"
            " models with tied adaptive input and softmax, sinusoidal positions, pre-norm layers"
            f" and activation {' or '.join(ACTIVATIONS)}."
        )


def _rename_weights(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights by the names that fairseq uses since 2019."""
    renamed = {}
    for name, tensor in stored.items():
        if NOT_WEIGHTS.fullmatch(name):
            continue
        for old, new in OLD_NAMES.items():
            name = name.replace(old, new)
        if match := re.fullmatch(r"(.*\.)in_proj_(weight|bias)", name):
            for part, third in zip("qkv", tensor.tensor_split(3), strict=True):
                renamed[f"{match[1]}{part}_proj.{match[2]}"] = third
        else:
            renamed[name] = tensor
    return renamed


def _weight_names(stored: dict[str, Tensor]) -> dict[str, str]:
    """Return the fairseq name of each weight of our model."""
    names = {"lm_head.class_proj.weight": "decoder.adaptive_softmax.head.class_proj.weight"}
    for cluster in range(_count(stored, CLUSTERS)):
        for part, number in (("embedding", 0), ("projection", 1)):
            fairseq_name = f"{CLUSTERS}{cluster}.{number}.weight"
            names[f"model.embed_tokens.bands.{cluster}.{part}.weight"] = fairseq_name
            names[f"lm_head.bands.{cluster}.{part}.weight"] = fairseq_name
    for layer in range(_count(stored, LAYERS)):
        for module, fairseq_module in LAYER_MODULES.items():
            for kind in ("weight", "bias"):
                fairseq_name = f"{LAYERS}{layer}.{fairseq_module}.{kind}"
                names[f"model.layers.{layer}.{module}.{kind}"] = fairseq_name
    if any(name.startswith("decoder.layer_norm.") for name in stored):
        for kind in ("weight", "bias"):
            names[f"model.layer_norm.{kind}"] = f"decoder.layer_norm.{kind}"
    return names


def _tied_names(n_clusters: int) -> dict[str, str]:
    """Return, for each weight of the softmax that the input stores too, its name there."""
    softmax = "decoder.adaptive_softmax"
    names = {f"{softmax}.head.word_proj.weight": f"{CLUSTERS}0.0.weight"}
    for tail in range(n_clusters - 1):
        names[f"{softmax}.tail.{tail}.0.weight"] = f"{CLUSTERS}{tail + 1}.1.weight"
        names[f"{softmax}.tail.{tail}.2.weight"] = f"{CLUSTERS}{tail + 1}.0.weight"
    return names


def _count(stored: dict[str, Tensor], prefix: str) -> int:
    """Return one more than the largest number after a prefix of names."""
    matches = (re.match(re.escape(prefix) + r"(\d+)\.", name) for name in stored)
    return max((int(match[1]) + 1 for match in matches if match), default=0)


def _check_names(checkpoint: Path, stored: dict[str, Tensor], names: dict[str, str]) -> None:
    """Raise unless the checkpoint has exactly the weights of a model of the paper's kind."""
    n_clusters = _count(stored, CLUSTERS)
    required = {*names.values(), *_tied_names(n_clusters)}
    if n_clusters == 0 or "model.layers.0.memory.keys.weight" not in names:
        raise ModelError(
            f"{checkpoint} has no decoder with adaptive input; it has {_format_names(stored)}."
            " Use a language model of the paper's kind."
        )
    if missing := required - set(stored):
        raise ModelError(f"{checkpoint} lacks {_format_names(missing)}. Download it again.")
    if unknown := set(stored) - required:
        raise ModelError(
            f"{checkpoint} has unknown weights: {_format_names(unknown)}."
            " It is not a model of the paper's kind."
        )


def _check_tied(checkpoint: Path, stored: dict[str, Tensor]) -> None:
    """Raise unless the softmax has the same weights as the input."""
    for copy, original in _tied_names(_count(stored, CLUSTERS)).items():
        first, second = stored[original], stored[copy]
        if first.shape != second.shape and copy.endswith(".0.weight"):
            second = second.T  # projections may be stored transposed
        if not torch.equal(first, second):
            raise ModelError(
                f"In {checkpoint}, {copy} differs from {original}. ffmem reads only models whose"
                " adaptive softmax shares all weights with the adaptive input."
            )


def _make_config(
    checkpoint: Path, options: dict[str, Any], stored: dict[str, Tensor]
) -> AdaptiveConfig:
    """Return the config: sizes from the tensors, and from the options what tensors do not show."""
    n_heads = options.get("decoder_attention_heads")
    if not isinstance(n_heads, int) or n_heads < 1:
        raise ModelError(
            f"The options of {checkpoint} do not give the number of attention heads"
            f" (decoder_attention_heads = {n_heads}), which no tensor shows."
        )
    n_clusters = _count(stored, CLUSTERS)
    embeddings = [stored[f"{CLUSTERS}{cluster}.0.weight"] for cluster in range(n_clusters)]
    n_memories, hidden = stored[f"{LAYERS}0.fc1.weight"].shape
    context = options.get("max_target_positions") or options.get("tokens_per_sample")
    return AdaptiveConfig(
        band_sizes=[len(embedding) for embedding in embeddings],
        band_widths=[embedding.shape[1] for embedding in embeddings],
        hidden_size=hidden,
        intermediate_size=n_memories,
        num_hidden_layers=_count(stored, LAYERS),
        num_attention_heads=n_heads,
        memory=options.get("activation_fn", "relu"),
        final_norm="decoder.layer_norm.weight" in stored,
        scale_embedding=not options.get("no_scale_embedding", False),
        **({"max_position_embeddings": context} if context else {}),
    )


def _make_model(checkpoint: Path, config: AdaptiveConfig, weights: dict[str, Tensor]) -> AdaptiveLM:
    """Return the model with these weights."""
    with torch.device("meta"):  # do not initialize weights that are replaced at once
        model = AdaptiveLM(config)
    for name, parameter in model.state_dict().items():
        if weights[name].shape != parameter.shape:
            raise ModelError(
                f"In {checkpoint}, {name} has shape {tuple(weights[name].shape)}, but the other"
                f" weights need {tuple(parameter.shape)}. Download it again."
            )
    model.load_state_dict(weights, assign=True)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _format_names(names: Iterable[str]) -> str:
    """Return the first few names, and the number of others."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return f"{', '.join(ordered[:3]) or 'nothing'}{more}"
