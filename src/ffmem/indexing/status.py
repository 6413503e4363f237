"""Unfinished indexes: how far a run is (`Status`), and reading what it has so far (`LiveRun`).

Both follow from the chunks that committed partials cover. Neither needs the model or torch.
"""

import fcntl
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy import ndarray

from ffmem.errors import StoreError
from ffmem.indexing.config import CorpusFacts, IndexRunConfig, make_manifest, read_facts, read_run
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
    chunks: int | None = None
    """Of an unfinished run, as is `chunks_read`."""
    chunks_read: int | None = None
    layers: int = 0
    values: int = 0
    """Layers whose values are projected."""
    skipped: int = 0
    """Sentences that the model could not read."""
    seconds_since_commit: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what `status --json` prints: what is known."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        if self.state == "finished":
            return f"Finished: {Index(self.folder)!r}"
        if self.state == "preparing":
            return "Preparing: the corpus has not been read yet."
        if self.state == "stopped" and self.chunks is None:
            return "Stopped before the corpus was read. Rerun the command to resume."
        share = int(1000 * self.tokens_read / self.tokens) / 10
        lines = [
            f"{self.state.capitalize()}: {self.tokens_read:,} of"
            f" {pluralize(self.tokens, 'tokens')} ({share}%), {self.chunks_read or 0:,} of"
            f" {pluralize(self.chunks or 0, 'chunks')}; values of {self.values} of"
            f" {pluralize(self.layers, 'layers')}."
        ]
        if self.skipped:
            lines.append(f"Skipped {pluralize(self.skipped, 'sentences')}.")
        if self.seconds_since_commit is not None:
            lines.append(f"Last commit: {self.seconds_since_commit:.0f} s ago.")
        if self.state == "stopped":
            lines.append("Rerun the command to resume.")
        return "\n".join(lines)


def status(folder: Path) -> Status:
    """Return how far an index is."""
    found = None
    if not (folder / "manifest.json").exists():
        with suppress(FileNotFoundError):  # the run deletes its files when it has finished
            found = _status(folder)
    if (folder / "manifest.json").exists():
        manifest = Manifest.read(folder)
        tokens, layers = manifest.corpus.tokens, manifest.model.layers
        values = layers if manifest.model.has_values else 0
        skipped = sum(len(source.skipped) for source in manifest.corpus.sources)
        return Status(
            folder=str(folder),
            state="finished",
            tokens=tokens,
            tokens_read=tokens,
            layers=layers,
            values=values,
            skipped=skipped,
        )
    if found is None and folder.exists():
        raise StoreError(f"{folder} is not an indexing run. Start one with `ffmem index`.")
    if found is None:
        raise StoreError(f"There is no folder {folder}. Start an index with `ffmem index`.")
    return found


def _status(folder: Path) -> Status | None:
    """Return how far the unfinished run in a folder is; None if there is none."""
    if not (folder / "partials").is_dir():
        return None
    is_running = _is_locked(folder / "partials" / "lock")
    storage, run, facts = _read_run(folder)
    if run is None or facts is None or not (folder / "partials/chunks.parquet").exists():
        return Status(str(folder), "preparing" if is_running else "stopped")
    partials = Partials(storage, run.fingerprint).disjoint()
    covered = [number for partial in partials for number in partial.chunks]
    tokens = pq.read_table(folder / "partials/chunks.parquet")["n_tokens"].to_pylist()
    last = None
    for partial in partials:
        with suppress(FileNotFoundError):  # in another storage, or deleted since it was listed
            last = max(last or 0.0, (folder / partial.name).stat().st_mtime)
    return Status(
        folder=str(folder),
        state="running" if is_running else "stopped",
        tokens=facts.source.tokens,
        tokens_read=sum(tokens[number] for number in covered),
        chunks=len(tokens),
        chunks_read=len(covered),
        layers=run.model.layers,
        values=len(storage.names("values")),
        skipped=sum(len(partial.skipped) for partial in partials),
        seconds_since_commit=None if last is None else max(0.0, time.time() - last),
    )


def _read_run(folder: Path) -> tuple[Storage, IndexRunConfig | None, CorpusFacts | None]:
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


class RunChangedError(StoreError):
    """A run has finished, or was restarted, since it was opened for reading."""


