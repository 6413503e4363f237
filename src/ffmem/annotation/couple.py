"""Two people's sheets about the same item: what all agreement is counted over.

With m sheets of an item, each couple of them weighs 1 / (m − 1): so α counts every answer once.
A machine is coupled with every person who judged the item, each weighing 1 / (number of people).
"""

from collections.abc import Iterable
from itertools import combinations
from typing import NamedTuple

from ffmem.annotation.item import Judged


class Couple(NamedTuple):
    """Two sheets of one item."""

    left: Judged
    right: Judged
    weight: float

    @property
    def names(self) -> tuple[str, str]:
        """Whose sheets they are."""
        return self.left.annotator, self.right.annotator

    @property
    def n(self) -> int:
        """Triggers that were judged."""
        return max(len(self.left.item.texts), len(self.right.item.texts))


def by_item(judged: Iterable[Judged]) -> dict[str, list[Judged]]:
    """Return the sheets of each item, in the order of keys and names."""
    found: dict[str, list[Judged]] = {}
    for one in sorted(judged, key=lambda one: (one.item.key, one.role, one.annotator)):
        found.setdefault(one.item.key, []).append(one)
    return found


def couples(people: Iterable[Judged]) -> list[list[Couple]]:
    """Return the couples of each item that two people or more judged."""
    return [
        [Couple(one, other, 1 / (len(sheets) - 1)) for one, other in combinations(sheets, 2)]
        for sheets in by_item(people).values()
        if len(sheets) > 1
    ]


def couples_between(machine: Iterable[Judged], people: Iterable[Judged]) -> list[list[Couple]]:
    """Return the couples of a machine's sheets with people's, item by item."""
    own, others = by_item(machine), by_item(people)
    return [
        [Couple(one, other, 1 / len(others[key])) for one in sheets for other in others[key]]
        for key, sheets in own.items()
        if key in others
    ]


def crossed(items: list[list[Couple]]) -> list[list[Couple]]:
    """Return the same people's sheets of different items side by side: what chance would give.

    Each left sheet stands beside the right sheet of the couple's next item.
    """
    by_names: dict[tuple[str, str], list[Couple]] = {}
    for couple in (couple for item in items for couple in item):
        by_names.setdefault(couple.names, []).append(couple)
    return [
        [one._replace(right=following.right)]
        for own in by_names.values()
        if len(own) > 1
        for one, following in zip(own, [*own[1:], own[0]], strict=True)
    ]
