"""Building an index.

    corpus → chunks → (values, every chunk, keys) on workers → merged partials → manifest

Interrupted? Rerun: the run resumes from what its partials cover. The result is byte-identical,
whether one process, several, or a cluster reads the chunks.
"""

import gc
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from ffmem.corpus.corpus import Corpus
from ffmem.errors import FfmemError, StoreError, WorkerError
from ffmem.files import committing, locked, remove_temporaries, sha256, try_locked
from ffmem.indexing.agreement import write_agreement
from ffmem.indexing.config import (
    CONFIG_FILE,
    CORPUS_FILE,
    BuildOptions,
    IndexConfig,
    make_manifest,
    read_run,
)
from ffmem.indexing.manifest import hash_files
from ffmem.indexing.prepare import SENTENCES, IndexPlan, prepare
from ffmem.indexing.results import merge_samples, write_layer, write_sample
from ffmem.indexing.sentences import Sentences
from ffmem.indexing.store import SHARED_FILE, Index
from ffmem.indexing.tables import layer_file
from ffmem.indexing.worker import IndexWorker, make_worker
from ffmem.models.arguments import IN_MEMORY, resolve_adapter, resolve_model
from ffmem.models.memories import Memories
from ffmem.parallel import Executor, Task, WorkerFactory, executor
from ffmem.progress import Progress
from ffmem.records import check_same_settings
from ffmem.storage import Storage, open_storage

MAX_STALLED_ROUNDS = 3
"""Give up after this many rounds without progress: workers die before they commit."""


def build(
    load: Callable[[], Memories],
    corpus: Corpus,
    folder: Path,
    config: IndexConfig,
    options: BuildOptions,
    progress: Progress,
    same_model: Index | None = None,
) -> bool:
    """Make or resume the index in a folder; return False if it was finished already.

    `load` returns the model. If other processes do the work, this one drops it before they start.
    `same_model` is an index of that model, whose values are copied.
    """
    existed = folder.exists()
    with lock_folder(folder) as is_finished:
        if is_finished:
            return False
        with _clean_up_on_error(folder, existed):
            _check_same_settings(folder, corpus, config)
            memories = load()
            if not options.is_serial and memories.source == IN_MEMORY:
                raise FfmemError(
                    "A model in memory cannot be sent to other processes. Save it with"
                    " save_pretrained, and pass the folder."
                )
            plan = prepare(memories, corpus, folder, config, options, progress)
        plan.partials.delete_damaged(plan.sampled_chunks, progress.say)
        if same_model is not None:
            _copy_projections(same_model, plan)
        make: WorkerFactory
        if options.is_serial:
            sentences, skip_bad = Sentences(folder / SENTENCES), options.bad_sentences == "skip"
            make = partial(IndexWorker, memories, plan.storage, sentences, plan.sample, skip_bad)
        else:
            make = _worker_factory(plan, options)
            del memories
            gc.collect()  # modules and hooks refer to each other
        with executor(options, make, progress, plan.run_config.threads) as workers:
            if plan.run_config.model.has_values:  # a lambda layer computes them from the input
                _project(workers, plan, "values", progress)
            _read_chunks(workers, plan, progress)
            _project(workers, plan, "keys", progress)
        finish(plan, progress)
    return True


def _check_same_settings(folder: Path, corpus: Corpus, config: IndexConfig) -> None:
    """Raise if the folder holds a run with other settings, before the model is loaded."""
    if (before := read_run(Storage(folder))) is None:
        return
    if config.threads is None:
        config = replace(config, threads=before.threads)
    # Its path may differ if its files do not: `prepare` compares them.
    files = {name: before.corpus[name] for name in ("source", "digest")}
    requested = replace(before, index=config, corpus=corpus.describe() | files)
    check_same_settings(
        f"{folder} holds an unfinished index", before.settings(), requested.settings()
    )


def _worker_factory(plan: IndexPlan, options: BuildOptions) -> WorkerFactory:
    """Return how other processes make their workers."""
    path = str(plan.folder.absolute() / SENTENCES)
    return partial(
        make_worker,
        storage=plan.storage.url,
        sentences=None if plan.storage.is_remote else path,
        device=options.device,
        sample=plan.sample,
        skip_bad=options.bad_sentences == "skip",
    )


def _copy_projections(index: Index, plan: IndexPlan) -> None:
    """Copy values and keys of an index that has the run's model, except damaged ones."""
    for name, expected in index.manifest.files.items():
        if not name.startswith(("values/", "keys/")) or plan.storage.exists(name):
            continue
        path = index.folder / name
        if path.is_file() and sha256(path) == expected:
            plan.storage.upload(path, name)


def _project(workers: Executor, plan: IndexPlan, kind: str, progress: Progress) -> None:
    """Project the values or keys of every layer that has no such file yet."""
    n_layers = plan.run_config.model.layers
    layers = [
        layer for layer in range(n_layers) if not plan.storage.exists(layer_file(kind, layer))
    ]
    tasks = [Task(f"{kind} of layer {layer}", f"project_{kind}", (layer,)) for layer in layers]
    with progress.bar(kind.capitalize(), n_layers, "layers", n_layers - len(layers)) as step:
        workers.run(tasks, step)


