"""How an index stands: finished, being made, or stopped on the way. No model is loaded for it."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ffmem.cluster.shared import SharedFolder
from ffmem.cluster.status import NAME, STALE, Status, read_status
from ffmem.cluster.telling import told
from ffmem.errors import StoreError
from ffmem.indexing.store import Index

PLACE = "shared.txt"
"""In the working folder: where the run's workers meet, if not there."""


@dataclass(frozen=True)
class Standing:
    """What is known of an index's making."""

    folder: str
    state: str
    """finished, preparing, prepared, running, stopped, or silent: not heard of for a while."""
    status: Status | None
    told: str

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return self.state == "finished"

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        status = None if self.status is None else asdict(self.status)
        return {"folder": self.folder, "state": self.state, "status": status}


def standing(folder: Path) -> Standing:
    """Return how an index stands."""
    working = folder / "segments"
    if (folder / "manifest.json").exists():
        return Standing(str(folder), "finished", None, f"Finished: {Index(folder)!r}")
    if not working.is_dir():
        raise StoreError(
            f"No index is being made at {folder}"
            f" ({'it is something else' if folder.exists() else 'there is no such folder'})."
            " Start one with `ffmem index`."
        )
    place = working / PLACE
    shared = SharedFolder.at(place.read_text(encoding="utf-8") if place.exists() else working)
    status = read_status(shared)
    if status is None and not (working / "plan.json").exists():
        text = "The corpus is being read and cut, or that was interrupted; no lease is read yet."
        return Standing(str(folder), "preparing", None, text)
    if status is None:
        text = (
            f"The corpus is prepared. Whoever leads has not said anything yet, or its"
            f" {NAME} cannot be read. What was committed is kept: the same command goes on."
        )
        return Standing(str(folder), "prepared", None, text)
    now = time.time()
    state = "silent" if now - status.written > STALE else "running"
    if status.ended is not None:
        state = "stopped"
    return Standing(str(folder), state, status, told(status, now))
