"""Indexes of parts of a corpus, joined: `merge` and `extend`.

    extend(index(A), B) == merge(index(A), index(B)), byte for byte

The sentences of the second part get numbers after those of the first; triggers, statistics and
samples merge by their laws; values and vocabulary depend on the model alone and are copied.
"""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path

from ffmem.corpus.corpus import Corpus
from ffmem.errors import StoreError
from ffmem.files import locked, storage_errors, sync, write_text
from ffmem.indexing.build import build, run_folder
from ffmem.indexing.config import BuildOptions, IndexConfig
from ffmem.indexing.manifest import CorpusRecord, SourceRecord, hash_files
from ffmem.indexing.results import LayerResult, read_layer, write_layer
from ffmem.indexing.sample import Sample, merge_samples, read_sample, write_sample
from ffmem.indexing.sentences import join_sentences
from ffmem.indexing.store import Index, beside, check_weights, recover
from ffmem.indexing.tables import layer_file, read_columns
from ffmem.models.memories import Memories
from ffmem.progress import Progress

_SAME = ("tokenizer", "t", "prefixes", "compat", "coefficient", "projection", "dtype")

MERGE = "partials/merge.json"
"""Marks a folder in which an unfinished merge may be done again."""


def merge(folders: Sequence[str | Path], out: str | Path, progress: Progress) -> Index:
    """Write the index of several corpora, from an index of each, to a new folder."""
    target = Path(out)
    indexes = [Index(folder) for folder in folders]
    if len(indexes) < 2:
        raise StoreError("Merging takes at least two indexes.")
    for other in indexes[1:]:
        check_compatible(indexes[0], other)
    _check_distinct(indexes)
    sources = [source for index in indexes for source in index.manifest.corpus.sources]
    with storage_errors(target), run_folder(target) as is_finished:
        if is_finished:
            merged = Index(target)
            check_compatible(indexes[0], merged)
            if merged.manifest.corpus.sources != sources:
                raise StoreError(f"{target} holds another index. Merge into a new folder.")
            progress.say(f"The index in {target} is finished: nothing to do.")
            return merged
        if (target / "partials" / "config.json").exists():
            raise StoreError(f"{target} holds an unfinished index. Merge into a new folder.")
        write_text(target / MERGE, "{}\n")
        _write(indexes, sources, target)
        shutil.rmtree(target / "partials")
    return Index(target)


def check_compatible(first: Index, other: Index) -> None:
    """Refuse to join indexes that were made differently, and name the difference."""
    mine, theirs = first.manifest, other.manifest
    pairs = {name: (getattr(mine, name), getattr(theirs, name)) for name in _SAME}
    # Weights do not say what is done with them: ReLU and GELU may share all.
    pairs["activation"] = (mine.model.activation, theirs.model.activation)
    pairs["model hash"] = (mine.model.hash, theirs.model.hash)
    pairs["start token"] = (mine.start.id, theirs.start.id)
    for name, (one, two) in pairs.items():
        if one != two:
            raise StoreError(
                f"Cannot merge {first.folder} and {other.folder}: {name} is {one} in the first and"
                f" {two} in the second. Index both with the same model and settings."
            )


def _check_distinct(indexes: list[Index]) -> None:
    """Refuse to count a source twice."""
    seen: dict[str, Path] = {}
    for index in indexes:
        for source in index.manifest.corpus.sources:
            if source.hash in seen:
                raise StoreError(
                    f"{source.source} is in {seen[source.hash]} and in {index.folder}: it would be"
                    " counted twice. Merge indexes of different texts."
                )
            seen[source.hash] = index.folder


def _write(indexes: list[Index], sources: list[SourceRecord], folder: Path) -> None:
    """Write all files of the merged index, the manifest last."""
    first = indexes[0]
    shifts = [0]
    for index in indexes:
        corpus = index.manifest.corpus
        shifts.append(shifts[-1] + corpus.tokens + corpus.sentences)
    corpus = CorpusRecord.joined(sources)
    for layer in range(first.n_layers):
        parts = [
            read_layer(index.folder, layer).shifted(shift)
            for index, shift in zip(indexes, shifts, strict=False)
        ]
        write_layer(folder, layer, reduce(LayerResult.merge, parts), corpus.prefixes)
    samples = []
    for index, shift in zip(indexes, shifts, strict=False):
        hashes, prefixes = read_sample(index.folder)
        samples.append(Sample(hashes, prefixes + shift))
    coefficients = (
        [
            read_columns(index.folder / layer_file("samples", layer))["coefficient"]
            for index in indexes
        ]
        for layer in range(first.n_layers)
    )
    write_sample(folder, *merge_samples(samples, coefficients))
    join_sentences(folder / "sentences.parquet", [index.sentences for index in indexes])
    if first.manifest.model.has_values:
        shutil.copytree(first.folder / "values", folder / "values", dirs_exist_ok=True)
    shutil.copy(first.folder / "vocabulary.parquet", folder / "vocabulary.parquet")
    replace(first.manifest, corpus=corpus, files=hash_files(folder)).write(folder)


