"""What tests of comparisons share: two indexes over one corpus, of models that differ."""

import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import ffmem
from ffmem.indexing.store import Index
from ffmem.interventions.compare import Comparison, compare
from ffmem.models.memories import Memories, fingerprint
from tests.indexing.folders import indexed, write_corpus
from tests.tiny import tiny, tiny_tokenizer

Edit = Callable[[Memories], None]

_FOLDER = TemporaryDirectory(prefix="ffmem-pairs-")
_MADE: dict[tuple, Path] = {}


def model(name: str = "llama", edit: Edit | None = None, seed: int = 0) -> Memories:
    """Return a tiny model, edited before anything is read from it."""
    memories = ffmem.load(tiny(name, seed), tiny_tokenizer())
    if edit is not None:
        edit(memories)
    return memories


def index_of(folder: Path, memories: Memories, **options) -> Index:
    """Index the corpus that all of them share, or the one beside the folder.

    Every index is made once; tests get copies.
    """
    options = {"chunk_tokens": 4096, "batch_tokens": 4096} | options  # one chunk
    corpus = folder.parent / "corpus.txt"
    if corpus.exists():
        return indexed(folder, corpus, memories, **options)
    key = (fingerprint(memories.model), tuple(sorted(options.items())))
    if key not in _MADE:
        base = Path(_FOLDER.name)
        if not (base / "corpus.txt").exists():
            write_corpus(base / "corpus.txt")
        _MADE[key] = base / str(len(_MADE))
        indexed(_MADE[key], base / "corpus.txt", memories, **options)
    return Index(shutil.copytree(_MADE[key], folder, dirs_exist_ok=True))


def compared(
    folder: Path, first: Memories, second: Memories, options: dict | None = None, **asked
) -> Comparison:
    """Index two models, and compare."""
    indexes = [
        index_of(folder / name, memories, **(options or {}))
        for name, memories in (("first", first), ("second", second))
    ]
    out = folder / "out"
    out.mkdir(exist_ok=True)
    given = {"first_model": first, "second_model": second}
    if asked.get("models") is False:
        given = {}
    return compare(*indexes, out, **({"top": 5} | given | asked))
