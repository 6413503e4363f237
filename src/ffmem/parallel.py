"""Workers behind one small loop: this process, local processes, or Ray actors.

    with executor(config, spec, progress) as workers:
        workers.run(tasks, done)        # calls methods of the workers, one task in flight each
        workers.flush()                 # lets every worker commit what it holds

A worker is any object that a `WorkerSpec` makes; a task is a call of one of its methods with plain
arguments. What a worker computes it writes itself. Workers may die at any time: a task is then
given to another one, and what the dead one had not committed is for the caller to notice. Nothing
here changes a result.
"""

import logging
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ffmem.cli_options import check_options, option
from ffmem.errors import FfmemError, WorkerError
from ffmem.progress import Progress

DEATHS = 3
"""Deaths of workers with the same task in flight after which the run stops; and failed starts."""

MOST = 1_024
"""Local processes that may be asked for."""

POLL = 1.0
"""Seconds between two looks whether the cluster is still there."""


@dataclass(frozen=True)
class ExecutionConfig:
    """How many workers there are, and where; nothing of it changes a result."""

    workers: int | None = option(
        "Number of worker processes; with --ray, of actors.", None, minimum=1
    )
    ray: str | None = option(
        "Run on Ray: start one here, find a running one, or connect to its address.",
        None,
        metavar="local|auto|ADDRESS",
    )
    gpus_per_worker: float = option("GPUs that Ray gives each worker.", 0.0, minimum=0)

    def __post_init__(self) -> None:
        check_options(self)
        if self.workers is not None and self.workers > MOST and self.ray in (None, "local"):
            raise FfmemError(f"--workers {self.workers} is out of range; use 1 to {MOST:,}.")
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
        on_a_cluster = self.ray not in (None, "local")
        return 1 if on_a_cluster else max(1, (os.cpu_count() or 1) // self.n_workers)

    def check(self) -> None:
        """Raise if there is no Ray where one was asked for, before anything is loaded."""
        if self.ray is None or _import_ray(self.ray).is_initialized() or self.ray == "local":
            return
        _ray_address(self.ray)


@dataclass(frozen=True)
class WorkerSpec:
    """How a process makes its worker: a function by its name, with plain arguments."""

    factory: str
    """`package.module:function`"""
    arguments: dict[str, Any]
    threads: int = 1

    def make(self) -> Any:
        """Return the worker."""
        module, _, function = self.factory.partition(":")
        return getattr(import_module(module), function)(**self.arguments)


@dataclass(frozen=True)
class Task:
    """A call of a worker's method."""

    name: str
    """For messages: `chunk 12`."""
    method: str
    arguments: tuple[Any, ...]
    size: int = 1
    """How much of the progress bar it is."""


class Executor(ABC):
    """Some workers."""

    @abstractmethod
    def run(self, tasks: Iterable[Task], done: Callable[[int], None]) -> None:
        """Do all tasks; call `done` with the size of each that is done, or of a part of it."""

    @abstractmethod
    def flush(self) -> None:
        """Let every worker commit what it holds; a worker that dies meanwhile has not."""

    def restart(self) -> None:  # noqa: B027 (a serial run's only worker holds nothing in doubt)
        """Replace workers that may hold what others hold, too."""


@contextmanager
def executor(
    config: ExecutionConfig, spec: WorkerSpec, progress: Progress, worker: Any = None
) -> Iterator[Executor]:
    """Give the workers; `worker` is this process's own, for a serial run."""
    if config.is_serial:
        yield SerialExecutor(spec.make() if worker is None else worker)
        return
    with ExitStack() as stack:
        if config.ray is None:
            slots: list[Slot] = [_ProcessSlot(spec) for _ in range(config.n_workers)]
            check: Callable[[bool], None] = lambda block: None  # noqa: E731
        else:
            cluster = stack.enter_context(_connect(config.ray, config.n_workers * spec.threads))
            slots = [
                _RaySlot(cluster.ray, spec, config.gpus_per_worker) for _ in range(config.n_workers)
            ]
            check = cluster.check
        pool = PoolExecutor(slots, check, progress)
        try:
            yield pool
        except BaseException as error:
            pool.close(flush=not isinstance(error, WorkerError))
            raise
        pool.close(flush=False)


class SerialExecutor(Executor):
    """The functions themselves, in this process."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def run(self, tasks: Iterable[Task], done: Callable[[int], None]) -> None:
        """Do all tasks, one after the other."""
        for task in tasks:
            try:
                getattr(self.worker, task.method)(*task.arguments)
            except BaseException:
                with suppress(Exception):  # report the first error
                    self.flush()
                raise
            done(task.size)

    def flush(self) -> None:
        """Let the worker commit what it holds."""
        if hasattr(self.worker, "flush"):
            self.worker.flush()


class Slot(ABC):
    """A place for one worker, which may be started again and again."""

    n_deaths = 1
    """Deaths that `WorkerDied` stands for: 1, or more where the engine restarts a worker itself."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        """Workers that have answered since the last start: more than one after restarts."""

    @abstractmethod
    def start(self) -> "Future[str]":
        """Make a new worker; the future is its name."""

    @abstractmethod
    def submit(self, method: str, arguments: tuple[Any, ...]) -> "Future[str]":
        """Call a method of the worker; the future is the worker's name."""

    @abstractmethod
    def stop(self) -> None:
        """End the worker, whatever it does."""

    @abstractmethod
    def cause_of_death(self, error: BaseException) -> str | None:
        """Return why the worker died; None if the error is not about its death."""


class PoolExecutor(Executor):
    """Workers in other processes, one task in flight each."""

    def __init__(
        self, slots: list[Slot], check: Callable[[bool], None], progress: Progress
    ) -> None:
        self._slots = slots
        self._check = check
        self._progress = progress
        self._starting: dict[Future[str], Slot] = {}
        self._running: dict[Future[str], tuple[Slot, Task]] = {}
        self._idle: list[Slot] = []
        self._failed_starts = 0
        self._deaths: Counter[str] = Counter()
        self._waiting_since = time.monotonic()

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
            finished, _ = wait([*running, *self._starting], POLL, FIRST_COMPLETED)
            if not finished:
                self._check(False)
                self._say_if_unplaced()
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
        """Take in a worker that has started, or start another one if it has not."""
        error = _cause(future)
        if error is None:
            slot.names.add(future.result())
            self._idle.append(slot)
            return
        self._check(True)
        self._failed_starts += 1
        reason = slot.cause_of_death(error) or _one_line(error)
        if self._failed_starts >= DEATHS:
            raise WorkerError(
                f"All workers crashed during start-up, {DEATHS} in a row. The last one: {reason}"
            ) from error
        self._progress.say(f"A worker could not start ({reason}). Starting another one.")
        slot.stop()
        self._start(slot)

    def _died(self, slot: Slot, task: Task, cause: str) -> None:
        """Start another worker for one that died, unless the task kills every worker."""
        self._check(True)
        # An engine that restarts workers itself tells of the last death alone.
        self._deaths[task.name] += max(1, slot.n_deaths - (len(slot.names) - 1))
        if self._deaths[task.name] >= DEATHS:
            raise WorkerError(
                f"{self._deaths[task.name]} workers died while working on {task.name}, the last"
                f" one: {cause}. What others finished is kept. If memory ran out, use fewer"
                " --workers or a smaller --batch-tokens; then rerun the command to resume."
            )
        self._progress.say(
            f"A worker died while working on {task.name} ({cause}). Starting another."
        )
        slot.stop()
        self._start(slot)

    def _say_if_unplaced(self) -> None:
        if self._starting and time.monotonic() - self._waiting_since > 20:
            n = len(self._starting)
            self._progress.say(f"Waiting for {n} worker{'s' if n > 1 else ''} to start.")
            self._waiting_since = time.monotonic() + 60

    def flush(self) -> None:
        """Let every idle worker commit what it holds; start dead ones again."""
        futures = {slot.submit("flush", ()): slot for slot in self._idle}
        pending = set(futures)
        while pending:
            finished, pending = wait(pending, POLL)
            if not finished:
                self._check(False)
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
        """End all workers; with `flush`, they first finish their task and commit what they hold."""
        try:
            if flush:
                with suppress(Exception):  # the error that ends the run is the one to report
                    busy = [slot for slot, _ in self._running.values()]
                    wait([slot.submit("flush", ()) for slot in (*self._idle, *busy)], 60)
        finally:
            for slot in self._slots:
                slot.stop()


def _cause(future: "Future[str]") -> BaseException | None:
    """Return the error of a future, as the worker raised it: Ray wraps it."""
    error = future.exception()
    return getattr(error, "cause", None) or error


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else text[:400] + "…"


# In a worker's process ----------------------------------------------------------------------------

_WORKER: Any = None
_NAME = ""


def _make_in_process(spec: WorkerSpec) -> str:
    """Make the worker of this process, which ends with its parent."""
    global _WORKER, _NAME
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _WORKER = spec.make()
    _NAME = secrets.token_hex(4)
    return _NAME


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call_in_process(method: str, arguments: tuple[Any, ...]) -> str:
    getattr(_WORKER, method)(*arguments)
    return _NAME


class _ProcessSlot(Slot):
    """A worker in a process of this machine: an executor of its own, so that a death breaks one."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__()
        self._spec = spec
        self._pool: ProcessPoolExecutor | None = None
        self._process: Any = None

    def start(self) -> "Future[str]":
        """Start a process and make its worker."""
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        before = set(multiprocessing.active_children())
        with _main_module_hidden():
            future = self._pool.submit(_make_in_process, self._spec)
        (self._process,) = set(multiprocessing.active_children()) - before
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
        hint = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
        return f"its process was killed by {names.get(-code, f'signal {-code}')}{hint}"


@contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Keep a spawned process from importing the caller's script again.

    Workers need ffmem alone; so scripts that call it need no `if __name__ == "__main__"`.
    """
    main = sys.modules["__main__"]
    hidden = {name: main.__dict__.pop(name) for name in ("__file__",) if name in main.__dict__}
    spec, main.__spec__ = getattr(main, "__spec__", None), None
    try:
        yield
    finally:
        main.__spec__ = spec
        main.__dict__.update(hidden)


# Ray ----------------------------------------------------------------------------------------------

COMPARED = ("ffmem", "torch", "transformers")
"""Packages of which another version may give other bytes."""

RESTARTS = 2
"""How often Ray restarts an actor, and gives it the same task again."""

OBJECT_STORE = 80 * 2**20
"""Bytes of a local Ray's object store, its minimum: only names and small numbers pass through."""

ADDRESS_TIMEOUT = 5.0
"""Seconds that an address has to answer."""

NODES_TIMEOUT = 30.0
"""Seconds that a Ray has to say which nodes it has."""


def _versions() -> dict[str, str]:
    """Return the compared packages' versions, without what tells builds apart (`+cpu`)."""
    found = {}
    for name in COMPARED:
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            found[name] = "none"
    return found


class _RayWorker:
    """What runs in an actor; Ray makes a new one when it restarts the actor."""

    def __init__(self, spec: WorkerSpec, versions: dict[str, str]) -> None:
        self.spec, self.versions = spec, versions
        self.name = secrets.token_hex(4)
        self.worker: Any = None

    def ready(self) -> str:
        """Make the worker: here and not in `__init__`, so that an error reaches us as it is."""
        if self.worker is None:
            if self.versions != _versions():
                raise WorkerError(
                    f"{socket.gethostname()} has {_versions()}, and the run was started with"
                    f" {self.versions}. Install the same versions on every node."
                )
            self.worker = self.spec.make()
        return self.name

    def call(self, method: str, arguments: tuple[Any, ...]) -> str:
        self.ready()
        getattr(self.worker, method)(*arguments)
        return self.name


class _RaySlot(Slot):
    """A worker in a Ray actor, which Ray restarts `RESTARTS` times by itself."""

    n_deaths = RESTARTS + 1

    def __init__(self, ray: Any, spec: WorkerSpec, gpus: float) -> None:
        super().__init__()
        self._ray, self._spec = ray, spec
        self._actor_class = ray.remote(
            num_cpus=spec.threads,
            num_gpus=gpus,
            max_restarts=RESTARTS,
            max_task_retries=RESTARTS,
        )(_RayWorker)
        self._actor: Any = None

    def start(self) -> "Future[str]":
        """Ask Ray for an actor; the future is done when its worker is made."""
        self._actor = self._actor_class.remote(self._spec, _versions())
        future: Future[str] = self._actor.ready.remote().future()
        return future

    def submit(self, method: str, arguments: tuple[Any, ...]) -> "Future[str]":
        """Call a method of the worker."""
        future: Future[str] = self._actor.call.remote(method, arguments).future()
        return future

    def stop(self) -> None:
        """End the actor."""
        if self._actor is not None:
            with suppress(Exception):  # the cluster may be gone
                self._ray.kill(self._actor)
            self._actor = None

    def cause_of_death(self, error: BaseException) -> str | None:
        """Return what Ray says about the actor's death, if the error is about that."""
        if not isinstance(error, self._ray.exceptions.RayActorError):
            return None
        text = str(error)
        if "its owner has died" in text:  # this process, as a dead node sees it
            raise _cluster_is_gone("of this run")
        _, mark, told = text.rpartition("\nThe actor ")
        told = f"The actor {told}".partition("Some common causes include")[0] if mark else text
        return _one_line(Exception(told))


@dataclass
class _Cluster:
    """A Ray that we are connected to."""

    ray: Any
    address: str
    _asked: float = 0.0
    _answer: list[Any] = field(default_factory=list)
    _thread: threading.Thread | None = None

    def check(self, block: bool = False) -> None:
        """Raise if the cluster is gone: no node is alive, or nothing answers."""
        if self._thread is None:
            self._asked, self._answer = time.monotonic(), []
            # In a thread, for a dead cluster may never answer.
            self._thread = threading.Thread(target=self._ask, daemon=True)
            self._thread.start()
        if block:
            self._thread.join(NODES_TIMEOUT)
        if not self._thread.is_alive():
            self._thread = None
            if not self._answer or not any(node["Alive"] for node in self._answer[0]):
                self._gone()
        elif time.monotonic() - self._asked > NODES_TIMEOUT:
            self._gone()

    def _ask(self) -> None:
        with suppress(Exception):
            self._answer.append(self.ray.nodes())

    def _gone(self) -> None:
        raise _cluster_is_gone(f"of --ray {self.address}")


def _cluster_is_gone(which: str) -> WorkerError:
    return WorkerError(
        f"The Ray {which} is gone: none of its nodes answers. What was committed is kept: rerun"
        " the command to resume."
    )


@contextmanager
def _connect(address: str, cpus: int) -> Iterator[_Cluster]:
    """Connect to a Ray; end it afterwards if it was started here."""
    ray = _import_ray(address)
    if ray.is_initialized():  # the user's own, which stays as it is
        yield _Cluster(ray, address)
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    # No usage statistics, and no printed errors of actors that were stopped.
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_IGNORE_UNHANDLED_ERRORS": "1"}
    if address == "local":
        options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE}
        options |= {"num_cpus": cpus}
        names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
        if not any(name in os.environ for name in names):
            variables["RAY_AUTH_TOKEN"] = _ray_token()
    found = address if address == "local" else _ray_address(address)
    with _environment(variables), ExitStack() as stack:
        stack.callback(ray.shutdown)
        try:
            ray.init(address=found, **options)
        except Exception as error:
            raise WorkerError(
                f"Cannot connect to the Ray of --ray {address}: {type(error).__name__}:"
                f" {_one_line(error)} Run ffmem on a node of the cluster, with the cluster's"
                " Python, Ray and token."
            ) from error
        yield _Cluster(ray, address)


