"""Labels of triggers, and their shares: the numbers of Figure 2 (§3.2).

    label of a trigger = kinds of the patterns that it shows;    none: uncovered
    share of a label   = triggers with it / all triggers, pooled over keys as in the paper

A *key* is a memory's list of triggers, as in the paper. Intervals resample keys with replacement,
because the triggers of one key are not independent.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ffmem.stats import bootstrap_interval, bootstrap_weights, number, ratio, wilson, with_interval

LABELS = ("shallow", "both", "semantic", "uncovered")
"""In the order of Figure 2."""


def labels(n: int, patterns: Iterable[tuple[str, Iterable[int]]]) -> list[str]:
    """Return the label of each of the first n triggers, from the (kind, ranks) of the patterns."""
    kinds: list[set[str]] = [set() for _ in range(n)]
    for kind, ranks in patterns:
        for rank in ranks:
            if rank <= n:
                kinds[rank - 1].add(kind)
    return ["both" if len(shown) > 1 else shown.pop() if shown else "uncovered" for shown in kinds]


class KeyCounts(NamedTuple):
    """Counts of patterns per key; means where several people annotated it."""

    triggers: Float[ndarray, "key label"]
    """Triggers with each label."""
    patterns: Float[ndarray, " key"]
    found: Float[ndarray, " key"]
    """1 if there is a pattern, 0 if not, between where people differ."""
    n: Float[ndarray, " key"]
    """Triggers."""

    @classmethod
    def of(cls, keys: Iterable[Sequence[tuple[Sequence[str], int]]]) -> "KeyCounts":
        """Count keys; of each, every person's labels and number of patterns."""
        rows = [
            np.mean(
                [[*map(seen.count, LABELS), k, k > 0, len(seen)] for seen, k in people],
                axis=0,
                dtype=np.float64,
            )
            for people in keys
        ]
        table = np.array(rows, np.float64).reshape(len(rows), len(LABELS) + 3)
        return cls(table[:, : len(LABELS)], *table[:, len(LABELS) :].T)

    def sums(self) -> dict[str, tuple[ndarray, ndarray]]:
        """Return what is summed over keys for each share: parts and wholes."""
        each = np.ones(len(self.n))
        by_label = dict(zip(LABELS, self.triggers.T, strict=True))
        return {
            **{name: (part, self.n) for name, part in by_label.items()},
            "covered": (self.n - by_label["uncovered"], self.n),
            "patterns_per_key": (self.patterns, each),
            "with_pattern": (self.found, each),
        }


def shares(keys: KeyCounts, seed: int = 0) -> dict[str, Any]:
    """Return the share of triggers with each label, and further counts, with intervals."""
    n_keys = len(keys.n)
    weights = bootstrap_weights(n_keys, seed)
    row: dict[str, Any] = {}
    for name, (parts, wholes) in keys.sums().items():
        row |= with_interval(name, parts, wholes, weights)
    # Nearly always 1: bootstrap draws would be too sure of it.
    low, high = wilson(float(keys.found.sum()), n_keys)
    return row | {
        "with_pattern_low": low,
        "with_pattern_high": high,
        "patterns_min": float(keys.patterns.min()) if n_keys else None,
        "patterns_max": float(keys.patterns.max()) if n_keys else None,
        "keys": n_keys,
        "n": int(keys.n.sum()),
    }


def difference(keys: KeyCounts, others: KeyCounts, seed: int = 0) -> dict[str, Any]:
    """Return how much more some keys have than others, with the interval of the difference."""
    row: dict[str, Any] = {}
    # Drawn from two seeds: from one, both sides would be drawn alike.
    weights = bootstrap_weights(len(keys.n), seed), bootstrap_weights(len(others.n), seed + 1)
    sides = keys.sums(), others.sums()
    for name in ("covered", "patterns_per_key", "with_pattern"):
        one, two = (ratio(side[name][0].sum(), side[name][1].sum()) for side in sides)
        draws = [
            ratio(drawn @ side[name][0], drawn @ side[name][1])
            for drawn, side in zip(weights, sides, strict=True)
        ]
        low, high = None, None
        if all(map(len, draws)):
            low, high = bootstrap_interval(draws[0] - draws[1])
        row |= {name: number(one - two), f"{name}_low": low, f"{name}_high": high}
    return row
