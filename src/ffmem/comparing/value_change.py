"""How the values of two models differ.

    cosine = v₁·v₂ / (‖v₁‖·‖v₂‖),   norm ratio = ‖v₂‖/‖v₁‖,   change = ‖v₂ − v₁‖ / max(‖v₁‖, ‖v₂‖)

The direction says what a value promotes, the norm how much. A value of zeros has no direction: an
edit that switches a memory off shows in the change, which is 1 then; it is 0 for equal values and
2 for opposite ones. One model is in memory at a time, and one layer of the other's values.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64
from numpy import ndarray

from ffmem.errors import ModelError
from ffmem.files import storage_errors
from ffmem.indexing.store import Index, check_weights
from ffmem.models.arguments import index_model_errors, resolve_model
from ffmem.models.load import load
from ffmem.models.memories import Memories
from ffmem.progress import Progress

Named = Memories | str | Path
"""A model, or where it is."""


class ValueChange(NamedTuple):
    """From the values of one model to another's; NaN where a number does not exist."""

    cosine: Float64[ndarray, " memory"]
    norm_ratio: Float64[ndarray, " memory"]
    change: Float64[ndarray, " memory"]


def value_change(
    first: Float[ndarray, "memory hidden"], second: Float[ndarray, "memory hidden"]
) -> ValueChange:
    """Return how each value of a layer changed."""
    one, other = first.astype(np.float64), second.astype(np.float64)
    squares = [(values * values).sum(axis=1) for values in (one, other)]
    # √(a·a) is a, where √a·√a need not be: the cosine of equal values is 1, not nearly.
    lengths = np.sqrt(squares[0] * squares[1])
    cosine = _ratio((one * other).sum(axis=1), lengths)
    ratio = _ratio(np.sqrt(squares[1]), np.sqrt(squares[0]))
    apart = np.sqrt(((other - one) ** 2).sum(axis=1))
    longest = np.sqrt(np.maximum(*squares))
    change = np.where(longest > 0, apart / np.where(longest > 0, longest, 1.0), 0.0)
    return ValueChange(np.clip(cosine, -1.0, 1.0), ratio, change)


def _ratio(part: Float64[ndarray, " n"], whole: Float64[ndarray, " n"]) -> Float64[ndarray, " n"]:
    there = whole > 0
    found: ndarray = np.where(there, part / np.where(there, whole, 1.0), np.nan)
    return found


Changes = Callable[[int], ValueChange]
"""Of a layer."""


@dataclass(frozen=True)
class Side:
    """One index, and where its model is."""

    index: Index
    model: Named | None
    """None: where the index says."""
    option: str
    """What the command line calls the model's place."""


@contextmanager
def value_changes(
    first: Side, second: Side, folder: Path, device: str, progress: Progress
) -> Iterator[Changes]:
    """Give how the values of each layer changed; the first model's stay in a folder meanwhile."""
    for side in (first, second):
        _refuse_missing(side)  # before the first is loaded
    if _same_model(first, second):
        memories = _memories(first, device, progress)
        yield lambda layer: value_change(_values(memories, layer), _values(memories, layer))
        return
    with storage_errors(folder):
        temporary = tempfile.TemporaryDirectory(dir=folder, prefix=".values-")
    with temporary as kept:
        with storage_errors(folder):
            # No name for the first model: it must be gone before the second is loaded.
            files = _keep(_memories(first, device, progress), Path(kept))
        memories = _memories(second, device, progress)
        yield lambda layer: value_change(np.load(files[layer]), _values(memories, layer))


def _same_model(first: Side, second: Side) -> bool:
    """Return whether both indexes are of the same weights, and both take them from one place."""
    hashes = (side.index.manifest.model.hash for side in (first, second))
    return len(set(hashes)) == 1 and _place(first) == _place(second)


def _place(side: Side) -> Named:
    return side.index.manifest.model.source if side.model is None else side.model


def _refuse_missing(side: Side) -> None:
    place = _place(side)
    if isinstance(place, str | Path):
        with _explaining(side):
            resolve_model(str(place))


def _memories(side: Side, device: str, progress: Progress) -> Memories:
    """Return the model of an index, refusing another one."""
    place = _place(side)
    if not isinstance(place, Memories):
        progress.say(f"Loading {place}.")
        with _explaining(side):
            # Whatever the index was made in: float32 holds the weights as they are stored.
            place = load(place, dtype="float32", device=device)
    check_weights(side.index, place.fingerprint())
    return place


@contextmanager
def _explaining(side: Side) -> Iterator[None]:
    """Add what to do to the error of a model that is not where its index says."""
    if side.model is not None:
        yield
        return
    try:
        with index_model_errors(side.index.manifest.model.source, side.index.folder, side.option):
            yield
    except ModelError as error:
        raise ModelError(
            f"{error} --no-models (models=False in Python) compares the indexes alone."
        ) from None


def _values(memories: Memories, layer: int) -> Float[ndarray, "memory hidden"]:
    values: ndarray = memories.values(layer).detach().to(torch.float32).cpu().numpy()
    return values


def _keep(memories: Memories, folder: Path) -> list[Path]:
    """Write the values of every layer to a folder, and return the files."""
    files = [folder / f"layer-{layer:03d}.npy" for layer in range(memories.n_layers)]
    for layer, file in enumerate(files):
        np.save(file, _values(memories, layer))
    return files
