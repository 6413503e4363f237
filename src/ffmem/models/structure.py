"""What the structure of a model says: why ffmem cannot read it, or where its memories may be.

A model of unknown family is searched. Its list of layers has the length that its config names. In
each layer, exactly one module has a linear map to `hidden` and one or two maps from it, with one
other width in common:

    hidden → memory (two of them, or one that is twice as wide, if gated),    memory → hidden

Where r is, which of two keys is the gate's and which norm is the final one remain open: every
possibility is a candidate row for the families table, and the self-check decides among them.
"""

import re
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D

from ffmem.errors import MixtureOfExperts, ModelError
from ffmem.models.families import FUSED, Family

_EXPERTS = re.compile(r"(^|_)(n|num)_(\w+_)?experts$")
"""Config names for the number of experts: num_local_experts, n_routed_experts, …"""

_NUMBERS = {
    "scale": "logit_scale",
    "divisor": "logits_scaling",
    "cap": "final_logit_softcapping",
    "multiplier": "residual_multiplier",
}
"""Fields of `Family`, and their usual names in configs."""

_ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation", "activation")

_COUNTS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "vocab_size", "max_position_embeddings"),
)
"""Counts in a config, by the common names to which transformers maps those of a family."""

_NO_MEMORIES = {
    **dict.fromkeys(
        ("mamba", "mamba2", "falcon_mamba"),
        "it is a state-space model without feed-forward layers, so it has no key-value memories",
    ),
    "prophetnet": "it runs one stream per future token through the same layers, so each position"
    " has several sets of coefficients",
    "rwkv": "its feed-forward layer mixes in the previous token and gates the sum of values, so not"
    " only coefficients multiply the values",
    "xlstm": "it is a recurrent network, and ffmem reads transformers only",
}
"""Types of causal language models that ffmem cannot read, and why."""


class FeedForward(NamedTuple):
    """The linear maps of a layer's feed-forward part, as paths from the layer."""

    parent: str
    keys: str
    up: str | None
    values: str


def check_config(config: PretrainedConfig) -> None:
    """Raise if the config alone shows that ffmem cannot read the model."""
    kind = config.model_type
    if config.is_encoder_decoder:
        raise ModelError(
            f"A {kind!r} model is an encoder-decoder, and ffmem reads decoders only: use a causal"
            " language model."
        )
    causal = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not causal:
        raise _encoder_error(f"A {kind!r} model")
    if kind in _NO_MEMORIES:
        raise ModelError(
            f"ffmem cannot read a {kind!r} model: {_NO_MEMORIES[kind]}; use a transformer that"
            " predicts the next token."
        )
    text_config = config.get_text_config()
    for name in _COUNTS:
        count = getattr(text_config, name, None)
        if isinstance(count, int) and count < 1:
            raise ModelError(
                f"The config of this {kind!r} model has {name} = {count}, which must be at least 1."
                " Use the config.json that belongs to the weights."
            )


def check_model(model: PreTrainedModel) -> None:
    """Raise if ffmem cannot read a model of this kind as dense, causal layers of memories."""
    kind, config = type(model).__name__, model.config
    check_config(config)
    encoders = set(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values())
    if kind in encoders - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        raise _encoder_error(kind)
    if model.get_output_embeddings() is None:
        raise ModelError(
            f"{kind} has no output embedding, so it is not a language model."
            " Load it as a causal language model."
        )
    experts = next(_expert_weights(model), None)
    if experts is not None:
        # A count from the config says more than a path. But a count alone proves nothing: a family
        # may have experts in some models and name a count in all.
        counts = (f"{name} = {count}" for name, count in _expert_counts(config.to_dict()))
        raise MixtureOfExperts(config.model_type, next(counts, experts))
    for name, weight in model.named_parameters():
        if weight.is_meta:
            raise ModelError(
                f"The weights {name} are not in memory. Load the whole model, in a smaller dtype or"
                " over several devices if necessary."
            )


def _encoder_error(what: str) -> ModelError:
    return ModelError(
        f"{what} is an encoder, which predicts masked tokens from both sides: use a causal language"
        " model, which predicts the next token from the prefix alone."
    )


def _expert_weights(model: PreTrainedModel) -> Iterator[str]:
    """Yield every weight of an expert: known by its name, or by being a stack of matrices."""
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(prefix=path, recurse=False):
            is_stack = weight.dim() == 3 and min(weight.shape) > 1
            if is_stack and not isinstance(module, nn.Conv1d):
                yield f"{name} has the shape {tuple(weight.shape)}"
            elif "expert" in name:
                yield name


