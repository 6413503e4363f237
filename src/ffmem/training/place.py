"""The folder of a run: new, unfinished or finished, and one process's at a time.

FOLDER/checkpoint/                            while it runs
FOLDER/training.json                          written last: the run is finished
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ffmem.errors import FfmemError, StoreError
from ffmem.files import locked, refuse_unwritable
from ffmem.training.checkpoint import FOLDER
from ffmem.training.record import TRAINING

TOKENIZER = ("dict.txt", "tokenizer.json", "tokenizer_config.json")
ASKED, PREPARED, STREAM = "asked.json", "prepared.json", "stream.safetensors"
SEAL = "prepared.sha256"
"""Of `PREPARED`, which decides how many steps there are and what the model card says."""


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Refuse to work in a folder that holds something else or that another process works in."""
    refuse_foreign(folder)
    new = not folder.exists()
    refuse_unwritable(folder)
    busy = f"Another process is training in {folder}. Wait for it, or choose another folder."
    with locked(folder / FOLDER / "lock", busy):
        try:
            yield
        except FfmemError:
            if new and not (folder / FOLDER / ASKED).exists():
                shutil.rmtree(folder)  # refused before it began: nothing is left of it
            raise


def refuse_foreign(folder: Path) -> None:
    """Raise unless a folder is free for a run, or one's already."""
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is a file. Choose a new or an empty folder for the model.")
    if not folder.exists() or is_finished(folder) or (folder / FOLDER).is_dir():
        return
    if any(folder.iterdir()):
        raise StoreError(
            f"{folder} holds something that ffmem did not train. Choose a new or an empty folder."
        )


def is_finished(folder: Path) -> bool:
    """Return whether a run has ended in a folder."""
    return (folder / TRAINING).is_file()


def clear(folder: Path) -> None:
    """Remove the checkpoint of a finished run."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
