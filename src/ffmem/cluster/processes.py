"""A crew of processes of this machine: `Crew` over pipes, with nothing else to install.

Each worker is a fresh Python (`ffmem.cluster.process`) in a session of its own, so that Ctrl-C
reaches only who leads, and ends as soon as its leader does, however that comes about. A worker
that is lost is replaced under a new name, later and later while it gets nothing done.
"""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from typing import Any

from ffmem.cluster.crew import Event, Failed, Finished, Joined, Lost, Recruit, Refused
from ffmem.cluster.task import Task
from ffmem.errors import FfmemError

DELAY = 0.1
"""Seconds until a first replacement; each further one without a finished task takes twice that."""

LONGEST_DELAY = 30.0

LOOK = 0.5
"""Seconds between looks for a dead process whose pipe somebody else holds open."""

GRACE = 2.0
"""Seconds that processes may take to end when asked."""

LAST_LINES, LAST_BYTES = 5, 2000
"""Of what a process wrote that are told when it dies."""


class _Child:
    """One process, its two pipes and its log."""

    def __init__(self, name: str, place: int, recruit: Recruit, log: Path | None) -> None:
        self.name = name
        self.place = place
        """Which of the crew's places it holds."""
        self.task: Task | None = None
        self.has_refused = False
        self.is_silent = False
        """Whether its pipe has ended."""
        self._buffer = b""
        with ExitStack() as begun:
            self._log = _opened(log, begun)
            self._log_begin = os.fstat(self._log).st_size
            source, self._down = _pipe(begun)
            self.up, out = _pipe(begun)
            os.set_blocking(self.up, False)
            self.process = self._started(source, out)
            os.close(source)
            os.close(out)
            begun.pop_all()
        self.send({"factory": recruit.factory, "arguments": recruit.arguments})

    def _started(self, source: int, out: int) -> "subprocess.Popen[bytes]":
        """Return the process: the same Python with the same modules, deaf to the terminal."""
        own = ["-u", "-P", "-m", "ffmem.cluster.process", str(source), str(out), str(os.getpid())]
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        return subprocess.Popen(
            [sys.executable, *own],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(source, out),
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def send(self, message: dict[str, Any]) -> None:
        """Write a message; to a dead process, in vain."""
        line = json.dumps(message).encode() + b"\n"
        with suppress(BrokenPipeError):
            while line:
                line = line[os.write(self._down, line) :]

    def messages(self) -> Iterator[dict[str, Any]]:
        """Give the whole messages that have come."""
        with suppress(BlockingIOError):
            while not self.is_silent:
                chunk = os.read(self.up, 1 << 16)
                self.is_silent = not chunk
                self._buffer += chunk
        *lines, self._buffer = self._buffer.split(b"\n")
        yield from map(json.loads, lines)

    @property
    def is_dead(self) -> bool:
        return self.process.poll() is not None

    def signal(self, signal: Signals) -> None:
        """Send a signal to the process and to those that it has started."""
        with suppress(ProcessLookupError, PermissionError):  # macOS forbids it on the dead
            os.killpg(self.process.pid, signal)

    def end(self, seconds: float) -> None:
        """Wait for the end, so long at most: a process that waits for a dead disk has none."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    @property
    def reason(self) -> str:
        """Why it ended, and its last words."""
        code = self.process.returncode
        if code is None:
            how = "it could not be heard any more"
        elif code < 0:
            names = {signal.value: signal.name for signal in Signals}  # real-time ones have none
            how = f"killed by {names.get(-code, f'signal {-code}')}"
            how += ", as the system does when memory runs out" if -code == SIGKILL else ""
        else:
            how = f"ended with exit code {code}"
        size = os.fstat(self._log).st_size
        begin = max(self._log_begin, size - LAST_BYTES)
        text = os.pread(self._log, size - begin, begin).decode("utf-8", "replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()][-LAST_LINES:]
        return f"{how}; its last words: {' | '.join(lines)}" if lines else how

    def close(self) -> None:
        """Let go of pipes and log."""
        for descriptor in (self._log, self._down, self.up):
            os.close(descriptor)


def _opened(log: Path | None, begun: ExitStack) -> int:
    """Return a log to append to, without a name if nobody asked for one."""
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile("a+b") if log is None else log.open("a+b") as file:
        descriptor = os.dup(file.fileno())
    begun.callback(os.close, descriptor)
    return descriptor


def _pipe(begun: ExitStack) -> tuple[int, int]:
    """Return both ends of a pipe, which are closed if what was begun fails."""
    ends = os.pipe()
    for end in ends:
        begun.callback(os.close, end)
    return ends


class Processes:
    """A crew of n processes. Close it, or use it in a `with`."""

    def __init__(self, recruit: Recruit, n: int, logs: Path | None = None) -> None:
        if n < 1:
            raise FfmemError(f"{n} workers were asked for. Ask for one at least.")
        self.size = n
        self.heard: Callable[[str, int], None] = lambda worker, units: None
        self._recruit = recruit
        self._logs = logs
        self._n_started = 0
        self._children: dict[str, _Child] = {}
        self._idle_losses = [0] * n
        """Per place: losses since a task was finished there."""
        self._empty = dict.fromkeys(range(n), 0.0)
        """Places without a process, and when to fill them."""
        self._selector = selectors.DefaultSelector()
        self._unsaid: list[Event] = []
        try:
            self._fill()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def now(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    def give(self, worker: str, task: Task) -> None:
        """Send a task to a worker; if that has died meanwhile, `wait` tells."""
        child = self._children[worker]
        child.task = task
        child.send(task.to_dict())

    def dismiss(self, worker: str) -> None:
        """End a worker that does not come back from its task."""
        if (child := self._children.get(worker)) is not None:
            child.signal(SIGKILL)

    def wait(self, seconds: float) -> Sequence[Event]:
        """Return what has happened; wait so long for a first event, at most."""
        end = self.now() + seconds
        while True:
            self._fill()
            self._unsaid.extend(self._arrived(self._patience(end)))
            if self._unsaid or self.now() >= end:
                events, self._unsaid = self._unsaid, []
                return events

    def _patience(self, end: float) -> float:
        """Return how long to wait for a message: until something else is due."""
        if self._unsaid:
            return 0.0
        due = min([end, *self._empty.values()]) - self.now()
        return min(max(due, 0.0), LOOK)

    def _fill(self) -> None:
        """Start a process at every place that is due."""
        for place, due in list(self._empty.items()):
            if self.now() < due:
                continue
            self._n_started += 1
            name = f"w{self._n_started}"
            try:
                child = _Child(name, place, self._recruit, self._log_of(self._n_started))
            except OSError as error:
                reason = f"no process could be started: {error}"
                self._unsaid.append(self._vacated(name, place, reason))
                continue
            del self._empty[place]
            self._children[name] = child
            self._selector.register(child.up, selectors.EVENT_READ, name)

    def _log_of(self, number: int) -> Path | None:
        return None if self._logs is None else self._logs / f"worker-{number}.log"

    def _vacated(self, name: str, place: int, reason: str) -> Lost:
        """Return the loss, after which the place is filled again."""
        delay = min(DELAY * 2 ** min(self._idle_losses[place], 16), LONGEST_DELAY)
        self._idle_losses[place] += 1
        self._empty[place] = self.now() + delay
        return Lost(name, reason)

    def _arrived(self, seconds: float) -> Iterator[Event]:
        """Give what has come from all children; wait so long for a first message."""
        ready = {key.data for key, _ in self._selector.select(seconds)}
        for name, child in list(self._children.items()):
            is_dead = child.is_dead  # asked before its pipe is emptied: nothing comes after that
            if name in ready or is_dead:
                for message in child.messages():
                    yield from self._understood(child, message)
            if is_dead or child.is_silent:
                yield from self._buried(child)

    def _understood(self, child: _Child, message: dict[str, Any]) -> Iterator[Event]:
        event, task = message.pop("event"), child.task
        if event == "step":
            self.heard(child.name, message["units"])
        elif event == "joined":
            yield Joined(child.name, **message)
        elif event == "refused":
            child.has_refused = True
            yield Refused(child.name, **message)
        elif task is not None:
            child.task = None
            if event == "finished":
                self._idle_losses[child.place] = 0
            kind = Finished if event == "finished" else Failed
            yield kind(child.name, task, **message)

    def _buried(self, child: _Child) -> Iterator[Event]:
        """Let a child go that is dead, or cannot be heard any more and so might as well be."""
        self._selector.unregister(child.up)
        del self._children[child.name]
        child.end(GRACE)  # its pipe ends a moment before the process does
        child.signal(SIGKILL)  # and what it has started itself
        child.end(GRACE)
        if not child.has_refused:
            yield self._vacated(child.name, child.place, child.reason)
        child.close()

    def close(self) -> None:
        """End all processes of this crew, whatever they do."""
        self._empty.clear()
        for signal in (SIGTERM, SIGKILL):
            for child in self._children.values():
                child.signal(signal)
            end = self.now() + GRACE
            for child in self._children.values():
                child.end(max(end - self.now(), 0.0))
        for child in self._children.values():
            child.close()
        self._children.clear()
        self._selector.close()
