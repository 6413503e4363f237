"""The one thread in which models run: requests queue, and each has the model to itself.

An edit is a hook on the model that everybody shares, so two requests must never run at once; and
one forward pass uses all cores by itself. The queue is bounded by time: a request that would wait
longer than `MAX_SECONDS` is refused at once. A job whose client has disconnected is dropped before
it begins. Indexes of the same weights share one model.
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

from ffmem.models.arguments import require_models
from ffmem.progress import Progress
from ffmem.text import pluralize
from ffmem.web.catalog import ServedIndex
from ffmem.web.errors import Busy, ClientGone

if TYPE_CHECKING:
    from ffmem.interventions.forward import LoadedModel
    from ffmem.models.memories import Memories

T = TypeVar("T")

MAX_MODELS = 2
"""Models to hold at once; the least recently used one makes room."""

MAX_WAITING = 64
"""Requests that may wait for the model, however fast it is."""

MAX_SECONDS = 20.0
"""How long a request may have to wait for the model: one that would wait longer gets 503."""

FIRST_GUESS = 1.0
"""Seconds that a job is expected to take before one was measured."""

POLL_SECONDS = 0.25
"""How often to check whether a waiting client is still there."""

Key = tuple[str, str, str, str]
"""Identifies a model: the same weights may be run with ReLU and with GELU."""

JobQueue = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class ModelWorker:
    """Runs jobs on models, one after the other, in the order in which they came."""

    def __init__(
        self, model: str | None = None, device: str = "auto", adapter: str | None = None
    ) -> None:
        self._model = model
        self._adapter = adapter
        self._device = device
        self._loaded: OrderedDict[Key, Memories] = OrderedDict()
        self._queue: JobQueue | None = None
        self._to_load: set[Key] = set()
        self._seconds = FIRST_GUESS
        self._lock = Lock()
        self.waiting = 0
        """Requests in the queue, the one that runs included."""
        self.loading: str | None = None
        """The model that is being loaded now."""

    async def run(
        self, served: ServedIndex, job: "Callable[[LoadedModel], T]", request: Request | None = None
    ) -> T:
        """Return the result of a job on the model of an index.

        With a `request`, the job is dropped if its client goes away before it begins.
        """
        if self.waiting >= MAX_WAITING or self.waiting * self._seconds >= MAX_SECONDS:
            raise Busy("The model is busy; please retry. Pages that need no model still work.")
        future: Future[T] = Future()
        self._count(1)
        future.add_done_callback(lambda _: self._count(-1))
        self._start().put((future, lambda: self._run_timed(job, served)))
        result = asyncio.wrap_future(future)
        while request is not None and not (await asyncio.wait({result}, timeout=POLL_SECONDS))[0]:
            if await request.is_disconnected():
                future.cancel()  # has no effect on a job that runs
                raise ClientGone("The client closed the connection.")
        return await result

    def load(self, served: ServedIndex) -> "Future[None]":
        """Load the model of an index before a page needs it."""
        future: Future[None] = Future()
        key = _model_key(served)
        self._to_load.add(key)
        future.add_done_callback(lambda _: self._to_load.discard(key))
        self._start().put((future, lambda: self._open(served) and None))
        return future

    def load_all(self, indexes: Iterable[ServedIndex]) -> None:
        """Load the models of the first indexes in the background; print what fails.

        Pages that need a missing model say so themselves.
        """
        by_model: dict[Key, ServedIndex] = {}
        for served in indexes:
            by_model.setdefault(_model_key(served), served)
        for served in list(by_model.values())[:MAX_MODELS]:

            def report(future: "Future[None]", name: str = served.name) -> None:
                if not future.cancelled() and (error := future.exception()):
                    Progress().say(f"The model of {name} was not loaded: {error}")

            self.load(served).add_done_callback(report)

    def close(self) -> None:
        """End the thread; jobs that have not begun are dropped. The next job starts another."""
        if self._queue is not None:
            while not self._queue.empty():
                if waiting := self._queue.get():
                    waiting[0].cancel()
            self._queue.put(None)
            self._queue = None

    def is_loaded(self, served: ServedIndex) -> bool:
        """Return whether the model of an index is loaded."""
        return _model_key(served) in self._loaded

    def model_state(self, served: ServedIndex) -> str:
        """Return whether the model of an index is `loaded`, `loading` or neither (`none`)."""
        if self.is_loaded(served):
            return "loaded"
        return "loading" if _model_key(served) in self._to_load else "none"

    def has_chat(self, served: ServedIndex) -> bool | None:
        """Return whether a model's tokenizer has a chat template; None until it is loaded."""
        memories = self._loaded.get(_model_key(served))
        return None if memories is None else memories.tokenizer.has_chat

    def status(self) -> str | None:
        """Return what waiting requests wait for, in words; None if only for their own work."""
        if self.loading is not None:
            return f"Loading {self.loading}"
        if self.waiting > 1:
            return f"Queued behind {pluralize(self.waiting - 1, 'other requests')}"
        return None

    def _count(self, change: int) -> None:
        with self._lock:  # the worker's thread counts too
            self.waiting += change

    def _start(self) -> JobQueue:
        """Return the queue of the thread, starting it if there is none."""
        if self._queue is None:
            self._queue = SimpleQueue()
            # A daemon: stopping the server does not wait for a running prompt.
            Thread(target=_work, args=(self._queue,), name="model", daemon=True).start()
        return self._queue

    def _run_timed(self, job: "Callable[[LoadedModel], T]", served: ServedIndex) -> T:
        """Run a job, and update the mean time of jobs, loading aside."""
        model = self._open(served)
        began = time.monotonic()
        try:
            return job(model)
        finally:
            self._seconds += 0.3 * (time.monotonic() - began - self._seconds)

    def _open(self, served: ServedIndex) -> "LoadedModel":
        require_models()
        from ffmem.interventions.forward import LoadedModel, open_model

        key = _model_key(served)
        if key not in self._loaded:
            while len(self._loaded) >= MAX_MODELS:
                self._loaded.popitem(last=False)
            self.loading = served.model
            try:
                has_adapter = served.index.manifest.model.adapter is not None
                opened = open_model(
                    served.index,
                    model=self._model,
                    adapter=self._adapter if has_adapter else None,
                    device=self._device,
                )
            finally:
                self.loading = None
            self._loaded[key] = opened.memories
        self._loaded.move_to_end(key)
        return LoadedModel(self._loaded[key], served.index, None)


def _work(queue: JobQueue) -> None:
    """Run the jobs of a queue until None comes."""
    while item := queue.get():
        future, job = item
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(job())
        except BaseException as error:  # the request gets it
            future.set_exception(error)


def _model_key(served: ServedIndex) -> Key:
    """Return what decides the model of an index: weights, what is done with them, and how."""
    manifest = served.index.manifest
    return manifest.model.hash, manifest.model.family, manifest.model.activation, manifest.dtype
