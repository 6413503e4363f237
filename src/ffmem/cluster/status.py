"""How a run stands, told while it runs: by the one who leads it, for anybody who asks.

The leader writes one small file to the shared folder every few seconds. Whoever reads it needs
neither the leader's machine nor its terminal, and sees by its age whether the leader still lives.
"""

import json
from dataclasses import dataclass, field

from ffmem.cluster.shared import SharedFolder
from ffmem.records import NotARecord, Record

NAME = "status.json"

STALE = 30.0
"""Seconds without news after which a leader is taken for dead or cut off."""


@dataclass(frozen=True, kw_only=True)
class WorkerStatus(Record):
    """One worker, as it was last heard of."""

    name: str
    where: str
    task: str | None
    """What it does; None if it waits."""
    share: float
    """How much of the task is done, 0–1."""
    rate: float | None
    """Units per second over its last tasks; None before it has done anything."""
    done: int
    """Tasks that it has finished."""
    seconds: float = 0.0
    """Since it began what it does."""


@dataclass(frozen=True, kw_only=True)
class Status(Record):
    """The whole run."""

    phase: str
    """What is done at the moment: reading, values, writing."""
    unit: str
    units: int
    units_done: int
    tasks_done: int
    running: int
    waiting: int
    given_up: int
    failures: int
    """Tasks that raised an error, each time."""
    losses: int
    """Workers that were lost."""
    rate: float | None
    """Units per second of all together, over the last minutes."""
    seconds_left: float | None
    seconds: float
    """Since this leader began."""
    leader: str
    written: float
    """When, by the leader's clock (seconds since 1970)."""
    size: int = 0
    """How many workers were asked for; some may not have begun yet."""
    ended: str | None = None
    """Why the leader has stopped; None while it leads."""
    workers: list[WorkerStatus] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """What went wrong and was mended, the latest last."""


def write_status(shared: SharedFolder, status: Status) -> None:
    """Let everybody know."""
    shared.write_text(NAME, status.to_json())


def read_status(shared: SharedFolder) -> Status | None:
    """Return how the run stood last; None if it never said, or in words of another version."""
    text = shared.read_text(NAME)
    if text is None:
        return None
    try:
        return Status.of(json.loads(text))
    except (ValueError, NotARecord):
        return None
