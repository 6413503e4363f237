"""An index that is still being made, read through its configuration, values and partials."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy import ndarray

from ffmem.errors import StoreError
from ffmem.indexing.config import make_manifest, read_facts, read_run
from ffmem.indexing.manifest import Manifest
from ffmem.indexing.partials import Partial, Partials
from ffmem.indexing.results import LayerResult
from ffmem.indexing.store import open_run
from ffmem.indexing.tables import GROUP, as_array
from ffmem.text import pluralize


@dataclass(frozen=True, eq=False)
class LiveRun:
    """What the workers of a run had committed when it was opened."""

    manifest: Manifest
    """As it would be if the run ended now; without hashes of files."""
    partials: Partials
    committed: list[Partial]
    n_prefixes: int
    sampled_chunks: list[int]

    @property
    def progress(self) -> str:
        """How far the run is, in words."""
        return f"{self.n_prefixes:,} of {pluralize(self.manifest.corpus.tokens, 'tokens')} so far"

    def group(self, kind: str, layer: int, group: int) -> dict[str, ndarray]:
        """Return the columns of one row group, as the finished table would have them."""
        columns = self._columns(kind, layer)
        rows = slice(group * GROUP, (group + 1) * GROUP)
        return {name: column[rows] for name, column in columns.items()}

    @lru_cache(maxsize=8)  # noqa: B019 (a page looks at one layer; the index drops it with itself)
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
    storage = open_run(folder)
    run, facts = read_run(storage), read_facts(storage)
    if run is None or facts is None or not (folder / "vocabulary.parquet").exists():
        return None
    missing = [
        layer
        for layer in range(run.model.layers if run.model.has_values else 0)
        if not (folder / f"values/layer-{layer:03d}.parquet").exists()
    ]
    if missing:
        raise StoreError(
            f"The index in {folder} has just been started:"
            f" {pluralize(len(missing), 'layers')} have no values yet. Try again in a minute."
        )
    partials = Partials(storage, run.fingerprint)
    committed, _ = partials.committed()
    covered = {number for partial in committed for number in partial.chunks}
    names = storage.names("partials")
    samples = [int(name[-12:-6]) for name in names if name.startswith("partials/sample-")]
    return LiveRun(
        manifest=make_manifest(run, facts, [], 0, {}),
        partials=partials,
        committed=committed,
        n_prefixes=sum(partial.n_prefixes for partial in committed),
        sampled_chunks=[chunk for chunk in samples if chunk in covered],
    )
