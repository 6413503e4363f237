"""Small workers for tests of crews, made by name in other processes. Never torch here.

A task's `arguments["act"]` says what happens (default `count`), in its first `arguments["times"]`
tries only, if that is given; later tries count. With `arguments["marks"]`, a folder, every try
leaves a file `KEY.TRY` there that holds the pid.

    Recruit("tests.cluster.workers:hired")                      does tasks
    Recruit("tests.cluster.workers:refusing", {"error": "…"})   raises an FfmemError instead
    Recruit("tests.cluster.workers:broken")                     raises a ValueError instead
    Recruit("tests.cluster.workers:dying")                      dies before it is made
"""

import os
import signal
import sys
import time
from pathlib import Path

from ffmem.cluster.task import Task
from ffmem.errors import CorpusError, ModelError, StorageFull

REPOSITORY = Path(__file__).parents[2]


class Acting:
    """Does what a task's arguments say."""

    def __init__(self, shared=None):
        if shared is not None:
            from ffmem.cluster.shared import SharedFolder  # half of a worker's start

            self.shared = SharedFolder.at(shared)
        self.n_done = 0

    def do(self, task, step):
        try_ = mark(task)
        act = task.arguments.get("act", "count")
        if try_ > task.arguments.get("times", sys.maxsize):
            act = "count"
        return {"key": task.key, "pid": os.getpid(), "try": try_} | getattr(self, act)(task, step)

    def count(self, task, step):
        """Tell every unit on its own."""
        for _ in range(task.size):
            step(1)
        self.n_done += 1
        return {"n_done": self.n_done}

    def sleep(self, task, step):
        """Take `seconds`, in as many parts as the task has units."""
        for _ in range(task.size):
            time.sleep(task.arguments["seconds"] / task.size)
            step(1)
        return {}

    def hang(self, task, step):
        """Never come to an end."""
        step(task.size // 2)
        while True:
            time.sleep(60)

    def freeze(self, task, step):
        """Be stopped whole: no thread runs, no signal but SIGKILL and SIGCONT is heard."""
        os.kill(os.getpid(), signal.SIGSTOP)
        return {}

    def stubborn(self, task, step):
        """Never come to an end, and not mind being asked to."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return self.hang(task, step)

    def kill(self, task, step):
        """Die as when memory runs out."""
        print("these are my last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def exit(self, task, step):
        """Leave without a word."""
        os._exit(7)

    def leave(self, task, step):
        """Leave as programs do."""
        sys.exit("I have had enough")

    def fail(self, task, step):
        """Raise what may be an accident."""
        raise RuntimeError(task.arguments.get("error", "a moment's trouble"))

    def refuse(self, task, step):
        """Raise an answer of ours."""
        raise CorpusError(task.arguments.get("error", "this cannot be read"))

    def full(self, task, step):
        """Raise what is the shared folder's fault."""
        raise StorageFull("No room left on the disk.")

    def chatter(self, task, step):
        """Print what no program can read, to both ends."""
        for stream in (sys.stdout, sys.stderr):
            stream.buffer.write(b'{"event": "finished"}\n\xff\xfe garbage \x00\n' * 2000)
            stream.flush()
        os.write(1, b"straight to the descriptor\n")
        return {}

    def big(self, task, step):
        """Return more than a pipe holds."""
        return {"text": "å" * task.arguments["length"]}

    def unspeakable(self, task, step):
        """Return what is no JSON."""
        return {"set": {1, 2}}

    def write(self, task, step):
        """Write a file to the shared folder: the task's key, as text."""
        self.shared.write_text(f"{task.key}.txt", task.key)
        step(task.size)
        return {}


def mark(task):
    """Return which try of the task this is, from 1; without a folder for marks it is the first."""
    if "marks" not in task.arguments:
        return 1
    try_ = 1
    while True:
        path = Path(task.arguments["marks"]) / f"{task.key}.{try_}"
        try:
            with path.open("x") as file:
                file.write(str(os.getpid()))
            return try_
        except FileExistsError:
            try_ += 1


def tasks(n, act="count", *, size=10, kind="read", **arguments):
    """Return n tasks of one kind."""
    return [Task(f"{act}-{i:03d}", kind, size, {"act": act} | arguments) for i in range(n)]


def hired(shared=None):
    return Acting(shared)


def refusing(error="there is no such model"):
    raise ModelError(error)


def broken():
    raise ValueError("wörter sind zu viel: 語")


def dying():
    print("no place to live", file=sys.stderr, flush=True)
    os._exit(3)


def dying_at_times(marks, times):
    """Die in the first `times` processes, work in later ones."""
    if mark(Task("start", "start", 1, {"marks": marks})) <= times:
        dying()
    return Acting()


class Gathering:
    """A work whose tasks are given, and that remembers what became of them."""

    phase, unit = "reading", "tokens"

    def __init__(self, given, kind="read", units_done=0):
        self.given, self.kind = list(given), kind
        self.units_done = units_done
        self.units = units_done + sum(task.size for task in self.given if task.kind == kind)
        self.results = {}
        self.lost = {}

    def tasks(self):
        yield from self.given

    def finished(self, task, result):
        assert task.key not in self.results, "done twice"
        self.results[task.key] = result
        return []

    def given_up(self, task, error):
        assert task.key not in self.lost, "given up twice"
        self.lost[task.key] = error
        return []


def is_alive(pid):
    """Whether a process runs; one that is dead and not yet buried does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:  # gone meanwhile, or no Linux
        return not stat.parent.parent.exists()


def gone(pids, seconds=10.0):
    """Return whether all processes end within some seconds."""
    end = time.monotonic() + seconds
    while any(map(is_alive, pids)):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
