"""A task: one piece of work that any worker can do, any number of times, with one outcome.

What a task computes goes to the shared folder under an idempotent name. So only names and small
numbers travel between processes, and a task that was done twice was done once.
"""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Task:
    """What to do: `kind` names a method of the worker, `arguments` are JSON."""

    key: str
    """The same key is the same work."""
    kind: str
    size: int
    """In units of its kind: tokens of a lease. What rates and expected times are made of."""
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)
    urgency: int = 0
    """More urgent tasks are given out first; equal ones in the order in which they came."""

    losses: int = 3
    """Workers that may be lost with it before it is given up: nodes are lost for other reasons."""

    def to_dict(self) -> dict[str, Any]:
        """Return the task as JSON."""
        return asdict(self)
