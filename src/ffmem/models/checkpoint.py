"""Hugging Face checkpoints: a folder, a Hub id, or a GGUF file converted to a folder.

transformers accepts much that does not compute what the checkpoint's author meant. ffmem rejects
it: Python code that comes with a model, quantized weights without their scales, and weights that do
not match the config.
"""

import io
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGUFReader
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from ffmem.errors import ModelError, one_line
from ffmem.files import sha256, storage_errors
from ffmem.models.quantization import (
    finish_dequantization,
    prepare_dequantization,
    quantization_method,
)
from ffmem.models.structure import check_config
from ffmem.models.tokenizer import SubwordTokenizer, Tokenizer, WordTokenizer
from ffmem.networks.config import AdaptiveConfig
from ffmem.progress import report_step
from ffmem.registry import cache_folder

NO_REMOTE_CODE: dict[str, Any] = {"trust_remote_code": False}
"""Passed to every loader of transformers. By default it asks on standard input, which may be the
corpus, whether to run Python code from the model folder."""

HASHES = "sha256.json"
"""The file of a converted GGUF model with the hash of each other file."""

_UNUSED_KEYS = re.compile(
    r"(^|\.)("
    r"\w*rotary\w*\.\w*(inv_freq|cos_cached|sin_cached)"
    r"|(attn|attention|self_attn)\.(bias|masked_bias|causal_mask|embed_positions)"
    r"|position_ids|embed_positions\.weights"
    r")$"
    r"|(^|\.)(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|mtp)\."
)
"""Keys of a checkpoint that a model may ignore, in addition to those transformers lists: masks and
positions, which old versions stored; vision, audio and multi-token prediction parts."""

_GGUF_BLOCK = re.compile(r"blk\.(\d+)\.")
"""Prefix of the names of a layer's tensors in a GGUF file."""

DeviceMapper = Callable[[PretrainedConfig], dict[str, Any]]
"""From a model's config to its device map."""


def load_hugging_face(
    name: str,
    revision: str | None = None,
    *,
    local_files_only: bool = False,
    device_mapper: DeviceMapper | None = None,
) -> tuple[PreTrainedModel, Tokenizer]:
    """Load a folder or Hub id; raise if its files do not make up one whole model."""
    where: dict[str, Any] = {"revision": revision, "local_files_only": local_files_only}
    with _remote_code_errors(name):
        config = AutoConfig.from_pretrained(name, **where, **NO_REMOTE_CODE)
    check_config(config)
    has_code = getattr(config, "auto_map", None)  # loading raises a better error below
    auto_class = find_auto_class(config)
    if auto_class is None and not has_code:
        raise ModelError(
            f"The model {name} has type {config.model_type!r}, which is not a causal language model"
            " in transformers: use a model that predicts the next token."
        )
    is_adaptive = config.model_type == AdaptiveConfig.model_type
    if device_mapper is not None and is_adaptive:
        raise split_adaptive_error(f"The model {name}")
    method = quantization_method(config)
    if method is None:
        _check_weight_dtypes(name, where)
    else:
        prepare_dequantization(name, config)
    with _remote_code_errors(name), _setting_errors(name, config):
        loaded: Any = (auto_class or AutoModelForCausalLM).from_pretrained(
            name,
            config=config,
            **where,
            **NO_REMOTE_CODE,
            dtype="auto",
            use_safetensors=True,
            device_map=None if device_mapper is None else device_mapper(config),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report
        )
    model, report = loaded
    _check_loading_report(name, report)
    finish_dequantization(name, model, method)
    dictionary = find_file(name, "dict.txt", where) if is_adaptive else None
    if dictionary is not None:
        return model, WordTokenizer.from_file(dictionary, config.vocab_size)
    return model, _load_tokenizer(name, where)


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer in the folder of an adapter; None if it has none of its own."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    return _load_tokenizer(str(folder), {"local_files_only": True})


