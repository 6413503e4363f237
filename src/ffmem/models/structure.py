"""Models that ffmem cannot read, and why: by their config, or by their modules."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from ffmem.errors import ModelError
from ffmem.models.families import ENCODERS, UNREADABLE

_COUNTS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "vocab_size", "max_position_embeddings"),
)
"""Counts in a config, by the common names to which transformers maps those of a family."""


def check_config(config: PretrainedConfig) -> None:
    """Raise if the config alone shows that ffmem cannot read the model."""
    kind = config.model_type
    if config.is_encoder_decoder:
        raise ModelError(
            f"A {kind!r} model is an encoder-decoder, and ffmem only reads decoders: use a causal"
            " language model."
        )
    is_causal = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    if kind in UNREADABLE:
        raise ModelError(
            f"ffmem cannot read a {kind!r} model: {UNREADABLE[kind]}; use a transformer that"
            " predicts the next token."
        )
    if kind in {*MODEL_FOR_MASKED_LM_MAPPING_NAMES, *ENCODERS} and not is_causal:
        raise _encoder_error(f"A {kind!r} model")
    text_config = config.get_text_config()
    for name in _COUNTS:
        count = _config_value(text_config, name)
        if isinstance(count, int) and count < 1:
            raise ModelError(
                f"The config of this {kind!r} model has {name} = {count}, which must be at least 1."
                " Use the config.json that belongs to the weights."
            )


def _config_value(config: PretrainedConfig, name: str) -> Any:
    """Return a value of a config; None if it has none, or one for each layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # Gemma 4's head_dim
        return None


def check_model(model: PreTrainedModel) -> None:
    """Raise if ffmem cannot read a model of this kind as causal layers of memories."""
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


def expert_weights(block: nn.Module) -> Iterator[str]:
    """Yield every weight of an expert: known by its name, or by being a stack of matrices.

    Convolutions and Mamba have stacks too, which are none.
    """
    for path, module in block.named_modules():
        for name, weight in module.named_parameters(prefix=path, recurse=False):
            is_stack = weight.dim() == 3 and min(weight.shape) > 1
            if is_stack and not isinstance(module, nn.Conv1d) and "mamba" not in path:
                yield f"{name} has the shape {tuple(weight.shape)}"
            elif "expert" in name:
                yield name
