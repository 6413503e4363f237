"""Few and different: which of a list's patterns are told, the most surprising first.

A pattern is taken only if at least three of the first triggers show it that no pattern taken before
shows. A sharp one gives way to a wider one that holds all its triggers and at least three more; of
two that mark the same, the one that is easier to read is told.
"""

from typing import NamedTuple

WORTH = 0.5
"""A wider one must have this share of the sharp one's surprise."""
READABLE = 0.6
"""One that reads better, but marks no more, must have this share."""


class Option(NamedTuple):
    """A pattern that may be told."""

    number: int
    """Whatever the caller knows it by."""
    surprise: float
    marks: int
    """First triggers that show it, a bit each."""
    fresh: int
    """The same, without repetitions."""
    effort: int
    """To read it: the least is best."""


def select(options: list[Option], least: int) -> list[int]:
    """Return the numbers of the patterns to tell, in the order in which they were taken."""
    left = sorted(options, key=lambda one: (-one.surprise, one.effort, one.number))
    taken: list[int] = []
    covered = 0
    while left:
        left = [one for one in left if (one.fresh & ~covered).bit_count() >= least]
        if not left:
            break
        best = max(
            (one for one in left if one is left[0] or _rather(one, left[0], least)),
            key=lambda one: (one is not left[0], one.surprise, -one.effort, -one.number),
        )
        taken.append(best.number)
        covered |= best.marks
        left = [one for one in left if one is not best]
    return taken


def _rather(other: Option, best: Option, least: int) -> bool:
    """Return whether another pattern says what the best says, and more or better."""
    if best.marks & ~other.marks:
        return False
    n_more = (other.fresh & ~best.marks).bit_count()
    if n_more >= least and other.surprise >= WORTH * best.surprise:
        return True
    return other.effort < best.effort and other.surprise >= READABLE * best.surprise
