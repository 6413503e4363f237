"""Pieces: tasks that need nothing of each other, each of which leaves one file of arrays.

    arrays laid out by the leader ─► task ─► arrays under the task's own name

The name of what is laid out holds the digest of its content, and the names of outcomes follow from
it. So a piece whose outcome lies in the shared folder is done, whoever did it and when.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy import ndarray

from ffmem.cluster.shared import SharedFolder
from ffmem.cluster.task import Task
from ffmem.errors import FfmemError, StoreError

Arrays = dict[str, ndarray]

OUTCOME = "outcome"
"""The argument of a task that names the file it leaves."""


class Pieces:
    """A piece of work for a leader: those tasks whose outcome is not there yet, the largest first.

    All are of one kind.
    """

    def __init__(self, shared: SharedFolder, phase: str, unit: str, tasks: Sequence[Task]) -> None:
        self.phase, self.unit = phase, unit
        self.kind = tasks[0].kind
        self.units = sum(task.size for task in tasks)
        left = [task for task in tasks if not shared.has(task.arguments[OUTCOME])]
        self.left = sorted(left, key=lambda task: -task.size)
        self.units_done = self.units - sum(task.size for task in left)

    def tasks(self) -> Iterator[Task]:
        """Return what is left."""
        return iter(self.left)

    def finished(self, task: Task, result: Mapping[str, Any]) -> Sequence[Task]:
        """Nothing follows."""
        return []

    def given_up(self, task: Task, error: str) -> Sequence[Task]:
        """All pieces are needed."""
        raise FfmemError(f"{task.key[:1].upper()}{task.key[1:]} could not be done: {error}")


def lay_out(shared: SharedFolder, what: str, arrays: Arrays) -> str:
    """Put what tasks need into the shared folder, unless it is there; return its name."""
    name = f"{what}-{_digest(arrays)}.npz"
    if not shared.has(name):
        write_arrays(shared, name, arrays)
    return name


def write_arrays(shared: SharedFolder, name: str, arrays: Arrays) -> None:
    """Commit arrays of numbers, truth values or short texts to a file."""
    with shared.writing(name) as path, path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def read_arrays(shared: SharedFolder, name: str) -> Arrays:
    """Return the arrays of a file."""
    try:
        with shared.reading(name) as file, np.load(file, allow_pickle=False) as found:
            return {key: found[key] for key in found.files}
    except FileNotFoundError:
        raise StoreError(
            f"{name} is not in {shared.shown} any more, or cannot be seen from here."
            " Run the same command again, in a folder that all workers share."
        ) from None
    except (ValueError, EOFError, BadZipFile) as error:
        raise StoreError(
            f"{name} in {shared.shown} is damaged ({error}). Delete it, and run the same command"
            " again."
        ) from None


def _digest(arrays: Arrays) -> str:
    """Return a name for the content of some arrays."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        one = np.ascontiguousarray(arrays[name])
        found.update(json.dumps([name, one.dtype.str, one.shape]).encode())
        found.update(one.data)
    return found.hexdigest()[:16]
