"""Workers of detections that die or fail once, or always, at one task.

Each leaves a file `PID` in the folder of marks, and `TASK.N` at its Nth try of the chosen task.
"""

import os
import signal
from pathlib import Path

from ffmem.cluster.crew import Recruit
from ffmem.errors import ModelError


class Faulty:
    """Does what the true worker does, but for one task."""

    def __init__(self, worker, at, act, marks):
        self.worker, self.at, self.act, self.marks = worker, at, act, Path(marks)
        (self.marks / str(os.getpid())).touch()

    def do(self, task, step):
        if task.key == self.at:
            tries = len(list(self.marks.glob("try.*")))
            (self.marks / f"try.{tries}").touch()
            if self.act == "fail":
                raise ModelError("the weights are bewitched")
            if tries == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.worker.do(task, step)


def hired(shared, factory, at, act, marks):
    return Faulty(Recruit(factory, {"shared": shared}).make(), at, act, marks)


def planting(at, act, marks):
    """Return what makes recruits of faulty workers, in place of `Recruit`."""
    marks.mkdir()

    def recruit(factory, arguments):
        more = {"factory": factory, "at": at, "act": act, "marks": str(marks)}
        return Recruit("tests.patterns.faulty:hired", arguments | more)

    return recruit


def pids(marks):
    return [int(path.name) for path in marks.iterdir() if path.name.isdigit()]
