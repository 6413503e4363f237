"""What a model's structure tells about it: why it cannot be read, or where its memories may be.

A model of unknown family is searched: the list of its layers has the length that its config
names; in each layer exactly one module holds a linear map to `hidden` and one or two from it, of
one other width:

    hidden → memory (→ or two of them, or one to twice as many),    memory → hidden

From where r is read, which key is the gate's and which norm is the last remain open: every
possibility is a candidate row, and only the self-check chooses among them. Nothing is guessed.
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
from ffmem.models.split import missing

_EXPERTS = re.compile(r"(^|_)(n|num)_(\w+_)?experts$")
"""Names in configs of how many experts there are: num_local_experts, n_routed_experts, …"""

_NUMBERS = {
    "scale": "logit_scale",
    "divisor": "logits_scaling",
    "cap": "final_logit_softcapping",
    "multiplier": "residual_multiplier",
}
"""Fields of a row, and what configs call them."""

_ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation", "activation")


_COUNTS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "vocab_size", "max_position_embeddings"),
)
"""What a config counts, under the names that transformers maps a family's own to."""

_NO_MEMORIES = {
    **dict.fromkeys(
        ("mamba", "mamba2", "falcon_mamba"),
        "its layers are state spaces without a feed-forward part, so it has no key-value memories",
    ),
    "prophetnet": "it runs one stream per future token through the same layers, so that a position"
    " has several sets of coefficients",
    "rwkv": "its feed-forward part mixes in the token before and gates what the values give, so"
    " that more than coefficients multiplies the values",
    "xlstm": "it is a recurrent network, and ffmem reads transformers only",
}
"""Why causal language models of some types are not read."""


class FeedForward(NamedTuple):
    """The linear maps of a layer's feed-forward part, as paths from the layer."""

    parent: str
    keys: str
    up: str | None
    values: str


def refuse_config(config: PretrainedConfig) -> None:
    """Raise if a config alone says that no causal layers of memories can be read."""
    kind = config.model_type
    if config.is_encoder_decoder:
        raise ModelError(
            f"A {kind!r} model is an encoder-decoder, and ffmem reads decoders only: give it a"
            " causal language model."
        )
    causal = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not causal:
        _refuse_encoder(f"A {kind!r} model")
    if kind in _NO_MEMORIES:
        raise ModelError(
            f"A {kind!r} model cannot be read: {_NO_MEMORIES[kind]}; give ffmem a transformer that"
            " predicts the next token."
        )
    _refuse_counts(config)


def _refuse_counts(config: PretrainedConfig) -> None:
    """Raise if a config counts less than one of something that every model has."""
    text = config.get_text_config()
    for name in _COUNTS:
        count = getattr(text, name, None)
        if isinstance(count, int) and count < 1:
            raise ModelError(
                f"The config of this {config.model_type!r} model says {name} = {count}, which must"
                " be at least 1: take the config.json that belongs to the weights."
            )


def _refuse_encoder(what: str) -> None:
    raise ModelError(
        f"{what} is an encoder, which predicts masked tokens from both sides: give ffmem a causal"
        " language model, which predicts the next token from the prefix alone."
    )


def refuse(model: PreTrainedModel) -> None:
    """Raise if the model is of a kind that cannot be read as dense, causal layers of memories."""
    kind, config = type(model).__name__, model.config
    refuse_config(config)
    encoders = set(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values())
    if kind in encoders - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        _refuse_encoder(kind)
    if model.get_output_embeddings() is None:
        raise ModelError(
            f"{kind} has no output embedding: it is a trunk, not a language model."
            " Load it as a causal language model."
        )
    experts = next(_expert_weights(model), None)
    if experts is not None:
        # The config's number says more than a path. Alone it says nothing: a family may have
        # experts in some models and name their number in all.
        counts = (f"{name} = {count}" for name, count in _expert_counts(config.to_dict()))
        raise MixtureOfExperts(config.model_type, next(counts, experts))
    nowhere = missing(model)
    if nowhere is not None:
        raise ModelError(
            f"The weights {nowhere} are not in memory. Load the whole model, in a smaller"
            " dtype if need be, or over several devices."
        )


