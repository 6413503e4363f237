"""What every result says about the index and the model that it is of."""

from typing import Any

from ffmem.indexing.store import Index

FOLDED = "folded"
"""How experiments read parts of the residual stream."""


def settings(index: Index, dtype: str, seed: int) -> dict[str, Any]:
    """Return how a result was made; `dtype` is of the model that was run."""
    manifest = index.manifest
    return {
        "model": manifest.model.source,
        "model_hash": manifest.model.hash,
        "layers": manifest.model.layers,
        "memories": manifest.model.layout.per_layer,
        "vocabulary": manifest.model.vocabulary,
        "activation": manifest.model.activation,
        "gated": manifest.model.gated,
        "kind": manifest.model.memory,
        "dtype": dtype,
        # Where an index has no values to project, y is still read so.
        "projection": manifest.projection if manifest.model.has_values else FOLDED,
        "start": manifest.start.token,
        "corpus": {
            "sources": [source.source for source in manifest.corpus.sources],
            "hash": manifest.corpus.hash,
            "sentences": manifest.corpus.sentences,
            "tokens": manifest.corpus.tokens,
            "limited": any(source.limit is not None for source in manifest.corpus.sources),
        },
        "t": manifest.t,
        "prefixes": manifest.prefixes,
        "compat": manifest.compat,
        "seed": seed,
    }
