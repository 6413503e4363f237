"""What a crew costs, and what it brings: the same leases read here, by processes, and on Ray.

All crews are loaded first and read the same leases, one crew after the other, several rounds; of
each the best round counts. Every worker has one thread.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ffmem.cluster.crew import Crew, Recruit
from ffmem.cluster.here import Here
from ffmem.cluster.hiring import Hiring
from ffmem.cluster.leader import Leader
from ffmem.cluster.shared import SharedFolder
from ffmem.cluster.task import Task
from ffmem.indexing.options import Options
from ffmem.indexing.orders import Leases

import ffmem
from ffmem.corpus.corpus import Corpus
from ffmem.indexing.build import Build
from ffmem.indexing.prepare import lay_out
from ffmem.indexing.worker import IndexWorker
from ffmem.progress import Progress

LEASE_TOKENS, N_LEASES = 4096, 4
QUIET = Progress(quiet=True)


class Some:
    """Reads some leases, whether they are read or not."""

    phase, kind, unit, units_done = "reading", "read", "tokens", 0

    def __init__(self, leases: Iterable[Any]) -> None:
        self._leases = list(leases)
        self.units = sum(lease.n_tokens for lease in self._leases)

    def tasks(self) -> Iterable[Task]:
        for lease in self._leases:
            arguments = {"lease": list(lease), "without": [], "floors": []}
            yield Task(f"lease {lease.number}", "read", lease.n_tokens, arguments)

    def finished(self, task: Task, result: dict[str, object]) -> Iterable[Task]:
        return []

    def given_up(self, task: Task, error: str) -> Iterable[Task]:
        raise RuntimeError(error)


def workers(rounds: int = 3) -> dict[str, Any]:
    """Tokens per second of one worker here, one process, two, one Ray actor, two."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name) / "index"
        shared = _prepared(folder)
        leases = list(Leases(shared))[:N_LEASES]
        leaders = {}
        for what, crew in _crews(shared, stack).items():
            leaders[what] = Leader(crew, QUIET)
            leaders[what].lead(Some(leases[:2]))  # everybody has begun and read once
        best = dict.fromkeys(leaders, 0.0)
        for _ in range(rounds):
            for what, leader in leaders.items():
                work = Some(leases)
                begin = time.perf_counter()
                leader.lead(work)
                best[what] = max(best[what], work.units / (time.perf_counter() - begin))
    return {
        "model": "smollm2-135m",
        "threads_per_worker": 1,
        "tokens": work.units,
        "leases": N_LEASES,
        "rounds": rounds,
        "tokens_per_second": best,
        "one_ray_worker_over_plain": best["one Ray worker"] / best["plain"],
        "one_process_over_plain": best["one process"] / best["plain"],
        "two_processes_over_one": best["two processes"] / best["one process"],
        "two_ray_workers_over_one": best["two Ray workers"] / best["one Ray worker"],
    }


def _prepared(folder: Path) -> SharedFolder:
    """Return a shared folder in which everything is laid out for reading."""
    options = Options(lease_tokens=LEASE_TOKENS, threads=1)
    corpus = Corpus("wikitext-2:valid", limit=800)
    build = Build(ffmem.load("smollm2-135m"), corpus, folder, options, QUIET)
    (folder / "segments").mkdir(parents=True)
    build._prepare()
    shared = SharedFolder.at(folder / "segments")
    lay_out(shared, folder, build.settings, build.plan, "cpu", False)
    return shared


def _crews(shared: SharedFolder, stack: ExitStack) -> dict[str, Crew]:
    recruit = Recruit("ffmem.indexing.worker:hired", {"shared": shared.place})
    logs = Path(shared.place) / "logs"
    hirings = {
        "one process": Hiring(1),
        "two processes": Hiring(2),
        "one Ray worker": Hiring(1, "auto"),
        "two Ray workers": Hiring(2, "auto"),
    }
    stack.callback(_ray())
    crews: dict[str, Crew] = {"plain": Here(IndexWorker(ffmem.load("smollm2-135m"), shared))}
    for what, hiring in hirings.items():
        crews[what] = stack.enter_context(hiring.crew(recruit, 1, logs, QUIET))
    return crews


def _ray() -> Callable[[], None]:
    """Start a Ray for all crews, and return how it is ended."""
    import ray

    os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    shutdown: Callable[[], None] = ray.shutdown
    return shutdown
