"""Whether an index is what it says: every hash, and every invariant that the pass promises."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy import ndarray

from ffmem.errors import StoreError
from ffmem.files import sha256
from ffmem.indexing.sample import SIZE, hashed
from ffmem.indexing.sentences import VACANT
from ffmem.indexing.store import Index
from ffmem.indexing.tables import layer_file, read_columns


def verify(index: Index) -> list[str]:
    """Return what is wrong with an index, a sentence each; an empty list if nothing is."""
    wrong = list(_files(index))
    if wrong:
        return wrong  # what is damaged need not make sense
    try:
        offsets, lengths, wrong = _sentences(index)
        wrong += _sample(index, offsets)
        for layer in range(index.n_layers):
            wrong += [
                f"layer {layer}: {sentence}" for sentence in _layer(index, layer, offsets, lengths)
            ]
    except StoreError as error:
        wrong.append(str(error))
    return wrong


def _files(index: Index) -> Iterator[str]:
    folder: Path = index.folder
    for name, expected in index.manifest.files.items():
        path = folder / name
        if not path.exists():
            yield f"{name} is missing."
        elif sha256(path) != expected:
            yield f"{name} was changed or damaged: its hash is not the manifest's."
    for layer in range(index.n_layers):
        for kind in ("triggers", "stats", "samples", "values"):
            if layer_file(kind, layer) not in index.manifest.files:
                yield f"{layer_file(kind, layer)} is not in the manifest."


def _sentences(index: Index) -> tuple[ndarray, ndarray, list[str]]:
    corpus = index.manifest.corpus
    lengths = np.concatenate(list(index.sentences.lengths()))
    offsets = np.concatenate([[0], np.cumsum(lengths + 1)])[:-1]
    stored = read_columns(index.folder / "sentences.parquet", ["sentence", "offset"])
    wrong = []
    if len(lengths) != corpus.sentences or int(lengths.sum()) != corpus.tokens:
        wrong.append(
            f"sentences.parquet has {len(lengths)} sentences and {int(lengths.sum())} tokens; the"
            f" manifest names {corpus.sentences} and {corpus.tokens}."
        )
    if (stored["offset"] != offsets).any() or (stored["sentence"] != np.arange(len(lengths))).any():
        wrong.append("sentences.parquet: numbers and offsets do not follow from the lengths.")
    return offsets, lengths, wrong


def _sample(index: Index, offsets: ndarray) -> Iterator[str]:
    drawn = read_columns(index.folder / "samples/prefixes.parquet")
    if len(drawn["prefix"]) != min(SIZE, index.manifest.corpus.tokens):
        yield f"the sample has {len(drawn['prefix'])} prefixes."
    base = 0
    for source in index.manifest.corpus.sources:
        past = base + source.tokens + source.sentences
        mine = (drawn["prefix"] >= base) & (drawn["prefix"] < past)
        if (hashed(source.hash, drawn["prefix"][mine] - base) != drawn["hash"][mine]).any():
            yield f"the sample's hashes are not those of {source.source}."
        base = past


def _layer(index: Index, layer: int, offsets: ndarray, lengths: ndarray) -> Iterator[str]:
    manifest = index.manifest
    triggers = read_columns(index.folder / layer_file("triggers", layer))
    stats = read_columns(index.folder / layer_file("stats", layer))
    values = read_columns(index.folder / layer_file("values", layer))
    for sign, name, extreme in ((1, "", "max"), (-1, "negative_", "min")):
        if f"{name}prefix" not in triggers:
            continue
        prefixes = triggers[f"{name}prefix"]
        strengths = triggers[f"{name}coefficient"] * sign
        yield from _list(prefixes, strengths, offsets, lengths, manifest.prefixes, name)
        some = prefixes[:, 0] != VACANT
        if (strengths[some, 0] != stats[extreme][some] * sign).any():
            yield f"a first {name}trigger is not the {extreme} of its memory."
        if (~some & (stats[extreme] * sign > 0)).any():
            yield f"a memory has no {name}trigger although its {extreme} is beyond 0."
    if (stats["active"] > manifest.corpus.tokens).any() or (stats["active"] < 0).any():
        yield "a memory is active on more prefixes than there are."
    for side in ("top", "bottom"):
        ids, logits = values[f"{side}_ids"], values[f"{side}_logits"]
        if not ((ids >= 0) & (ids < manifest.model.vocabulary)).all():
            yield f"a {side} token is not in the vocabulary."
        if (np.diff(logits if side == "top" else -logits, axis=1) > 0).any():
            yield f"{side} tokens are not in the order of their logits."


def _list(
    prefixes: ndarray,
    strengths: ndarray,
    offsets: ndarray,
    lengths: ndarray,
    which: str,
    name: str,
) -> Iterator[str]:
    filled = prefixes != VACANT
    if (~filled[:, :-1] & filled[:, 1:]).any():
        yield f"a {name}trigger stands behind a vacant slot."
    if not (strengths[filled] > 0).all() or strengths[~filled].any():
        yield f"a {name}coefficient has the wrong sign."
    tied = (np.diff(strengths, axis=1) == 0) & filled[:, 1:]
    if (np.diff(strengths, axis=1) > 0).any() or (np.diff(prefixes, axis=1)[tied] <= 0).any():
        yield f"{name}triggers are not in order."
    owners = np.searchsorted(offsets, prefixes, side="right") - 1
    places = prefixes - offsets[owners]
    if (filled & ((places < 0) | (places > lengths[owners]))).any():
        yield f"a {name}trigger is not a prefix of the corpus."
    if which == "best":
        ordered = np.sort(np.where(filled, owners, -1 - np.arange(owners.shape[1])), axis=1)
        if (np.diff(ordered, axis=1) == 0).any():
            yield f"two {name}triggers of a memory are prefixes of one sentence."
