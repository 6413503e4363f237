"""The scheduler on a simulated clock: up to 10,000 workers, with faults, and 300,000 leases.

Leader, schedule, merge tree and the examination of leases that fail are those of a real run; only
the workers are simulated
(`ffmem.cluster.simulated`). Measured: how much longer a run takes than its units need at the
speed of all workers, what is done twice, what the leader holds, and its own time and memory.
"""

import gc
import tempfile
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ffmem.cluster.crew import Event, Finished
from ffmem.cluster.leader import Leader
from ffmem.cluster.shared import SharedFolder
from ffmem.cluster.simulated import Faults, Place, Simulated
from ffmem.cluster.task import Task
from ffmem.indexing.leases import Lease
from ffmem.indexing.orders import Leases, write_leases
from ffmem.indexing.segments import Segments
from ffmem.indexing.work import Reading
from ffmem.progress import Progress

LEASE = 65_536
"""Tokens of a lease."""

SPEEDS = {"read": 1000.0, "probe": 1000.0, "merge": 1.0}
"""Tokens per second, and segments merged per second: a lease takes a minute, a merge seconds."""

PLACE = Place(SPEEDS)

FAULTY = Faults(deaths=0.05, node_deaths=0.01, failures=0.001, hangs=0.0001, slow=0.02)
"""A bad cluster: each worker dies once in 20 hours, each node of 8 once in 100; 2 % are slow."""


SENTENCES = 2_048
"""Of a lease: 32 tokens each, as WikiText's have."""


class Rehearsal(Reading):
    """Reading leases and merging what they found: the real work, whose tasks nobody does."""

    def __init__(self, folder: Path, n_leases: int) -> None:
        shared = SharedFolder.at(folder)
        places = LEASE + SENTENCES
        write_leases(
            shared,
            (Lease(i, i * SENTENCES, SENTENCES, i * places, LEASE) for i in range(n_leases)),
        )
        segments = Segments(shared, "rehearsal", t=50, gated=True)
        super().__init__(shared, segments, Leases(shared), n_leases * LEASE, skip=True)
        self.n_read = self.n_merged = self.n_given_up = self.most_segments = 0
        self._n_segments = 0

    def finished(self, task: Task, result: dict[str, object]) -> Iterable[Task]:
        """Count what is there at once."""
        if task.kind == "merge":
            self.n_merged += 1
            self._n_segments += 1 - len(task.arguments["parts"])
        elif task.kind == "read":
            self.n_read += 1
            self._n_segments += 1
        self.most_segments = max(self.most_segments, self._n_segments)
        return super().finished(task, result)

    def given_up(self, task: Task, error: str) -> Iterable[Task]:
        """Count leases that are examined."""
        self.n_given_up += task.kind == "read"
        return super().given_up(task, error)


def poisoned(every: int) -> Callable[[Task], bool]:
    """Return what fails whenever it has to read one sentence of so many, in a random place."""

    def is_poison(task: Task) -> bool:
        if task.kind == "merge":
            return False
        asked = task.arguments
        first, n = asked["lease"][1:3] if task.kind == "read" else (asked["first"], asked["n"])
        bad = {
            block * every + zlib.crc32(str(block).encode()) % every
            for block in range(first // every, (first + n - 1) // every + 1)
        }
        return any(first <= one < first + n for one in bad - set(asked.get("without", ())))

    return is_poison


def run(
    workers: int,
    leases: int,
    faults: Faults | None = None,
    place: Place = PLACE,
    seed: int = 0,
    poison: int | None = None,
) -> dict[str, Any]:
    """Return what a simulated run took and met; one sentence of `poison` cannot be read."""
    with tempfile.TemporaryDirectory() as folder:
        return _run(Rehearsal(Path(folder), leases), workers, faults, place, seed, poison)


def _run(
    work: Rehearsal,
    workers: int,
    faults: Faults | None,
    place: Place,
    seed: int,
    poison: int | None,
) -> dict[str, Any]:
    crew = Simulated(workers, place, faults, seed)
    if poison is not None:
        crew.is_poison = poisoned(poison)
    leader = Leader(crew, Progress(quiet=True))
    peak = {"waiting": 0, "running": 0}
    counted: Counter[str] = Counter()
    ended = {"read": 0.0}

    def watch(at: float, event: Event) -> None:
        counted["events"] += 1
        if isinstance(event, Finished):
            counted[event.task.kind] += 1
            ended[event.task.kind] = at
        if counted["events"] % 64 == 0:
            counts = leader._schedule.counts()
            peak["waiting"] = max(peak["waiting"], counts.waiting)
            peak["running"] = max(peak["running"], counts.running)

    crew.watch = watch
    begin = time.process_time()
    leader.lead(work)
    taken = time.process_time() - begin
    merged = work.n_read + work.n_merged - 1  # every segment but the root, once
    needed = work.units / place.speeds["read"] + merged / place.speeds["merge"]
    ideal = place.start_up + needed / crew.power
    return {
        "workers": workers,
        "leases": work.n_read,
        "merges": work.n_merged,
        "seconds": round(crew.now(), 1),
        "ideal_seconds": round(ideal, 1),
        "over_ideal": round(crew.now() / ideal, 3),
        "seconds_after_the_last_lease": round(crew.now() - ended["read"], 1),
        "done_twice": counted["read"] + counted["merge"] - work.n_read - work.n_merged,
        "deaths": crew.seen.deaths,
        "tasks_lost_with_a_worker": crew.seen.cut_short,
        "failures": crew.seen.failed,
        "hanging": crew.seen.hanging,
        "leases_examined": work.n_given_up,
        "sentences_left_out": len(work.skipped),
        "most_waiting": peak["waiting"],
        "most_running": peak["running"],
        "most_segments": work.most_segments,
        "events": counted["events"],
        "leader_cpu_seconds": round(taken, 2),
        "events_per_cpu_second": round(counted["events"] / taken),
    }


def traced(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a run's figures with the peak of the memory that it took, simulation included."""
    gc.collect()
    tracemalloc.start()
    try:
        figures = run()
        return figures | {"peak_megabytes": round(tracemalloc.get_traced_memory()[1] / 1e6, 2)}
    finally:
        tracemalloc.stop()


def simulation() -> dict[str, Any]:
    """Return how the scheduler does at each size, and how its memory grows with leases."""
    poison = 2_000 * SENTENCES
    sizes = {10: 1_000, 100: 5_000, 1_000: 20_000, 10_000: 100_000}
    return {
        "lease_tokens": LEASE,
        "speeds": SPEEDS,
        "faults": vars(FAULTY) | {"sentences_per_bad_one": poison},
        "without_faults": [run(workers, leases) for workers, leases in sizes.items()],
        "with_faults": [
            run(workers, leases, FAULTY, poison=poison) for workers, leases in sizes.items()
        ],
        "memory": [
            traced(lambda leases=leases: run(100, leases, FAULTY, poison=poison))
            for leases in (10_000, 100_000, 300_000)
        ],
    }