def _load_tokenizer(name: str, where: dict[str, Any]) -> Tokenizer:
    try:
        with _remote_code_errors(name):
            tokenizer = AutoTokenizer.from_pretrained(name, **where, **NO_REMOTE_CODE)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"transformers cannot load a tokenizer for {name} ({one_line(error)}). Put the"
            " tokenizer's files next to the model, or use ffmem.load(model, tokenizer)."
        ) from error
    return SubwordTokenizer(tokenizer)


def find_auto_class(config: PretrainedConfig) -> Any:
    """Return the class of transformers that loads a language model; None if there is none.

    A model that reads images too is loaded whole; text runs its decoder alone.
    """
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    return None


def split_adaptive_error(what: str) -> ModelError:
    """Return the error for splitting a model with adaptive softmax over devices."""
    return ModelError(
        f"{what} cannot be split over devices: its adaptive softmax shares its weights with its"
        " input. Use one device, such as --device cuda."
    )


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Hide progress bars and warnings of transformers and accelerate."""
    verbosity = transformers_logging.get_verbosity()
    has_bars = transformers_logging.is_progress_bar_enabled()
    accelerate = logging.getLogger("accelerate")
    accelerate_level = accelerate.level
    accelerate.setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        accelerate.setLevel(accelerate_level)
        transformers_logging.set_verbosity(verbosity)
        if has_bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def _remote_code_errors(name: str | Path) -> Iterator[None]:
    """Explain what to do with a model that only its own Python code can load.

    A model that names such code loads without it if transformers has the architecture.
    """
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ModelError(
            f"The model {name} needs its own Python code (`auto_map` in its config.json or"
            " tokenizer_config.json), which ffmem never runs. Use a model that transformers"
            " supports. Or, if you trust the code, load model and tokenizer with transformers and"
            " use ffmem.load(model, tokenizer)."
        ) from error


@contextmanager
def _setting_errors(name: str, config: PretrainedConfig) -> Iterator[None]:
    """Name the config setting that transformers does not know: it raises a bare KeyError."""
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


def _settings_with(config: Mapping[Any, Any], value: object, prefix: str = "") -> list[str]:
    """Return the settings of a config that have a value, such as `rope_parameters.rope_type`."""
    found = []
    for name, setting in config.items():
        if isinstance(setting, Mapping):
            found += _settings_with(setting, value, f"{prefix}{name}.")
        elif setting == value:
            found.append(f"{prefix}{name}")
    return found


def find_file(name: str, file: str, where: dict[str, Any]) -> Path | None:
    """Return the local path of a model's file; None if the model has no such file."""
    found = cached_file(
        name,
        file,
        **where,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


def _check_weight_dtypes(name: str, where: dict[str, Any]) -> None:
    """Raise if weights are not floating-point numbers.

    transformers would silently cast quantized weights, without their scales.
    """
    files = []
    if find_file(name, SAFE_WEIGHTS_NAME, where) is not None:
        files = [SAFE_WEIGHTS_NAME]
    elif (index := find_file(name, SAFE_WEIGHTS_INDEX_NAME, where)) is not None:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    for file in files:
        with safe_open(cached_file(name, file, **where), "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a dictionary
                dtype = tensors.get_slice(key).get_dtype()
                if not dtype.startswith(("F", "BF")) and not _UNUSED_KEYS.search(key):
                    raise ModelError(
                        f"The checkpoint {name} stores {key} as {dtype}, but its config has no"
                        " quantization_config. Use a checkpoint in float32, bfloat16 or float16."
                    )


def _check_loading_report(name: str | Path, report: dict[str, Any]) -> None:
    """Raise unless the checkpoint has exactly the weights of the model in its config."""
    for key, stored, needed in sorted(report["mismatched_keys"]):
        raise ModelError(
            f"The checkpoint {name} does not match its config: {key} has shape {tuple(stored)}, but"
            f" the config requires {tuple(needed)}. Use the config.json that belongs to the"
            " weights."
        )
    if report["missing_keys"]:
        example = sorted(report["missing_keys"])[0]
        raise ModelError(
            f"The checkpoint {name} is incomplete: {len(report['missing_keys'])} missing keys, such"
            f" as {example}, which transformers would initialize randomly. Use a complete"
            " checkpoint."
        )
    unexpected = sorted(key for key in report["unexpected_keys"] if not _UNUSED_KEYS.search(key))
    if unexpected:
        raise ModelError(
            f"The checkpoint {name} does not match its config: {len(unexpected)} unexpected keys,"
            f" such as {unexpected[0]}, which transformers would ignore. Use the config.json that"
            " belongs to the weights."
        )


# GGUF


def convert_gguf(gguf: Path) -> Path:
    """Return a Hugging Face folder with the content of a GGUF file, from the cache if possible.

    The folder is converted again if any of its files has changed.
    """
    folder = cache_folder() / "gguf" / sha256(gguf)[:32]
    if _is_intact(folder):
        return folder
    _check_gguf(gguf)
    report_step(f"Converting {gguf.name} to a Hugging Face checkpoint, once")
    # transformers' switch does not turn off this progress bar.
    with redirect_stderr(io.StringIO()), _remote_code_errors(gguf):
        model, tokenizer = _read_gguf(gguf)
    with storage_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".converting-"))
        try:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            hashes = {path.name: sha256(path) for path in temporary.iterdir()}
            (temporary / HASHES).write_text(json.dumps(hashes, indent=2), encoding="utf-8")
            if not _is_intact(folder):  # another process may have finished first
                if folder.exists():
                    folder.rename(temporary.with_name(f"{temporary.name}.damaged"))
                try:
                    temporary.replace(folder)
                except OSError:  # or just now
                    if not _is_intact(folder):
                        raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(f"{temporary}.damaged", ignore_errors=True)
    return folder


