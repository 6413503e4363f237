"""Whether values predict the next tokens of triggers (§4), for every memory of a layer.

    agrees ⇔ top(sign·v) is the next token of the memory's top trigger (`triggers.py`)
    followed = triggers whose next token is top(sign(m)·v),  followable = triggers that have one

    agreement/layer-000.parquet   memory, sign; with static values: agreement, followed, followable

All of it follows from triggers, values and sentences. It is stored because decoding those takes a
hundred times as long; it is read whole, so a file is one row group.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Int8, Int32
from numpy import ndarray

from ffmem.indexing.manifest import ModelRecord
from ffmem.indexing.sentences import Sentences
from ffmem.indexing.store import Index
from ffmem.indexing.tables import layer_file, read_columns, write_table
from ffmem.indexing.triggers import (
    NONE,
    FollowedTriggers,
    corpus_tokens,
    read_following,
    select_top,
)
from ffmem.progress import Progress


class Agreement(NamedTuple):
    """Top triggers and values of a layer's memories, compared; without values only the sign."""

    sign: Int8[ndarray, " memory"]
    """Sign of the top trigger's coefficient; NO_SIGN without a top trigger."""
    agreement: Int8[ndarray, " memory"] | None = None
    """1 if they agree, 0 if not, −1 without a top trigger."""
    followed: Int32[ndarray, " memory"] | None = None
    followable: Int32[ndarray, " memory"] | None = None

    def columns(self) -> dict[str, ndarray]:
        """Return what is there, by name."""
        columns = zip(self._fields, self, strict=True)
        return {name: column for name, column in columns if column is not None}


def read_agreement(index: Index, layer: int) -> Agreement:
    """Return the agreement of a layer: as stored, or so far if the index is unfinished."""
    if index.live is None:
        columns = index.columns("agreement", layer)
        return Agreement(**{name: columns[name] for name in Agreement._fields if name in columns})
    values = None
    if index.manifest.model.has_values:
        values = index.columns("values", layer)
        values = values if values["top_ids"].shape[1] else None  # not computed yet
    following = corpus_tokens(index).following
    triggers = index.columns("triggers", layer)
    return agreement_of(triggers, values, lambda prefixes: following[prefixes])


def write_agreement(folder: Path, model: ModelRecord, progress: Progress) -> None:
    """Write the agreement of every layer, when all other tables are in the folder."""
    path = folder / "sentences.parquet"
    with (
        pa.OSFile(str(path)) as file,  # if mapped, its pages would stay in memory
        progress.bar("Agreement", model.layers, "layers") as step,
    ):
        sentences = Sentences(path, file)
        for layer in range(model.layers):
            columns = compute_agreement(folder, layer, model, sentences).columns()
            memory = np.arange(model.layout.widths[layer], dtype=np.int32)
            table = pa.table({"memory": memory, **columns})
            write_table(folder / layer_file("agreement", layer), table, max(len(memory), 1))
            step(1)


def compute_agreement(
    folder: Path, layer: int, model: ModelRecord, sentences: Sentences
) -> Agreement:
    """Return the agreement of a layer, computed from its finished tables."""
    signs = ("", "negative_") if model.gated else ("",)
    names = [f"{sign}{name}" for sign in signs for name in ("coefficient", "prefix")]
    triggers = read_columns(folder / layer_file("triggers", layer), names)
    values = None
    if model.has_values:
        path = folder / layer_file("values", layer)
        values = read_columns(path, ["top_ids", "bottom_ids"])
    return agreement_of(triggers, values, lambda prefixes: read_following(sentences, prefixes))


def agreement_of(
    triggers: Mapping[str, ndarray],
    values: Mapping[str, ndarray] | None,
    next_tokens: Callable[[ndarray], ndarray],
) -> Agreement:
    """Return the agreement of a layer's triggers and values, both as columns."""
    signs = [sign for sign in ("", "negative_") if f"{sign}prefix" in triggers]
    prefixes = np.stack([triggers[f"{sign}prefix"] for sign in signs])
    positive, *others = (
        FollowedTriggers(triggers[f"{sign}coefficient"], *both)
        for sign, *both in zip(signs, prefixes, next_tokens(prefixes), strict=True)
    )
    negative = others[0] if others else positive.without_triggers()
    top = select_top(positive, negative)
    if values is None:
        return Agreement(top.sign)
    first = {1: values["top_ids"][:, 0], -1: values["bottom_ids"][:, 0]}
    followed, followable = np.zeros((2, len(top.sign)), np.int32)
    for lists, ids in ((positive, first[1]), (negative, first[-1])):
        followed += np.count_nonzero(lists.next == ids[:, None], axis=1).astype(np.int32)
        followable += np.count_nonzero(lists.next != NONE, axis=1).astype(np.int32)
    predicted = np.where(top.sign < 0, first[-1], first[1])
    agrees = np.where(top.exists, predicted == top.next_token, -1)
    return Agreement(top.sign, agrees.astype(np.int8), followed, followable)
