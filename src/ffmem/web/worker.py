"""The one thread in which models run: requests wait in line, and each has the model to itself.

An edit is a hook on the model that everybody shares, so two requests must never run at once; and
one forward pass uses all cores by itself. The line is bounded by time: whoever would wait longer
than `MOST_SECONDS` is refused at once. Work whose client has gone is dropped before it begins.
Indexes of the same weights share one model.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from ffmem.progress import Progress
from ffmem.text import pluralize
from ffmem.web.library import Shelf
from ffmem.web.limits import MOST_SECONDS, MOST_WAITING, Busy, ClientGone

if TYPE_CHECKING:
    from ffmem.interventions.prompts import LoadedModel
    from ffmem.models.memories import Memories

T = TypeVar("T")

MOST_MODELS = 2
"""Models to hold at once; the least recently used one makes room."""

FIRST_GUESS = 1.0
"""Seconds that a job is expected to take before one was measured."""

POLL = 0.25
"""Seconds between two looks whether a waiting client is still there."""

Key = tuple[str, str, str, str]
"""Of a model: the same weights may belong to two, one with ReLU and one with GELU."""


class Worker:
    """Runs jobs on models, one after the other, in the order in which they came."""

    def __init__(self, model: str | None = None, device: str = "auto") -> None:
        self._model = model
        self._device = device
        self._loaded: OrderedDict[Key, Memories] = OrderedDict()
        self._line: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] | None = None
        self._coming: set[Key] = set()
        self._seconds = FIRST_GUESS
        self._counting = Lock()
        self.waiting = 0
        """Requests in line, the one that runs included."""
        self.loading: str | None = None
        """The model that is being loaded now."""

    async def run(
        self, shelf: Shelf, job: "Callable[[LoadedModel], T]", request: Request | None = None
    ) -> T:
        """Return what a job gives on the model of an index, when its turn has come.

        With a `request`, the job is dropped if its client goes away before it begins.
        """
        if self.waiting >= MOST_WAITING or self.waiting * self._seconds >= MOST_SECONDS:
            raise Busy("The model is busy; please retry. Pages that need no model work meanwhile.")
        turn: Future[T] = Future()
        self._count(1)
        turn.add_done_callback(lambda _: self._count(-1))
        self._start().put((turn, lambda: self._timed(job, shelf)))
        answer = asyncio.wrap_future(turn)
        while request is not None and not (await asyncio.wait({answer}, timeout=POLL))[0]:
            if await request.is_disconnected():
                turn.cancel()  # has no effect on a job that runs
                raise ClientGone("The client closed the connection.")
        return await answer

    def load(self, shelf: Shelf) -> "Future[None]":
        """Load the model of an index before anybody asks for it."""
        turn: Future[None] = Future()
        self._coming.add(_key(shelf))
        turn.add_done_callback(lambda _: self._coming.discard(_key(shelf)))
        self._start().put((turn, lambda: self._open(shelf) and None))
        return turn

    def load_all(self, shelves: Iterable[Shelf]) -> None:
        """Load the models of the first indexes in the background; say on the terminal what fails.

        Pages that need a missing model say so themselves.
        """
        wanted: dict[Key, Shelf] = {}
        for shelf in shelves:
            wanted.setdefault(_key(shelf), shelf)
        for shelf in list(wanted.values())[:MOST_MODELS]:

            def report(turn: "Future[None]", shelf: Shelf = shelf) -> None:
                if not turn.cancelled() and (error := turn.exception()):
                    Progress().say(f"The model of {shelf.name} was not loaded: {error}")

            self.load(shelf).add_done_callback(report)

    def close(self) -> None:
        """End the thread; jobs that have not begun are dropped. The next job starts another."""
        if self._line is not None:
            while not self._line.empty():
                if waiting := self._line.get():
                    waiting[0].cancel()
            self._line.put(None)
            self._line = None

    def is_loaded(self, shelf: Shelf) -> bool:
        """Return whether the model of an index is loaded."""
        return _key(shelf) in self._loaded

    def readiness(self, shelf: Shelf) -> str:
        """Return whether the model of an index is `loaded`, `loading` or neither (`none`)."""
        if self.is_loaded(shelf):
            return "loaded"
        return "loading" if _key(shelf) in self._coming else "none"

    def status(self) -> str | None:
        """Return what waiting requests wait for, in words; None if only for their own work."""
        if self.loading is not None:
            return f"Loading {self.loading}"
        if self.waiting > 1:
            return f"In line with {pluralize(self.waiting - 1, 'other requests')}"
        return None

    def _count(self, change: int) -> None:
        with self._counting:  # the worker's thread counts too
            self.waiting += change

    def _start(self) -> "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]":
        """Return the line of the thread, starting it if there is none."""
        if self._line is None:
            self._line = SimpleQueue()
            # A daemon: whoever stops the server does not wait for a prompt to end.
            Thread(target=_work, args=(self._line,), name="model", daemon=True).start()
        return self._line

    def _timed(self, job: "Callable[[LoadedModel], T]", shelf: Shelf) -> T:
        """Run a job, and remember about how long jobs take, loading aside."""
        model = self._open(shelf)
        began = time.monotonic()
        try:
            return job(model)
        finally:
            self._seconds += 0.3 * (time.monotonic() - began - self._seconds)

    def _open(self, shelf: Shelf) -> "LoadedModel":
        from ffmem.interventions.prompts import LoadedModel, open_model

        key = _key(shelf)
        if key not in self._loaded:
            while len(self._loaded) >= MOST_MODELS:
                self._loaded.popitem(last=False)
            self.loading = shelf.model
            try:
                found = open_model(shelf.index, model=self._model, device=self._device)
            finally:
                self.loading = None
            self._loaded[key] = found.memories
        self._loaded.move_to_end(key)
        return LoadedModel(self._loaded[key], shelf.index, None)


def _work(line: "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]") -> None:
    """Run what stands in line, until nothing more will come."""
    while turn := line.get():
        future, job = turn
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(job())
        except BaseException as error:  # whatever it is, the asker gets it
            future.set_exception(error)


def _key(shelf: Shelf) -> Key:
    """Return what decides the model of an index: weights, what is done with them, and how."""
    manifest = shelf.index.manifest
    return manifest.model.hash, manifest.model.family, manifest.model.activation, manifest.dtype
