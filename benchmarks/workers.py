"""What workers cost, and what they bring: the same chunks read here, by processes, and on Ray.

All workers load first and then read the same chunks, one executor after the other, several
rounds, each round other chunks; of each executor the best round counts. Every worker has one
thread.
"""

import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ffmem
from ffmem.corpus.corpus import Corpus
from ffmem.indexing.build import _worker_factory
from ffmem.indexing.chunks import Chunk
from ffmem.indexing.config import BuildOptions, IndexConfig
from ffmem.indexing.prepare import SENTENCES, IndexPlan, prepare
from ffmem.indexing.sentences import Sentences
from ffmem.indexing.worker import IndexWorker
from ffmem.parallel import ExecutionConfig, Executor, Task, executor
from ffmem.progress import Progress

CHUNK_TOKENS, N_CHUNKS = 4096, 4
QUIET = Progress(quiet=True)
EXECUTIONS = {
    "plain": ExecutionConfig(),
    "one process": ExecutionConfig(workers=1),
    "two processes": ExecutionConfig(workers=2),
    "one Ray worker": ExecutionConfig(workers=1, ray="auto"),
    "two Ray workers": ExecutionConfig(workers=2, ray="auto"),
}


def workers(rounds: int = 2) -> dict[str, Any]:
    """Tokens per second of one worker here, one process, two, one Ray actor, two."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        memories = ffmem.load("smollm2-135m")
        plan = _plan(memories, Path(name) / "index")
        stack.callback(_start_ray())
        make = _worker_factory(plan, BuildOptions())
        sentences = Sentences(plan.folder / SENTENCES)
        own = IndexWorker(memories, plan.storage, sentences, plan.sample, False)
        executors = {}
        for what, execution in EXECUTIONS.items():
            if what == "one process":  # which a run of one worker would not take
                execution = ExecutionConfig(workers=2)
            one = executor(execution, (lambda: own) if execution.is_serial else make, QUIET)
            executors[what] = stack.enter_context(one)
            if what == "one process":
                executors[what]._slots.pop()  # type: ignore[attr-defined]
            _read(executors[what], plan.chunks[:2])  # every worker has loaded and read once
        best = dict.fromkeys(executors, 0.0)
        for turn in range(1, rounds + 1):
            chunks = plan.chunks[turn * N_CHUNKS : (turn + 1) * N_CHUNKS]
            for what, one in executors.items():
                best[what] = max(best[what], _read(one, chunks))
    return {
        "model": "smollm2-135m",
        "threads_per_worker": 1,
        "chunks": N_CHUNKS,
        "rounds": rounds,
        "tokens_per_second": best,
        "one_ray_worker_over_plain": best["one Ray worker"] / best["plain"],
        "one_process_over_plain": best["one process"] / best["plain"],
        "two_processes_over_one": best["two processes"] / best["one process"],
        "two_ray_workers_over_one": best["two Ray workers"] / best["one Ray worker"],
    }


def _read(workers: Executor, chunks: list[Chunk]) -> float:
    """Return the tokens per second of reading some chunks."""
    tasks = [Task(chunk.name, "read_chunk", (chunk.number,), chunk.n_tokens) for chunk in chunks]
    begin = time.perf_counter()
    workers.run(tasks, lambda n: None)
    return sum(chunk.n_tokens for chunk in chunks) / (time.perf_counter() - begin)


def _plan(memories: ffmem.Memories, folder: Path) -> IndexPlan:
    """Return a run in which everything is prepared for reading."""
    (folder / "partials").mkdir(parents=True)
    corpus = Corpus("wikitext-2:valid", limit=2000)
    config = IndexConfig(chunk_tokens=CHUNK_TOKENS, threads=1)
    return prepare(memories, corpus, folder, config, BuildOptions(), QUIET)


def _start_ray() -> Any:
    """Start a Ray for all executors, and return how it is ended."""
    import ray

    os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    return ray.shutdown
