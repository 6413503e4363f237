"""The worker of a study: does the long parts of its experiments, piece by piece.

    section5   a group of prefixes       → what the model does on each
    removal    a layer's sequences       → the coefficients that were read
    values     a layer's heads           → what its values predict

It is made once per process, with the model loaded, and does tasks in any order. What comes out
depends on the model, on what was laid out, and on the number of threads, which is the same for all.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ffmem.cluster.orders import Orders
from ffmem.cluster.pieces import OUTCOME, Arrays, read_arrays, write_arrays
from ffmem.cluster.shared import SharedFolder
from ffmem.cluster.task import Task
from ffmem.errors import ModelError
from ffmem.experiments.heads import Heads
from ffmem.experiments.inference import Pass, Places, groups
from ffmem.experiments.sequences import measure
from ffmem.experiments.sharing import read_sample, read_sequences
from ffmem.experiments.value_readings import read_values
from ffmem.experiments.value_tops import AdaptiveTops, PlainTops, ValueTops
from ffmem.models.memories import Memories
from ffmem.models.threads import threads
from ffmem.progress import Step


@dataclass(frozen=True, kw_only=True)
class StudyOrders(Orders):
    """What all workers of a study do alike."""

    model: str
    hash: str
    """Of the model's weights: a worker with others is refused."""
    dtype: str
    device: str
    threads: int


class StudyWorker:
    """Does the tasks of one study with one model."""

    def __init__(self, memories: Memories, shared: SharedFolder, n_threads: int) -> None:
        self.memories = memories
        self.shared = shared
        self.n_threads = n_threads
        self._sample = ""
        """The name of the sample that was last looked at."""
        self._pass: Pass
        self._groups: list[list[Places]]

    def do(self, task: Task, step: Step) -> dict[str, Any]:
        """Do a task with the study's number of threads."""
        doing = {"section5": self._section5, "removal": self._removal, "values": self._values}
        with threads(self.n_threads):
            found = doing[task.kind](task.arguments, step)
        write_arrays(self.shared, task.arguments[OUTCOME], found)
        return {}

    def _section5(self, asked: dict[str, Any], step: Step) -> Arrays:
        if asked["of"] != self._sample:
            self._begin(read_arrays(self.shared, asked["of"]))
            self._sample = asked["of"]
        group = self._groups[asked["group"]]
        return self._pass.read(group).tables()

    def _begin(self, sample: Arrays) -> None:
        """Prepare for the groups of a sample."""
        drawn, start = read_sample(sample)
        tops = partial(_tops, self.memories, sample)
        parts = sample["parts"].tolist()
        self._pass = Pass(self.memories, parts, tops, sample["frequencies"])
        self._groups = list(groups(drawn, start, self.memories))

    def _removal(self, asked: dict[str, Any], step: Step) -> Arrays:
        sequences, start = read_sequences(read_arrays(self.shared, asked["of"]))
        return measure(self.memories, sequences, start, step)._asdict()

    def _values(self, asked: dict[str, Any], step: Step) -> Arrays:
        heads = Heads(**read_arrays(self.shared, asked["of"]))
        return read_values(self.memories, heads, asked["layer"])._asdict()


def _tops(memories: Memories, sample: Arrays, layer: int) -> ValueTops:
    """Return what the values of a layer promote."""
    if memories.head.adaptive:
        return AdaptiveTops(memories, layer)
    return PlainTops(sample["plain"][layer], sample["negative"][layer])


def hired(shared: str) -> StudyWorker:
    """Return a worker for the study whose shared folder this is, with its model loaded."""
    from ffmem.models.load import load

    folder = SharedFolder.at(shared)
    orders = StudyOrders.read(folder)
    torch.set_num_threads(orders.threads)
    memories = load(orders.model, dtype=orders.dtype, device=orders.device)
    if memories.fingerprint() != orders.hash:
        raise ModelError(
            f"The study was started with weights of hash {orders.hash}; {memories.source} has"
            f" {memories.fingerprint()} here. Use the same model everywhere."
        )
    return StudyWorker(memories, folder, orders.threads)
