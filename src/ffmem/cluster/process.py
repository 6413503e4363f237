"""One worker in a process of its own: `python -m ffmem.cluster.process IN OUT PARENT`.

Tasks come and events go as lines of JSON on two pipes that were inherited, never on stdout, which
belongs to whatever libraries print:

    IN    {"factory", "arguments"}, then tasks            OUT    joined | refused, then
                                                                 step …, finished | failed

The worker lives no longer than whoever started it. The pipe's end tells a thread of that, in the
middle of a task too; should another process hold the pipe open, the parent's number does.
"""

import faulthandler
import json
import os
import selectors
import socket
import sys
import time
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

from ffmem.cluster.crew import Failed, Recruit, Worker
from ffmem.cluster.task import Task

PAUSE = 0.2
"""Seconds between two steps that are told; what is done meanwhile is summed up."""

LOOK = 1.0
"""Seconds between looks at the parent."""

Message = dict[str, Any]


class Speaker:
    """Writes events; with nobody left to hear them, the process ends."""

    def __init__(self, out: int) -> None:
        self._file = os.fdopen(out, "wb")
        self._lock = Lock()
        self._units = 0
        self._told = time.monotonic()

    def say(self, event: str, **content: Any) -> None:
        """Tell an event, after the steps that were kept back."""
        text = json.dumps({"event": event, **content})  # first: it may fail, and is then not said
        with self._lock:
            self._tell_units()
            self._write(text)

    def step(self, n: int) -> None:
        """Take note of units that are done, and tell them now and then."""
        with self._lock:
            self._units += n
            if time.monotonic() - self._told >= PAUSE:
                self._tell_units()

    def _tell_units(self) -> None:
        self._told = time.monotonic()
        units, self._units = self._units, 0
        if units:
            self._write(json.dumps({"event": "step", "units": units}))

    def _write(self, text: str) -> None:
        try:
            self._file.write(text.encode() + b"\n")
            self._file.flush()
        except BrokenPipeError:
            os._exit(0)


def listen(source: int, parent: int, heard: "SimpleQueue[Message]") -> None:
    """Pass on what comes; end the process with its parent."""
    buffer = b""
    with selectors.DefaultSelector() as selector:  # `select` would refuse descriptors over 1,023
        selector.register(source, selectors.EVENT_READ)
        while os.getppid() == parent:
            if not selector.select(LOOK):
                continue
            if not (chunk := os.read(source, 1 << 16)):
                break
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                heard.put(json.loads(line))
    os._exit(0)


def begin(recruit: Recruit, speaker: Speaker) -> Worker | None:
    """Return the worker; None, and why, if it cannot be made."""
    where = f"{socket.gethostname()}:{os.getpid()}"
    try:
        worker = recruit.make()
    except Exception as error:
        nothing = Task("start", "start", 0)
        speaker.say("refused", where=where, error=Failed.by("", nothing, error).error)
        return None
    speaker.say("joined", where=where)
    return worker


def do(worker: Worker, task: Task, speaker: Speaker) -> None:
    """Do one task, and say how it ended."""
    try:
        speaker.say("finished", result=worker.do(task, speaker.step))
    except Exception as error:
        failed = Failed.by("", task, error)
        speaker.say("failed", error=failed.error, of_place=failed.of_place, certain=failed.certain)


def main(arguments: list[str]) -> None:
    """Work until nobody wants it any more."""
    faulthandler.enable()  # the last words of a process that crashes
    source, out, parent = map(int, arguments)
    for descriptor in (source, out):
        os.set_inheritable(descriptor, False)  # a program that a task starts must not hold them
    speaker = Speaker(out)
    heard: SimpleQueue[Message] = SimpleQueue()
    Thread(target=listen, args=(source, parent, heard), daemon=True).start()
    worker = begin(Recruit(**heard.get()), speaker)
    while worker is not None:
        do(worker, Task(**heard.get()), speaker)


if __name__ == "__main__":
    main(sys.argv[1:])
