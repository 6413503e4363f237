"""Whether a finished index is the one that a command asks for; no model is loaded for it."""

from dataclasses import asdict
from pathlib import Path

from ffmem.corpus.corpus import Corpus
from ffmem.errors import StoreError
from ffmem.indexing.settings import Options
from ffmem.indexing.store import Index


def refuse_other(index: Index, model: str, corpus: Corpus, options: Options, dtype: str) -> None:
    """Refuse a command that asks for another index than the finished one, and name why."""
    manifest = index.manifest
    first = asdict(manifest.corpus.sources[0])
    asked = {
        "model": (_absolute(model), manifest.model.source),
        "t": (options.t, manifest.t),
        "prefixes": (options.prefixes, manifest.prefixes),
        "compat": (options.compat, manifest.compat),
        "start": (options.start, manifest.start.asked),
        "dtype": (dtype, manifest.dtype),
        **{name: (value, first[name]) for name, value in corpus.describe().items()},
    }
    differences = [f"{name}: {old} → {new}" for name, (new, old) in asked.items() if new != old]
    if differences:
        raise StoreError(
            f"{index.folder} holds a finished index with other settings: {'; '.join(differences)}."
            " Choose another folder."
        )


def _absolute(model: str) -> str:
    """Return a MODEL argument as a manifest names it, without the loader, which needs torch."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model
