"""Whose pattern is whose: the best one-to-one matching of two people's patterns of one item.

    maximise Σ J(a, b) over couples (a, b),    J(a, b) = |marks of both| / |marks of either|

(the Hungarian method). Patterns that share no mark are not matched. The marks are then compared
cell by cell, trigger × pattern: a matched couple is one column, a pattern without a match is a
column against nothing, so it counts against agreement.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from ffmem.annotation.sheet import Sheet, SheetPattern

Score = Callable[[SheetPattern, SheetPattern], float]


class Match(NamedTuple):
    """One pattern of each side, and how alike their marks are."""

    left: int
    right: int
    jaccard: float


def jaccard(one: SheetPattern, other: SheetPattern) -> float:
    """Return the share of common marks among all marks of two patterns."""
    union = one.marks | other.marks
    return len(one.marks & other.marks) / len(union) if union else 0.0


def jaccard_of_kind(one: SheetPattern, other: SheetPattern) -> float:
    """Return the same; 0 where one is called shallow and the other semantic."""
    return jaccard(one, other) if one.kind == other.kind else 0.0


def match(
    left: Sequence[SheetPattern], right: Sequence[SheetPattern], score: Score = jaccard
) -> list[Match]:
    """Return the matching of largest sum, by the left side's order."""
    if not left or not right:
        return []
    from scipy.optimize import linear_sum_assignment

    scores = np.array([[score(one, other) for other in right] for one in left])
    rows, columns = linear_sum_assignment(scores, maximize=True)
    return [
        Match(i, j, float(scores[i, j]))
        for i, j in zip(rows.tolist(), columns.tolist(), strict=True)
        if scores[i, j] > 0
    ]


def likeness(one: Sheet, other: Sheet) -> float:
    """Return how alike two sheets are: 2·Σ J / (patterns of both); 1 where both have none."""
    n = len(one.patterns) + len(other.patterns)
    found = match(one.patterns, other.patterns)
    return 2 * sum(matched.jaccard for matched in found) / n if n else 1.0


def marks_confusion(
    one: Sheet, other: Sheet, n: int, score: Score = jaccard
) -> Int[ndarray, "label label"]:
    """Return in how many cells (trigger × pattern) one and the other marked: no, yes."""
    found = match(one.patterns, other.patterns, score)
    lone = frozenset[int]()
    columns = [(one.patterns[m.left].marks, other.patterns[m.right].marks) for m in found]
    left, right = {m.left for m in found}, {m.right for m in found}
    columns += [(p.marks, lone) for i, p in enumerate(one.patterns) if i not in left]
    columns += [(lone, p.marks) for i, p in enumerate(other.patterns) if i not in right]
    counts = np.zeros((2, 2), np.int64)
    for mine, theirs in columns:
        both, either = len(mine & theirs), len(mine | theirs)
        counts += np.array([[n - either, len(theirs) - both], [len(mine) - both, both]])
    return counts
