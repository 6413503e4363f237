"""What is compared between two sheets of one item, as a table of counts: one said c, the other k.

coverage   does a trigger show any pattern?                no, yes
type       shallow, both, semantic or uncovered            `LABELS`
related    is a case of composition to a related word?     no, yes
marks      is a trigger marked with a pattern?             no, yes (`matching.py`)
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from ffmem.annotation.sheet import Sheet
from ffmem.patterns.store import LABELS, labels

Confusion = Callable[[Sheet, Sheet, int], Int[ndarray, "label label"]]
"""The counts of two sheets about n triggers."""


def sheet_labels(sheet: Sheet, n: int) -> list[str]:
    """Return the label of each of n triggers by a sheet that was handed in."""
    return labels(n, [(str(pattern.kind), pattern.marks) for pattern in sheet.patterns])


def coverage_confusion(one: Sheet, other: Sheet, n: int) -> Int[ndarray, "label label"]:
    """Return how often triggers are covered for one and for the other."""
    mine, theirs = (
        [name != "uncovered" for name in sheet_labels(sheet, n)] for sheet in (one, other)
    )
    return counted(mine, theirs, 2)


def type_confusion(one: Sheet, other: Sheet, n: int) -> Int[ndarray, "label label"]:
    """Return how often triggers have each of the four labels for one and for the other."""
    mine, theirs = (
        [LABELS.index(name) for name in sheet_labels(sheet, n)] for sheet in (one, other)
    )
    return counted(mine, theirs, len(LABELS))


def related_confusion(one: Sheet, other: Sheet, n: int) -> Int[ndarray, "label label"]:
    """Return whether a case of composition is related for one and for the other."""
    return counted([bool(one.related)], [bool(other.related)], 2)


def counted(one: Sequence[int], other: Sequence[int], size: int) -> Int[ndarray, "label label"]:
    """Return how often two people gave each couple of answers to the same units."""
    counts = np.zeros((size, size), np.int64)
    np.add.at(counts, (np.array(one, np.int64), np.array(other, np.int64)), 1)
    return counts
