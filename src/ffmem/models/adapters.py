"""Adapters: what fine-tuning with peft stores instead of a whole model.

    W' = W + ΔW        LoRA: ΔW = α/r · B · A

An adapter is merged into its base model on load, so that everything else reads one whole model.
Weights are merged in float32: in bfloat16, rounding would swallow much of ΔW. Law: the merged model
computes what the base computes with the adapter beside it. It is checked on every load.
"""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ffmem.errors import ModelError, one_line
from ffmem.files import sha256
from ffmem.models.arguments import ADAPTER_CONFIG, ADAPTER_WEIGHTS

TOLERANCE = 1e-3
"""Of the largest logit: how far the merged model may be from the base with its adapter."""

_CHECKED_TOKENS = 12


@dataclass(frozen=True)
class Adapter:
    """The files of an adapter."""

    source: str
    """As --adapter takes it: a folder, or a Hub id."""
    folder: Path
    settings: dict[str, Any]
    """Its adapter_config.json."""

    @property
    def kind(self) -> str:
        """Its method, such as LORA."""
        return str(self.settings.get("peft_type"))

    @property
    def base(self) -> str | None:
        """The model that it was trained on, with its revision; None if it does not say."""
        name, revision = (self.settings.get(key) for key in ("base_model_name_or_path", "revision"))
        is_local = name and (Path(name).exists() or (self.folder / name).exists())
        return f"{name}@{revision}" if name and revision and not is_local else name or None

    def hash(self) -> str:
        """Return the SHA-256 of its weights."""
        return sha256(self.folder / ADAPTER_WEIGHTS)


def read_adapter(source: str, folder: Path) -> Adapter:
    """Return the adapter in a folder; raise unless it can be merged and is free of pickle."""
    path = folder / ADAPTER_CONFIG
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"Cannot read {path}: {error}. Use the folder that peft's save_pretrained wrote."
        ) from None
    if not isinstance(settings, dict) or not isinstance(settings.get("peft_type"), str):
        raise ModelError(
            f"{path} is not the config of an adapter: it names no peft_type. Use the folder that"
            " peft's save_pretrained wrote."
        )
    adapter = Adapter(source, folder, settings)
    if find_spec("peft") is None:
        raise ModelError(
            f"{source} is an adapter ({adapter.kind}); merging it needs the package `peft`."
            " Install it: pip install 'ffmem[peft]'."
        )
    if not (folder / ADAPTER_WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        found = " (only adapter_model.bin, a pickle, which ffmem never reads)" if pickled else ""
        raise ModelError(
            f"The adapter {source} has no {ADAPTER_WEIGHTS}{found}. Save it again with peft's"
            " save_pretrained, which writes safetensors."
        )
    return adapter


@contextmanager
def base_errors(adapter: Adapter) -> Iterator[None]:
    """If the base that an adapter names cannot be loaded, say how to pass it."""
    try:
        yield
    except ModelError as error:
        raise ModelError(
            f"{error} The adapter {adapter.source} was trained on this model. If it is elsewhere,"
            f" pass it as MODEL, with --adapter {adapter.source}."
        ) from None


def check_base(adapter: Adapter, base: str, loaded_from: str) -> None:
    """Raise if an adapter says that it was trained on a model of another name.

    Only the last part of a name counts: a copy may be anywhere.
    """
    if adapter.base is None or _names(adapter.base) & (_names(base) | _names(loaded_from)):
        return
    raise ModelError(
        f"The adapter {adapter.source} was trained on {adapter.base}, not on {base}. Pass that"
        f" model. If {base} is a copy of it, set base_model_name_or_path to {base!r} in"
        f" {adapter.folder / ADAPTER_CONFIG}."
    )


def _names(source: str) -> set[str]:
    """Return the names that a model may go by; in the Hub's cache, a folder above has the name."""
    path = Path(source)
    of_cache = [
        part.split("--")[-1]
        for part, below in zip(path.parts, path.parts[1:], strict=False)
        if part.startswith("models--") and below == "snapshots"
    ]
    names = [path.name, *of_cache]
    return {name.partition("@")[0].removesuffix(".gguf").lower() for name in names if name}


def merge_adapter(model: PreTrainedModel, adapter: Adapter) -> PreTrainedModel:
    """Return a model with an adapter merged into its weights, in float32; changes the model."""
    import peft
    from peft.utils import (
        get_peft_model_state_dict,
        load_peft_weights,
        set_peft_model_state_dict,
    )

    config = _read_config(adapter)
    try:
        weights = load_peft_weights(str(adapter.folder), device="cpu")
    except Exception as error:  # damaged files make safetensors raise anything
        raise ModelError(
            f"Cannot read {adapter.folder / ADAPTER_WEIGHTS}: {one_line(error)}. Download or save"
            " it again."
        ) from error
    model = model.float()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with_adapter: Any = peft.PeftModel(model, config, autocast_adapter_dtype=False)
            _check_shapes(
                adapter,
                weights,
                get_peft_model_state_dict(with_adapter, save_embedding_layers=False),
            )
            report: Any = set_peft_model_state_dict(with_adapter, weights)
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"The adapter {adapter.source} does not fit its base model: {one_line(error)}. Pass the"
            " model that it was trained on."
        ) from error
    _check_complete(adapter, with_adapter, set(report.missing_keys), list(report.unexpected_keys))
    with_adapter.eval()
    before = _logits(with_adapter)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            merged: PreTrainedModel = with_adapter.merge_and_unload()
    except (NotImplementedError, AttributeError, ValueError, TypeError) as error:
        raise _cannot_merge(adapter, one_line(error)) from error
    apart = float((_logits(merged) - before).abs().max() / before.abs().max().clamp_min(1e-12))
    if not apart <= TOLERANCE:
        raise _cannot_merge(
            adapter,
            f"merged, its logits are off by {apart:.1e} of the largest; at most"
            f" {TOLERANCE:.0e} is allowed",
        )
    merged.__dict__.pop("peft_config", None)
    return merged


