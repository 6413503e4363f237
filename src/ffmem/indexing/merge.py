"""Indexes of parts of a corpus, put together: `merge` and `extend`.

    extend(index(A), B) == merge(index(A), index(B)), byte for byte

The sentences of the second part get numbers behind those of the first; triggers, statistics and
samples merge by their laws; values and vocabulary are the model's and stay as they are.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

from ffmem.errors import StoreError
from ffmem.files import storage_errors, sync
from ffmem.indexing.contents import read_contents, write_contents
from ffmem.indexing.found import Found
from ffmem.indexing.hashes import hashes
from ffmem.indexing.manifest import CorpusRecord
from ffmem.indexing.sentences import join_sentences
from ffmem.indexing.store import Index, beside, recover

_SAME = ("tokenizer", "t", "prefixes", "compat", "coefficient", "projection", "dtype")


def merge(folders: Sequence[str | Path], out: str | Path) -> Index:
    """Write the index of several corpora, from an index of each, to a new folder."""
    target = Path(out)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise StoreError(f"{target} is not an empty folder. Merge into a new folder.")
    indexes = [Index(folder) for folder in folders]
    if len(indexes) < 2:
        raise StoreError("Merging takes at least two indexes.")
    for other in indexes[1:]:
        refuse_different(indexes[0], other)
    _refuse_twice(indexes)
    with storage_errors(target):
        working = beside(target, "merging")
        shutil.rmtree(working, ignore_errors=True)
        _write(indexes, working)
        if target.exists():
            target.rmdir()
        working.rename(target)
        sync(target.parent)
    return Index(target)


def swap(folder: Path, other: Path) -> Index:
    """Replace an index by itself merged with another; killed at any moment, one is whole."""
    extended, before = beside(folder, "extended"), beside(folder, "before")
    shutil.rmtree(extended, ignore_errors=True)
    merge([folder, other], extended)
    with storage_errors(folder):
        # Of the former state, and refused from now on; but what a language model said was dear.
        if (folder / "patterns").is_dir():
            shutil.copytree(folder / "patterns", extended / "patterns")
        folder.rename(before)
        extended.rename(folder)
        sync(folder.parent)
    recover(folder)
    return Index(folder)


def refuse_different(first: Index, other: Index) -> None:
    """Refuse to put together what was not made alike, and name the difference."""
    mine, theirs = first.manifest, other.manifest
    pairs = {name: (getattr(mine, name), getattr(theirs, name)) for name in _SAME}
    # Weights do not say what is done with them: ReLU and GELU may share all.
    pairs["activation"] = (mine.model.activation, theirs.model.activation)
    pairs["model hash"] = (mine.model.hash, theirs.model.hash)
    pairs["start token"] = (mine.start.id, theirs.start.id)
    for name, (one, two) in pairs.items():
        if one != two:
            raise StoreError(
                f"{first.folder} and {other.folder} were not made alike: {name} is {one} in the"
                f" first and {two} in the second. Index both with the same model and settings."
            )


def _refuse_twice(indexes: list[Index]) -> None:
    seen: dict[str, Path] = {}
    for index in indexes:
        for source in index.manifest.corpus.sources:
            if source.hash in seen:
                raise StoreError(
                    f"{source.source} is in {seen[source.hash]} already, and would be counted"
                    f" twice with {index.folder}."
                )
            seen[source.hash] = index.folder


def _write(indexes: list[Index], folder: Path) -> None:
    parts = []
    n_places = 0
    for index in indexes:
        parts.append(_shifted(index, n_places))
        n_places += index.manifest.corpus.tokens + index.manifest.corpus.sentences
    write_contents(folder, (reduce(Found.merge, layer) for layer in zip(*parts, strict=True)))
    join_sentences(folder / "sentences.parquet", [index.sentences for index in indexes])
    first = indexes[0]
    if first.manifest.model.has_values:
        shutil.copytree(first.folder / "values", folder / "values")
    shutil.copy(first.folder / "vocabulary.parquet", folder / "vocabulary.parquet")
    sources = [source for index in indexes for source in index.manifest.corpus.sources]
    corpus = CorpusRecord.joined(sources)
    replace(first.manifest, corpus=corpus, files=hashes(folder)).write(folder)


def _shifted(index: Index, places: int) -> Iterator[Found]:
    """Return what an index holds, layer by layer, with `places` more prefixes in front."""
    model, n_prefixes = index.manifest.model, index.manifest.corpus.prefixes
    for found in read_contents(index.folder, model.layers, n_prefixes, model.gated):
        yield found.shifted(places)
