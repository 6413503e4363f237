"""One worker of a Ray cluster: an actor that works in a thread and is asked how far it is.

    who()                     host, process and versions, before anything dear is loaded
    hear(turn, order, s)      take an order, if there is one; answer with what has happened, or
                              after s seconds with the units done meanwhile

One question is open at any time and its answer comes as soon as there is one, so a cluster carries
a few bytes per worker every few seconds, and an end is known at once. A later turn answers an
earlier one, which nobody waits for any more. Only strings of JSON travel.
"""

import json
import os
import socket
from importlib.metadata import PackageNotFoundError, version
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any

from ffmem.cluster.crew import Failed, Recruit, Worker
from ffmem.cluster.task import Task

COMPARED = ("ffmem", "torch", "transformers")
"""Packages of which another version may give other bytes."""


def versions() -> dict[str, str]:
    """Return the compared packages' versions here, without what tells builds apart (`+cpu`)."""
    found = {}
    for name in COMPARED:
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            found[name] = "none"
    return found


class RayWorker:
    """What runs in an actor; a plain class until Ray is told about it."""

    def __init__(self) -> None:
        self._orders: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._changed = Condition()
        self._turn = 0
        self._units = 0
        self._news: dict[str, Any] = {}
        # One thread for all: Ray's own take turns, and threads of torch are set per thread.
        Thread(target=self._work, daemon=True).start()

    def who(self) -> str:
        """Return where this is and what is installed here."""
        where = f"{socket.gethostname()}:{os.getpid()}"
        return json.dumps({"where": where, "versions": versions()})

    def hear(self, turn: int, order: str | None, seconds: float) -> str:
        """Take an order; return the units done since last time, and how the last order ended."""
        with self._changed:
            if order is not None:
                self._orders.put(json.loads(order))
            self._turn = max(self._turn, turn)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._news or self._turn > turn, seconds)
            if self._turn > turn:
                return "{}"
            news, self._news = self._news, {}
            units, self._units = self._units, 0
        return json.dumps({"units": units, **news})

    def _work(self) -> None:
        """Make the worker by the first order, then do task after task."""
        try:
            worker = self._made(Recruit(**self._orders.get()))
            while worker is not None:
                self._do(worker, Task(**self._orders.get()))
        except BaseException:  # a library that leaves takes its process along
            os._exit(1)

    def _made(self, recruit: Recruit) -> Worker | None:
        try:
            worker = recruit.make()
        except Exception as error:
            self._tell(event="refused", error=Failed.by("", Task("", "", 0), error).error)
            return None
        self._tell(event="joined")
        return worker

    def _do(self, worker: Worker, task: Task) -> None:
        try:
            result = worker.do(task, self._step)
            json.dumps(result)  # an error now is the task's
        except Exception as error:
            _, _, text, of_place, certain = Failed.by("", task, error)
            self._tell(event="failed", error=text, of_place=of_place, certain=certain)
        else:
            self._tell(event="finished", result=result)

    def _step(self, n: int) -> None:
        with self._changed:
            self._units += n

    def _tell(self, **news: Any) -> None:
        with self._changed:
            self._news = news
            self._changed.notify_all()
