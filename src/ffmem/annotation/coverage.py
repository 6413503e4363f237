"""Figure 2 in numbers (§3.2): what share of triggers is shallow, both, semantic or uncovered.

    share of a label = triggers with it / triggers,    pooled over keys, as in the paper

Intervals draw keys anew; those of a share of keys are Wilson's. Where one key has several voices
(people without adjudication), it counts once, with the mean of what they say.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ffmem.annotation.bootstrap import as_number, interval, ratio, weights
from ffmem.annotation.couple import by_item
from ffmem.annotation.item import Judged
from ffmem.annotation.questions import sheet_labels
from ffmem.cells import Cell
from ffmem.patterns.store import LABELS
from ffmem.stats import wilson

Row = dict[str, Any]


class Key(NamedTuple):
    """What was seen in one list of triggers, as numbers."""

    layer: int
    n: int
    """Triggers."""
    labels: tuple[float, ...]
    """How many of them have each label."""
    patterns: float
    found: float
    """1 if there is a pattern, 0 if not; between them where voices differ."""


def key_of(layer: int, seen: Sequence[tuple[Sequence[str], int]]) -> Key:
    """Return a key from what each voice says: the labels of all triggers, and how many patterns."""
    n = len(seen[0][0])
    counts = [[list(names).count(label) for label in LABELS] for names, _ in seen]
    return Key(
        layer,
        n,
        tuple(np.mean(counts, 0).tolist()),
        sum(patterns for _, patterns in seen) / len(seen),
        sum(patterns > 0 for _, patterns in seen) / len(seen),
    )


def voices(judged: Iterable[Judged]) -> dict[str, list[Judged]]:
    """Return whose sheets count for each item: the adjudicated one, or all of its annotators'."""
    found = by_item(judged)
    return {
        key: [one for one in sheets if one.role == "adjudicator"] or sheets
        for key, sheets in found.items()
    }


def judged_keys(judged: Iterable[Judged]) -> list[Key]:
    """Return the keys of items that were judged; a control counts for the layer it stands in."""
    return [
        key_of(
            Cell.parse(str(sheets[0].item.cell)).layer,
            [
                (sheet_labels(one.sheet, len(one.item.texts)), len(one.sheet.patterns))
                for one in sheets
            ],
        )
        for sheets in voices(judged).values()
    ]


def shares(keys: Sequence[Key], seed: int = 0) -> Row:
    """Return the numbers of some keys, with their intervals; None where there is none."""
    table = _table(keys)
    drawn = _numbers(weights(len(keys), seed) @ table)
    row: Row = {}
    for name, number in _numbers(table.sum(0)).items():
        low, high = interval(drawn[name])
        if name == "with_pattern":  # nearly always 1 in a layer: draws would say so too surely
            low, high = wilson(round(sum(key.found for key in keys)), len(keys))
        row |= {name: as_number(number), f"{name}_low": low, f"{name}_high": high}
    counts = [key.patterns for key in keys]
    row |= {"patterns_min": min(counts, default=None), "patterns_max": max(counts, default=None)}
    return row | {"keys": len(keys), "n": sum(key.n for key in keys)}


def difference(keys: Sequence[Key], others: Sequence[Key], seed: int = 0) -> Row:
    """Return how much more some keys have than others, with the interval of the difference."""
    tables = _table(keys), _table(others)
    one, two = (_numbers(table.sum(0)) for table in tables)
    # The two are drawn apart: from one seed they would be drawn alike.
    drawn = [_numbers(weights(len(t), seed + place) @ t) for place, t in enumerate(tables)]
    row: Row = {}
    for name in ("covered", "patterns_per_key", "with_pattern"):
        draws = [numbers[name] for numbers in drawn]
        known = all(map(len, draws))
        low, high = interval(draws[0] - draws[1]) if known else (None, None)
        row |= {name: as_number(one[name] - two[name]), f"{name}_low": low, f"{name}_high": high}
    return row


def _table(keys: Sequence[Key]) -> Float[ndarray, "key sum"]:
    """Return what adds up over keys: four labels, patterns, found, triggers, keys."""
    rows = [[*key.labels, key.patterns, key.found, key.n, 1.0] for key in keys]
    return np.array(rows, np.float64).reshape(len(keys), len(LABELS) + 4)


def _numbers(sums: Float[ndarray, "*draw sum"]) -> dict[str, Float[ndarray, "*draw"]]:
    """Return the numbers that follow from the sums."""
    *labels, patterns, found, n, keys = np.moveaxis(sums, -1, 0)
    by_label = {name: ratio(labels[place], n) for place, name in enumerate(LABELS)}
    return by_label | {
        "covered": ratio(n - labels[LABELS.index("uncovered")], n),
        "patterns_per_key": ratio(patterns, keys),
        "with_pattern": ratio(found, keys),
    }
