"""A crew of one, in this process: the plain run."""

import time
from collections.abc import Callable, Sequence

from ffmem.cluster.crew import Event, Failed, Finished, Joined, Worker
from ffmem.cluster.task import Task
from ffmem.errors import FfmemError, StorageFull, StoreError

NAME = "here"


class Here:
    """Does a task while somebody waits for it."""

    size = 1

    def __init__(self, worker: Worker) -> None:
        self.heard: Callable[[str, int], None] = lambda worker, n: None
        self._worker = worker
        self._has_joined = False
        self._task: Task | None = None

    def now(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    def give(self, worker: str, task: Task) -> None:
        """Keep a task until somebody waits."""
        self._task = task

    def wait(self, seconds: float) -> Sequence[Event]:
        """Do the task, if there is one."""
        if not self._has_joined:
            self._has_joined = True
            return [Joined(NAME, "this process")]
        if self._task is None:
            return []
        task, self._task = self._task, None
        try:
            return [Finished(NAME, task, self._worker.do(task, lambda n: self.heard(NAME, n)))]
        except (StoreError, StorageFull):
            raise  # nobody else could do better on this disk
        except (FfmemError, RuntimeError) as error:  # torch's own errors are RuntimeErrors
            return [Failed.by(NAME, task, error)]

    def dismiss(self, worker: str) -> None:
        """Who waits for the one worker is the worker: it never hangs."""

    def close(self) -> None:
        """Nothing was started."""
