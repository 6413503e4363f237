"""What tests of comparisons share: two indexes over one corpus, of models that differ."""

from collections.abc import Callable
from pathlib import Path

import ffmem
from ffmem.indexing.store import Index
from ffmem.interventions.compare import compare
from ffmem.interventions.comparison import Comparison
from ffmem.models.memories import Memories
from tests.indexing.folders import indexed, write_corpus
from tests.tiny import tiny, tiny_tokenizer

Edit = Callable[[Memories], None]


def model(name: str = "llama", edit: Edit | None = None, seed: int = 0) -> Memories:
    """Return a tiny model, edited before anything is read from it."""
    memories = ffmem.load(tiny(name, seed), tiny_tokenizer())
    if edit is not None:
        edit(memories)
    return memories


def index_of(folder: Path, memories: Memories, **options) -> Index:
    """Index the corpus that all of them share."""
    corpus = folder.parent / "corpus.txt"
    if not corpus.exists():
        write_corpus(corpus)
    whole = {"chunk_tokens": 4096, "batch_tokens": 4096}  # one chunk: nothing here is about them
    return indexed(folder, corpus, memories, **(whole | options))


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