@dataclass(frozen=True, eq=False)
class LiveRun:
    """What the workers of a run had committed when it was opened."""

    manifest: Manifest
    """As it would be if the run ended now, without hashes of files."""
    partials: Partials
    committed: list[Partial]
    n_prefixes: int
    sampled_chunks: list[int]
    value_layers: frozenset[int]
    """Layers whose values are computed."""
    key_layers: frozenset[int] = frozenset()
    """Layers whose keys are; they come last."""

    @property
    def progress(self) -> str:
        """How many tokens are done, in words."""
        return f"{self.n_prefixes:,} of {pluralize(self.manifest.corpus.tokens, 'tokens')} so far"

    def group(self, kind: str, layer: int, group: int) -> dict[str, ndarray]:
        """Return the columns of one row group, as the finished table would have them."""
        rows = slice(group * GROUP, (group + 1) * GROUP)
        return {name: column[rows] for name, column in self.columns(kind, layer).items()}

    def columns(self, kind: str, layer: int) -> dict[str, ndarray]:
        """Return all columns of a layer, as the finished table would have them.

        `n_prefixes` is added: how many prefixes were read when these columns were committed.
        """
        try:
            if kind == "values":
                return self._values(layer)
            if kind == "keys":
                return self._keys(layer)
            return self._sample(layer) if kind == "samples" else self._result(layer)
        except FileNotFoundError:
            raise RunChangedError(
                f"The run in {self.partials.storage.shown} has changed since you opened it,"
                " probably because it finished. Open it again."
            ) from None

    @lru_cache(maxsize=64)  # noqa: B019 (a search reads all layers; the cache goes with the index)
    def _values(self, layer: int) -> dict[str, ndarray]:
        if layer not in self.value_layers:
            n = self.manifest.model.layout.widths[layer]
            ids, numbers = np.zeros((n, 0), np.int32), np.zeros((n, 0), np.float32)
            columns = {"ids": ids, "logits": numbers, "probabilities": numbers}
            ends = ("top", "bottom")
            return {f"{end}_{name}": empty for end in ends for name, empty in columns.items()}
        return self._projected("values", layer)

    @lru_cache(maxsize=64)  # noqa: B019
    def _keys(self, layer: int) -> dict[str, ndarray]:
        """Return the columns of a layer's keys; of one that has none yet, the memories alone."""
        if layer not in self.key_layers:
            return {"memory": np.arange(self.manifest.model.layout.widths[layer], dtype=np.int32)}
        return self._projected("keys", layer)

    def _projected(self, kind: str, layer: int) -> dict[str, ndarray]:
        with self.partials.storage.reading(layer_file(kind, layer)) as file:
            table = pq.ParquetFile(file).read(use_threads=False)
        return {name: as_array(table[name]) for name in table.column_names}

    @lru_cache(maxsize=8)  # noqa: B019
    def _sample(self, layer: int) -> dict[str, ndarray]:
        parts = next(self.partials.sample_layers(self.sampled_chunks, layer), [])
        empty = np.zeros((self.manifest.model.layout.widths[layer], 0), np.float32)
        return {"coefficient": np.concatenate([empty, *parts], axis=1)}

    @lru_cache(maxsize=8)  # noqa: B019
    def _result(self, layer: int) -> dict[str, ndarray]:
        model = self.manifest.model
        empty = LayerResult.empty(
            model.layout.widths[layer], self.manifest.t, model.gated, model.layout.has_experts
        )
        result, n_prefixes = self.partials.layer(self.committed, layer, empty)
        columns = result.columns(n_prefixes)
        arrays = {name: as_array(column) for name, column in columns.items()}
        return arrays | {"n_prefixes": np.full(len(arrays["memory"]), n_prefixes)}


def open_live(folder: Path) -> LiveRun | None:
    """Return what the unfinished run in a folder has so far; None if it has not begun."""
    storage, run, facts = _read_run(folder)
    if run is None or facts is None or not (folder / "vocabulary.parquet").exists():
        return None
    present = {*storage.names("values"), *storage.names("keys")}
    layers = range(run.model.layers)
    partials = Partials(storage, run.fingerprint)
    committed = partials.disjoint()
    covered = {number for partial in committed for number in partial.chunks}
    return LiveRun(
        manifest=make_manifest(run, facts, [], 0, {}),
        partials=partials,
        committed=committed,
        n_prefixes=sum(partial.n_prefixes for partial in committed),
        sampled_chunks=[chunk for chunk in partials.sampled_chunks() if chunk in covered],
        value_layers=frozenset(one for one in layers if layer_file("values", one) in present),
        key_layers=frozenset(one for one in layers if layer_file("keys", one) in present),
    )
