"""Who does what next: every task once, through lost workers, failures and slow ones.

Pure bookkeeping on a clock that it is told, so that the same code runs a laptop, a cluster and a
simulation. It holds what is waiting and running, never what is done: its size depends on the
number of workers, not of tasks, which are pulled from a source one by one.

    waiting ─► running ─► done                      the first result counts, later ones do not
       ▲          │
       └──────────┴─► given up                      after TRIES errors, or too many lost workers

When nothing waits, an idle worker is given the oldest running task again if that takes more than
SLOW times as long as such tasks take: its worker may be slow, or hang, or be cut off. So may the
next one, after as long a time again.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from ffmem.cluster.task import Task

TRIES = 3
"""Errors of one task before it is given up: most errors come again, a few are of the moment."""

SLOW = 2.0
"""How many times the usual time a task may take before somebody idle does it as well."""

REMEMBERED = 64
"""Finished tasks of a kind that its usual time is taken from."""

UNKNOWN = 600.0
"""Seconds after which one is late whose kind nobody has finished yet."""

SHORTEST = 5.0
"""Seconds that no task is late before: very short ones say little about what is usual."""


class Counts(NamedTuple):
    """How far the work has come."""

    done: int
    running: int
    waiting: int
    """That are known of; the source may hold more."""
    given_up: int


@dataclass
class Running:
    """A task that some workers do at the moment."""

    task: Task
    since: dict[str, float] = field(default_factory=dict)
    """When each of its workers began."""


class Schedule:
    """Gives tasks to workers, and learns from them what became of each."""

    def __init__(self, source: Iterable[Task] = ()) -> None:
        self._source: Iterator[Task] = iter(source)
        self._waiting: list[tuple[int, int, Task]] = []
        self._n_added = 0
        self._running: dict[str, Running] = {}
        """By key."""
        self._begun: dict[str, OrderedDict[str, None]] = {}
        """Per kind, the keys of running tasks, first what nobody has begun for the longest time."""
        self._by_worker: dict[str, str] = {}
        self._failures: dict[str, int] = {}
        self._losses: dict[str, int] = {}
        self._usual: dict[str, deque[float]] = {}
        self._n_done = self._n_given_up = 0

    def add(self, task: Task) -> None:
        """Let a task wait."""
        heapq.heappush(self._waiting, (-task.urgency, self._n_added, task))
        self._n_added += 1

    def next(self, worker: str, now: float) -> Task | None:
        """Return what a worker is to do, None if there is nothing for it at the moment."""
        if worker in self._by_worker:
            raise ValueError(f"{worker} has a task already: {self._by_worker[worker]}.")
        task = self._pulled() or self._late(now)
        if task is not None:
            running = self._running.setdefault(task.key, Running(task))
            running.since[worker] = now
            self._by_worker[worker] = task.key
            begun = self._begun.setdefault(task.kind, OrderedDict())
            begun[task.key] = None
            begun.move_to_end(task.key)
        return task

    def _pulled(self) -> Task | None:
        """Return the most urgent waiting task; the source's are no more urgent than any."""
        if not self._waiting and (task := next(self._source, None)) is not None:
            return task
        return heapq.heappop(self._waiting)[2] if self._waiting else None

    def _late(self, now: float) -> Task | None:
        """Return a running task that is late since a worker began with it last."""
        for begun in self._begun.values():
            if not begun:
                continue
            running = self._running[next(iter(begun))]
            usual = self.usual_seconds(running.task)
            patience = UNKNOWN if usual is None else max(SLOW * usual, SHORTEST)
            if now - max(running.since.values()) > patience:
                return running.task
        return None

    def usual_seconds(self, task: Task) -> float | None:
        """Return how long such a task usually takes; None before the first is done."""
        paces = self._usual.get(task.kind)
        return median(paces) * max(task.size, 1) if paces else None

    def finished(self, worker: str, now: float) -> bool:
        """Take a worker's task as done; return whether it was the first to do it."""
        running = self._released(worker)
        if running is None:
            return False  # somebody else was faster
        seconds = now - running.since[worker]
        task = running.task
        paces = self._usual.setdefault(task.kind, deque(maxlen=REMEMBERED))
        paces.append(seconds / max(task.size, 1))
        del self._running[task.key]
        self._begun[task.kind].pop(task.key, None)
        self._failures.pop(task.key, None)
        self._losses.pop(task.key, None)
        self._n_done += 1
        return True

    def failed(self, worker: str, certain: bool = False) -> Task | None:
        """Take a worker's task as failed; return it if it is given up, None if it goes on.

        An error that is certain to come again is not tried again.
        """
        return self._ended(worker, self._failures, 1 if certain else TRIES)

    def lost(self, worker: str) -> Task | None:
        """Take a worker as gone; return its task if that is given up, None otherwise."""
        task = self.task_of(worker)
        return self._ended(worker, self._losses, 1 if task is None else task.losses)

    def _ended(self, worker: str, counted: dict[str, int], most: int) -> Task | None:
        running = self._released(worker)
        if running is None:
            return None
        key = running.task.key
        counted[key] = counted.get(key, 0) + 1
        del running.since[worker]
        if running.since and counted[key] < max(most, TRIES):
            return None  # another one is at it, and may do better
        del self._running[key], self._begun[running.task.kind][key]
        if counted[key] >= most:
            self._failures.pop(key, None)
            self._losses.pop(key, None)
            self._n_given_up += 1
            return running.task
        self.add(running.task)
        return None

    def _released(self, worker: str) -> Running | None:
        """Return what a worker was running, None if that is done already; it is idle from now."""
        key = self._by_worker.pop(worker, None)
        running = None if key is None else self._running.get(key)
        return running if running is not None and worker in running.since else None

    def task_of(self, worker: str) -> Task | None:
        """Return what a worker does at the moment."""
        key = self._by_worker.get(worker)
        running = None if key is None else self._running.get(key)
        return None if running is None else running.task

    @property
    def is_done(self) -> bool:
        """Whether nothing is left; a task that others still repeat does not count."""
        if self._waiting or self._running:
            return False
        if (task := next(self._source, None)) is not None:
            self.add(task)
            return False
        return True

    def counts(self) -> Counts:
        """Return how far the work has come."""
        return Counts(self._n_done, len(self._running), len(self._waiting), self._n_given_up)
