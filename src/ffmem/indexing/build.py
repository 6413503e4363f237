"""Building an index.

    corpus → chunks → (values, then every chunk) on workers → merge of their partials → manifest

A run that was killed at any moment resumes from what its partials cover, and ends in the same
bytes, whether this process, several, or a cluster reads the chunks.
"""

import gc
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ffmem.corpus.corpus import Corpus
from ffmem.errors import FfmemError, StoreError, WorkerError
from ffmem.files import committing, locked, remove_temporaries
from ffmem.indexing.config import FACTS, BuildOptions, IndexConfig, make_manifest
from ffmem.indexing.manifest import Manifest, hash_files
from ffmem.indexing.partials import Partial
from ffmem.indexing.prepare import SENTENCES, Plan, configure, prepare
from ffmem.indexing.results import write_layer
from ffmem.indexing.sample import merge_samples, write_sample
from ffmem.indexing.sentences import Sentences
from ffmem.indexing.tables import layer_file
from ffmem.indexing.worker import IndexWorker
from ffmem.models.arguments import IN_MEMORY
from ffmem.models.memories import Memories
from ffmem.parallel import Executor, Task, WorkerSpec, executor
from ffmem.progress import Progress

ROUNDS = 3
"""Rounds without progress after which a run gives up: workers die before they commit."""


def build(
    memories: Memories,
    corpus: Corpus,
    folder: Path,
    config: IndexConfig,
    options: BuildOptions,
    progress: Progress,
) -> bool:
    """Make or resume the index in a folder; return False if it was finished already."""
    if not options.is_serial and memories.source == IN_MEMORY:
        raise FfmemError(
            "A model in memory cannot be sent to other processes. Save it with save_pretrained,"
            " and pass the folder."
        )
    if config.threads is None:
        config = replace(config, threads=options.threads)
    existed = folder.exists()
    with run_folder(folder) as is_finished:
        if is_finished:
            return False
        with _undone_if_nothing_was_read(folder, existed):
            run = configure(memories, corpus, folder, config, progress)
            plan = prepare(memories, corpus, folder, run, options.shared, progress)
        plan.partials.delete_damaged(plan.sampled_chunks, progress.say)
        spec, worker = _worker(memories, plan, options)
        del memories  # if others do the work, this process need not keep the weights
        gc.collect()
        with _resumable(progress), executor(options, spec, progress, worker) as workers:
            _project_values(workers, plan, progress)
            _read_chunks(workers, plan, progress)
        finish(plan)
    return True


def _worker(
    memories: Memories, plan: Plan, options: BuildOptions
) -> tuple[WorkerSpec, IndexWorker | None]:
    """Return how workers are made, and this process's own for a serial run."""
    skip = options.bad_sentences == "skip"
    path = plan.folder.absolute() / SENTENCES
    spec = WorkerSpec(
        "ffmem.indexing.worker:make_worker",
        {
            "storage": plan.storage.url,
            "sentences": None if plan.storage.is_remote else str(path),
            "device": options.device,
            "prefixes": plan.sample.prefixes.tolist(),
            "hashes": plan.sample.hashes.tolist(),
            "skip_bad": skip,
        },
        plan.run.threads,
    )
    if not options.is_serial:
        return spec, None
    return spec, IndexWorker(memories, plan.storage, Sentences(path), plan.sample, skip)


def _project_values(workers: Executor, plan: Plan, progress: Progress) -> None:
    """Project the values of all layers that are not there yet."""
    if not plan.run.model.has_values:  # those of a lambda layer come from the input
        return
    layers = [
        layer
        for layer in range(plan.run.model.layers)
        if not plan.storage.exists(layer_file("values", layer))
    ]
    tasks = [Task(f"values of layer {layer}", "project_values", (layer,)) for layer in layers]
    done = plan.run.model.layers - len(layers)
    with progress.bar("Values", plan.run.model.layers, "layers", done) as step:
        workers.run(tasks, step)


