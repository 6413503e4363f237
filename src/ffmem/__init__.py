"""ffmem reads the feed-forward layers of a language model as key-value memories.

    model = ffmem.load("smollm2-135m")
    index = ffmem.index(model, ffmem.Corpus("wikitext-2:train", limit=2000), "runs/demo")
    index["L5N1234"].triggers

Names are looked up when they are first used, so that reading an index never loads torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ffmem.acting import compare, edit, effect, neighbours, serve, trace
    from ffmem.api import (
        estimate,
        export,
        extend,
        index,
        load,
        merge,
        open,
        search,
        train,
        verify,
    )
    from ffmem.cells import Cell
    from ffmem.corpus.corpus import Corpus
    from ffmem.errors import FfmemError
    from ffmem.indexing.memory import Memory
    from ffmem.indexing.store import Index
    from ffmem.measuring import experiment, report
    from ffmem.models.memories import Memories
    from ffmem.patterning import detect, explain, export_patterns, patterns_of, study

_HOMES = {
    "Cell": "ffmem.cells",
    "Corpus": "ffmem.corpus.corpus",
    "FfmemError": "ffmem.errors",
    "Index": "ffmem.indexing.store",
    "Memories": "ffmem.models.memories",
    "Memory": "ffmem.indexing.memory",
    "compare": "ffmem.acting",
    "detect": "ffmem.patterning",
    "edit": "ffmem.acting",
    "effect": "ffmem.acting",
    "estimate": "ffmem.api",
    "experiment": "ffmem.measuring",
    "explain": "ffmem.patterning",
    "export": "ffmem.api",
    "export_patterns": "ffmem.patterning",
    "extend": "ffmem.api",
    "index": "ffmem.api",
    "load": "ffmem.api",
    "merge": "ffmem.api",
    "neighbours": "ffmem.acting",
    "open": "ffmem.api",
    "patterns_of": "ffmem.patterning",
    "report": "ffmem.measuring",
    "search": "ffmem.api",
    "serve": "ffmem.acting",
    "study": "ffmem.patterning",
    "trace": "ffmem.acting",
    "train": "ffmem.api",
    "verify": "ffmem.api",
}

__all__ = [
    "Cell",
    "Corpus",
    "FfmemError",
    "Index",
    "Memories",
    "Memory",
    "compare",
    "detect",
    "edit",
    "effect",
    "estimate",
    "experiment",
    "explain",
    "export",
    "export_patterns",
    "extend",
    "index",
    "load",
    "merge",
    "neighbours",
    "open",
    "patterns_of",
    "report",
    "search",
    "serve",
    "study",
    "trace",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ffmem' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
