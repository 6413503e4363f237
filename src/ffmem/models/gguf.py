"""A GGUF file, converted once to a Hugging Face folder in the cache.

Beside the folder's files lies their SHA-256: one that was damaged since is made anew.
"""

import io
import json
import re
import shutil
import sys
import tempfile
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ffmem.errors import ModelError, one_line
from ffmem.files import sha256, storage_errors
from ffmem.models.checkpoint import OWN_CODE, refuse_unfitting, refusing_own_code
from ffmem.registry import cache_folder

HASHES = "sha256.json"
"""The file of a converted model that names the hash of each of the others."""

_BLOCK = re.compile(r"blk\.(\d+)\.")
"""How the names of a layer's tensors begin in a GGUF file."""


def converted(gguf: Path) -> Path:
    """Return a Hugging Face folder with the content of a GGUF file, made once and cached."""
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
    refuse_unfitting(gguf, report)
    _forget_quantisation(model)
    # transformers takes a tensor of any shape from a GGUF file.
    with torch.device("meta"):
        described = AutoModelForCausalLM.from_config(model.config, **OWN_CODE)
    for key, weight in described.named_parameters():
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
