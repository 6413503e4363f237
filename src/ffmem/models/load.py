"""From a MODEL argument to `Memories`.

MODEL is a local Hugging Face folder, a `.gguf` file, a fairseq checkpoint (`model.pt` with
`dict.txt` beside it, or their folder), a named model, or a Hub id with an optional `@revision`.
"""

import io
import json
import logging as python_logging
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from gguf import GGUFReader
from huggingface_hub.constants import ENDPOINT
from safetensors import safe_open
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
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging
from transformers.utils.hub import cached_file

from ffmem.errors import FfmemError, ModelError, one_line
from ffmem.files import sha256, storage_errors
from ffmem.models.argument import FORMS, NAMED, canonical, path_of
from ffmem.models.fairseq import load_fairseq
from ffmem.models.memories import Memories, fingerprint
from ffmem.models.split import device_map, refuse_no_accelerator
from ffmem.models.structure import refuse_config
from ffmem.models.tokenizer import SubwordTokenizer, Tokenizer, WordTokenizer
from ffmem.networks.config import AdaptiveConfig
from ffmem.registry import cache_folder

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "auto": None,
}
"""What weights are cast to; auto leaves them as they are stored."""

SPLIT = "split"
"""The device that is all accelerators together, whole layers on each."""

ADAPTER = "adapter_config.json"
"""The file that makes a folder an adapter, such as LoRA, of peft."""

_IF_THERE = {
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
}
"""What `cached_file` is told of a file that a model may lack."""

_IGNORED = re.compile(
    r"(^|\.)("
    r"\w*rotary\w*\.\w*(inv_freq|cos_cached|sin_cached)"
    r"|(attn|attention|self_attn)\.(bias|masked_bias|causal_mask|embed_positions)"
    r"|position_ids|embed_positions\.weights"
    r")$"
    r"|(^|\.)(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|mtp)\."
)
"""Keys that may be left out beside those that transformers itself ignores: masks and positions,
which older versions stored and which are computed; parts that see or hear, or predict further
tokens."""

HASHES = "sha256.json"
"""The file of a converted model that names the hash of each of the others."""

_BLOCK = re.compile(r"blk\.(\d+)\.")
"""How the names of a layer's tensors begin in a GGUF file."""

OWN_CODE: dict[str, Any] = {"trust_remote_code": False}
"""What every loader of transformers is told: left to itself, it asks on standard input, which may
be the corpus, whether to run Python code that a model folder holds."""

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
    refuse_no_accelerator()
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
    _refuse_adapter(name, where)
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
        _refuse_integers(name, where)
    with refusing_own_code(name):
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
    _refuse_unfitting(name, report)
    if config.model_type == AdaptiveConfig.model_type:
        words = cached_file(name, "dict.txt", **where, **_IF_THERE)
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


def _refuse_unfitting(name: str | Path, report: dict[str, Any]) -> None:
    """Raise unless the weights of a checkpoint are those of the model that its config describes."""
    for kind in ("missing_keys", "mismatched_keys"):
        if report[kind]:
            example = sorted(map(str, report[kind]))[0]
            raise ModelError(
                f"The checkpoint {name} does not fill the model: {len(report[kind])}"
                f" {kind.replace('_', ' ')}, such as {example}. transformers would fill them with"
                " random numbers; give a whole checkpoint."
            )
    unexpected = sorted(key for key in report["unexpected_keys"] if not _IGNORED.search(key))
    if unexpected:
        raise ModelError(
            f"The checkpoint {name} holds more than the model that its config describes:"
            f" {len(unexpected)} unexpected keys, such as {unexpected[0]}. transformers would leave"
            " them out and compute something else; give the config that belongs to the weights."
        )