def _expert_counts(config: dict[Any, Any]) -> Iterator[tuple[str, int]]:
    """Yield every number of experts above one in a nested config."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _expert_counts(value)
        elif _EXPERTS.search(str(name)) and isinstance(value, int) and value > 1:
            yield name, value


def candidate_families(model: PreTrainedModel) -> Iterator[Family]:
    """Yield every row of the families table that the structure of a model allows."""
    config = model.config.get_text_config()
    activation = next((name for name in _ACTIVATIONS if hasattr(config, name)), None)
    n_layers, hidden = (getattr(config, x, 0) for x in ("num_hidden_layers", "hidden_size"))
    found = [
        (path, _find_feed_forwards(blocks, hidden))
        for path, blocks in model.named_modules()
        if isinstance(blocks, nn.ModuleList) and len(blocks) == n_layers
    ]
    found = [(path, options) for path, options in found if options]
    if activation is None or len(found) != 1:
        return
    blocks, options = found[0]
    if len({option.parent for option in options}) != 1:
        return
    trunk = blocks.rpartition(".")[0]
    final_norms = [*_norm_paths(model.get_submodule(trunk), prefix=trunk), None]
    residuals = list(_residual_options(model.get_submodule(f"{blocks}.0"), options[0].parent))
    numbers: dict[str, Any] = {
        field: name for field, name in _NUMBERS.items() if hasattr(config, name)
    }
    for final_norm, option, residual in product(final_norms, options, residuals):
        yield Family(
            blocks=blocks,
            values=option.values,
            keys=option.keys,
            up=option.up,
            final_norm=final_norm,
            activation=activation,
            **numbers,
            **residual,
        )


def _find_feed_forwards(blocks: nn.ModuleList, hidden: int) -> list[FeedForward]:
    """Return the ways to read the feed-forward part of every block; none unless all are alike."""
    ways = [_find_in_block(block, hidden) for block in blocks]
    return ways[0] if all(way == ways[0] for way in ways) else []


def _find_in_block(block: nn.Module, hidden: int) -> list[FeedForward]:
    """Return the ways to read modules of a block as a feed-forward part."""
    by_parent: dict[str, dict[str, tuple[int, int]]] = {}
    for path, module in block.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            rows, columns = module.get_parameter("weight").shape
            sizes = (rows, columns) if isinstance(module, Conv1D) else (columns, rows)
            by_parent.setdefault(path.rpartition(".")[0], {})[path] = sizes
    return [way for parent, maps in by_parent.items() for way in _match(parent, maps, hidden)]


def _match(parent: str, maps: dict[str, tuple[int, int]], hidden: int) -> list[FeedForward]:
    """Return the ways to read a module's linear maps, given as (inputs, outputs)."""
    for values, (memories, outputs) in maps.items():
        others = {path: sizes for path, sizes in maps.items() if path != values}
        if outputs != hidden or memories == hidden:
            continue
        match list(others.items()):
            case [(keys, sizes)] if sizes == (hidden, memories):
                return [FeedForward(parent, keys, None, values)]
            case [(keys, sizes)] if sizes == (hidden, 2 * memories):
                return [FeedForward(parent, keys, FUSED, values)]
            case [(one, sizes), (two, sizes2)] if sizes == sizes2 == (hidden, memories):
                return [
                    FeedForward(parent, one, two, values),
                    FeedForward(parent, two, one, values),
                ]
    return []


def _residual_options(block: nn.Module, parent: str) -> Iterator[dict[str, Any]]:
    """Yield every way to read r and y that the modules of a block allow."""
    norms = list(_norm_paths(block))
    residuals = [*reversed(norms), *([parent] if parent else [])]
    for post_norm, residual in product([None, *norms], residuals):
        if residual != post_norm:
            yield {"residual": residual, "post_norm": post_norm}
    for name, child in block.named_children():
        has_weights = next(child.parameters(), None) is not None
        is_other = name not in norms and name != parent.partition(".")[0]
        if has_weights and is_other and not isinstance(child, nn.Linear | Conv1D):
            yield {"attention": name}


def _norm_paths(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield the paths of a module's own norms."""
    for name, child in module.named_children():
        if "norm" in type(child).__name__.lower():
            yield f"{prefix}.{name}" if prefix else name