def _read_chunks(workers: Executor, plan: Plan, progress: Progress) -> None:
    """Read every chunk, until committed partials cover them all."""
    missing = plan.missing_chunks()
    done = plan.facts.tokens - sum(chunk.n_tokens for chunk in missing)
    rounds = 0
    with progress.bar("Triggers", plan.facts.tokens, "tokens", done) as step:
        while missing:
            tasks = [
                Task(chunk.name, "read_chunk", (chunk.number,), chunk.n_tokens) for chunk in missing
            ]
            workers.run(tasks, step)
            workers.flush()
            _, overlapping = plan.partials.committed()
            for partial in overlapping:
                plan.partials.delete(partial)
            if overlapping:
                workers.restart()
            before, missing = len(missing), plan.missing_chunks()
            rounds = 0 if len(missing) < before else rounds + 1
            if rounds == ROUNDS:
                raise WorkerError(
                    f"{len(missing)} chunks are still missing: workers die before they commit"
                    " what they read. Rerun the command to resume."
                )
            step(-sum(chunk.n_tokens for chunk in missing))  # read, but lost with a worker


def finish(plan: Plan) -> None:
    """Merge the partials into the finished files; the manifest comes last."""
    folder = plan.folder
    kept, _ = plan.partials.committed()
    covered = sorted(number for partial in kept for number in partial.chunks)
    if covered != [chunk.number for chunk in plan.chunks]:
        raise StoreError(f"The partials in {plan.storage.shown} do not cover every chunk once.")
    n_prefixes = sum(partial.n_prefixes for partial in kept)
    for layer, result in enumerate(plan.partials.layers(kept)):
        write_layer(folder, layer, result, n_prefixes)
    _write_sample(plan)
    if plan.storage.is_remote or plan.storage.url != str(folder.absolute()):
        _download_values(plan)
    remove_temporaries(folder, "triggers", "stats", "samples", "values")
    _manifest(plan, kept).write(folder)
    if plan.storage.url != str(folder.absolute()):
        plan.storage.clear()
    shutil.rmtree(folder / "partials")


def _write_sample(plan: Plan) -> None:
    """Write the sampled prefixes, except those of skipped sentences."""
    chunks = sorted(plan.sampled_chunks)
    samples = [plan.partials.sample(chunk) for chunk in chunks]
    sample, layers = merge_samples(samples, plan.partials.sample_layers(chunks))
    write_sample(plan.folder, sample, layers)


def _download_values(plan: Plan) -> None:
    for name in plan.storage.names("values"):
        with plan.storage.reading(name) as file, committing(plan.folder / name) as temporary:
            temporary.write_bytes(file.read())


def _manifest(plan: Plan, partials: list[Partial]) -> Manifest:
    skipped = sorted(number for partial in partials for number in partial.skipped)
    sentences = Sentences(plan.folder / SENTENCES)
    n_tokens = sum(len(sentences.row(number).ids) for number in skipped)
    return make_manifest(plan.run, plan.facts, skipped, n_tokens, hash_files(plan.folder))


@contextmanager
def run_folder(folder: Path) -> Iterator[bool]:
    """Lock a folder for making an index in it; give whether a finished one is there already."""
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
        raise StoreError(f"{folder} is not empty and not an index. Choose a new or empty folder.")
    busy = f"Another process is working on {folder}. Wait for it, or choose another folder."
    with locked(folder / "partials" / "lock", busy):
        if (folder / "manifest.json").exists():  # finished while this one waited
            shutil.rmtree(folder / "partials")
            yield True
            return
        yield False


@contextmanager
def _undone_if_nothing_was_read(folder: Path, existed: bool) -> Iterator[None]:
    """Leave a folder as it was if a new run fails before its corpus is read."""
    is_new = not (folder / "partials" / "config.json").exists()
    try:
        yield
    except FfmemError:
        if is_new and not (folder / FACTS).exists():
            shutil.rmtree(folder / "partials")
            (folder / SENTENCES).unlink(missing_ok=True)
            if not existed:
                folder.rmdir()
        raise


@contextmanager
def _resumable(progress: Progress) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        progress.say("Stopped. Rerun the command to resume.")
        raise
