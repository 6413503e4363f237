"""ffmem reads the feed-forward layers of a language model as key-value memories.

    model = ffmem.load("smollm2-135m")
    index = ffmem.index(model, ffmem.Corpus("wikitext-2:train", limit=2000), "runs/demo")
    index["L5N1234"].triggers

Names are imported when they are first used, so that reading an index never loads torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ffmem.api.experiments import compare_reports, experiment, report
    from ffmem.api.hub import pull, push
    from ffmem.api.index import estimate, export, extend, index, merge, open, search, serve, verify
    from ffmem.api.interventions import (
        circuit,
        coefficients,
        compare,
        compare_models,
        edit,
        effect,
        neighbours,
        sources,
        trace,
        write,
    )
    from ffmem.api.model import load, train
    from ffmem.api.patterns import detect, explain, export_patterns, patterns_of, study
    from ffmem.cells import Cell
    from ffmem.corpus.corpus import Corpus
    from ffmem.errors import FfmemError
    from ffmem.indexing.memory import Memory
    from ffmem.indexing.store import Index
    from ffmem.models.memories import Memories

_NAMES = {
    "api.experiments": ["compare_reports", "experiment", "report"],
    "api.index": [
        *("estimate", "export", "extend", "index", "merge", "open", "search", "serve", "verify")
    ],
    "api.hub": ["pull", "push"],
    "api.interventions": [
        *("circuit", "coefficients", "compare", "compare_models", "edit", "effect", "neighbours"),
        *("sources", "trace", "write"),
    ],
    "api.model": ["load", "train"],
    "api.patterns": ["detect", "explain", "export_patterns", "patterns_of", "study"],
    "cells": ["Cell"],
    "corpus.corpus": ["Corpus"],
    "errors": ["FfmemError"],
    "indexing.memory": ["Memory"],
    "indexing.store": ["Index"],
    "models.memories": ["Memories"],
}
_MODULES = {name: f"ffmem.{module}" for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'ffmem' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
