"""Whether a finished index is the one that a command asks for; no model is loaded for it."""

from dataclasses import asdict

from ffmem.corpus.corpus import Corpus
from ffmem.errors import StoreError
from ffmem.indexing.options import Options
from ffmem.indexing.store import Index
from ffmem.models.argument import canonical


def refuse_other(index: Index, model: str, corpus: Corpus, options: Options, dtype: str) -> None:
    """Refuse a command that asks for another index than the finished one, and name why."""
    manifest = index.manifest
    first = asdict(manifest.corpus.sources[0])
    source = manifest.model.source
    asked = {
        "model": (model if model == source else canonical(model), source),
        "t": (options.t, manifest.t),
        "prefixes": (options.prefixes, manifest.prefixes),
        "compat": (options.compat, manifest.compat),
        "start": (options.start, manifest.start.asked),
        "dtype": (dtype, manifest.dtype),
        **{name: (value, first[name]) for name, value in corpus.describe().items()},
    }
    named = asked.pop("source")
    differences = [f"{name}: {old} → {new}" for name, (new, old) in asked.items() if new != old]
    if len(manifest.corpus.sources) > 1:
        others = ", ".join(source.source for source in manifest.corpus.sources[1:])
        differences.append(f"it holds further corpora: {others}")
    # The files are hashed last, and once: that takes as long as reading them.
    digest = None if differences else corpus.digest()
    if named[0] != named[1] and (digest is None or digest != first["digest"]):
        differences.append(f"source: {named[1]} → {named[0]}")
    elif not differences and digest != first["digest"]:
        differences.append(f"the corpus' files have changed, digest: {first['digest']} → {digest}")
    if differences:
        raise StoreError(
            f"{index.folder} holds a finished index with other settings: {'; '.join(differences)}."
            " Choose another folder."
        )


def refuse_other_weights(index: Index, weights: str) -> None:
    """Refuse an index of another model than the one that is loaded already."""
    if weights != index.manifest.model.hash:
        raise StoreError(
            f"{index.folder} was made with the model of hash {index.manifest.model.hash}, not"
            f" {weights}. Give the model that it was made with, or another index."
        )
