"""A crew: workers that do tasks, wherever they are, and the events by which they are heard.

    Joined ─► (given a task) ─► Finished | Failed ─► (given a task) ─► … ─► Lost

A worker does one task at a time. It can be lost at any moment, and others may join later: a crew
replaces its losses by itself. Crews differ in where their workers live: in this process (`Here`),
in processes of this machine (`Processes`), on a Ray cluster (`RayCrew`), or on a simulated clock
(`Simulated`). Who works with a crew sees no difference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ffmem.cluster.task import Task
from ffmem.errors import FfmemError, StorageFull, StoreError
from ffmem.progress import Step


class Joined(NamedTuple):
    """A worker is ready for its first task."""

    worker: str
    where: str
    """Host and process, for people."""


class Finished(NamedTuple):
    """A worker has done its task; what it computed lies in the shared folder."""

    worker: str
    task: Task
    result: dict[str, Any]
    """Small, JSON."""


class Failed(NamedTuple):
    """A task raised an error; its worker is ready for another one."""

    worker: str
    task: Task
    error: str
    of_place: bool = False
    """Whether the shared folder is to blame (full, read-only, damaged), not the task."""
    certain: bool = False
    """Whether the error would come again: it is an answer of ours, not an accident."""

    @classmethod
    def by(cls, worker: str, task: Task, error: Exception) -> "Failed":
        """Return the failure that an error is."""
        known = isinstance(error, FfmemError)
        text = str(error) if known else f"{type(error).__name__}: {error}"
        # Names of files may hold halves of characters, which no other file could take.
        text = text.encode("utf-8", "backslashreplace").decode()
        return cls(worker, task, text, isinstance(error, StoreError | StorageFull), known)


class Lost(NamedTuple):
    """A worker is gone, with the task that it had, if it had one."""

    worker: str
    reason: str


class Refused(NamedTuple):
    """A worker could not begin at all: no model there, another version, no memory."""

    worker: str
    where: str
    error: str


Event = Joined | Finished | Failed | Lost | Refused


@runtime_checkable
class Worker(Protocol):
    """Does tasks; made once per process, with whatever is dear to load."""

    def do(self, task: Task, step: Step) -> dict[str, Any]:
        """Do a task; tell `step` how many units are done since the last call."""
        ...


@dataclass(frozen=True)
class Recruit:
    """How a worker is made in another process: `factory` is `module:function`, called there."""

    factory: str
    arguments: dict[str, Any] = field(default_factory=dict)
    """JSON."""

    def make(self) -> Worker:
        """Return the worker."""
        from importlib import import_module

        module, _, name = self.factory.partition(":")
        worker: Worker = getattr(import_module(module), name)(**self.arguments)
        return worker


@runtime_checkable
class Crew(Protocol):
    """Workers. `give` only to one that has joined and has no task."""

    size: int
    """How many workers were asked for."""
    heard: Callable[[str, int], None]
    """Is told of units done in a worker's present task since last time; set by whoever listens."""

    def now(self) -> float:
        """Return the time in seconds, from any beginning."""
        ...

    def give(self, worker: str, task: Task) -> None:
        """Let a worker begin a task."""
        ...

    def wait(self, seconds: float) -> Sequence[Event]:
        """Return what has happened; wait so long for a first event, at most."""
        ...

    def dismiss(self, worker: str) -> None:
        """End one worker that does not come back from its task; `wait` tells of its loss."""
        ...

    def close(self) -> None:
        """End all workers that this crew has started, whatever they do."""
        ...
