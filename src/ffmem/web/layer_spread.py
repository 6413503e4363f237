"""How the memories of each layer differ: how often active, and how strong, in quartiles."""

from functools import lru_cache
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from ffmem.indexing.store import Index
from ffmem.stats import spread


class LayerSpread(TypedDict):
    """How the memories of one layer differ: quartiles over them."""

    layer: int
    active_share: dict[str, Any]
    largest: dict[str, Any]
    """Of each memory's largest |m|; `max` is the largest of all."""


@lru_cache(maxsize=8)
def spreads(index: Index) -> list[LayerSpread]:
    """Return how active and how strong the memories of each layer are, from the index alone."""
    found: list[LayerSpread] = []
    for layer in index.layout.memory_layers:
        stats = index.table("stats", layer=layer, columns=["active_share", "max", "min"])
        largest = np.maximum(np.abs(stats["max"].to_numpy()), np.abs(stats["min"].to_numpy()))
        largest = largest[np.isfinite(largest)]
        share = stats["active_share"].to_numpy()
        most = {"max": float(largest.max()) if len(largest) else None}
        found.append(
            {"layer": layer, "active_share": spread(share), "largest": spread(largest) | most}
        )
    return found
