"""Where the long parts of a study are done, and by whom.

    OUT/.working/FINGERPRINT/ or a folder in --shared:    orders.json, what is laid out, outcomes

The fingerprint names what decides the numbers beside what is laid out: weights, dtype, device,
threads, versions. So a study that was stopped goes on with what lies there, and another one never
takes it. Everything is removed when the study has come to its end.
"""

import fcntl
import hashlib
import json
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import torch

from ffmem.cluster.crew import Crew, Recruit
from ffmem.cluster.here import Here
from ffmem.cluster.hiring import Hiring
from ffmem.cluster.leader import Leader
from ffmem.cluster.pieces import OUTCOME, Arrays, Pieces, lay_out, read_arrays
from ffmem.cluster.shared import SharedFolder
from ffmem.cluster.task import Task
from ffmem.errors import FfmemError
from ffmem.experiments.study_worker import StudyOrders, StudyWorker
from ffmem.files import storage_errors
from ffmem.models.memories import IN_MEMORY, Memories
from ffmem.progress import Progress

WORKING = ".working"
"""Beside what is measured."""

VERSIONS = ("ffmem", "torch", "transformers", "numpy")


@dataclass(frozen=True)
class Labour:
    """Who does the work of a study, and where; of it, only the threads decide any bits."""

    hiring: Hiring = field(default_factory=Hiring)
    folder: Path | None = None
    """Where what is measured is kept until the end; None for a temporary folder."""
    shared: str | None = None
    """Path or URL of a folder that all workers see, if they do not see the other one."""
    device: str = "auto"
    threads: int | None = None

    @property
    def n_threads(self) -> int:
        """How many threads each worker takes."""
        return self.threads or self.hiring.threads or torch.get_num_threads()


class Workplace:
    """Gives tasks to a crew that is hired with the first of them; close it in the end."""

    def __init__(self, memories: Memories, labour: Labour, progress: Progress) -> None:
        if not labour.hiring.is_here and memories.source == IN_MEMORY:
            raise FfmemError(
                "A model in memory cannot be handed to other processes. Save it, and give its"
                " folder."
            )
        self.memories = memories
        self.labour = labour
        self.progress = progress
        self.n_threads = labour.n_threads
        self._hired = ExitStack()
        self._lock: IO[str] | None = None

    def lay_out(self, what: str, arrays: Arrays) -> str:
        """Put what tasks need where workers see it; return its name."""
        return lay_out(self.shared, what, arrays)

    def task(self, key: str, kind: str, size: int, of: str, **arguments: Any) -> Task:
        """Return a task on what was laid out; further arguments tell its outcome from others."""
        name = "-".join([kind, *map(str, arguments.values()), of])
        return Task(key, kind, size, {"of": of, OUTCOME: name, **arguments})

    def outcomes(self, phase: str, unit: str, tasks: Sequence[Task]) -> Iterator[Arrays]:
        """Do what is not done yet; return the outcome of every task, in order."""
        pieces = Pieces(self.shared, phase, unit, tasks)
        if pieces.units_done:
            self.progress.say(
                f"Going on: {pieces.units_done:,} of {pieces.units:,} {unit} are measured already."
            )
        if pieces.left:
            self.leader.lead(pieces)
        return (read_arrays(self.shared, task.arguments[OUTCOME]) for task in tasks)

    @cached_property
    def shared(self) -> SharedFolder:
        """The folder of this study, with its orders."""
        shared = self._shared()
        StudyOrders(
            model=self.memories.source,
            hash=self.memories.fingerprint(),
            dtype=str(self.memories.dtype).removeprefix("torch."),
            device=self.labour.device,
            threads=self.n_threads,
        ).write(shared)
        return shared

    def _shared(self) -> SharedFolder:
        if self.labour.shared is None:
            return SharedFolder.at(self.folder, self.fingerprint)
        # Another study of the model that meets there must not lose what this one clears.
        own = hashlib.sha256(str(self.folder.absolute()).encode()).hexdigest()[:8]
        return SharedFolder.at(self.labour.shared, f"ffmem-study-{self.fingerprint}-{own}")

    @cached_property
    def folder(self) -> Path:
        """The working folder of this machine; who works there holds its lock."""
        folder = self.labour.folder
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="ffmem-study-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            return folder
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        return folder

    @property
    def fingerprint(self) -> str:
        """A name for everything that decides the outcome of what is laid out."""
        decides = {
            "model": self.memories.fingerprint(),
            "dtype": str(self.memories.dtype),
            "device": self.memories.device.type,
            "threads": self.n_threads,
            "versions": {name: version(name) for name in VERSIONS},
        }
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]

    @cached_property
    def leader(self) -> Leader:
        """Who leads the crew, hired at the first look."""
        return Leader(self._crew(), self.progress)

    def _crew(self) -> Crew:
        hiring = self.labour.hiring
        if hiring.is_here:
            return Here(StudyWorker(self.memories, self.shared, self.n_threads))
        recruit = Recruit("ffmem.experiments.study_worker:hired", {"shared": self.shared.place})
        hired = hiring.crew(recruit, self.n_threads, self.folder / "logs")
        return self._hired.enter_context(hired)

    def close(self, is_done: bool) -> None:
        """Let the crew go; if all was measured, remove what was kept on the way."""
        self._hired.close()
        if self._lock is None:
            return  # nothing was begun, or in a temporary folder, which goes with this object
        with self._lock:
            if not is_done:
                return
            if self.labour.shared is not None:
                self.shared.clear()
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # another study works here; the last one tidies up
            SharedFolder(self.folder).clear()
