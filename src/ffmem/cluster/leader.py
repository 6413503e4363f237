"""The leader: gives a crew its tasks until all are done, and tells how far they are.

It sees events and a clock and nothing else, so that it leads one worker in this process, a
cluster, and ten thousand simulated ones alike. Workers stay when a piece of work is done, and
begin with the next one.
"""

import os
import socket
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from ffmem.cluster.crew import Crew, Event, Failed, Finished, Joined, Lost, Refused
from ffmem.cluster.schedule import UNKNOWN, Schedule
from ffmem.cluster.shared import SharedFolder
from ffmem.cluster.status import Status, WorkerStatus, write_status
from ffmem.cluster.task import Task
from ffmem.errors import FfmemError, StoreError
from ffmem.progress import Progress, Step

TICK = 1.0
"""Seconds between looks at idle workers."""

TELL = 2.0
"""Seconds between two states that are written down, for each thousand workers begun."""

SPAN = 300.0
"""Seconds over which the common rate is taken."""

STARTS = 3
"""Times that each worker may die before its first task, until the run is given up."""

HUNG = 10.0
"""How many times the usual time a worker may spend on what another one has done already."""

SAID = 20
"""Mishaps that a state remembers."""


@runtime_checkable
class Work(Protocol):
    """What is to be done, and what follows from each task that was."""

    phase: str
    kind: str
    """Whose sizes are its units; other tasks come and go beside them."""
    unit: str
    units: int
    units_done: int
    """Of the units, those that an earlier run has done."""

    def tasks(self) -> Iterable[Task]:
        """Return, one by one, what can be done at once."""
        ...

    def finished(self, task: Task, result: dict[str, object]) -> Iterable[Task]:
        """Return what can be done now that a task is."""
        ...

    def given_up(self, task: Task, error: str) -> Iterable[Task]:
        """Return what to do instead of a task that cannot be done, or raise."""
        ...


@dataclass
class _Known:
    """A worker, as the leader knows it."""

    where: str
    task: Task | None = None
    units: int = 0
    """Of its present task."""
    since: float = 0.0
    rate: float | None = None
    done: int = 0


