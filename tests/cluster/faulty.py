"""A crew whose workers really read and merge, and whose world is out to get them.

At every step of a simulated clock a worker may be lost before, in the middle of, or just after its
work, fail by accident, hang for a while, or be slow; the leader itself may be killed. The chances
come from a seed.
"""

import random
from contextlib import contextmanager

from ffmem.cluster.crew import Failed, Finished, Joined, Lost
from ffmem.cluster.hiring import Hiring
from ffmem.cluster.shared import SharedFolder
from ffmem.indexing.worker import IndexWorker

KINDS = (*5 * ("well",), "lost before", "lost after", "accident", "hangs", "slow")


class LeaderKilled(BaseException):
    """Stands for the end of the leader's process."""


class Faulty:
    """Some workers in one process, on a clock of their own."""

    def __init__(self, make, n, seed, kills_leader):
        self.size, self.heard = n, lambda worker, units: None
        self._make, self._chance, self._kills = make, random.Random(seed), kills_leader
        self._clock = 0.0
        self._begun = 0
        self._events = [self._join() for _ in range(n)]
        self._queue = []
        """(when, worker, task, fate)"""
        self.faults = []

    def _join(self):
        self._begun += 1
        self._worker = self._make()  # state of its own, made anew after every loss
        return Joined(f"w{self._begun}", "a corner of this process")

    def now(self):
        return self._clock

    def give(self, worker, task):
        fate = self._chance.choice(KINDS)
        seconds = {"hangs": 150, "slow": 40}.get(fate, self._chance.uniform(1, 10))
        self._queue.append((self._clock + seconds, worker, task, fate))

    def wait(self, seconds):
        if self._events:
            events, self._events = self._events, []
            return events
        self._clock += seconds
        ready = [entry for entry in self._queue if entry[0] <= self._clock]
        if not ready:
            return []
        entry = self._chance.choice(ready)
        self._queue.remove(entry)
        if self._kills and self._chance.random() < 0.05:
            raise LeaderKilled
        return self._happens(*entry[1:])

    def _happens(self, worker, task, fate):
        if fate != "well":
            self.faults.append(fate)
        if fate == "accident":
            return [Failed(worker, task, "RuntimeError: cosmic rays")]
        if fate != "lost before":
            result = self._worker.do(task, lambda units: self.heard(worker, units))
        if fate.startswith("lost"):
            return [Lost(worker, f"{fate} {task.key}"), self._join()]
        return [Finished(worker, task, result)]

    def dismiss(self, worker):
        self._queue = [entry for entry in self._queue if entry[1] != worker]
        self._events += [Lost(worker, "dismissed"), self._join()]

    def close(self):
        pass


class FaultyHiring(Hiring):
    """Hires such a crew; what it did is kept in `faults`."""

    is_here = False
    threads = 1

    @contextmanager
    def crew(self, recruit, threads, logs, progress):
        folder = SharedFolder.at(recruit.arguments["shared"])
        crew = Faulty(lambda: IndexWorker(self.memories, folder), 3, self.seed, self.kills_leader)
        try:
            yield crew
        finally:
            self.faults.extend(crew.faults)


def faulty(memories, seed, kills_leader):
    """Return how such a crew is hired."""
    hiring = FaultyHiring()
    for name, value in {
        "memories": memories,
        "seed": seed,
        "kills_leader": kills_leader,
        "faults": [],
    }.items():
        object.__setattr__(hiring, name, value)
    return hiring
