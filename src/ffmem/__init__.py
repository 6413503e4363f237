"""ffmem reads the feed-forward layers of a language model as key-value memories.

    model = ffmem.load("smollm2-135m")
    index = ffmem.index(model, ffmem.Corpus("wikitext-2:train", limit=2000), "runs/demo")
    index["L5N1234"].triggers

Names are imported when they are first used, so that reading an index never loads torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ffmem.annotation.study import study
    from ffmem.api.experiments import compare_reports, experiment, report
    from ffmem.api.index import estimate, export, extend, index, open, search, verify
    from ffmem.api.interventions import compare_models, edit, effect, neighbours, trace
    from ffmem.api.model import train
    from ffmem.cells import Cell
    from ffmem.corpus.corpus import Corpus
    from ffmem.errors import FfmemError
    from ffmem.indexing.memory import Memory
    from ffmem.indexing.merge import merge
    from ffmem.indexing.store import Index
    from ffmem.interventions.circuit import circuit
    from ffmem.interventions.coefficients import coefficients
    from ffmem.interventions.compare import compare
    from ffmem.interventions.sources import sources
    from ffmem.interventions.write import write
    from ffmem.models.load import load
    from ffmem.models.memories import Memories
    from ffmem.patterns.detect import detect
    from ffmem.patterns.explain import explain
    from ffmem.patterns.store import export_patterns, patterns_of
    from ffmem.sharing.transfer import pull, push
    from ffmem.web.server import serve

_NAMES = {
    "annotation.study": ["study"],
    "api.experiments": ["compare_reports", "experiment", "report"],
    "api.index": ["estimate", "export", "extend", "index", "open", "search", "verify"],
    "api.interventions": ["compare_models", "edit", "effect", "neighbours", "trace"],
    "api.model": ["train"],
    "cells": ["Cell"],
    "corpus.corpus": ["Corpus"],
    "errors": ["FfmemError"],
    "indexing.memory": ["Memory"],
    "indexing.merge": ["merge"],
    "indexing.store": ["Index"],
    "interventions.circuit": ["circuit"],
    "interventions.coefficients": ["coefficients"],
    "interventions.compare": ["compare"],
    "interventions.sources": ["sources"],
    "interventions.write": ["write"],
    "models.load": ["load"],
    "models.memories": ["Memories"],
    "patterns.detect": ["detect"],
    "patterns.explain": ["explain"],
    "patterns.store": ["export_patterns", "patterns_of"],
    "sharing.transfer": ["pull", "push"],
    "web.server": ["serve"],
}
_MODULES = {name: f"ffmem.{module}" for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'ffmem' has no attribute {name!r}")
    try:
        module = import_module(_MODULES[name])
    except ModuleNotFoundError:
        from ffmem.models.arguments import require_models

        require_models()  # which says what to install
        raise
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