def _read_chunks(workers: Executor, plan: IndexPlan, progress: Progress) -> None:
    """Read every chunk, until committed partials cover them all."""
    missing = plan.missing_chunks()
    done = plan.facts.source.tokens - sum(chunk.n_tokens for chunk in missing)
    stalled = 0
    with progress.bar("Triggers", plan.facts.source.tokens, "tokens", done) as step:
        while missing:
            tasks = [
                Task(
                    chunk.name, "read_chunk", (chunk.number,), chunk.n_tokens, reports_progress=True
                )
                for chunk in missing
            ]
            workers.run(tasks, step)
            workers.flush()
            overlapping = plan.partials.overlapping()
            for partial in overlapping:
                plan.storage.delete(partial.name)
            if overlapping:
                workers.restart()
            before, missing = len(missing), plan.missing_chunks()
            stalled = 0 if len(missing) < before else stalled + 1
            if stalled == MAX_STALLED_ROUNDS:
                raise WorkerError(
                    f"{len(missing)} chunks are still missing: workers die before they commit"
                    " their results. Rerun the command to resume."
                )
            step(-sum(chunk.n_tokens for chunk in missing))  # read, but lost with a worker


def finish(plan: IndexPlan, progress: Progress) -> None:
    """Merge the partials into the finished files; write the manifest last."""
    folder, storage, partials = plan.folder, plan.storage, plan.partials.disjoint()
    covered = sorted(number for partial in partials for number in partial.chunks)
    if covered != [chunk.number for chunk in plan.chunks]:
        raise StoreError(f"The partials in {storage.shown} do not cover every chunk exactly once.")
    skipped = sorted(number for partial in partials for number in partial.skipped)
    sentences = Sentences(folder / SENTENCES)
    skipped_tokens = sum(sentences.row(number).n_prefixes for number in skipped)
    n_prefixes = sum(partial.n_prefixes for partial in partials)
    expected = plan.facts.source.tokens - plan.facts.source.left_out - skipped_tokens
    if n_prefixes != expected:
        raise StoreError(
            f"The partials in {storage.shown} count {n_prefixes:,} prefixes; the corpus has"
            f" {expected:,}. Delete partials/partial-*.arrow there"
            " and rerun the command to read the corpus again."
        )
    for layer, result in enumerate(plan.partials.layers(partials)):
        write_layer(folder, layer, result, n_prefixes)
    chunks = sorted(plan.sampled_chunks)
    samples = [plan.partials.sample(chunk) for chunk in chunks]
    write_sample(folder, *merge_samples(samples, plan.partials.sample_layers(chunks)))
    is_shared = storage.url != str(folder.absolute())
    if is_shared:
        for name in (*storage.names("values"), *storage.names("keys")):
            with storage.reading(name) as file, committing(folder / name) as temporary:
                temporary.write_bytes(file.read())
    write_agreement(folder, plan.run_config.model, progress)
    remove_temporaries(folder, "triggers", "stats", "samples", "values", "keys", "agreement")
    files = hash_files(folder)
    make_manifest(plan.run_config, plan.facts, skipped, skipped_tokens, files).write(folder)
    if is_shared:
        storage.clear()
    remove_partials(folder)


def check_finished_index(
    index: Index, model: str, adapter: str | None, corpus: Corpus, config: IndexConfig, dtype: str
) -> None:
    """Raise if a finished index is not the requested one, and name the differences."""
    manifest, found = index.manifest, f"{index.folder} holds a finished index"
    source, *further = manifest.corpus.sources
    before = None if manifest.model.adapter is None else manifest.model.adapter.source
    model = model if model == manifest.model.source else resolve_model(model)
    if adapter is None and model == before:  # a LoRA folder names its base
        model, adapter = manifest.model.source, before
    requested = {
        "model": model,
        "adapter": None if adapter is None else resolve_adapter(adapter),
        "t": config.t,
        "prefixes": config.prefixes,
        "compat": config.compat,
        "start": config.start,
        "dtype": dtype,
    }
    made = {name: getattr(manifest, name, None) for name in requested}
    made |= {"model": manifest.model.source, "adapter": before, "start": manifest.start.requested}
    check_same_settings(found, made, requested)
    if further:
        others = ", ".join(other.source for other in further)
        raise StoreError(f"{found} of further corpora: {others}. Choose another folder.")
    # Last, since hashing the files takes as long as reading them.
    identity = corpus.identify()
    read = {name: getattr(source, name) for name in identity}
    check_same_settings(found, {"corpus": read}, {"corpus": identity})


@contextmanager
def lock_folder(folder: Path) -> Iterator[bool]:
    """Lock a folder to make an index in it; yield whether it holds a finished one already."""
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is a file. Choose a new or an empty folder for the index.")
    if (folder / "manifest.json").exists():
        yield True
        return
    if folder.exists() and not (folder / "partials").exists() and any(folder.iterdir()):
        # A run that finishes writes the manifest before it deletes partials/.
        if (folder / "manifest.json").exists():
            yield True
            return
        raise StoreError(
            f"{folder} contains other files, but no index. Choose a new or empty folder."
        )
    busy = f"Another process is working on {folder}. Wait for it, or choose another folder."
    with locked(folder / "partials" / "lock", busy):
        if (folder / "manifest.json").exists():  # another process has just finished it
            remove_partials(folder)
            yield True
            return
        yield False


def remove_partials(folder: Path) -> None:
    """Delete what a finished index no longer needs; call it with the lock of the folder."""
    shutil.rmtree(folder / "partials", ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Delete the partials of a finished index, unless the process that made it still does that."""
    with try_locked(folder / "partials" / "lock") as is_free:
        if is_free and (folder / "partials").exists():
            if (url := Storage(folder).read_text(SHARED_FILE)) is not None:
                open_storage(url).clear()
            remove_partials(folder)


@contextmanager
def _clean_up_on_error(folder: Path, existed: bool) -> Iterator[None]:
    """Leave a folder as it was if a new run fails before it has read its corpus."""
    is_new = not (folder / CONFIG_FILE).exists()
    try:
        yield
    except Exception:
        if is_new and not (folder / CORPUS_FILE).exists():
            remove_partials(folder)
            (folder / SENTENCES).unlink(missing_ok=True)
            if not existed:
                folder.rmdir()
        raise
