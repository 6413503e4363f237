"""Segments: what each finished lease found, one file each, until the index is whole.

A segment is written atomically under its lease's number, so a lease is either committed or not,
and doing it twice changes nothing. It keeps only triggers that its floor let through, so that
the segments of a long run stay small. The merge of all segments is the index.
"""

import hashlib
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ffmem.errors import StoreError
from ffmem.files import committing
from ffmem.indexing.found import Found
from ffmem.indexing.sample import Sample
from ffmem.indexing.sentences import VACANT
from ffmem.indexing.statistics import Statistics
from ffmem.indexing.triggers import Triggers


class Segments:
    """The folder of committed leases of one run, named by the run's fingerprint."""

    def __init__(self, folder: Path, run: str, shape: tuple[int, int, int]) -> None:
        self.folder = folder
        self.run = run
        self.shape = shape
        """Layers, memories, t."""

    def path(self, lease: int) -> Path:
        """Return where the segment of a lease lies."""
        return self.folder / f"lease-{lease:06d}.safetensors"

    def committed(self, lease: int) -> bool:
        """Whether a lease is done."""
        return self.path(lease).exists()

    def commit(self, lease: int, found: Found) -> None:
        """Write what a lease found."""
        arrays = {
            "n_prefixes": np.array([found.statistics.n_prefixes]),
            "active": found.statistics.active,
            "sums": found.statistics.sums,
            "maximum": found.statistics.maximum,
            "minimum": found.statistics.minimum,
            "sample_hashes": found.sample.hashes,
            "sample_prefixes": found.sample.prefixes,
            "sample_coefficients": found.sample.coefficients,
            **_sparse("positive", found.positive),
            **({} if found.negative is None else _sparse("negative", found.negative)),
        }
        metadata = {"run": self.run, "lease": str(lease), "sha256": _digest(arrays)}
        with committing(self.path(lease)) as temporary:
            temporary.write_bytes(save(arrays, metadata))

    def load(self, lease: int) -> Found:
        """Read what a lease found, if the file is whole and of this run."""
        path = self.path(lease)
        try:
            with safe_open(path, "np") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise StoreError(
                f"The segment {path} is damaged ({error})."
                " Delete that file and run the same command again: only its lease is repeated."
            ) from None
        if metadata.get("run") != self.run or metadata.get("lease") != str(lease):
            raise StoreError(
                f"The segment {path} belongs to another run or lease"
                f" ({metadata.get('run')}, lease {metadata.get('lease')}; this is run {self.run},"
                f" lease {lease}). Delete that file and run the same command again."
            )
        if metadata.get("sha256") != _digest(arrays):
            raise StoreError(
                f"The segment {path} is damaged (its bytes do not match its hash)."
                " Delete that file and run the same command again: only its lease is repeated."
            )
        return self._found(arrays)

    def _found(self, arrays: dict[str, np.ndarray]) -> Found:
        counted = (arrays[name] for name in ("active", "sums", "maximum", "minimum"))
        return Found(
            _dense("positive", arrays, self.shape),
            _dense("negative", arrays, self.shape) if "negative_slots" in arrays else None,
            Statistics(int(arrays["n_prefixes"][0]), *counted),
            Sample(
                arrays["sample_hashes"], arrays["sample_prefixes"], arrays["sample_coefficients"]
            ),
        )


def _sparse(name: str, triggers: Triggers) -> dict[str, np.ndarray]:
    """Return the filled slots of a list and what stands in them."""
    slots = np.flatnonzero(triggers.prefixes != VACANT)
    values = {field: getattr(triggers, field).reshape(-1)[slots] for field in triggers._fields}
    return {f"{name}_slots": slots} | {f"{name}_{field}": values[field] for field in values}


def _dense(name: str, arrays: dict[str, np.ndarray], shape: tuple[int, int, int]) -> Triggers:
    triggers = Triggers.empty(*shape)
    for field in triggers._fields:
        getattr(triggers, field).reshape(-1)[arrays[f"{name}_slots"]] = arrays[f"{name}_{field}"]
    return triggers


def _digest(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()
