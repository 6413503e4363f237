"""What a study's tasks need, as arrays that any process can read: a sample, a layer's sequences.

read_x(x_arrays(x)) == x        in all that the pass looks at
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from ffmem.cluster.pieces import Arrays
from ffmem.corpus.sentences import TokenSentence
from ffmem.experiments.drawn import Drawn, Example
from ffmem.experiments.heads import NONE
from ffmem.experiments.sequences import Sequences


def sample_arrays(drawn: Drawn, start: int | None) -> Arrays:
    """Return the prefixes of a sample; nothing behind the last one of a sentence is kept."""
    sequences = [example.sentence.ids[: example.lengths[-1]] for example in drawn.examples]
    lengths = [example.lengths for example in drawn.examples]
    return {
        "start": _of_start(start),
        **_ragged("ids", sequences),
        **_ragged("lengths", lengths),
    }


def read_sample(arrays: Arrays) -> tuple[Drawn, int | None]:
    """Return the sample of some arrays, and its start token."""
    pairs = zip(_rows(arrays, "ids"), _rows(arrays, "lengths"), strict=True)
    examples = [
        Example(number, TokenSentence(None, ids, None, None), lengths)
        for number, (ids, lengths) in enumerate(pairs)
    ]
    return Drawn(examples, len(examples), 0), _start(arrays)


def sequence_arrays(sequences: Sequences, start: int | None) -> Arrays:
    """Return what a layer's trials run."""
    columns = {
        name: np.asarray(column) for name, column in sequences._asdict().items() if name != "ids"
    }
    return {"start": _of_start(start), **_ragged("ids", sequences.ids), **columns}


def read_sequences(arrays: Arrays) -> tuple[Sequences, int | None]:
    """Return what a layer's trials run, and the start token."""
    ids = [tuple(row) for row in _rows(arrays, "ids")]
    columns = (arrays[name] for name in ("sequence", "length"))
    return Sequences(int(arrays["layer"]), arrays["memory"], ids, *columns), _start(arrays)


def _of_start(start: int | None) -> Int64[ndarray, ""]:
    return np.array(NONE if start is None else start)


def _start(arrays: Arrays) -> int | None:
    start = int(arrays["start"])
    return None if start == NONE else start


def _ragged(name: str, rows: Sequence[Sequence[int]]) -> Arrays:
    """Return rows of any length as one array, and where each row begins."""
    flat = np.fromiter((one for row in rows for one in row), np.int32)
    return {name: flat, f"{name} bounds": np.cumsum([0, *map(len, rows)])}


def _rows(arrays: Arrays, name: str) -> list[list[int]]:
    flat, bounds = arrays[name].tolist(), arrays[f"{name} bounds"].tolist()
    return [flat[begin:end] for begin, end in pairwise(bounds)]
