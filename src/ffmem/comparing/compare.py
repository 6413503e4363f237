"""From two index folders to a `Comparison`, one layer at a time."""

from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from ffmem.comparing.changed import RULES, described, most_changed, most_changed_values
from ffmem.comparing.changes import TOKENS, layer_changes
from ffmem.comparing.chart import draw
from ffmem.comparing.comparison import Comparison, summed_up
from ffmem.comparing.matching import differences, refuse_unlike
from ffmem.comparing.overlap import P
from ffmem.comparing.value_change import Changes, Named, Side, value_changes
from ffmem.errors import FfmemError, StoreError
from ffmem.indexing.memory import NO_VALUES
from ffmem.indexing.store import Index
from ffmem.indexing.verify import damaged_files
from ffmem.progress import Progress

Numbers = dict[str, ndarray]


def compare(
    first: Index,
    second: Index,
    out: Path,
    *,
    models: bool = True,
    first_model: Named | None = None,
    second_model: Named | None = None,
    top: int = 50,
    device: str = "auto",
    progress: Progress | None = None,
) -> Comparison:
    """Compare two indexes memory by memory; write numbers and figure to a folder."""
    refuse_unlike(first, second)
    _refuse_idle(models, first_model, second_model, top)
    say = progress or Progress(quiet=True)
    for index in (first, second):
        _refuse_damaged(index)
    has_values = first.manifest.model.has_values
    for name, (one, other) in differences(first.manifest, second.manifest).items():
        say.say(f"The indexes differ in {name}: {one} and {other}.")
    sides = (
        Side(first, first_model, "--first-model"),
        Side(second, second_model, "--second-model"),
    )
    read = models and has_values
    reading = value_changes(*sides, out, device, say) if read else nullcontext()
    if not has_values:
        say.say(f"{NO_VALUES} Nothing is said about values, and no model is read.")
    elif not models:
        say.say("The models are not read: value_cosine, value_norm_ratio, value_change are null.")
    with reading as values:
        layers = _layers(first, second, values, say)
    found = _comparison(first, second, layers, read, top)
    found.write(out)
    draw(found.to_dict(), out)
    return found


def _refuse_damaged(index: Index) -> None:
    """Raise if a file is not the one that was written: wrong numbers look like any others."""
    wrong = damaged_files(index)
    if wrong:
        raise StoreError(f"The index {index.folder} is damaged: {' '.join(wrong[:3])}")


def _refuse_idle(
    models: bool, first_model: Named | None, second_model: Named | None, top: int
) -> None:
    """Refuse options that cannot have an effect."""
    if top < 1:
        raise FfmemError(f"top = {top!r} was asked for. Give 1 or more.")
    if not models and (first_model is not None or second_model is not None):
        raise FfmemError(
            "A model was named, and also that models are not to be read. Give one of both."
        )


def _layers(
    first: Index, second: Index, values: Changes | None, progress: Progress
) -> list[Numbers]:
    found = []
    with progress.bar("Comparing", len(first), "memories") as step:
        for layer, width in enumerate(first.layout.widths):
            change = None if values is None else values(layer)
            found.append(layer_changes(first, second, layer, change))
            step(width)
    return found


def _comparison(
    first: Index, second: Index, layers: list[Numbers], models: bool, top: int
) -> Comparison:
    numbers = {name: np.concatenate([layer[name] for layer in layers]) for name in layers[0]}

    @cache  # many a memory stands in both lists, and its triggers are read from the folders
    def told(place: int) -> dict[str, Any]:
        return described(first, second, numbers, place)

    return Comparison(
        settings=_settings(first, second, models, top),
        rows=[{"layer": layer} | summed_up(layers[layer]) for layer in first.layout.memory_layers],
        overall=summed_up(numbers),
        changed=[told(place) for place in most_changed(numbers, top).tolist()],
        changed_values=[told(place) for place in most_changed_values(numbers, top).tolist()],
        numbers=numbers,
        layout=first.layout,
    )


def _settings(first: Index, second: Index, models: bool, top: int) -> dict[str, Any]:
    """Return everything that decides the numbers."""
    manifest = first.manifest
    return {
        "first": _named(first),
        "second": _named(second),
        "differences": differences(first.manifest, second.manifest),
        "family": manifest.model.family,
        "layers": manifest.model.layers,
        "memories": first.layout.per_layer,
        "gated": manifest.model.gated,
        "corpus": {
            "sources": [source.source for source in manifest.corpus.sources],
            "hash": manifest.corpus.hash,
            "sentences": manifest.corpus.sentences,
            "tokens": manifest.corpus.tokens,
        },
        "start": manifest.start.token,
        "t": manifest.t,
        "prefixes": manifest.prefixes,
        "compat": manifest.compat,
        "projection": manifest.projection,
        "models": models,
        "values": "static" if manifest.model.has_values else "input",
        "p": P,
        "value_tokens": TOKENS,
        "top": top,
        "rules": RULES,
    }


def _named(index: Index) -> dict[str, Any]:
    manifest = index.manifest
    return {
        "index": str(index.folder),
        "model": manifest.model.source,
        "model_hash": manifest.model.hash,
        "dtype": manifest.dtype,
    }