def _import_ray(address: str) -> Any:
    try:
        import ray
    except ImportError:
        raise FfmemError(
            f"--ray {address} needs Ray, which is not installed: pip install 'ffmem[ray]'"
        ) from None
    return ray


_TOKEN: list[str] = []


def _ray_token() -> str:
    """Return one token for all Rays of this process: Ray reads it only once."""
    if not _TOKEN:
        _TOKEN.append(secrets.token_hex(32))
    return _TOKEN[0]


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables that new processes inherit, except those that the user has set."""
    before = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    os.environ.update(values | before)
    try:
        yield
    finally:  # Ray sets more of them, which must not count as the user's next time
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]
        os.environ.update(before)


def _ray_address(address: str) -> str:
    """Return the address of the Ray that is meant, if one answers there.

    `ray.init` itself waits for minutes at an address without a Ray, and then ends the process.
    """
    shown = f"--ray {address}"
    if address == "auto":
        address = _running_ray()
        shown += f" (found {address})"
    if address.startswith("ray://"):
        raise FfmemError(
            f"{shown} is a Ray Client address, whose actors die with the connection. Run ffmem on a"
            " node of the cluster, with --ray auto or --ray HOST:6379."
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise FfmemError(f"{shown} is not an address. Use local, auto or HOST:PORT.")
    try:
        problem = _probe(host.strip("[]"), int(port))
    except OSError as error:
        problem = f"Nothing answers there ({error})"
    if problem:
        raise FfmemError(
            f"{shown}: {problem}. Use the address that `ray start --head` printed (port 6379 by"
            " default), and check firewalls."
        )
    return address


def _running_ray() -> str:
    """Return the address of the cluster that $RAY_ADDRESS names, or that runs on this machine."""
    if (named := os.environ.get("RAY_ADDRESS", "")) not in ("", "auto", "local"):
        return named
    # Where `ray start` leaves its address for `ray.init("auto")`.
    path = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray/ray_current_cluster"
    with suppress(OSError):
        if found := path.read_text(encoding="utf-8").strip():
            return found
    raise FfmemError(
        "No Ray was found for --ray auto. Start one with `ray start --head`, give its address, or"
        " let ffmem start one with --ray local."
    )


def _probe(host: str, port: int) -> str:
    """Return what is wrong with an address; nothing if a Ray head node may listen there."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    with socket.create_connection((host, port), timeout=ADDRESS_TIMEOUT) as connection:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return ""
        connection.sendall(preface)
        try:
            answer = connection.recv(9)
        except TimeoutError:
            answer = b""
    is_settings_frame = answer[3:4] == bytes([4])
    return "" if is_settings_frame else "That address is not a Ray head node"
