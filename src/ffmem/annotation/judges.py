"""Who judges what, when not everybody judges everything.

Each item goes to those who have least so far, and among them to those who have met least:

    after any number of items:  loads differ by at most one
    pairs share evenly:         what two people both judge differs little from pair to pair

So annotators can be compared two by two, and nobody has to do more than the others.
"""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import combinations


def judges(
    n: int, people: Sequence[str], overlap: int, order: random.Random
) -> list[tuple[str, ...]]:
    """Return who judges each of n items, `overlap` people each."""
    loads: Counter[str] = Counter()
    met: Counter[frozenset[str]] = Counter()
    chosen: list[tuple[str, ...]] = []
    for _ in range(n):
        some: list[str] = []
        for _ in range(overlap):
            # Random among equals: else the same people would always be first.
            left = order.sample([one for one in people if one not in some], len(people) - len(some))
            some.append(min(left, key=lambda one: (loads[one], _shared(met, one, some))))
        loads.update(some)
        met.update(frozenset(pair) for pair in combinations(some, 2))
        chosen.append(tuple(one for one in people if one in some))
    return chosen


def _shared(met: Counter[frozenset[str]], one: str, others: Sequence[str]) -> tuple[int, int]:
    """Return how much somebody has shared with others, the most with one of them first."""
    counts = [met[frozenset((one, other))] for other in others]
    return (max(counts, default=0), sum(counts))
