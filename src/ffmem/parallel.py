"""Workers behind one small loop: this process, local processes, or Ray actors.

    with executor(config, worker_factory, progress) as workers:
        workers.run(tasks, done)        # calls methods of the workers, one task in flight each
        workers.flush()                 # lets every worker commit what it holds

A task is a call of one of a worker's methods with plain arguments. Workers write their results
themselves. If a worker dies, another one gets its task; the caller checks what the dead one had
committed. Nothing here changes a result.
"""

import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, Protocol, runtime_checkable

from ffmem.config_fields import check_options, option
from ffmem.errors import ClusterGone, FfmemError, StorageFull, StoreError, WorkerError, one_line
from ffmem.progress import Progress, TaskProgress
from ffmem.text import pluralize

MAX_DEATHS = 3
"""The run stops after this many deaths on the same task, or failed starts in a row."""

MAX_PROCESSES = 1_024
"""Limit of --workers on one machine."""

POLL_SECONDS = 1.0
"""Time between checks that the cluster is still there."""

LOST_SECONDS = 60.0
"""How long a cluster may have too little room before workers that do not answer are abandoned."""

FLUSH_SECONDS = 60
"""How long a run that is stopped waits for its workers to commit."""


@dataclass(frozen=True)
class ExecutionConfig:
    """How many workers there are, and where. None of it changes a result."""

    workers: int | None = option("Worker processes; with --ray, actors.", None, minimum=1)
    ray: str | None = option(
        "Run on Ray: start it here, find a running cluster, or connect to an address.",
        None,
        metavar="local|auto|ADDRESS",
    )
    gpus_per_worker: float = option("GPUs that Ray assigns to each worker.", 0.0, minimum=0)

    def __post_init__(self) -> None:
        check_options(self)
        if self.workers is not None and self.workers > MAX_PROCESSES and self._is_local:
            raise FfmemError(
                f"--workers {self.workers} is out of range; use 1 to {MAX_PROCESSES:,}."
            )
        if self.gpus_per_worker and self.ray is None:
            raise FfmemError(
                "--gpus-per-worker is for Ray. Add --ray local, or choose a device with --device."
            )

    @property
    def is_serial(self) -> bool:
        """Whether this process does the work itself."""
        return self.ray is None and self.workers in (None, 1)

    @property
    def n_workers(self) -> int:
        """How many workers there are."""
        return self.workers or 1

    @property
    def threads(self) -> int | None:
        """Threads per worker by default; None where torch decides."""
        if self.is_serial:
            return None
        return max(1, _count_cpus() // self.n_workers) if self._is_local else 1

    def check(self) -> None:
        """Raise if --ray names a Ray that cannot be reached, before anything is loaded."""
        if self.ray is not None:
            from ffmem.ray_workers import check_ray

            check_ray(self.ray)

    @property
    def _is_local(self) -> bool:
        """Whether all workers share this machine."""
        return self.ray in (None, "local")


def _count_cpus() -> int:
    """Return how many CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@runtime_checkable  # tests check types as the code runs
class Worker(Protocol):
    """What does tasks: any object with the methods that tasks name, and `flush`.

    What a method has done counts once it is committed; a worker may commit later than that, but
    at the latest in `flush`.
    """

    def flush(self) -> None:
        """Commit what is not committed yet."""


WorkerFactory = Callable[[], Worker]
"""Other processes get it by pickle: a function of a module, or a `functools.partial` of one."""


@dataclass(frozen=True)
class Task:
    """A call of a worker's method."""

    name: str
    """For messages: `chunk 12`."""
    method: str
    arguments: tuple[Any, ...]
    size: int = 1
    """Its share of the progress bar."""
    reports_progress: bool = False
    """Whether the method's last parameter is a TaskProgress; only a serial run passes one."""


class Executor(ABC):
    """The workers of a run."""

    @abstractmethod
    def run(self, tasks: Iterable[Task], done: Callable[[int], None]) -> None:
        """Do all tasks; call `done` with the size of each one that is done.

        A serial run also calls it within a task that reports its progress. If the task fails, it
        takes that back.
        """

    @abstractmethod
    def flush(self) -> None:
        """Let every worker commit what it holds; one that dies meanwhile has not."""

    def restart(self) -> None:  # noqa: B027 (a serial run has one worker: no overlap)
        """Replace workers whose results may overlap with those of others."""


@contextmanager
def executor(
    config: ExecutionConfig, worker_factory: WorkerFactory, progress: Progress, threads: int = 1
) -> Iterator[Executor]:
    """Give the workers, and end them afterward. On Ray, each takes `threads` CPUs."""
    if config.is_serial:
        yield SerialExecutor(worker_factory())
        return
    with ExitStack() as stack:
        slots: list[Slot]
        check: Callable[[bool], float] | None = None
        if config.ray is None:
            slots = [ProcessSlot(worker_factory) for _ in range(config.n_workers)]
        else:
            from ffmem.ray_workers import RaySlot, connect

            gpus = config.gpus_per_worker
            per_worker = {"CPU": float(threads), "GPU": gpus}
            cluster = stack.enter_context(
                connect(config.ray, config.n_workers * threads, per_worker)
            )
            slots = [
                RaySlot(cluster.ray, worker_factory, threads, gpus) for _ in range(config.n_workers)
            ]
            check = cluster.check
        pool = PoolExecutor(slots, check, progress)
        try:
            yield pool
        except BaseException as error:
            pool.close(flush=not isinstance(error, ClusterGone))
            raise
        pool.close(flush=False)


class SerialExecutor(Executor):
    """The functions themselves, in this process."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def run(self, tasks: Iterable[Task], done: Callable[[int], None]) -> None:
        """Do all tasks, one after the other."""
        for task in tasks:
            progress = TaskProgress(done)
            parts = (progress,) if task.reports_progress else ()
            try:
                getattr(self.worker, task.method)(*task.arguments, *parts)
            except BaseException:
                progress.take_back()
                with suppress(Exception):  # report the first error
                    self.flush()
                raise
            progress.complete(task.size)

    def flush(self) -> None:
        """Let the worker commit what it holds."""
        self.worker.flush()


@runtime_checkable
class Slot(Protocol):
    """A place for one worker, which can be started again and again."""

    names: set[str]
    """Workers that have answered since the last start; several if the engine restarts them."""
    n_deaths: int
    """Deaths of workers after which a task fails: 1, or more if the engine restarts them."""

    def start(self) -> "Future[str]":
        """Make a new worker; the future is its name."""

    def submit(self, method: str, arguments: tuple[Any, ...]) -> "Future[str]":
        """Call a method of the worker; the future is the worker's name."""

    def stop(self) -> None:
        """Kill the worker."""

    def cause_of_death(self, error: BaseException) -> str | None:
        """Return why the worker died; None if the error is not about its death."""


class PoolExecutor(Executor):
    """Workers in other processes, one task in flight each."""

    def __init__(
        self,
        slots: Sequence[Slot],
        check: Callable[[bool], float] | None,
        progress: Progress,
    ) -> None:
        self._slots = list(slots)
        self._check = check or (lambda block: math.inf)
        """Returns how many workers there is room for; raises if the cluster is gone.

        With True, it waits for the answer of the cluster.
        """
        self._progress = progress
        self._starting: dict[Future[str], Slot] = {}
        self._running: dict[Future[str], tuple[Slot, Task]] = {}
        self._idle: list[Slot] = []
        self._failed_starts = 0
        self._deaths: Counter[str] = Counter()
        self._waiting_since = time.monotonic()
        self._short_since: float | None = None

    def run(self, tasks: Iterable[Task], done: Callable[[int], None]) -> None:
        """Do all tasks; give those of dead workers to others."""
        waiting = deque(tasks)
        running = self._running
        if waiting and not self._starting and not self._idle:
            for slot in self._slots:
                self._start(slot)
        while waiting or running:
            while waiting and self._idle:
                slot, task = self._idle.pop(), waiting.popleft()
                running[slot.submit(task.method, task.arguments)] = (slot, task)
            finished, _ = wait([*running, *self._starting], POLL_SECONDS, FIRST_COMPLETED)
            if not finished:
                excess = self._count_excess()
                self._report_slow_start()
                if self._idle and not waiting:
                    waiting.extend(self._give_up(excess))
            for future in finished:
                if future in self._starting:
                    self._started(self._starting.pop(future), future)
                    continue
                slot, task = running.pop(future)
                error = _cause(future)
                if error is None:
                    slot.names.add(future.result())
                    self._failed_starts = 0
                    self._idle.append(slot)
                    done(task.size)
                elif (cause := slot.cause_of_death(error)) is not None:
                    self._died(slot, task, cause)
                    waiting.appendleft(task)
                else:
                    self._idle.append(slot)
                    raise error

    def _start(self, slot: Slot) -> None:
        slot.names.clear()
        self._waiting_since = time.monotonic()
        self._starting[slot.start()] = slot

    def _started(self, slot: Slot, future: "Future[str]") -> None:
        """Use a worker that has started; start another one if it failed."""
        error = _cause(future)
        if error is None:
            slot.names.add(future.result())
            self._idle.append(slot)
            return
        if isinstance(error, FfmemError) and not isinstance(error, StoreError | StorageFull):
            raise error  # another worker would fail in the same way
        self._check(True)
        self._failed_starts += 1
        reason = slot.cause_of_death(error) or one_line(error)
        if self._failed_starts >= MAX_DEATHS:
            raise WorkerError(
                f"All workers crashed during start-up, {MAX_DEATHS} in a row. The last error:"
                f" {reason}."
            ) from error
        self._progress.say(f"A worker could not start ({reason}). Starting another.")
        slot.stop()
        self._start(slot)

    def _died(self, slot: Slot, task: Task, cause: str) -> None:
        """Start another worker for one that died, unless the task kills every worker."""
        self._check(True)
        # Ray reports the last death alone; those of workers that had answered were on other tasks.
        self._deaths[task.name] += max(1, slot.n_deaths - (len(slot.names) - 1))
        if self._deaths[task.name] >= MAX_DEATHS:
            raise WorkerError(
                f"{self._deaths[task.name]} workers died while working on {task.name}, the last"
                f" one: {cause}. Finished work is kept. If memory ran out, use fewer"
                " --workers or a smaller --batch-tokens; then rerun the command to resume."
            )
        self._progress.say(
            f"A worker died while working on {task.name} ({cause}). Starting another."
        )
        slot.stop()
        self._start(slot)

    def _count_excess(self) -> int:
        """Return how many workers the cluster has had no room for during `LOST_SECONDS`.

        When a node is gone for good, Ray keeps its actors, and the tasks in flight there, waiting
        for another node.
        """
        room, now = self._check(False), time.monotonic()
        n = len(self._idle) + len(self._running)
        if room < 1 or n <= room:
            self._short_since = None
            return 0
        if self._short_since is None:
            self._short_since = now
        return int(n - room) if now - self._short_since > LOST_SECONDS else 0

    def _give_up(self, n: int) -> list[Task]:
        """Stop n workers that have not finished their task; return the tasks.

        Any of them will do: stopping one makes room for another that Ray is waiting to place.
        """
        tasks = []
        for future, (slot, task) in list(self._running.items())[:n]:
            self._remove(slot)
            del self._running[future]
            tasks.append(task)
        return tasks

    def _remove(self, slot: Slot) -> None:
        slot.stop()
        self._slots.remove(slot)
        left = pluralize(len(self._slots), "workers")
        self._progress.say(f"A Ray node was lost; continuing with {left}.")
        self._short_since = None

    def _report_slow_start(self) -> None:
        if self._starting and time.monotonic() - self._waiting_since > 20:
            self._progress.say(f"Waiting for {pluralize(len(self._starting), 'workers')} to start.")
            self._waiting_since = time.monotonic() + 60

    def flush(self) -> None:
        """Let every idle worker commit what it holds; start dead ones again."""
        futures = {slot.submit("flush", ()): slot for slot in self._idle}
        pending = set(futures)
        while pending:
            finished, pending = wait(pending, POLL_SECONDS)
            if not finished:
                for future in list(pending)[: self._count_excess()]:
                    pending.remove(future)
                    slot = futures.pop(future)
                    self._idle.remove(slot)
                    self._remove(slot)
        for future, slot in futures.items():
            error = _cause(future)
            if error is None:
                continue
            if slot.cause_of_death(error) is None:
                raise error
            self._idle.remove(slot)
            slot.stop()
            self._start(slot)

    def restart(self) -> None:
        """Replace all workers, so that none holds anything."""
        for slot in self._slots:
            slot.stop()
        self._idle.clear()
        self._starting.clear()
        self._running.clear()

    def close(self, flush: bool) -> None:
        """End all workers; with `flush`, they finish their tasks and commit first."""
        slots = [*self._idle, *(slot for slot, _ in self._running.values())]
        try:
            if flush and slots:
                self._progress.say(f"Stopping: committing finished work (up to {FLUSH_SECONDS} s).")
                with suppress(Exception):  # the error that ends the run is the one to report
                    wait([slot.submit("flush", ()) for slot in slots], FLUSH_SECONDS)
        finally:
            for slot in self._slots:
                slot.stop()


def _cause(future: "Future[str]") -> BaseException | None:
    """Return the error of a future, as the worker raised it: Ray wraps it."""
    error = future.exception()
    return getattr(error, "cause", None) or error


# Local processes

_WORKER: Worker | None = None


def _make_in_process(make: WorkerFactory) -> str:
    """Make the worker of this process, which ends with its parent."""
    global _WORKER
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _WORKER = make()
    return str(os.getpid())


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call_in_process(method: str, arguments: tuple[Any, ...]) -> str:
    getattr(_WORKER, method)(*arguments)
    return str(os.getpid())


class _SpawnContext(SpawnContext):
    """Starts the one process of a pool, and keeps it: a pool has no public name for it."""

    process: SpawnProcess

    def Process(self, *arguments: Any, **options: Any) -> SpawnProcess:  # type: ignore[override]
        """Return a new process."""
        self.process = SpawnProcess(*arguments, **options)
        return self.process


class ProcessSlot:
    """A place for one worker: a process of this machine.

    Each has a pool of its own, so that a death breaks only one.
    """

    n_deaths = 1

    def __init__(self, make: WorkerFactory) -> None:
        self.names: set[str] = set()
        self._make = make
        self._pool: ProcessPoolExecutor | None = None
        self._process: Any = None

    def start(self) -> "Future[str]":
        """Start a process and make its worker."""
        context = _SpawnContext()
        self._pool = ProcessPoolExecutor(1, context)
        with hide_main_module():
            future = self._pool.submit(_make_in_process, self._make)
        self._process = context.process
        return future

    def submit(self, method: str, arguments: tuple[Any, ...]) -> "Future[str]":
        """Call a method of the worker."""
        assert self._pool is not None, "it was started"
        try:
            return self._pool.submit(_call_in_process, method, arguments)
        except BrokenProcessPool as error:  # it died while it was idle
            failed: Future[str] = Future()
            failed.set_exception(error)
            return failed

    def stop(self) -> None:
        """Kill the process."""
        if self._pool is None:
            return
        self._process.kill()
        self._process.join(10)
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None

    def cause_of_death(self, error: BaseException) -> str | None:
        """Return how the process ended, if it did."""
        if not isinstance(error, BrokenProcessPool):
            return None
        self._process.join(10)
        code = self._process.exitcode
        if code is None or code >= 0:
            return f"its process ended with exit code {code}"
        names = {one.value: one.name for one in signal.Signals}  # real-time signals have none
        hint = " (probably out of memory)" if -code == signal.SIGKILL else ""
        return f"its process was killed by {names.get(-code, f'signal {-code}')}{hint}"


@contextmanager
def hide_main_module() -> Iterator[None]:
    """Keep a spawned process from importing the caller's script again.

    Workers need ffmem alone; so scripts that call it need no `if __name__ == "__main__"`.
    """
    main = sys.modules["__main__"]
    path = main.__dict__.pop("__file__", None)
    spec, main.__spec__ = getattr(main, "__spec__", None), None
    try:
        yield
    finally:
        main.__spec__ = spec
        if path is not None:
            main.__file__ = path
