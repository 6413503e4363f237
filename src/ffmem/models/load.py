"""From a MODEL argument to `Memories`.

MODEL is a local Hugging Face folder, a `.gguf` file, a fairseq checkpoint (`model.pt` with
`dict.txt` beside it, or their folder), a named model, or a Hub id with an optional `@revision`.
"""

import logging as python_logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import transformers
from huggingface_hub.constants import ENDPOINT
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging
from transformers.utils.hub import cached_file

from ffmem.errors import FfmemError, ModelError, one_line
from ffmem.models.argument import FORMS, NAMED, canonical, path_of
from ffmem.models.checkpoint import (
    ADAPTER,
    IF_THERE,
    OWN_CODE,
    refuse_adapter,
    refuse_integers,
    refuse_unfitting,
    refusing_own_code,
)
from ffmem.models.fairseq import load_fairseq
from ffmem.models.gguf import converted
from ffmem.models.memories import Memories, fingerprint
from ffmem.models.split import device_map, require_accelerator
from ffmem.models.structure import refuse_config
from ffmem.models.tokenizer import SubwordTokenizer, Tokenizer, WordTokenizer
from ffmem.networks.config import AdaptiveConfig

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "auto": None,
}
"""What weights are cast to; auto leaves them as they are stored."""

SPLIT = "split"
"""The device that is all accelerators together, whole layers on each."""

Plan = Callable[[PretrainedConfig], dict[str, Any]]
"""From a model's config to the place of each of its parts: accelerate's device map."""


def load(
    model: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | Tokenizer | None = None,
    *,
    dtype: str = "float32",
    device: str | dict[str, Any] = "auto",
) -> Memories:
    """Return the memories of a model, by MODEL argument or of one that is already in memory.

    A model in memory is switched to evaluation and its weights are frozen; it stays on its device,
    or devices, and keeps its dtype. `device` may be a device map of your own instead of a name.
    """
    if isinstance(model, PreTrainedModel):
        if tokenizer is None:
            raise ModelError("A model in memory needs its tokenizer: load(model, tokenizer).")
        return Memories(model, _wrapped(tokenizer))
    if dtype not in DTYPES:
        raise ModelError(f"--dtype {dtype} was asked for; there are {', '.join(DTYPES)}.")
    plan = _plan(device, dtype)
    place = None if isinstance(device, dict) or device == SPLIT else find_device(device)
    source, revision = canonical(str(model)), None
    with quiet(), _explaining(source):
        if Path(source).exists() or source in NAMED:
            network, tokens = _local(source, plan)
        else:
            name, _, revision = source.partition("@")
            network, tokens = _from_hub(name, revision or None, plan)
        # The weights' hash is taken before any cast, so that it does not depend on --dtype.
        weights = fingerprint(network)
        # accelerate forbids `to` on a split model, which also means a dtype: past it, then.
        cast: Any = network.to if plan is None else partial(nn.Module.to, network)
        cast(device=place, dtype=DTYPES[dtype])
    used = tokens if tokenizer is None else _wrapped(tokenizer)
    return Memories(network, used, source, revision or None, weights)


def find_device(device: str) -> torch.device:
    """Return the device that `--device` names; `auto` takes an accelerator if there is one."""
    if device == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator or torch.device("cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ModelError(
            f"--device {device} was asked for, and is not there ({reason})."
            " Use auto, cpu, cuda, cuda:N, mps or split."
        ) from None
    return found


def _plan(device: str | dict[str, Any], dtype: str) -> Plan | None:
    """Return how to place a model over several devices; None for one device."""
    if isinstance(device, dict):
        return lambda config: device
    if device != SPLIT:
        return None
    require_accelerator()
    return lambda config: device_map(empty(config, dtype))


def empty(config: PretrainedConfig, dtype: str = "auto") -> PreTrainedModel:
    """Return a model without weights, in the wider of its stored dtype and the wanted one.

    It is loaded as it is stored and cast then, so that there must be room for both.
    """
    stored = getattr(config, "dtype", None) or torch.float32
    wanted = torch.promote_types(stored, DTYPES[dtype] or stored)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=wanted, **OWN_CODE)
    return model


def _refuse_split(what: str) -> None:
    raise ModelError(
        f"{what} was to be split over devices. Its adaptive softmax shares its weights with its"
        " input, and ffmem keeps the two together: give one device, such as --device cuda."
    )


def _local(source: str, plan: Plan | None = None) -> tuple[PreTrainedModel, Tokenizer]:
    """Load what lies on this machine, or is fetched by name."""
    path = path_of(source)
    if path.suffix == ".gguf":
        return _hugging_face(str(converted(path)), plan=plan)
    if path.is_file() or (path / "model.pt").exists():
        if plan is not None:
            _refuse_split(f"The fairseq checkpoint {path}")
        return load_fairseq(path)
    if (path / "checkpoint" / "prepared.safetensors").exists() and not (
        path / "config.json"
    ).exists():
        raise ModelError(
            f"{path} is an unfinished training run. Rerun its `ffmem train` command to finish it."
        )
    if not (path / "config.json").exists() and not (path / ADAPTER).exists():
        raise ModelError(
            f"{path} is not a model: it has neither config.json (Hugging Face) nor model.pt"
            " (fairseq)."
        )
    return _hugging_face(str(path), plan=plan)


