"""The one thread in which models run: requests wait in line, and each has the model to itself.

An edit is a hook on the model that everybody shares, so two requests must never run at once; and
one forward pass uses all cores by itself. A model is loaded when somebody first needs it, and
shared by all indexes that were made with the same weights.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from ffmem.web.library import Shelf
from ffmem.web.limits import MOST_WAITING, Busy

if TYPE_CHECKING:
    from starlette.requests import Request

    from ffmem.interventions.prompts import LoadedModel
    from ffmem.models.memories import Memories

T = TypeVar("T")

MOST_MODELS = 2
"""Models held at once; the one that was not used for longest makes room."""


Key = tuple[str, str, str, str]
"""Of a model: the same weights may belong to two, one with ReLU and one with GELU."""


class Worker:
    """Runs jobs on models, one after the other, in the order in which they came."""

    def __init__(self, model: str | None = None, device: str = "auto") -> None:
        self._model = model
        self._device = device
        self._loaded: OrderedDict[Key, Memories] = OrderedDict()
        self._line: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] | None = None
        self.waiting = 0
        """Requests in line, the one that runs included."""

    async def run(
        self, shelf: Shelf, job: "Callable[[LoadedModel], T]", request: "Request | None" = None
    ) -> T:
        """Return what a job gives on the model of an index, when its turn has come."""
        if self.waiting >= MOST_WAITING:
            raise Busy(
                f"{self.waiting} requests wait for the model already. Come again in a moment;"
                " pages that need no model work meanwhile."
            )
        self.waiting += 1
        try:
            turn: Future[T] = Future()
            self._begun().put((turn, lambda: job(self._opened(shelf))))
            # One whose visitor has gone is cancelled, and passed over when its turn comes.
            return await asyncio.wrap_future(turn)
        finally:
            self.waiting -= 1

    def close(self) -> None:
        """End the thread; jobs that have not begun are dropped. The next job starts another."""
        if self._line is not None:
            while not self._line.empty():
                if waiting := self._line.get():
                    waiting[0].cancel()
            self._line.put(None)
            self._line = None

    def is_loaded(self, shelf: Shelf) -> bool:
        """Return whether the model of an index is there already."""
        return _key(shelf) in self._loaded

    def _begun(self) -> "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]":
        """Return the line of the thread, which is started if there is none."""
        if self._line is None:
            self._line = SimpleQueue()
            # A daemon: whoever stops the server does not wait for a prompt to end.
            Thread(target=_work, args=(self._line,), name="model", daemon=True).start()
        return self._line

    def _opened(self, shelf: Shelf) -> "LoadedModel":
        from ffmem.interventions.prompts import LoadedModel, open_model

        key = _key(shelf)
        if key not in self._loaded:
            while len(self._loaded) >= MOST_MODELS:
                self._loaded.popitem(last=False)
            found = open_model(shelf.index, model=self._model, device=self._device)
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
        except BaseException as error:  # whatever it is, it is the asker's
            future.set_exception(error)


def _key(shelf: Shelf) -> Key:
    """Return what decides the model of an index: weights, what is done with them, and how."""
    manifest = shelf.index.manifest
    return manifest.model.hash, manifest.model.family, manifest.model.activation, manifest.dtype
