"""A crew on a simulated clock: thousands of workers, and any fault, in the time of their events.

    seconds of a task = its size / (speed of its kind × the worker's own factor)

Workers of one node die together. A death is heard of a little later, and another worker takes the
place after a start-up. Leader and schedule run on it as they are. The same seed gives the same
events in the same order.
"""

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ffmem.cluster.crew import Event, Failed, Finished, Joined, Lost
from ffmem.cluster.task import Task

HOUR = 3600.0


@dataclass(frozen=True)
class Faults:
    """What goes wrong, and how often; nothing by itself."""

    deaths: float = 0.0
    """Of a worker, per hour."""
    node_deaths: float = 0.0
    """Of a node with all its workers, per hour."""
    failures: float = 0.0
    """Probability that a task raises an error; another try may go well."""
    hangs: float = 0.0
    """Probability that a worker never comes back from a task."""
    slow: float = 0.0
    """Share of slow workers."""
    slowness: float = 4.0
    """How many times as long they take."""


@dataclass(frozen=True)
class Place:
    """Where the workers live, and how fast they are."""

    speeds: Mapping[str, float]
    """Units per second of an ordinary worker, by the kind of a task."""
    spread: float = 0.1
    """How workers differ: standard deviation of the logarithm of their speeds."""
    jitter: float = 0.02
    """How the times of equal tasks differ on one worker, likewise."""
    node: int = 8
    """Workers of a node."""
    start_up: float = 60.0
    """Seconds until a worker has loaded its model."""
    notice: float = 10.0
    """Seconds until a death is heard of."""
    per_event: float = 0.0
    """Seconds that the leader takes for an event: what happens meanwhile has to wait."""


@dataclass
class Seen:
    """What a crew went through so far."""

    given: int = 0
    finished: int = 0
    failed: int = 0
    deaths: int = 0
    """Of workers, one by one or with their node."""
    cut_short: int = 0
    """Tasks that were under way when their worker died."""
    hanging: int = 0
    """Workers that hang, those that died of it aside."""
    busy: float = 0.0
    """Seconds of finished tasks, all workers together."""


@dataclass
class _Worker:
    """One life of a worker."""

    name: str
    node: int
    factor: float
    task: Task | None = None
    begun: float = 0.0
    is_alive: bool = True
    hangs: bool = False


class Simulated:
    """Workers that pass the time of their tasks on a clock of their own."""

    def __init__(
        self, size: int, place: Place, faults: Faults | None = None, seed: int = 0
    ) -> None:
        self.size = size
        self.place = place
        self.faults = faults or Faults()
        self.seed = seed
        self.heard: Callable[[str, int], None] = lambda worker, n: None
        self.watch: Callable[[float, Event], None] = lambda at, event: None
        """Is told of every event, for whoever wants a log."""
        self.is_poison: Callable[[Task], bool] = lambda task: False
        """Whether a task raises an error every time."""
        self._random = random.Random(seed)
        self._clock = 0.0
        self._owed = 0
        """Events that the leader has taken and not yet spent its time on."""
        self._n_pushed = self._n_lives = 0
        self._heap: list[tuple[float, int, Callable[[], Event | None]]] = []
        self._workers: dict[str, _Worker] = {}
        self._nodes: list[set[str]] = [set() for _ in range(-(-size // place.node))]
        self.seen = Seen()
        self.power = 0.0
        """Ordinary workers that those of the beginning are worth together."""
        for number in range(size):
            self.power += self._hire(number // place.node, place.start_up)
        if self.faults.node_deaths:
            for node in range(len(self._nodes)):
                self._await_node_death(node)

    def now(self) -> float:
        """Return the simulated seconds since the crew was called."""
        return self._clock

    def give(self, worker: str, task: Task) -> None:
        """Let a worker begin a task: its end is known at once, and told in its time."""
        one = self._workers.get(worker)
        self.seen.given += 1
        if one is None:
            return  # it is dead, and nobody has heard of it yet
        if one.task is not None:
            raise ValueError(f"{worker} has a task already: {one.task.key}.")
        one.task, one.begun = task, self._clock
        if self._random.random() < self.faults.hangs:
            one.hangs = True
            self.seen.hanging += 1
            return
        pace = self.place.speeds[task.kind] * one.factor
        seconds = max(task.size, 1) / pace * self._random.lognormvariate(0.0, self.place.jitter)
        if self.is_poison(task) or self._random.random() < self.faults.failures:
            self._after(seconds * self._random.random(), lambda: self._fail(one))
        else:
            self._after(seconds, lambda: self._finish(one))

    def wait(self, seconds: float) -> Sequence[Event]:
        """Return what has happened; move the clock to the first event, or so far at most."""
        self._clock += self._owed * self.place.per_event
        self._owed = 0
        limit = self._clock + seconds
        events: list[Event] = []
        while self._heap and self._heap[0][0] <= (self._clock if events else limit):
            at, _, happen = heapq.heappop(self._heap)
            self._clock = max(self._clock, at)
            if (event := happen()) is not None:
                events.append(event)
                self.watch(self._clock, event)
        if not events:
            self._clock = limit
        self._owed = len(events)
        return events

    def dismiss(self, worker: str) -> None:
        """End a worker."""
        if (one := self._workers.get(worker)) is not None:
            self._die(one)

    def close(self) -> None:
        """Nobody was started."""

    def _after(self, seconds: float, happen: Callable[[], Event | None]) -> None:
        heapq.heappush(self._heap, (self._clock + seconds, self._n_pushed, happen))
        self._n_pushed += 1

    def _hire(self, node: int, seconds: float) -> float:
        """Let a new worker join after so long; return how fast it is."""
        number, self._n_lives = self._n_lives, self._n_lives + 1
        factor = self._random.lognormvariate(0.0, self.place.spread)
        if self._random.random() < self.faults.slow:
            factor /= self.faults.slowness
        one = _Worker(f"worker-{number}", node, factor)
        self._after(seconds, lambda: self._join(one))
        return factor

    def _join(self, one: _Worker) -> Event:
        self._workers[one.name] = one
        self._nodes[one.node].add(one.name)
        if self.faults.deaths:
            lifetime = self._random.expovariate(self.faults.deaths / HOUR)
            self._after(lifetime, lambda: self._die(one))
        return Joined(one.name, f"node-{one.node}")

    def _finish(self, one: _Worker) -> Event | None:
        if not one.is_alive or one.task is None:
            return None
        task, one.task = one.task, None
        self.seen.finished += 1
        self.seen.busy += self._clock - one.begun
        return Finished(one.name, task, {})

    def _fail(self, one: _Worker) -> Event | None:
        if not one.is_alive or one.task is None:
            return None
        task, one.task = one.task, None
        self.seen.failed += 1
        return Failed(one.name, task, "RuntimeError: simulated")

    def _die(self, one: _Worker) -> None:
        """End a worker's life now; that is heard of later, and another one comes."""
        if not one.is_alive:
            return
        one.is_alive = False
        del self._workers[one.name]
        self._nodes[one.node].discard(one.name)
        self.seen.deaths += 1
        self.seen.cut_short += one.task is not None
        self.seen.hanging -= one.hangs
        self._after(self.place.notice, lambda: Lost(one.name, "simulated death"))
        self._hire(one.node, self.place.notice + self.place.start_up)

    def _await_node_death(self, node: int) -> None:
        seconds = self._random.expovariate(self.faults.node_deaths / HOUR)
        self._after(seconds, lambda: self._die_with_node(node))

    def _die_with_node(self, node: int) -> None:
        for name in sorted(self._nodes[node]):
            self._die(self._workers[name])
        self._await_node_death(node)