def _from_hub(
    name: str, revision: str | None, plan: Plan | None = None
) -> tuple[PreTrainedModel, Tokenizer]:
    """Load a Hub id; without a network, from the cache alone and at once."""
    online = _hub_is_known()
    try:
        return _hugging_face(name, revision, local_files_only=not online, plan=plan)
    except OSError as error:
        asked = name if revision is None else f"{name}@{revision}"
        why = f"the Hub gives none ({one_line(error, 120)})" if online else "no way to the Hub"
        raise ModelError(
            f"There is no file or folder {asked!r} here, no such model in the cache, and {why}."
            f" {FORMS}"
        ) from error


def _hub_is_known() -> bool:
    """Return whether the Hub's name can be looked up, here or by a proxy."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return True
    try:
        socket.getaddrinfo(urlsplit(ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


def _hugging_face(
    name: str,
    revision: str | None = None,
    *,
    local_files_only: bool = False,
    plan: Plan | None = None,
) -> tuple[PreTrainedModel, Tokenizer]:
    """Load a folder or Hub id, refusing a checkpoint that lacks weights."""
    where: dict[str, Any] = {"revision": revision, "local_files_only": local_files_only}
    refuse_adapter(name, where)
    with refusing_own_code(name):
        config = AutoConfig.from_pretrained(name, **where, **OWN_CODE)
    refuse_config(config)
    own_code = getattr(config, "auto_map", None)  # refused below, and for that reason
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not own_code:
        raise ModelError(
            f"The model {name} is of type {config.model_type!r}, which is no causal language model"
            " of transformers: give ffmem one that predicts the next token."
        )
    if plan is not None and config.model_type == AdaptiveConfig.model_type:
        _refuse_split(f"The model {name}")
    if getattr(config, "quantization_config", None) is None:
        refuse_integers(name, where)
    with refusing_own_code(name), _explaining_settings(name, config):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            **where,
            **OWN_CODE,
            dtype="auto",
            use_safetensors=True,
            device_map=None if plan is None else plan(config),
            output_loading_info=True,
        )
    model, report = loaded
    refuse_unfitting(name, report)
    if config.model_type == AdaptiveConfig.model_type:
        words = cached_file(name, "dict.txt", **where, **IF_THERE)
        if words is not None:
            return model, _words(Path(words), config.vocab_size)
    try:
        with refusing_own_code(name):
            tokens = AutoTokenizer.from_pretrained(name, **where, **OWN_CODE)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{name} has no tokenizer that transformers can load ({one_line(error)})."
            " Put the tokenizer's files beside the model, or give load(model, tokenizer)."
        ) from error
    return model, SubwordTokenizer(tokens)


def _words(path: Path, vocabulary: int) -> WordTokenizer:
    """Return the tokenizer of a dictionary, which must have a word for each of the model's."""
    tokenizer = WordTokenizer.from_file(path)
    if len(tokenizer.words) != vocabulary:
        raise ModelError(
            f"The model has {vocabulary} words, but {path} has {len(tokenizer.words)}, the four"
            " special ones included. Give the dict.txt that the model was trained with."
        )
    return tokenizer


def _wrapped(tokenizer: PreTrainedTokenizerBase | Tokenizer) -> Tokenizer:
    return tokenizer if isinstance(tokenizer, Tokenizer) else SubwordTokenizer(tokenizer)


@contextmanager
def _explaining_settings(name: str, config: PretrainedConfig) -> Iterator[None]:
    """Say which setting of a config transformers does not know: it raises a bare KeyError."""
    try:
        yield
    except KeyError as error:
        settings = _settings_with(config.to_dict(), error.args[0])
        if not settings:
            raise
        raise ModelError(
            f"Cannot load the model {name}: its config says {settings[0]} = {error.args[0]!r},"
            f" which transformers {transformers.__version__} does not know. Use the config.json"
            " that belongs to the weights, or another version of transformers."
        ) from error


def _settings_with(config: Mapping[Any, Any], value: object, place: str = "") -> list[str]:
    """Return the settings of a config that have a value, such as `rope_parameters.rope_type`."""
    found = []
    for name, setting in config.items():
        if isinstance(setting, Mapping):
            found += _settings_with(setting, value, f"{place}{name}.")
        elif setting == value:
            found.append(f"{place}{name}")
    return found


@contextmanager
def _explaining(source: str) -> Iterator[None]:
    """Turn what transformers raises on an unreadable model into an error that names the model."""
    try:
        yield
    except FfmemError:
        raise
    except Exception as error:  # a damaged or foreign file makes its readers raise anything
        raise ModelError(
            f"Cannot load the model {source}: {one_line(error)}. If a file of it is damaged or"
            " missing, fetch or make it anew."
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keep bars and warnings of libraries off the screen: what matters is raised."""
    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    mover = python_logging.getLogger("accelerate")  # it warns of weights in main memory
    mover_level = mover.level
    mover.setLevel(python_logging.ERROR)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        mover.setLevel(mover_level)
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
