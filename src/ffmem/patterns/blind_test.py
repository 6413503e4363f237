"""How far a described pattern holds: pointed out among held-out triggers and random prefixes.

recall = shown / held-out triggers,  base = shown / random prefixes,  lift = recall / base
p = P(Hypergeometric ≥ shown held-out triggers | all that were said to show the pattern)
"""

from collections.abc import Sequence
from math import comb

import numpy as np

from ffmem.patterns.pattern import Pattern
from ffmem.patterns.significance import false_discovery


def scored(
    pattern: Pattern, held_ranks: tuple[int, ...], held: int, shown_others: int, others: int
) -> Pattern:
    """Return a pattern with its scores from a blind test."""
    recall, base = len(held_ranks) / held, shown_others / others
    return pattern._replace(
        held_ranks=held_ranks,
        held=held,
        precision=recall / (recall + base) if recall + base else None,
        recall=recall,
        base=base,
        lift=recall / base if base else None,
        p_value=tail(len(held_ranks), held, shown_others, others),
    )


def tail(shown: int, held: int, shown_others: int, others: int) -> float:
    """Return how probable so many held-out texts, or more, are among all that were pointed at."""
    pointed = shown + shown_others
    ways = sum(comb(held, k) * comb(others, pointed - k) for k in range(shown, pointed + 1))
    return ways / comb(held + others, pointed)


def with_q_values(patterns: Sequence[Pattern]) -> list[Pattern]:
    """Return patterns with what their p-values are worth, given how many were tested."""
    tested = [one.p_value for one in patterns if one.p_value is not None]
    values = iter(false_discovery(np.asarray(tested, np.float64)).tolist())
    return [one if one.p_value is None else one._replace(q_value=next(values)) for one in patterns]