def _read_config(adapter: Adapter) -> Any:
    """Return peft's config of an adapter; raise if its kind cannot be merged."""
    import peft
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    if adapter.kind not in peft.PeftType.__members__:
        raise ModelError(
            f"The adapter {adapter.source} has the kind {adapter.kind!r}, which peft"
            f" {peft.__version__} does not know. Use another version of peft."
        )
    if adapter.settings.get("megatron_config"):  # peft would import a module that the file names
        raise _cannot_merge(adapter, "it was trained with Megatron and needs its code")
    try:
        kind: Any = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(adapter.kind)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config: Any = kind.from_peft_type(**adapter.settings)
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"Cannot read {adapter.folder / ADAPTER_CONFIG}: {one_line(error)}. Use the folder"
            " that peft's save_pretrained wrote."
        ) from error
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise _cannot_merge(adapter, "it adds tokens or attention, and changes no weights")
    if getattr(config, "alora_invocation_tokens", None):
        raise _cannot_merge(adapter, "it acts only after its invocation tokens (aLoRA)")
    config.inference_mode = True
    return config


def _cannot_merge(adapter: Adapter, reason: str) -> ModelError:
    return ModelError(
        f"The adapter {adapter.source} ({adapter.kind}) cannot be merged into its base model:"
        f" {reason}. ffmem reads weights, so use an adapter that peft can merge, such as LoRA."
    )


def _check_shapes(
    adapter: Adapter, weights: dict[str, Tensor], expected: dict[str, Tensor]
) -> None:
    """Raise unless the weights of an adapter have the shapes that they need on this base."""
    for name, weight in weights.items():
        if name in expected and weight.shape != expected[name].shape:
            found, needed = (" × ".join(map(str, one.shape)) for one in (weight, expected[name]))
            raise ModelError(
                f"The adapter {adapter.source} does not fit its base model: {name} is {found}, but"
                f" this model needs {needed}. Pass the model that it was trained on."
            )


def _check_complete(adapter: Adapter, model: Any, missing: set[str], unexpected: list[str]) -> None:
    """Raise unless an adapter has exactly the weights that it needs on this base."""
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    prefix = PEFT_TYPE_TO_PREFIX_MAPPING[model.peft_config["default"].peft_type]
    own = sorted(
        key for key in missing if ".default" in key and (prefix in key or "modules_to_save" in key)
    )
    for keys, what in ((sorted(unexpected), "unexpected"), (own, "missing")):
        if keys:
            raise ModelError(
                f"The adapter {adapter.source} does not fit its base model: {len(keys)} {what}"
                f" weights, such as {keys[0]}. Pass the model that it was trained on; if a file is"
                " damaged, download or save it again."
            )


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    """Return the logits of a model on a few tokens."""
    vocabulary = model.config.get_text_config().vocab_size
    device = next(model.parameters()).device
    ids = torch.arange(1, _CHECKED_TOKENS + 1, device=device) * 7919 % vocabulary
    logits: Tensor = model(input_ids=ids[None], use_cache=False).logits
    return logits.float()
