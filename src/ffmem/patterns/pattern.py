"""What recurs in a memory's triggers, whoever saw it: a person, a detector, a language model.

The paper's rule (Section 3.1): a pattern is seen in at least three of a memory's first 25 triggers,
has a description, and is shallow (a recurring n-gram, say) or semantic (a recurring topic). A
trigger may show several patterns of either kind.

    label of a trigger = kinds of the patterns that it shows;    none: not covered
"""

from collections.abc import Iterable
from typing import NamedTuple

from ffmem.cells import Cell

KINDS = ("shallow", "semantic")
"""The paper's two."""

LEAST = 3
"""Triggers that must show a pattern, for it to be one."""

TOP = 25
"""Triggers of a memory in which patterns are looked for."""

LABELS = ("shallow", "both", "semantic", "uncovered")
"""What a trigger can be called, in the order of Figure 2."""


class Pattern(NamedTuple):
    """One pattern of one list of triggers, and how well it holds beyond those it was seen in.

    The scores are None where nobody measured them, as with people's patterns.
    """

    cell: Cell
    sign: int
    """Of the coefficients in the list: +1, or −1 for the negative triggers of a gated model."""
    number: int
    """Place among the patterns of its list, from 1, the best first."""
    kind: str
    description: str
    rule: str
    """What finds it: `last-token`, `topic`, …; `person` or `explained` where no program can say."""
    what: str
    """What the rule looks for: the token, the n-gram, the words of the topic."""
    ranks: tuple[int, ...]
    """Which triggers show it, from 1: of all that somebody looked at, at least the first TOP."""
    held_ranks: tuple[int, ...] = ()
    """Which of the held-out triggers show it."""
    held: int = 0
    """Held-out triggers that count; recall = len(held_ranks) / held."""
    precision: float | None = None
    """recall / (recall + base): of as many random prefixes as triggers, the share that are such."""
    recall: float | None = None
    """Share of the held-out triggers that show it."""
    base: float | None = None
    """Share of random prefixes that show it."""
    lift: float | None = None
    """recall / base."""
    p_value: float | None = None
    """Of so many held-out triggers by chance."""
    q_value: float | None = None
    """The same after false-discovery control over everything that was tested."""


SCORES = ("precision", "recall", "base", "lift", "p_value", "q_value")
"""Numbers of a pattern that somebody may have measured."""


class Examined(NamedTuple):
    """A list of triggers in which somebody looked for patterns, found or not."""

    cell: Cell
    sign: int
    n: int
    """Triggers that were looked at, at most TOP."""


def label(kinds: Iterable[str]) -> str:
    """Return what a trigger is called that shows patterns of some kinds."""
    shown = set(kinds)
    if len(shown) > 1:
        return "both"
    return shown.pop() if shown else "uncovered"


def labels(n: int, patterns: Iterable[tuple[str, Iterable[int]]]) -> list[str]:
    """Return the label of each of n triggers, from the (kind, ranks) of the patterns."""
    kinds: list[set[str]] = [set() for _ in range(n)]
    for kind, ranks in patterns:
        for rank in ranks:
            if rank <= n:
                kinds[rank - 1].add(kind)
    return [label(shown) for shown in kinds]