def _is_intact(folder: Path) -> bool:
    """Return whether a converted model has all its files, unchanged."""
    try:
        hashes = json.loads((folder / HASHES).read_text(encoding="utf-8"))
        return bool(hashes) and all(sha256(folder / name) == hashes[name] for name in hashes)
    except (OSError, ValueError, TypeError):
        return False


def _check_gguf(gguf: Path) -> None:
    """Raise unless a GGUF file has the tensors, settings and layers that its header counts."""
    try:
        reader = GGUFReader(gguf)
        names = [tensor.name for tensor in reader.tensors]
        architecture = reader.get_field("general.architecture")
        field = reader.get_field(f"{architecture.contents()}.block_count") if architecture else None
        n_layers = field.contents() if field else None
    except Exception as error:  # the reader raises anything on a damaged file
        raise ModelError(
            f"The GGUF file {gguf} is damaged: its header does not match its content"
            f" ({one_line(error, 120)}). Download or convert it again."
        ) from error
    found = {int(match[1]) for name in names if (match := _GGUF_BLOCK.match(name))}
    if len(found) != n_layers or max(found) != n_layers - 1:
        raise ModelError(
            f"The GGUF file {gguf} is damaged: its header says {n_layers or 'no'} layers, but it"
            f" has tensors for {len(found)}. Download or convert it again."
        )


def _read_gguf(gguf: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the dequantized model and the tokenizer of a GGUF file."""
    folder, name = gguf.parent, gguf.name
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, output_loading_info=True, **NO_REMOTE_CODE
    )
    model, report = loaded
    _check_loading_report(gguf, report)
    # The weights are dequantized; save_pretrained fails as long as the model says otherwise.
    model.config.__dict__.pop("quantization_config", None)
    for attribute in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(attribute, None)
    # transformers does not check the shapes of tensors in a GGUF file.
    with torch.device("meta"):
        described = AutoModelForCausalLM.from_config(model.config, **NO_REMOTE_CODE)
    for key, weight in described.named_parameters():
        found, expected = tuple(model.get_parameter(key).shape), tuple(weight.shape)
        if found != expected:
            raise ModelError(
                f"The GGUF file {gguf} is damaged: {key} has shape {found}, but its header says"
                f" {expected}. Download or convert it again."
            )
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=name, **NO_REMOTE_CODE)
