"""The one list of triggers that stands for a memory: that of its strongest trigger.

    main sign = sign of the larger |m| of the two first triggers, + of equals, 0 without triggers

Gated models keep a list for each sign of the coefficient; others have one. Where the paper speaks
of a key's top triggers (the study, Figure 2), this list is meant.
"""

import numpy as np
from jaxtyping import Float32, Int8, Int64
from numpy import ndarray

from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.store import Index
from ffmem.indexing.tables import layer_file, read_columns

NO_SIGN = 0
"""Of a memory that nothing triggers."""


def main_sign(index: Index, layer: int) -> Int8[ndarray, " memory"]:
    """Return the sign of each memory's main list."""
    names = ["coefficient", "prefix"]
    if index.manifest.model.gated:
        names += [f"negative_{name}" for name in names]
    columns = read_columns(index.folder / layer_file("triggers", layer), names)
    up = _first(columns["coefficient"], columns["prefix"])
    down = np.full_like(up, -1)
    if index.manifest.model.gated:
        down = _first(columns["negative_coefficient"], columns["negative_prefix"])
    signs = np.where(up >= down, 1, -1)
    signs[np.maximum(up, down) < 0] = NO_SIGN
    return signs.astype(np.int8)


def main_prefixes(index: Index, layer: int, top: int) -> Int64[ndarray, "memory top"]:
    """Return the first triggers of each memory's main list, NO_PREFIX where there are no more."""
    columns = read_columns(index.folder / layer_file("triggers", layer))
    signs = main_sign(index, layer)
    found = columns["prefix"]
    if index.manifest.model.gated:
        found = np.where(signs[:, None] < 0, columns["negative_prefix"], found)
    prefixes = np.full((len(signs), top), NO_PREFIX, np.int64)
    kept = found[:, :top]
    prefixes[:, : kept.shape[1]] = kept
    return prefixes


def _first(
    coefficients: Float32[ndarray, "memory top"], prefixes: Int64[ndarray, "memory top"]
) -> Float32[ndarray, " memory"]:
    """Return |m| of each list's first trigger, −1 of an empty list."""
    return np.where(prefixes[:, 0] == NO_PREFIX, np.float32(-1), np.abs(coefficients[:, 0]))
