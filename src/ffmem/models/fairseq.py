"""fairseq checkpoints of the paper's kind: `model.pt`, with `dict.txt` beside it.

Law: nothing is guessed and nothing is dropped. Sizes come from the tensors, since an architecture's
name may be wrong; every stored weight is used, or known to carry nothing, or refused by name; what
is stored twice must be equal.
"""

import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ffmem.errors import ModelError
from ffmem.models.tokenizer import WordTokenizer
from ffmem.networks.config import AdaptiveConfig
from ffmem.networks.model import AdaptiveLM

NEEDED = {
    "adaptive_input": True,
    "tie_adaptive_weights": True,
    "decoder_normalize_before": True,
    "character_embeddings": False,
    "decoder_learned_pos": False,
    "no_token_positional_embeddings": False,
    "layernorm_embedding": False,
}
"""What a checkpoint's options must say, where they say anything."""

BANDS = "decoder.embed_tokens.embeddings."
LAYERS = "decoder.layers."

OLD_NAMES = {
    "layer_norms.0.": "self_attn_layer_norm.",
    "layer_norms.2.": "final_layer_norm.",
}

EMPTY = re.compile(r"(.*\.)?(version|_float_tensor)|decoder\.embed_positions\.weights")
"""Names of what fairseq stores beside the weights; sinusoids are computed."""

ACTIVATIONS = ("relu", "gelu")
"""What fairseq calls the kinds of memory that its models have."""

OWN_NAMES = {"fc1": "memory.keys", "fc2": "memory.values"}
"""What our model calls a part of a layer, where fairseq calls it otherwise."""

LAYER_PARTS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.out_proj",
    "self_attn_layer_norm",
    "final_layer_norm",
    "fc1",
    "fc2",
)


class Meter:
    """Stands in for the training meters in checkpoints of 2019, whose classes are not loaded."""


METERS = [
    (Meter, f"fairseq.meters.{name}") for name in ("AverageMeter", "StopwatchMeter", "TimeMeter")
]


def load_fairseq(path: Path) -> tuple[AdaptiveLM, WordTokenizer]:
    """Return the model and the tokenizer of a checkpoint, given its `model.pt` or their folder."""
    checkpoint = path / "model.pt" if path.is_dir() else path
    dictionary = checkpoint.parent / "dict.txt"
    for file in (checkpoint, dictionary):
        if not file.is_file():
            raise ModelError(
                f"{path} was given as a fairseq checkpoint, but there is no {file}."
                " Put model.pt and dict.txt into one folder."
            )
    options, stored = read(checkpoint)
    refuse_other_choices(checkpoint, options)
    stored = with_current_names(stored)
    names = names_of(stored)
    refuse_missing_and_unknown(checkpoint, stored, names)
    refuse_untied(checkpoint, stored)
    config = config_of(checkpoint, options, stored)
    tokenizer = WordTokenizer.from_file(dictionary)
    if len(tokenizer.words) != config.vocab_size:
        raise ModelError(
            f"{checkpoint} has {config.vocab_size} words, in bands of {config.band_sizes}, but"
            f" {dictionary} has {len(tokenizer.words)}, the four special ones included."
            " Give the dict.txt that the model was trained with."
        )
    weights = {name: stored[its_name].float() for name, its_name in names.items()}
    return built(checkpoint, config, weights), tokenizer


