"""Patterns of several people side by side: which of them are the same, by the texts they mark.

    overlap(a, b) = |marks of a ∩ marks of b| / |marks of a ∪ marks of b|

The closest two are put in one row first, then the next, as long as nobody has two patterns in a
row. It is a help for the eye of whoever adjudicates; agreement is measured elsewhere.
"""

from collections.abc import Mapping
from itertools import combinations

from ffmem.annotation.sheet import Sheet, SheetPattern

LEAST = 0.2
"""Overlap below which two patterns are not called the same."""

Row = dict[str, tuple[int, SheetPattern]]
"""By name: a pattern and its number on that person's sheet, from 1."""


def overlap(one: SheetPattern, other: SheetPattern) -> float:
    """Return how far two patterns mark the same texts, 0 to 1."""
    either = one.marks | other.marks
    return len(one.marks & other.marks) / len(either) if either else 0.0


def aligned(sheets: Mapping[str, Sheet]) -> list[Row]:
    """Return the patterns of all people in rows, those of most people and marks first."""
    rows: list[Row] = [
        {name: (number, pattern)}
        for name, sheet in sheets.items()
        for number, pattern in enumerate(sheet.patterns, start=1)
    ]
    while True:
        best, pair = LEAST, None
        for one, other in combinations(rows, 2):
            if one.keys() & other.keys():
                continue
            close = min(overlap(a[1], b[1]) for a in one.values() for b in other.values())
            if close > best:
                best, pair = close, (one, other)
        if pair is None:
            break
        rows = [row for row in rows if row is not pair[0] and row is not pair[1]]
        rows.append(pair[0] | pair[1])
    return sorted(
        rows,
        key=lambda row: (
            -len(row),
            -sum(len(pattern.marks) for _, pattern in row.values()),
            min(number for number, _ in row.values()),
            sorted(row),
        ),
    )