class Leader:
    """Leads a crew through one or several pieces of work."""

    def __init__(self, crew: Crew, progress: Progress, shared: SharedFolder | None = None) -> None:
        self.crew = crew
        self.progress = progress
        self.shared = shared
        self.failures = self.losses = 0
        self._workers: dict[str, _Known] = {}
        self._idle: dict[str, None] = {}
        self._refused: list[str] = []
        self._lost_early = 0
        self._said: deque[str] = deque(maxlen=SAID)
        self._began = crew.now()
        self._told = float("-inf")
        self._step: Step = lambda n: None
        crew.heard = self._heard

    def lead(self, work: Work) -> None:
        """Do a piece of work."""
        self._work = work
        self._schedule = Schedule(work.tasks())
        for worker in self._workers.values():
            worker.rate = None  # was in other units
        self._units = self._shown = work.units_done
        self._history = deque([(self.crew.now(), self._units)])
        title = work.phase.capitalize()
        with self.progress.bar(title, work.units, work.unit, work.units_done) as self._step:
            try:
                while not self._schedule.is_done:
                    self._give()
                    self._take(self.crew.wait(TICK))
                    self._tell()
                self._tell(at_once=True)
            except BaseException as error:
                self._tell_end(error)
                raise

    def _give(self) -> None:
        for name in list(self._idle):
            if (task := self._schedule.next(name, self.crew.now())) is None:
                break  # nor is there anything for the others
            del self._idle[name]
            worker = self._workers[name]
            worker.task, worker.units, worker.since = task, 0, self.crew.now()
            self.crew.give(name, task)

    def _heard(self, name: str, units: int) -> None:
        if (worker := self._workers.get(name)) is not None:
            worker.units += units
            self._tell()

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Joined(name, where):
                    self._workers[name] = _Known(where)
                    self._idle[name] = None
                case Finished(name, task, result):
                    self._finished(name, task, result)
                case Failed():
                    self._failed(event)
                case Lost(name, reason):
                    self._lost(name, reason)
                case Refused():
                    self._refuse(event)

    def _finished(self, name: str, task: Task, result: dict[str, object]) -> None:
        worker = self._workers[name]
        if task.kind == self._work.kind:
            rate = task.size / max(self.crew.now() - worker.since, 1e-9)
            worker.rate = rate if worker.rate is None else 0.5 * (worker.rate + rate)
        worker.task, worker.units, worker.done = None, 0, worker.done + 1
        self._idle[name] = None
        if self._schedule.finished(name, self.crew.now()):
            self._lost_early = 0
            self._units += task.size if task.kind == self._work.kind else 0
            self._add(self._work.finished(task, result))

    def _add(self, following: Iterable[Task]) -> None:
        for task in following:
            self._schedule.add(task)

    def _failed(self, event: Failed) -> None:
        worker = self._workers[event.worker]
        worker.task, worker.units = None, 0
        self._idle[event.worker] = None
        if self._schedule.task_of(event.worker) is None:
            self._schedule.failed(event.worker)
            return  # somebody else has done it, and may have tidied up what this one still read
        self.failures += 1
        if event.of_place:
            raise StoreError(event.error)
        self._say(f"{event.task.key} failed on {worker.where}: {event.error}")
        given_up = self._schedule.failed(event.worker, event.certain)
        if given_up is not None:
            self._add(self._work.given_up(given_up, event.error))

    def _lost(self, name: str, reason: str) -> None:
        worker = self._workers.pop(name, None)
        self._idle.pop(name, None)
        self.losses += 1
        if worker is None:
            self._lost_early += 1
            self._say(f"Worker {name} was lost before it could begin: {reason}")
            if self._lost_early >= STARTS * self.crew.size and not self._workers:
                raise FfmemError(f"No worker lives long enough to begin. The last one: {reason}")
            return
        doing = "" if worker.task is None else f" with {worker.task.key}"
        self._say(f"Worker {name} on {worker.where} was lost{doing}: {reason}")
        if (given_up := self._schedule.lost(name)) is not None:
            self._add(self._work.given_up(given_up, f"its workers died: {reason}"))

    def _refuse(self, event: Refused) -> None:
        self._refused.append(event.error)
        if len(self._refused) >= self.crew.size and not self._workers:
            raise FfmemError(f"No worker could begin. {event.where}: {event.error}")
        self._say(f"Worker {event.worker} on {event.where} could not begin: {event.error}")

    def _say(self, line: str) -> None:
        self._said.append(line)
        self.progress.say(line)

    def _tell(self, at_once: bool = False) -> None:
        """Move the bar, and write the state down every few seconds."""
        now = self.crew.now()
        if not at_once and now - self._told < TELL * (1 + len(self._workers) // 1000):
            return
        self._told = now
        self._dismiss_hanging()
        units = self._units + self._in_hand()
        if units != self._shown:
            self._step(units - self._shown)
        elif len(self._history) == 1:
            self._history.clear()  # nobody has begun: the time until then says nothing of the rate
        self._shown = units
        self._history.append((now, units))
        while len(self._history) > 2 and now - self._history[1][0] > SPAN:
            self._history.popleft()
        if self.shared is not None:
            write_status(self.shared, self.status())

    def _tell_end(self, error: BaseException) -> None:
        """Write down why the work ends here, if that can be written anywhere."""
        stopped = "stopped by hand" if isinstance(error, KeyboardInterrupt) else str(error)
        if self.shared is not None:
            with suppress(FfmemError, OSError):
                ended = stopped or type(error).__name__
                write_status(self.shared, replace(self.status(), ended=ended))

    def _dismiss_hanging(self) -> None:
        """Let workers go that do not come back from a task; others take their places."""
        for name, worker in self._workers.items():
            if worker.task is None or self._schedule.task_of(name) is not None:
                continue
            usual = self._schedule.usual_seconds(worker.task)
            patience = max(HUNG * (usual or 0.0), UNKNOWN)
            if self.crew.now() - worker.since > patience:
                worker.since = self.crew.now()  # once is enough
                self.crew.dismiss(name)

    def _in_hand(self) -> int:
        """Return the units done of running tasks, each counted once however many are at it."""
        units: dict[str, int] = {}
        for name, worker in self._workers.items():
            task = self._schedule.task_of(name)  # None if another one has done it meanwhile
            if task is not None and task.kind == self._work.kind:
                units[task.key] = max(units.get(task.key, 0), min(worker.units, task.size))
        return sum(units.values())

    def status(self) -> Status:
        """Return how the run stands."""
        counts, now = self._schedule.counts(), self.crew.now()
        (began, before), (last, units) = self._history[0], self._history[-1]
        rate = (units - before) / (last - began) if last > began and units > before else None
        left = None if rate is None else max(self._work.units - units, 0) / rate
        return Status(
            phase=self._work.phase,
            unit=self._work.unit,
            units=self._work.units,
            units_done=units,
            tasks_done=counts.done,
            running=counts.running,
            waiting=counts.waiting,
            given_up=counts.given_up,
            failures=self.failures,
            losses=self.losses,
            rate=rate,
            seconds_left=left,
            seconds=now - self._began,
            leader=f"{socket.gethostname()}:{os.getpid()}",
            written=time.time(),
            size=self.crew.size,
            workers=[self._worker(name, known) for name, known in self._workers.items()],
            said=list(self._said),
        )

    def _worker(self, name: str, known: _Known) -> WorkerStatus:
        task = known.task
        return WorkerStatus(
            name=name,
            where=known.where,
            task=None if task is None else task.key,
            share=0.0 if task is None else min(known.units / max(task.size, 1), 1.0),
            rate=known.rate,
            done=known.done,
            seconds=0.0 if task is None else self.crew.now() - known.since,
        )