def read(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the options and the tensors of a checkpoint; no code of its own is ever run."""
    try:
        with torch.serialization.safe_globals([Namespace, *METERS]):
            found = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise whatever their bytes lead to
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        reason = (
            f"it wants to load {foreign[1]}, which is neither a tensor nor an option"
            if foreign
            else f"it is damaged, cut short or something else ({type(error).__name__})"
        )
        raise ModelError(
            f"Cannot read {checkpoint} as a fairseq checkpoint: {reason}."
            " Fetch the file again, or save it with tensors and plain options only."
        ) from error
    found = found if isinstance(found, dict) else {}
    stored, options = found.get("model"), found.get("args")
    if options is None and isinstance(found.get("cfg"), dict):  # since fairseq 0.10
        options = found["cfg"].get("model")
    options = vars(options) if isinstance(options, Namespace) else options
    if not isinstance(options, dict) or not holds_tensors(stored):
        raise ModelError(
            f"{checkpoint} is no fairseq checkpoint: it needs `model` (tensors) and `args` or `cfg`"
            f" (options), and has {listed(set(map(str, found)))}. Give fairseq's model.pt."
        )
    return options, dict(stored)


def holds_tensors(found: object) -> TypeGuard[Mapping[str, Tensor]]:
    """Return whether this is a mapping from names to tensors, and nothing else."""
    return isinstance(found, Mapping) and all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
    )


def refuse_other_choices(checkpoint: Path, options: dict[str, Any]) -> None:
    """Raise unless the options describe a model of the paper's kind."""
    found = [
        f"{name} = {options[name]}"
        for name, needed in NEEDED.items()
        if bool(options.get(name, needed)) is not needed
    ]
    if options.get("activation_fn", "relu") not in ACTIVATIONS:
        found.append(f"activation_fn = {options['activation_fn']}")
    if found:
        raise ModelError(
            f"{checkpoint} is a fairseq model of another kind: {', '.join(found)}. ffmem reads"
            " those with tied adaptive input and softmax, sinusoidal positions, the norms in front"
            f" and one of the activations {', '.join(ACTIVATIONS)}."
        )


def with_current_names(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by the names that fairseq gives them since 2019, empty ones left out."""
    renamed = {}
    for name, tensor in stored.items():
        if EMPTY.fullmatch(name):
            continue
        for old, current in OLD_NAMES.items():
            name = name.replace(old, current)
        if match := re.fullmatch(r"(.*\.)in_proj_(weight|bias)", name):
            for part, third in zip("qkv", tensor.tensor_split(3), strict=True):
                renamed[f"{match[1]}{part}_proj.{match[2]}"] = third
        else:
            renamed[name] = tensor
    return renamed


def names_of(stored: dict[str, Tensor]) -> dict[str, str]:
    """Return where each of the model's parameters is stored: its name here, its name there."""
    names = {"lm_head.class_proj.weight": "decoder.adaptive_softmax.head.class_proj.weight"}
    for band in range(count(stored, BANDS)):
        for part, place in (("embedding", 0), ("projection", 1)):
            there = f"{BANDS}{band}.{place}.weight"
            names[f"model.embed_tokens.bands.{band}.{part}.weight"] = there
            names[f"lm_head.bands.{band}.{part}.weight"] = there
    for layer in range(count(stored, LAYERS)):
        for part in LAYER_PARTS:
            for kind in ("weight", "bias"):
                own = OWN_NAMES.get(part, part)
                names[f"model.layers.{layer}.{own}.{kind}"] = f"{LAYERS}{layer}.{part}.{kind}"
    if any(name.startswith("decoder.layer_norm.") for name in stored):
        for kind in ("weight", "bias"):
            names[f"model.layer_norm.{kind}"] = f"decoder.layer_norm.{kind}"
    return names


def tied_names(n_bands: int) -> dict[str, str]:
    """Return the names under which the softmax stores once more what the input has stored."""
    softmax = "decoder.adaptive_softmax"
    names = {f"{softmax}.head.word_proj.weight": f"{BANDS}0.0.weight"}
    for tail in range(n_bands - 1):
        names[f"{softmax}.tail.{tail}.0.weight"] = f"{BANDS}{tail + 1}.1.weight"
        names[f"{softmax}.tail.{tail}.2.weight"] = f"{BANDS}{tail + 1}.0.weight"
    return names


def count(stored: dict[str, Tensor], prefix: str) -> int:
    """Return one more than the largest number that follows the prefix in a name."""
    matches = (re.match(re.escape(prefix) + r"(\d+)\.", name) for name in stored)
    return max((int(match[1]) + 1 for match in matches if match), default=0)


def refuse_missing_and_unknown(
    checkpoint: Path, stored: dict[str, Tensor], names: dict[str, str]
) -> None:
    """Raise unless the checkpoint holds exactly the weights of a model of the paper's kind."""
    n_bands = count(stored, BANDS)
    needed = {*names.values(), *tied_names(n_bands)}
    if n_bands == 0 or "model.layers.0.memory.keys.weight" not in names:
        raise ModelError(
            f"{checkpoint} holds no decoder with adaptive input; it holds"
            f" {listed(set(stored))}. Give a language model of the paper's kind."
        )
    if missing := needed - set(stored):
        raise ModelError(f"{checkpoint} lacks {listed(missing)}. Fetch the file again.")
    if unknown := set(stored) - needed:
        raise ModelError(
            f"{checkpoint} holds weights that ffmem would leave out: {listed(unknown)}."
            " Its model is not of the paper's kind."
        )


def refuse_untied(checkpoint: Path, stored: dict[str, Tensor]) -> None:
    """Raise unless the softmax has the very weights of the input."""
    n_bands = count(stored, BANDS)
    for copy, original in tied_names(n_bands).items():
        first, second = stored[original], stored[copy]
        if first.shape != second.shape and copy.endswith(".0.weight"):
            second = second.T  # a projection may be stored either way
        if not torch.equal(first, second):
            raise ModelError(
                f"In {checkpoint}, {copy} differs from {original}."
                " ffmem reads adaptive softmaxes that share all weights with the adaptive input."
            )


def config_of(
    checkpoint: Path, options: dict[str, Any], stored: dict[str, Tensor]
) -> AdaptiveConfig:
    """Return the sizes: those of the tensors, and from the options what no tensor shows."""
    heads = options.get("decoder_attention_heads")
    if not isinstance(heads, int) or heads < 1:
        raise ModelError(
            f"The options of {checkpoint} do not say how many attention heads there are"
            f" (decoder_attention_heads = {heads}), and no tensor shows it."
        )
    n_bands = count(stored, BANDS)
    bands = [stored[f"{BANDS}{band}.0.weight"] for band in range(n_bands)]
    n_memories, hidden = stored[f"{LAYERS}0.fc1.weight"].shape
    context = options.get("max_target_positions") or options.get("tokens_per_sample")
    known = {"max_position_embeddings": context} if context else {}
    return AdaptiveConfig(
        band_sizes=[len(band) for band in bands],
        band_widths=[band.shape[1] for band in bands],
        hidden_size=hidden,
        intermediate_size=n_memories,
        num_hidden_layers=count(stored, LAYERS),
        num_attention_heads=heads,
        memory=options.get("activation_fn", "relu"),
        final_norm="decoder.layer_norm.weight" in stored,
        scale_embedding=not options.get("no_scale_embedding", False),
        **known,
    )


def built(checkpoint: Path, config: AdaptiveConfig, weights: dict[str, Tensor]) -> AdaptiveLM:
    """Return the model with these weights."""
    with torch.device("meta"):  # no time for random weights that are replaced at once
        model = AdaptiveLM(config)
    for name, parameter in model.state_dict().items():
        if weights[name].shape != parameter.shape:
            raise ModelError(
                f"In {checkpoint}, {name} has shape {tuple(weights[name].shape)};"
                f" {tuple(parameter.shape)} would fit the other weights. Fetch the file again."
            )
    model.load_state_dict(weights, assign=True)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def listed(names: set[str]) -> str:
    """Return the first few names, and how many more there are."""
    shown = sorted(names)[:3]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"{', '.join(shown) or 'nothing'}{more}"
