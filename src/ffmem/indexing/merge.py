"""Merging indexes of parts of a corpus, and extending one.

    extend(index(A), B) == merge(index(A), index(B)), byte for byte

Sentences of the second part are numbered after those of the first. Triggers, statistics and
samples merge as in `results.py`; values, keys and vocabulary depend on the model alone and are
copied; agreement follows from all of these.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import accumulate
from pathlib import Path

from ffmem.corpus.corpus import Corpus
from ffmem.errors import StoreError
from ffmem.files import locked, storage_errors, sync, write_text
from ffmem.indexing.agreement import write_agreement
from ffmem.indexing.build import build, lock_folder, remove_partials
from ffmem.indexing.config import BuildOptions, IndexConfig, read_run
from ffmem.indexing.manifest import CorpusRecord, SourceRecord, hash_files
from ffmem.indexing.results import (
    LayerResult,
    merge_samples,
    read_layer,
    read_sample,
    write_layer,
    write_sample,
)
from ffmem.indexing.sentences import join_sentences
from ffmem.indexing.store import Index, as_index, check_weights, finish_swap, sibling
from ffmem.indexing.tables import layer_file, read_columns
from ffmem.models.memories import Memories
from ffmem.progress import Progress
from ffmem.signatures import check_arguments
from ffmem.storage import Storage

_MUST_MATCH = ("tokenizer", "t", "prefixes", "compat", "coefficient", "projection", "dtype")

MERGE_MARK = "partials/merge.json"
"""Marks a folder with an unfinished merge, which may start over."""


@check_arguments
def merge(
    folders: Sequence[str | Path | Index], out: str | Path, *, progress: Progress | None = None
) -> Index:
    """Merge indexes of parts of a corpus into the folder `out`; return the merged index."""
    target, progress = Path(out), progress or Progress(quiet=True)
    indexes = [as_index(folder) for folder in folders]
    if len(indexes) < 2:
        raise StoreError("Pass at least two indexes to merge.")
    for other in indexes[1:]:
        check_compatible(indexes[0], other)
    _check_distinct(indexes)
    sources = [source for index in indexes for source in index.manifest.corpus.sources]
    with storage_errors(target), lock_folder(target) as is_finished:
        if is_finished:
            merged = Index(target)
            check_compatible(indexes[0], merged)
            if merged.manifest.corpus.sources != sources:
                raise StoreError(f"{target} holds another index. Merge into a new folder.")
            progress.say(f"The index in {target} is finished: nothing to do.")
            return merged
        if (target / "partials" / "config.json").exists():
            raise StoreError(f"{target} holds an unfinished index. Merge into a new folder.")
        write_text(target / MERGE_MARK, "{}\n")
        _write(indexes, sources, target, progress)
        remove_partials(target)
    return Index(target)


def check_compatible(first: Index, other: Index) -> None:
    """Raise if two indexes were made differently, and name the difference."""
    mine, theirs = first.manifest, other.manifest
    if mine.model.hash != theirs.model.hash and mine.dtype == theirs.dtype:
        raise StoreError(
            f"Cannot merge {first.folder} and {other.folder}: they are of different models,"
            f" {mine.model.shown} and {theirs.model.shown} (their weights differ). Merge indexes of"
            " one model."
        )
    pairs = {name: (getattr(mine, name), getattr(theirs, name)) for name in _MUST_MATCH}
    # Not part of the weights: a ReLU and a GELU model may share them all.
    pairs["activation"] = (mine.model.activation, theirs.model.activation)
    pairs["start token"] = (mine.start.id, theirs.start.id)
    for name, (one, two) in pairs.items():
        if one != two:
            raise StoreError(
                f"Cannot merge {first.folder} and {other.folder}: {name} is {one} in the first and"
                f" {two} in the second. Index both with the same model and settings."
            )


def _check_distinct(indexes: list[Index]) -> None:
    """Raise if two indexes contain the same source."""
    folders: dict[str, Path] = {}
    for index in indexes:
        for source in index.manifest.corpus.sources:
            if source.hash in folders:
                raise StoreError(
                    f"{source.source} in {index.folder} has the same text as a corpus of"
                    f" {folders[source.hash]}: it would be counted twice. Merge indexes of"
                    " different texts."
                )
            folders[source.hash] = index.folder


def _write(
    indexes: list[Index], sources: list[SourceRecord], folder: Path, progress: Progress
) -> None:
    """Write all files of the merged index, the manifest last."""
    first = indexes[0]
    corpora = [index.manifest.corpus for index in indexes]
    shifts = list(accumulate((one.tokens + one.sentences for one in corpora[:-1]), initial=0))
    corpus = CorpusRecord.join(sources)
    for layer in range(first.n_layers):
        parts = [
            read_layer(index.folder, layer).shift(shift)
            for index, shift in zip(indexes, shifts, strict=True)
        ]
        write_layer(folder, layer, reduce(LayerResult.merge, parts), corpus.prefixes)
    samples = [
        read_sample(index.folder).shift(shift) for index, shift in zip(indexes, shifts, strict=True)
    ]
    coefficients = (
        [
            read_columns(index.folder / layer_file("samples", layer))["coefficient"]
            for index in indexes
        ]
        for layer in range(first.n_layers)
    )
    write_sample(folder, *merge_samples(samples, coefficients))
    join_sentences(folder / "sentences.parquet", [index.sentences for index in indexes])
    for kind in first.kinds:
        if kind in ("values", "keys"):
            shutil.copytree(first.folder / kind, folder / kind, dirs_exist_ok=True)
    shutil.copy(first.folder / "vocabulary.parquet", folder / "vocabulary.parquet")
    write_agreement(folder, first.manifest.model, progress)
    replace(first.manifest, corpus=corpus, files=hash_files(folder)).write(folder)


def extend(
    index: Index,
    load: Callable[[], Memories],
    corpus: Corpus,
    options: BuildOptions,
    progress: Progress,
) -> Index:
    """Add a corpus to an index, read by the same model with the same settings.

    If the chat template ends no prefix in the index, it ends none in the corpus either.
    The corpus is indexed in a folder next to the index and merged; then the folders are swapped.
    If the process is killed, the index is complete: either as before or extended.
    """

    def load_same() -> Memories:
        memories = load()
        check_weights(index, memories.fingerprint())
        return memories

    work = sibling(index.folder, "extending")
    busy = f"Another process is extending {index.folder}. Wait for it."
    with storage_errors(work), locked(work / "lock", busy):
        finish_swap(index.folder)
        index = Index(index.folder)
        if any(source.content_only for source in index.manifest.corpus.sources):
            corpus = replace(corpus, content_only=True)
        request = corpus.identify()
        if request["digest"] is not None and any(
            _matches(source, request) for source in index.manifest.corpus.sources
        ):
            progress.say(f"{corpus.source} is already in {index.folder}: nothing to do.")
            shutil.rmtree(work)
            return index
        before = read_run(Storage(work / "index"))
        if before is not None and before.corpus != request:
            raise StoreError(
                f"An earlier `ffmem extend {index.folder} {before.corpus['source']}` is unfinished."
                f" Rerun it first, or delete {work} to discard it."
            )
        config = _same_config(index)
        build(load_same, corpus, work / "index", config, options, progress, same_model=index)
        added = Index(work / "index")
        (source,) = added.manifest.corpus.sources
        if not _matches(source, request):
            raise StoreError(
                f"{work} holds {source.source}, which an interrupted `ffmem extend` has read but"
                f" not added yet. Extend with {source.source} first, or delete that folder."
            )
        if source.hash in {known.hash for known in index.manifest.corpus.sources}:
            progress.say(f"{source.source} is already in {index.folder}: nothing to do.")
        else:
            _swap(index.folder, added.folder, progress)
        shutil.rmtree(work)
    return Index(index.folder)


def _matches(source: SourceRecord, request: dict[str, str | int | bool | None]) -> bool:
    """Return whether a source was read from the requested corpus, with the same settings."""
    return all(getattr(source, name) == value for name, value in request.items())


def _same_config(index: Index) -> IndexConfig:
    """Return the configuration that an index was made with."""
    manifest, last = index.manifest, index.manifest.corpus.sources[-1]
    start = manifest.start.id
    return IndexConfig(
        t=manifest.t,
        prefixes=manifest.prefixes,
        compat=manifest.compat,
        start="none" if start is None else f"id:{start}",
        batch_tokens=last.batch_tokens,
        chunk_tokens=last.chunk_tokens,
        threads=last.threads,
    )


def _swap(folder: Path, other: Path, progress: Progress) -> None:
    """Merge another index into the one in a folder."""
    extended, before = sibling(folder, "extended"), sibling(folder, "before")
    shutil.rmtree(extended, ignore_errors=True)
    merge([folder, other], extended, progress=progress)
    # The patterns no longer fit and will be refused. Keep them: an LLM may have been expensive.
    if (folder / "patterns").is_dir():
        shutil.copytree(folder / "patterns", extended / "patterns")
    folder.rename(before)
    extended.rename(folder)
    sync(folder.parent)
    finish_swap(folder)
