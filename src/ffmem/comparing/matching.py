"""Whether two indexes can be compared, and in what else they differ.

Memories are told apart by their places, and triggers by the numbers of their prefixes. So model,
corpus and settings must give both the same meaning; only the weights are another's.
"""

from typing import Any

from ffmem.errors import StoreError
from ffmem.indexing.manifest import Manifest
from ffmem.indexing.store import Index

_SHAPE = ("family", "layers", "hidden", "vocabulary", "gated")

_WHAT_TO_DO = {
    "model": "Only models of one architecture have memories that correspond.",
    "corpus": "Index both models over the same corpus, read in the same way.",
    "settings": "Index one of them again with the settings of the other.",
}


def refuse_unlike(first: Index, second: Index) -> None:
    """Refuse two indexes whose memories or prefixes do not correspond, and name both values."""
    one, other = _binding(first.manifest), _binding(second.manifest)
    for group, what_to_do in _WHAT_TO_DO.items():
        unlike = [
            f"{name}: {shown} in the first, {other[group][name][1]} in the second"
            for name, (value, shown) in one[group].items()
            if value != other[group][name][0]
        ]
        if unlike:
            raise StoreError(
                f"{first.folder} and {second.folder} cannot be compared. {'; '.join(unlike)}."
                f" {what_to_do}"
            )


def _binding(manifest: Manifest) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Return what two indexes must have in common: each value, and how it is shown."""
    corpus, start = manifest.corpus, manifest.start
    sources = ", ".join(source.source for source in corpus.sources)
    read = f"{sources} ({corpus.sentences:,} sentences, hash {corpus.hash[:12]})"
    shape = {name: getattr(manifest.model, name) for name in _SHAPE}
    shape["memories"] = manifest.model.layout.per_layer
    # Indexes of models of ours that were made before there were kinds name the activation alone.
    shape["memory"] = manifest.model.memory or manifest.model.activation
    settings = {name: getattr(manifest, name) for name in ("t", "prefixes", "projection")}
    return {
        "model": {name: (value, value) for name, value in shape.items()},
        "corpus": {"corpus": (corpus.hash, read)},
        "settings": {
            "start token": (start.id, "none" if start.token is None else repr(start.token)),
            "compat": (manifest.compat, manifest.compat or "none"),
            **{name: (value, value) for name, value in settings.items()},
        },
    }


def differences(first: Manifest, second: Manifest) -> dict[str, list[Any]]:
    """Return what may differ and does, by name: the values of both."""
    one, other = _free(first), _free(second)
    return {
        name: [one.get(name), other.get(name)]
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name)
    }


def _free(manifest: Manifest) -> dict[str, Any]:
    sources = manifest.corpus.sources
    run = {
        name: [getattr(source, name) for source in sources]
        for name in ("chunk_tokens", "batch_tokens", "threads", "device")
    }
    versions = {f"version of {name}": version for name, version in manifest.versions.items()}
    return {"dtype": manifest.dtype, "tokenizer": manifest.tokenizer, **run, **versions}
