"""Hiring: how many workers, and where they work."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ffmem.cluster.crew import Crew, Recruit
from ffmem.errors import FfmemError
from ffmem.progress import Progress


@dataclass(frozen=True)
class Hiring:
    """Who is asked for: this process, processes beside it, or actors on a Ray cluster."""

    workers: int | None = None
    ray: str | None = None
    """`local` starts a Ray here, `auto` finds a running one, anything else is its address."""
    gpus_per_worker: float = 0.0

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise FfmemError(f"--workers {self.workers} was asked for; give 1 or more.")
        if self.gpus_per_worker < 0:
            raise FfmemError(f"--gpus-per-worker {self.gpus_per_worker} was asked for.")
        if self.gpus_per_worker and self.ray is None:
            raise FfmemError(
                "--gpus-per-worker shares accelerators out through Ray: add --ray local, or choose"
                " one with --device."
            )

    @property
    def is_here(self) -> bool:
        """Whether this process does the work itself."""
        return self.ray is None and self.workers in (None, 1)

    @property
    def n(self) -> int:
        """How many workers there are."""
        return self.workers or 1

    def refuse_unreachable(self) -> None:
        """Raise if there is no Ray where one was asked for, before anything is loaded."""
        if self.ray is not None:
            from ffmem.cluster.ray_connection import refuse_unreachable

            refuse_unreachable(self.ray)

    @property
    def threads(self) -> int | None:
        """How many threads each worker takes unless told; None where torch decides."""
        if self.is_here:
            return None
        on_a_cluster = self.ray not in (None, "local")
        return 1 if on_a_cluster else max(1, (os.cpu_count() or 1) // self.n)

    @contextmanager
    def crew(
        self, recruit: Recruit, threads: int, logs: Path, progress: Progress | None = None
    ) -> Iterator[Crew]:
        """Give the workers, and let them go in the end, whatever happens."""
        crew = self._hired(recruit, threads, logs, progress)
        try:
            yield crew
        finally:
            crew.close()

    def _hired(self, recruit: Recruit, threads: int, logs: Path, progress: Progress | None) -> Crew:
        if self.ray is None:
            from ffmem.cluster.processes import Processes

            return Processes(recruit, self.n, logs)
        from ffmem.cluster.ray_crew import RayCrew

        return RayCrew(recruit, self.n, self.ray, self.gpus_per_worker, threads, progress)
