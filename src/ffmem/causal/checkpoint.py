"""A model written as a Hugging Face folder, whole or not at all.

    fingerprint(AutoModelForCausalLM.from_pretrained(folder)) = fingerprint(model)

Config, weights, generation config and tokenizer: what `transformers` alone needs to load it, once
`ffmem.networks.model` is imported if the model is one of ours, a fairseq checkpoint too. All is
written to a folder beside the one asked for, read back and compared, then renamed.
"""

import copy
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from ffmem.errors import ModelError, StoreError
from ffmem.files import check_writable, storage_errors, sync
from ffmem.models.checkpoint import NO_REMOTE_CODE, silence_transformers
from ffmem.models.memories import fingerprint
from ffmem.models.tokenizer import SubwordTokenizer
from ffmem.training.data import WordVocabulary


def refuse_taken(folder: Path) -> None:
    """Raise unless a folder is free to be written, before any work is done for it."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise StoreError(
            f"{folder} is there already, and not empty. Choose another place: a checkpoint is"
            " written as a whole, over nothing."
        )
    check_writable(folder.absolute().parent)


def save(
    model: PreTrainedModel,
    tokens: SubwordTokenizer | WordVocabulary,
    folder: Path,
    expected: str,
    add: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write a model of an expected hash; `add` puts further files beside it."""
    with _new(folder) as temporary, silence_transformers():
        try:
            model.save_pretrained(temporary)
            if isinstance(tokens, WordVocabulary):
                tokens.save(temporary)
            else:
                _without_place(tokens.tokenizer).save_pretrained(temporary)
        except ValueError as error:  # a generation config that transformers finds contradictory
            reason = " ".join(str(error).split())[:300]
            raise ModelError(f"transformers does not save this model: {reason}") from error
        add(temporary)
        _share(temporary)
        _refuse_other(temporary, folder, expected)


def _share(folder: Path) -> None:
    """Let those read the weights who may read the config: safetensors writes for the owner only."""
    mode = (folder / "config.json").stat().st_mode
    for path in folder.iterdir():
        path.chmod(mode)


def _without_place(tokenizer: Any) -> Any:
    """Return a tokenizer that does not write down where it was loaded from."""
    other = copy.copy(tokenizer)
    place = ("is_local", "local_files_only")
    other.init_kwargs = {k: v for k, v in tokenizer.init_kwargs.items() if k not in place}
    return other


@contextmanager
def _new(folder: Path) -> Iterator[Path]:
    """Give a folder to write to; rename it to `folder` when the block ends well."""
    refuse_taken(folder)
    place = folder.absolute()
    # Not by mkdtemp, whose folders nobody else may read.
    temporary = place.with_name(f".{place.name}.{secrets.token_hex(8)}.tmp")
    with storage_errors(folder):
        try:
            temporary.mkdir()
            yield temporary
            for path in temporary.iterdir():
                sync(path)
            sync(temporary)
            temporary.replace(place)  # takes the place of an empty folder, and of nothing else
            sync(place.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _refuse_other(temporary: Path, folder: Path, expected: str) -> None:
    """Raise unless what was written is what plain transformers reads."""
    model = AutoModelForCausalLM.from_pretrained(temporary, dtype="auto", **NO_REMOTE_CODE)
    found = fingerprint(model)
    if found != expected:
        raise ModelError(
            f"The checkpoint {folder} would be read as another model: its weights have the hash"
            f" {found}, not {expected}. It was not kept; please report the model."
        )
