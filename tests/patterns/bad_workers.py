"""Workers that die or do not start. A module of their own: their processes import nothing else."""

import os
import signal

from ffmem.errors import FfmemError
from ffmem.patterns.detect import LayerWorker


class DyingWorker(LayerWorker):
    """Kills its process when it first meets layer 1."""

    def examine(self, layer, shuffled):
        marker = self.folder / "died"
        if layer == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().examine(layer, shuffled)


class DeadlyWorker(LayerWorker):
    """Kills its process whenever it meets layer 1."""

    def examine(self, layer, shuffled):
        if layer == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().examine(layer, shuffled)


class FailingWorker(LayerWorker):
    """Cannot start."""

    def __init__(self, *arguments):
        raise FfmemError("There is no room here.")
