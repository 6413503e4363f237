"""Figure 2 (§3.2): what share of each layer's triggers shows shallow and semantic patterns?

    share of a label = a layer's triggers with it / a layer's triggers;    label: `pattern.py`

One row per layer and source of the patterns that the index keeps: people (human), a language model
(explained), the detector (automatic). Only people's labels follow the paper's protocol. A memory
stands with its main list of triggers. No model is needed.
"""

from typing import Any

from ffmem.annotation.coverage import Key, key_of, shares
from ffmem.annotation.machine import kept_agreements
from ffmem.errors import StoreError
from ffmem.experiments.result import Result, Row
from ffmem.experiments.settings import settings
from ffmem.indexing.store import Index
from ffmem.patterns.store import (
    LABELS,
    SOURCES,
    Examined,
    Patterns,
    is_stale,
    labels,
    main_sign,
    open_patterns,
)

FIELDS = (
    *(*LABELS, "patterns_per_key", "n", "keys", "with_pattern"),
    *("covered", "low", "high", "patterns_min", "patterns_max"),
)

PROTOCOL = (
    "human: the paper's protocol. explained (a language model) and automatic (the detector) are"
    " not: nobody looked at the triggers."
)


class NoPatterns(StoreError):
    """Figure 2 of an index in which nobody has looked for patterns."""

    def __init__(self, index: Index) -> None:
        stale = [source for source in SOURCES if is_stale(index, source)]
        found = (
            f"those there ({', '.join(stale)}) are of another state of it"
            if stale
            else "it keeps none"
        )
        super().__init__(
            f"The experiment `patterns` reads the patterns of an index, and {found}."
            f" Find them with `ffmem patterns detect {index.folder}`."
        )


def has_patterns(index: Index) -> bool:
    """Return whether there is something to measure."""
    return bool(open_patterns(index))


def patterns(index: Index, seed: int = 0) -> Result:
    """Return the shares of labels by layer and source."""
    sources = open_patterns(index)
    if not sources:
        raise NoPatterns(index)
    rows = [
        _row(found, layer, _keys(index, found, layer), seed)
        for found in sources
        for layer in index.layout.memory_layers
    ]
    also: dict[str, Any] = {
        "sources": {found.source: found.settings for found in sources},
        "agreement": kept_agreements(index, seed),
        "protocol": PROTOCOL,
    }
    made = settings(index, index.manifest.dtype, seed)
    return Result("patterns", "Fig. 2, Table 1", made, rows, also)


def _keys(index: Index, found: Patterns, layer: int) -> list[Key]:
    """Return the memories of a layer whose main list was examined."""
    main = main_sign(index, layer)
    examined = [one for one in found.lists(layer) if one.n and one.sign == main[one.cell.memory]]
    return [_key(found, one) for one in examined]


def _key(found: Patterns, examined: Examined) -> Key:
    own = [one for one in found.of(examined.cell) if one.sign == examined.sign]
    seen = labels(examined.n, [(one.kind, one.ranks) for one in own])
    return key_of(examined.cell.layer, [(seen, len(own))])


def _row(found: Patterns, layer: int, keys: list[Key], seed: int) -> Row:
    """Return the row of a layer and a source; without a key, without numbers."""
    numbers = shares(keys, seed)
    numbers |= {"low": numbers["covered_low"], "high": numbers["covered_high"]}
    return {"layer": layer, "source": found.source, **{name: numbers[name] for name in FIELDS}}
