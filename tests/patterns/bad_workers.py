"""Workers that die or do not start. A module of their own: their processes import nothing else."""

import os
import signal

from ffmem.errors import FfmemError
from ffmem.patterns.detect import LayerWorker, make_worker


class DyingWorker(LayerWorker):
    """Kills its process when it first meets layer 1, or always."""

    always = False

    def examine(self, layer, shuffle_seed):
        marker = self.folder / "died"
        if layer == 1 and (self.always or not marker.exists()):
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().examine(layer, shuffle_seed)


def dying(**arguments):
    made = make_worker(**arguments)
    return DyingWorker(made.examiner, made.folder)


def deadly(**arguments):
    made = dying(**arguments)
    made.always = True
    return made


def failing(**arguments):
    raise FfmemError("There is no room here.")
