"""How far an index is: finished, running, or stopped. It needs neither the model nor torch.

The chunks that committed partials cover say how far a run is; a lock says whether it runs.
"""

import fcntl
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from ffmem.errors import StoreError
from ffmem.indexing.config import read_facts, read_run
from ffmem.indexing.partials import Partials
from ffmem.indexing.store import Index, open_run
from ffmem.text import pluralize


@dataclass(frozen=True)
class Status:
    """How far an index is."""

    folder: str
    state: str
    """finished, preparing (the corpus is being read), running, or stopped."""
    tokens: int = 0
    tokens_read: int = 0
    """In committed partials; workers hold up to half a minute more."""
    chunks: int = 0
    chunks_read: int = 0
    layers: int = 0
    values: int = 0
    """Layers whose values are projected."""
    workers: int = 0
    """Partials: one per worker that has committed anything, restarted ones too."""
    skipped: int = 0
    """Sentences that could not be read and were skipped."""
    seconds_since_commit: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if self.state == "finished":
            return f"Finished: {Index(self.folder)!r}"
        if self.state == "preparing":
            return "The corpus is being read, or that was interrupted; no chunk is read yet."
        share = int(1000 * self.tokens_read / self.tokens) / 10
        lines = [
            f"{self.state.capitalize()}: {self.tokens_read:,} of"
            f" {pluralize(self.tokens, 'tokens')} ({share} %), {self.chunks_read:,} of"
            f" {pluralize(self.chunks, 'chunks')}; values of {self.values} of"
            f" {pluralize(self.layers, 'layers')}."
        ]
        if self.skipped:
            lines.append(f"Skipped {pluralize(self.skipped, 'sentences')}.")
        if self.seconds_since_commit is not None:
            n = pluralize(self.workers, "workers")
            lines.append(
                f"{n} committed; the last commit was {self.seconds_since_commit:.0f} s ago."
            )
        if self.state == "stopped":
            lines.append("Rerun the command to resume.")
        return "\n".join(lines)


def status(folder: Path) -> Status:
    """Return how far an index is."""
    if (folder / "manifest.json").exists():
        return Status(str(folder), "finished")
    if not (folder / "partials").is_dir():
        found = "it is something else" if folder.exists() else "there is no such folder"
        raise StoreError(
            f"No index is being made at {folder} ({found}). Start one with `ffmem index`."
        )
    storage = open_run(folder)
    run, facts = read_run(storage), read_facts(storage)
    if run is None or facts is None or not (folder / "partials/chunks.parquet").exists():
        return Status(str(folder), "preparing")
    kept, _ = Partials(storage, run.fingerprint).committed()
    covered = [number for partial in kept for number in partial.chunks]
    tokens = pq.read_table(folder / "partials/chunks.parquet")["n_tokens"].to_pylist()
    paths = [folder / partial.name for partial in kept if (folder / partial.name).exists()]
    last = max((path.stat().st_mtime for path in paths), default=None)
    return Status(
        folder=str(folder),
        state="running" if _is_locked(folder / "partials" / "lock") else "stopped",
        tokens=facts.tokens,
        tokens_read=sum(tokens[number] for number in covered),
        chunks=len(tokens),
        chunks_read=len(covered),
        layers=run.model.layers,
        values=len(storage.names("values")),
        workers=len(kept),
        skipped=sum(len(partial.skipped) for partial in kept),
        seconds_since_commit=None if last is None else max(0.0, time.time() - last),
    )


def _is_locked(path: Path) -> bool:
    """Return whether a process of this machine holds a lock file."""
    try:
        with path.open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