def _refuse_integers(name: str, where: dict[str, Any]) -> None:
    """Raise if weights are stored as integers, or as anything else that is no real number.

    transformers would cast them without a word: quantized weights, without their scales.
    """
    single = cached_file(name, SAFE_WEIGHTS_NAME, **where, **_IF_THERE)
    parts = [] if single is None else [SAFE_WEIGHTS_NAME]
    if single is None and (
        listed := cached_file(name, SAFE_WEIGHTS_INDEX_NAME, **where, **_IF_THERE)
    ):
        parts = sorted(
            set(json.loads(Path(listed).read_text(encoding="utf-8"))["weight_map"].values())
        )
    for part in parts:
        with safe_open(cached_file(name, part, **where), "pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no dictionary
                dtype = file.get_slice(key).get_dtype()
                if not dtype.startswith(("F", "BF")) and not _IGNORED.search(key):
                    raise ModelError(
                        f"The checkpoint {name} stores {key} as {dtype}, and its config names no"
                        " quantization that says what these numbers mean. Give a checkpoint in"
                        " float32, bfloat16 or float16."
                    )


def _refuse_adapter(name: str, where: dict[str, Any]) -> None:
    """Raise if a model is an adapter, which transformers adds to its base only if peft is there."""
    found = cached_file(name, ADAPTER, **where, **_IF_THERE)
    if found is None:
        return
    try:
        settings = json.loads(Path(found).read_text(encoding="utf-8"))
        kind, base = settings.get("peft_type"), settings.get("base_model_name_or_path")
    except (ValueError, AttributeError):
        kind, base = None, None
    what = "a LoRA adapter" if kind in (None, "LORA") else f"an adapter ({kind})"
    of = f"the base model {base}" if base else f"a base model that {ADAPTER} does not name"
    aside = f" Or move {ADAPTER} away, to read the model beside it without the adapter."
    raise ModelError(
        f"{name} is {what} of {of}, and ffmem reads whole models only. Merge them with peft:"
        f" AutoPeftModelForCausalLM.from_pretrained({name!r}).merge_and_unload()"
        ".save_pretrained(FOLDER); save the tokenizer to FOLDER too, and give FOLDER to ffmem."
        + (aside if (Path(name) / "config.json").exists() else "")
    )


def _words(path: Path, vocabulary: int) -> WordTokenizer:
    """Return the tokenizer of a dictionary, which must have a word for each of the model's."""
    tokenizer = WordTokenizer.from_file(path)
    if len(tokenizer.words) != vocabulary:
        raise ModelError(
            f"The model has {vocabulary} words, but {path} has {len(tokenizer.words)}, the four"
            " special ones included. Give the dict.txt that the model was trained with."
        )
    return tokenizer


def converted(gguf: Path) -> Path:
    """Return a Hugging Face folder with the content of a GGUF file, made once and cached.

    Beside its files lies their SHA-256: a folder that was damaged since is made anew.
    """
    folder = cache_folder() / "gguf" / sha256(gguf)[:32]
    if _is_whole(folder):
        return folder
    _refuse_damaged(gguf)
    # Its bar belongs on a terminal, and takes no heed of transformers' own switch.
    quiet_bar = nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
    with quiet_bar, refusing_own_code(gguf):
        model, tokenizer = _read_gguf(gguf)
    with storage_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".converting-"))
        try:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            hashes = {path.name: sha256(path) for path in temporary.iterdir()}
            (temporary / HASHES).write_text(json.dumps(hashes, indent=2), encoding="utf-8")
            if not _is_whole(folder):  # another process may have been faster
                if folder.exists():
                    folder.rename(temporary.with_name(f"{temporary.name}.damaged"))
                temporary.replace(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(f"{temporary}.damaged", ignore_errors=True)
    return folder


def _is_whole(folder: Path) -> bool:
    """Return whether a converted model has its files, and no byte of them has changed."""
    try:
        hashes = json.loads((folder / HASHES).read_text(encoding="utf-8"))
        return bool(hashes) and all(sha256(folder / name) == hashes[name] for name in hashes)
    except (OSError, ValueError, TypeError):
        return False


def _refuse_damaged(gguf: Path) -> None:
    """Raise unless a GGUF file holds what its header counts: tensors, settings, layers."""
    try:
        reader = GGUFReader(gguf)
        names = [tensor.name for tensor in reader.tensors]
        kind = reader.get_field("general.architecture")
        count = reader.get_field(f"{kind.contents()}.block_count") if kind else None
        said = count.contents() if count else None
    except Exception as error:  # of a damaged file, its reader raises anything
        raise ModelError(
            f"The GGUF file {gguf} is damaged: its header does not fit what it holds"
            f" ({one_line(error, 120)}). Fetch or make it anew."
        ) from error
    held = {int(found[1]) for name in names if (found := _BLOCK.match(name))}
    if len(held) != said or max(held) != said - 1:
        raise ModelError(
            f"The GGUF file {gguf} is damaged: it says that it has {said or 'no'} layers, and holds"
            f" the tensors of {len(held)}. Fetch or make it anew."
        )


def _read_gguf(gguf: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    place, name = gguf.parent, gguf.name
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        place, gguf_file=name, dtype=torch.float32, output_loading_info=True, **OWN_CODE
    )
    model, report = loaded
    _refuse_unfitting(gguf, report)
    _forget_quantisation(model)
    # transformers takes a tensor of any shape from a GGUF file.
    for key, weight in empty(model.config).named_parameters():
        if (found := tuple(model.get_parameter(key).shape)) != (said := tuple(weight.shape)):
            raise ModelError(
                f"The GGUF file {gguf} is damaged: {key} has the shape {found}, where its header"
                f" says {said}. Fetch or make it anew."
            )
    return model, AutoTokenizer.from_pretrained(place, gguf_file=name, **OWN_CODE)


def _forget_quantisation(model: PreTrainedModel) -> None:
    """Let a dequantised model be saved: its weights are plain numbers, its config says not."""
    for holder, name in (
        (model, "hf_quantizer"),
        (model.config, "quantization_config"),
        (model, "is_quantized"),
        (model, "quantization_method"),
    ):
        holder.__dict__.pop(name, None)


def _wrapped(tokenizer: PreTrainedTokenizerBase | Tokenizer) -> Tokenizer:
    return tokenizer if isinstance(tokenizer, Tokenizer) else SubwordTokenizer(tokenizer)


@contextmanager
def refusing_own_code(name: str | Path) -> Iterator[None]:
    """Say it plainly when transformers would have to run Python code that comes with a model.

    A model that names such code, but whose architecture transformers has, loads without it.
    """
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ModelError(
            f"The model {name} asks for its own Python code to run (`auto_map` in its config.json"
            " or tokenizer_config.json), which ffmem never does: give a model that transformers"
            " supports by itself, or, if you trust the code, load model and tokenizer with"
            " transformers and use ffmem.load(model, tokenizer)."
        ) from error


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
