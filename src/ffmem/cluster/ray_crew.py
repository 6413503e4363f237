"""A crew on a Ray cluster: one plain actor per worker, replaced by us when it is lost.

n actors are asked for at any time. Ray finds them a place; those that have none yet wait for a
node, and join when there is one. Ray retries nothing: what is lost is known here first, and the
schedule decides. Only names and small numbers pass through Ray (`RayWorker`).
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from ffmem.cluster.crew import Event, Failed, Finished, Joined, Lost, Recruit, Refused
from ffmem.cluster.ray_connection import RayConnection
from ffmem.cluster.ray_worker import RayWorker, versions
from ffmem.cluster.task import Task
from ffmem.counted import counted
from ffmem.errors import FfmemError
from ffmem.progress import Progress

LISTEN = 2.0
"""Seconds after which a worker that has nothing to say tells how far it is."""

ANSWERS = 500
"""Of those per second, from all workers together, at most."""

DELAY = 0.1
"""Seconds until a first replacement; each further one without a finished task takes twice that."""

LONGEST_DELAY = 30.0

PLACELESS = 20.0
"""Seconds after which people are told that workers still have no place."""

LONGEST_REASON = 400
"""Characters of what Ray says about a loss."""


@dataclass
class _Hired:
    """One actor, and the question that it has not answered yet."""

    name: str
    place: int
    actor: Any
    question: Any
    where: str = ""
    """Empty until Ray has found it a place."""
    turn: int = 0
    task: Task | None = None


class RayCrew:
    """A crew of n actors. Close it, or use it in a `with`."""

    def __init__(
        self,
        recruit: Recruit,
        n: int,
        address: str,
        gpus_per_worker: int | float = 0,
        threads: int = 1,
        progress: Progress | None = None,
    ) -> None:
        if n < 1 or threads < 1 or gpus_per_worker < 0:
            raise FfmemError(
                f"{n} workers of {threads} threads and {gpus_per_worker} GPUs were asked for."
                " Ask for one worker and one thread at least, and for no fewer than 0 GPUs."
            )
        self.size = n
        self.heard: Callable[[str, int], None] = lambda worker, units: None
        self._recruit = recruit
        self._threads, self._gpus = threads, gpus_per_worker
        self._progress = Progress() if progress is None else progress
        self._versions = versions()
        self._listen = max(LISTEN, n / ANSWERS)
        self._n_hired = 0
        self._hired: dict[str, _Hired] = {}
        self._idle_losses = [0] * n
        """Per place: losses since a task was finished there."""
        self._empty = dict.fromkeys(range(n), 0.0)
        """Places without an actor, and when to fill them."""
        self._placeless_since: float | None = None
        self._connection = RayConnection(address, n * threads)
        self._ray = self._connection.ray
        try:
            self._check(address)
            self._fill()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "RayCrew":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def now(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    def give(self, worker: str, task: Task) -> None:
        """Send a task to a worker; if that has died meanwhile, `wait` tells."""
        hired = self._hired[worker]
        hired.task = task
        self._ask(hired, task.to_dict())

    def dismiss(self, worker: str) -> None:
        """End a worker that does not come back from its task: Ray then tells of its death."""
        if (hired := self._hired.get(worker)) is not None:
            self._ray.kill(hired.actor)

    def wait(self, seconds: float) -> Sequence[Event]:
        """Return what has happened; wait so long for a first event, at most."""
        end = self.now() + seconds
        while True:
            self._fill()
            due = min([end, *self._empty.values()])
            events = list(self._answered(max(due - self.now(), 0.0)))
            self._tell_placeless()
            if events or self.now() >= end:
                return events

    def close(self) -> None:
        """End all actors of this crew, whatever they do, and leave Ray if we came to it."""
        self._empty.clear()
        for hired in list(self._hired.values()):
            self._dismiss(hired)
        self._connection.close()

    def _check(self, address: str) -> None:
        """Refuse what a Ray of our own, which never grows, cannot give."""
        found = self._ray.cluster_resources().get("GPU", 0.0)
        if address == "local" and found < self.size * self._gpus:
            raise FfmemError(
                f"{self.size} workers of {self._gpus:g} GPUs were asked for, and Ray finds"
                f" {found:g} GPUs here. Ask for fewer, or for a share (--gpus-per-worker 0.5)."
            )

    def _fill(self) -> None:
        """Ask Ray for an actor at every place that is due."""
        for place in [place for place, due in self._empty.items() if due <= self.now()]:
            del self._empty[place]
            self._n_hired += 1
            name = f"w{self._n_hired}"
            # Two at once: a later question is heard while an earlier one is still open.
            actor_class = self._ray.remote(
                num_cpus=self._threads,
                num_gpus=self._gpus,
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=2,
            )(RayWorker)
            actor = actor_class.remote()
            self._hired[name] = _Hired(name, place, actor, actor.who.remote())

    def _ask(self, hired: _Hired, order: dict[str, Any] | None = None) -> None:
        hired.turn += 1
        text = None if order is None else json.dumps(order)
        hired.question = hired.actor.hear.remote(hired.turn, text, self._listen)

    def _answered(self, seconds: float) -> Iterator[Event]:
        """Give what has come from all actors; wait so long for a first answer."""
        for hired in self._hired.values():
            if hired.question is None:
                self._ask(hired)
        open_ = {hired.question: hired for hired in self._hired.values()}
        if not open_:
            time.sleep(seconds)
            return
        if not self._ray.wait(list(open_), num_returns=1, timeout=seconds)[0]:
            return
        for question in self._ray.wait(list(open_), num_returns=len(open_), timeout=0)[0]:
            yield from self._understood(open_[question])

    def _understood(self, hired: _Hired) -> Iterator[Event]:
        from ray.exceptions import RayActorError, RayError

        try:
            answer = json.loads(self._ray.get(hired.question))
        except RayError as error:
            self._dismiss(hired)
            is_death = isinstance(error, RayActorError) and not error.actor_init_failed
            if is_death or hired.where:
                yield self._vacated(hired, _reason(error))
            else:  # its class could not be read there
                yield Refused(hired.name, "a node of the cluster", _strange(error))
            return
        hired.question = None
        if hired.where:
            yield from self._heard(hired, answer)
        else:
            yield from self._met(hired, **answer)

    def _met(self, hired: _Hired, where: str, versions: dict[str, str]) -> Iterator[Event]:
        """Let an actor that has a place make its worker, if it is as we are."""
        hired.where = where
        others = [
            f"{name} {there} (here {self._versions.get(name)})"
            for name, there in versions.items()
            if there != self._versions.get(name)
        ]
        if others:
            self._dismiss(hired)
            error = f"It has {', '.join(others)}. Install the same versions on all nodes."
            yield Refused(hired.name, where, error)
        else:
            self._ask(hired, asdict(self._recruit))

    def _heard(self, hired: _Hired, answer: dict[str, Any]) -> Iterator[Event]:
        event, units = answer.pop("event", None), answer.pop("units", 0)
        if units:
            self.heard(hired.name, units)
        if event == "joined":
            yield Joined(hired.name, hired.where)
        elif event == "refused":
            self._dismiss(hired)
            yield Refused(hired.name, hired.where, **answer)
        elif event is not None and hired.task is not None:
            task, hired.task = hired.task, None
            if event == "finished":
                self._idle_losses[hired.place] = 0
            kind = Finished if event == "finished" else Failed
            yield kind(hired.name, task, **answer)

    def _vacated(self, hired: _Hired, reason: str) -> Lost:
        """Return the loss, after which the place is filled again."""
        delay = min(DELAY * 2 ** min(self._idle_losses[hired.place], 16), LONGEST_DELAY)
        self._idle_losses[hired.place] += 1
        self._empty[hired.place] = self.now() + delay
        return Lost(hired.name, reason)

    def _dismiss(self, hired: _Hired) -> None:
        """Let an actor go; one that only cannot be reached must not work on either."""
        del self._hired[hired.name]
        with suppress(Exception):  # it may be dead, or Ray may be
            self._ray.kill(hired.actor)

    def _tell_placeless(self) -> None:
        """Say, once, that workers have waited long for a node that can take them."""
        n = sum(not hired.where for hired in self._hired.values())
        if n == 0:
            self._placeless_since = None
        elif self._placeless_since is None:
            self._placeless_since = self.now()
        elif self.now() - self._placeless_since > PLACELESS:
            self._placeless_since = float("inf")
            free, all_ = self._ray.available_resources(), self._ray.cluster_resources()
            there = ", ".join(
                f"{free.get(name, 0):g} of {counted(all_.get(name, 0), f'{name}s')}"
                for name in ("CPU", "GPU")
            )
            self._progress.say(
                f"Workers that wait for a node with {counted(self._threads, 'CPUs')} and"
                f" {counted(self._gpus, 'GPUs')} to spare: {n} of {self.size}. Free on the"
                f" cluster: {there}. They join when there is one."
            )


def _reason(error: Exception) -> str:
    """Return in one line why an actor is gone: what Ray says after its list of ids."""
    _, _, told = str(error).rpartition("\nThe actor ")
    told, _, _ = f"The actor {told}".partition("Some common causes include")
    reason = " ".join((told if "\nThe actor " in str(error) else str(error)).split())
    return reason if len(reason) <= LONGEST_REASON else reason[:LONGEST_REASON] + " …"


def _strange(error: Exception) -> str:
    """Return why an actor could not be made; the last line of a traceback says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (
        f"{lines[-1] if lines else type(error).__name__}. Can the node import ffmem?"
        " Install the same version there as here."
    )
