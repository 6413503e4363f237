"""Workers for tests of `ffmem.parallel`: they leave files behind, and do harm when told."""

import os
import signal
import time
from pathlib import Path

import psutil

from ffmem.errors import FfmemError, ModelError, StoreError


class Worker:
    """Leaves a file per task in a folder."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.done = []
        with (self.folder / f"made-{os.getpid()}").open("a") as file:
            file.write("x")

    def work(self, n):
        time.sleep(0.01)
        with (self.folder / f"task-{n}").open("a") as file:
            file.write("x")
        self.done.append(n)

    def die(self, n):
        os.kill(os.getpid(), signal.SIGKILL)

    def die_once(self, n):
        """Kill the process, unless another one has died of this task."""
        marker = self.folder / f"died-{n}"
        if not marker.exists():
            marker.touch()
            self.die(n)
        self.work(n)

    def fail(self, n):
        raise FfmemError(f"Task {n} cannot be done: ✗.")

    def meet(self, n):
        """Wait until there are n workers."""
        end = time.monotonic() + 120
        while len(list(self.folder.glob("made-*"))) < n and time.monotonic() < end:
            time.sleep(0.02)

    def sleep(self, seconds):
        (self.folder / f"asleep-{os.getpid()}").touch()
        time.sleep(seconds)

    def flush(self):
        names = " ".join(map(str, self.done))
        (self.folder / f"flushed-{os.getpid()}").write_text(names)


def make_failing(folder):
    with (Path(folder) / "failures").open("a") as file:
        file.write("x")
    raise ModelError("There is no model here.")


def make_dying(folder):
    os.kill(os.getpid(), signal.SIGKILL)


def make_after_two_failures(folder):
    failures = Path(folder) / "failures"
    with failures.open("a") as file:  # two workers may start at once
        file.write("x")
    if failures.stat().st_size <= 2:
        raise StoreError("Not yet.")
    return Worker(folder)


def gone(pids, seconds=15.0):
    """Return whether some processes are no more, or are within some seconds."""
    end = time.monotonic() + seconds
    while any(is_alive(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