def _expert_weights(model: PreTrainedModel) -> Iterator[str]:
    """Yield every weight that belongs to experts: by its name, or as a stack of matrices."""
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(prefix=path, recurse=False):
            is_stack = weight.dim() == 3 and min(weight.shape) > 1
            if is_stack and not isinstance(module, nn.Conv1d):
                yield f"{name} has the shape {tuple(weight.shape)}"
            elif "expert" in name:
                yield name


def _expert_counts(config: dict[Any, Any]) -> Iterator[tuple[str, int]]:
    """Yield every number of experts above one that a nested config names."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _expert_counts(value)
        elif _EXPERTS.search(str(name)) and isinstance(value, int) and value > 1:
            yield name, value


def candidates(model: PreTrainedModel) -> Iterator[Family]:
    """Yield the rows that the structure of a model of unknown family allows."""
    config = model.config.get_text_config()
    activation = next((name for name in _ACTIVATIONS if hasattr(config, name)), None)
    n_layers, hidden = (getattr(config, x, 0) for x in ("num_hidden_layers", "hidden_size"))
    found = [
        (path, _feed_forwards(blocks, hidden))
        for path, blocks in model.named_modules()
        if isinstance(blocks, nn.ModuleList) and len(blocks) == n_layers
    ]
    found = [(path, parts) for path, parts in found if parts]
    if activation is None or len(found) != 1 or len({part.parent for part in found[0][1]}) != 1:
        return
    blocks, parts = found[0]
    trunk = blocks.rpartition(".")[0]
    norms = [*_norms(model.get_submodule(trunk), prefix=trunk), None]
    first = model.get_submodule(f"{blocks}.0")
    numbers: dict[str, Any] = {
        field: name for field, name in _NUMBERS.items() if hasattr(config, name)
    }
    for norm, part, reading in product(norms, parts, list(_readings(first, parts[0].parent))):
        yield Family(
            blocks=blocks,
            values=part.values,
            keys=part.keys,
            up=part.up,
            final_norm=norm,
            activation=activation,
            **numbers,
            **reading,
        )


def _feed_forwards(blocks: nn.ModuleList, hidden: int) -> list[FeedForward]:
    """Return the ways to read the layers' feed-forward parts; none unless all are alike."""
    ways = [_of_block(block, hidden) for block in blocks]
    return ways[0] if all(way == ways[0] for way in ways) else []


def _of_block(block: nn.Module, hidden: int) -> list[FeedForward]:
    """Return the ways to read the groups of linear maps that look like a feed-forward part."""
    groups: dict[str, dict[str, tuple[int, int]]] = {}
    for path, module in block.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            rows, columns = module.get_parameter("weight").shape
            sizes = (rows, columns) if isinstance(module, Conv1D) else (columns, rows)
            groups.setdefault(path.rpartition(".")[0], {})[path] = sizes
    return [way for parent, maps in groups.items() for way in _ways(parent, maps, hidden)]


def _ways(parent: str, maps: dict[str, tuple[int, int]], hidden: int) -> list[FeedForward]:
    """Return how a group of maps (from width, to width) can be keys and values, if it can."""
    for values, (memories, to) in maps.items():
        others = {path: sizes for path, sizes in maps.items() if path != values}
        if to != hidden or memories == hidden:
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


def _readings(block: nn.Module, parent: str) -> Iterator[dict[str, Any]]:
    """Yield every way to read r and y that a block's own modules allow."""
    norms = list(_norms(block))
    befores = [*reversed(norms), *([parent] if parent else [])]
    for post_norm, residual in product([None, *norms], befores):
        if residual != post_norm:
            yield {"residual": residual, "post_norm": post_norm}
    for name, child in block.named_children():
        has_weights = next(child.parameters(), None) is not None
        is_other = name not in norms and name != parent.partition(".")[0]
        if has_weights and is_other and not isinstance(child, nn.Linear | Conv1D):
            yield {"attention": name}


def _norms(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield the paths of a module's own norms."""
    for name, child in module.named_children():
        if "norm" in type(child).__name__.lower():
            yield f"{prefix}.{name}" if prefix else name