def extend(
    index: Index, memories: Memories, corpus: Corpus, options: BuildOptions, progress: Progress
) -> Index:
    """Add a corpus to an index, read by the same model with the same settings.

    The corpus is indexed in a folder beside the index, and merged; then the folders are swapped.
    Killed at any moment, the index is whole, as it was or as it will be.
    """
    check_weights(index, memories.fingerprint())
    work = beside(index.folder, "extending")
    busy = f"Another process is extending {index.folder}. Wait for it."
    with storage_errors(work), locked(work / "lock", busy):
        recover(index.folder)
        index = Index(index.folder)
        asked = {**corpus.describe(), "digest": corpus.digest()}
        if asked["digest"] is not None and any(
            _is_request(source, asked) for source in index.manifest.corpus.sources
        ):
            progress.say(f"{corpus.source} is in {index.folder} already: nothing to do.")
            shutil.rmtree(work)
            return index
        build(memories, corpus, work / "index", _same_config(index), options, progress)
        added = Index(work / "index")
        (source,) = added.manifest.corpus.sources
        if not _is_request(source, asked):
            raise StoreError(
                f"{work} holds {source.source}, which an interrupted `ffmem extend` has read but"
                f" not added yet. Extend with {source.source} first, or delete that folder."
            )
        if source.hash in {known.hash for known in index.manifest.corpus.sources}:
            progress.say(f"{source.source} is in {index.folder} already: nothing to do.")
        else:
            _swap(index.folder, added.folder, progress)
        shutil.rmtree(work)
    return Index(index.folder)


def _is_request(source: SourceRecord, asked: dict[str, str | int | None]) -> bool:
    """Return whether a source was read from the corpus that is asked for."""
    return all(getattr(source, name) == value for name, value in asked.items())


def _same_config(index: Index) -> IndexConfig:
    """Return the configuration with which an index was made."""
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
    """Replace an index by itself merged with another one."""
    extended, before = beside(folder, "extended"), beside(folder, "before")
    shutil.rmtree(extended, ignore_errors=True)
    merge([folder, other], extended, progress)
    # Patterns are of the former state, and refused from now on; but asking an LLM was expensive.
    if (folder / "patterns").is_dir():
        shutil.copytree(folder / "patterns", extended / "patterns")
    folder.rename(before)
    extended.rename(folder)
    sync(folder.parent)
    recover(folder)


def check_same_request(
    index: Index, model: str, corpus: Corpus, config: IndexConfig, dtype: str
) -> None:
    """Refuse a command that asks for another index than the finished one, and name why."""
    from ffmem.models.arguments import resolve_model

    manifest = index.manifest
    first = asdict(manifest.corpus.sources[0])
    source = manifest.model.source
    asked = {
        "model": (model if model == source else resolve_model(model), source),
        "t": (config.t, manifest.t),
        "prefixes": (config.prefixes, manifest.prefixes),
        "compat": (config.compat, manifest.compat),
        "start": (config.start, manifest.start.asked),
        "dtype": (dtype, manifest.dtype),
        **{name: (value, first[name]) for name, value in corpus.describe().items()},
    }
    named = asked.pop("source")
    differences = [f"{name}: {old} → {new}" for name, (new, old) in asked.items() if new != old]
    if len(manifest.corpus.sources) > 1:
        others = ", ".join(source.source for source in manifest.corpus.sources[1:])
        differences.append(f"it holds further corpora: {others}")
    # Files are hashed last, and once: that takes as long as reading them.
    digest = None if differences else corpus.digest()
    if named[0] != named[1] and (digest is None or digest != first["digest"]):
        differences.append(f"source: {named[1]} → {named[0]}")
    elif not differences and digest != first["digest"]:
        differences.append(f"the corpus's files have changed, digest: {first['digest']} → {digest}")
    if differences:
        raise StoreError(
            f"{index.folder} holds a finished index with other settings: {'; '.join(differences)}."
            " Choose another folder."
        )
