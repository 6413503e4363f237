"""Unfinished indexes: how far a run is (`Status`), and reading what it has so far (`LiveRun`).

Both follow from the chunks that committed partials cover. Neither needs the model or torch.
"""

import fcntl
import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy import ndarray

from ffmem.errors import StoreError
from ffmem.indexing.config import CorpusFacts, RunConfig, make_manifest, read_facts, read_run
from ffmem.indexing.manifest import Manifest
from ffmem.indexing.partials import Partial, Partials
from ffmem.indexing.results import LayerResult
from ffmem.indexing.store import SHARED_FILE, Index
from ffmem.indexing.tables import GROUP, as_array, layer_file
from ffmem.storage import Storage, open_storage
from ffmem.text import pluralize


@dataclass(frozen=True)
class Status:
    """How far an index is."""

    folder: str
    state: str
    """finished, preparing (reading the corpus), running, or stopped."""
    tokens: int = 0
    tokens_read: int = 0
    """In committed partials; workers hold up to half a minute more."""
    chunks: int = 0
    chunks_read: int = 0
    layers: int = 0
    values: int = 0
    """Layers whose values are projected."""
    workers: int = 0
    """Workers that have committed anything; a restarted worker counts again."""
    skipped: int = 0
    """Sentences that the model could not read."""
    seconds_since_commit: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what `status --json` prints."""
        return asdict(self)

    def __str__(self) -> str:
        if self.state == "finished":
            return f"Finished: {Index(self.folder)!r}"
        if self.state == "preparing":
            return "Reading the corpus, or stopped while reading it; no chunk is done yet."
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
        reason = "it is something else" if folder.exists() else "there is no such folder"
        raise StoreError(
            f"No index is being made at {folder} ({reason}). Start one with `ffmem index`."
        )
    storage, run, facts = _read_run(folder)
    if run is None or facts is None or not (folder / "partials/chunks.parquet").exists():
        return Status(str(folder), "preparing")
    partials = Partials(storage, run.fingerprint).disjoint()
    covered = [number for partial in partials for number in partial.chunks]
    tokens = pq.read_table(folder / "partials/chunks.parquet")["n_tokens"].to_pylist()
    paths = [folder / partial.name for partial in partials if (folder / partial.name).exists()]
    last = max((path.stat().st_mtime for path in paths), default=None)
    return Status(
        folder=str(folder),
        state="running" if _is_locked(folder / "partials" / "lock") else "stopped",
        tokens=facts.source.tokens,
        tokens_read=sum(tokens[number] for number in covered),
        chunks=len(tokens),
        chunks_read=len(covered),
        layers=run.model.layers,
        values=len(storage.names("values")),
        workers=len(partials),
        skipped=sum(len(partial.skipped) for partial in partials),
        seconds_since_commit=None if last is None else max(0.0, time.time() - last),
    )


def _read_run(folder: Path) -> tuple[Storage, RunConfig | None, CorpusFacts | None]:
    """Return the storage, configuration and corpus facts of the unfinished run in a folder."""
    shared = folder / SHARED_FILE
    storage = open_storage(shared.read_text("utf-8")) if shared.exists() else Storage(folder)
    return storage, read_run(storage), read_facts(storage)


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


@dataclass(frozen=True, eq=False)
class LiveRun:
    """What the workers of a run had committed when it was opened."""

    manifest: Manifest
    """As it would be if the run ended now, without hashes of files."""
    partials: Partials
    committed: list[Partial]
    n_prefixes: int
    sampled_chunks: list[int]

    @property
    def progress(self) -> str:
        """How many tokens are done, in words."""
        return f"{self.n_prefixes:,} of {pluralize(self.manifest.corpus.tokens, 'tokens')} so far"

    def group(self, kind: str, layer: int, group: int) -> dict[str, ndarray]:
        """Return the columns of one row group, as the finished table would have them."""
        columns = self._columns(kind, layer)
        rows = slice(group * GROUP, (group + 1) * GROUP)
        return {name: column[rows] for name, column in columns.items()}

    @lru_cache(maxsize=8)  # noqa: B019 (a page shows one layer; the cache goes with the index)
    def _columns(self, kind: str, layer: int) -> dict[str, ndarray]:
        model = self.manifest.model
        if kind == "samples":
            parts = next(self.partials.sample_layers(self.sampled_chunks, layer), [])
            empty = np.zeros((model.layout.widths[layer], 0), np.float32)
            return {"coefficient": np.concatenate([empty, *parts], axis=1)}
        result = LayerResult.empty(model.layout.widths[layer], self.manifest.t, model.gated)
        if self.committed:
            result = self.partials.layer(self.committed, layer)
        columns = result.columns(self.n_prefixes)
        return {name: as_array(column) for name, column in columns.items()}


def open_live(folder: Path) -> LiveRun | None:
    """Return what the unfinished run in a folder has so far; None if it has not begun."""
    storage, run, facts = _read_run(folder)
    if run is None or facts is None or not (folder / "vocabulary.parquet").exists():
        return None
    n_layers = run.model.layers if run.model.has_values else 0
    n_missing = sum(
        not (folder / layer_file("values", layer)).exists() for layer in range(n_layers)
    )
    if n_missing:
        raise StoreError(
            f"The index in {folder} has just been started: {pluralize(n_missing, 'layers')} have"
            " no values yet. Try again in a minute."
        )
    partials = Partials(storage, run.fingerprint)
    committed = partials.disjoint()
    covered = {number for partial in committed for number in partial.chunks}
    return LiveRun(
        manifest=make_manifest(run, facts, [], 0, {}),
        partials=partials,
        committed=committed,
        n_prefixes=sum(partial.n_prefixes for partial in committed),
        sampled_chunks=[chunk for chunk in partials.sampled_chunks() if chunk in covered],
    )
