"""Agreement between annotators: κ, α, and matching of patterns, with intervals.

Cohen's κ of two annotators, from how often one answered c and the other k:

    κ = (p − e) / (1 − e),    p = share of equal answers,    e = Σ_c p₁(c)·p₂(c)

Krippendorff's α (nominal) of everybody at once, from coincidences o: every ordered pair of answers
to one unit, weighted by 1 / (answers to that unit − 1):

    α = 1 − (n − 1)·Σ_{c≠k} o(c, k) / Σ_{c≠k} n(c)·n(k)

Both are undefined where only one answer was ever given. Everything here is a function of sums over
items, so intervals come from drawing items with replacement (triggers of one memory are not
independent draws):

    s(Σᵢ wᵢ·xᵢ),    w ~ Multinomial(n; 1/n, …, 1/n)
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Shaped
from numpy import ndarray

from ffmem.annotation.study import (
    ADJUDICATOR,
    MACHINE,
    TRIGGERS,
    Item,
    Judgment,
    Sheet,
    SheetPattern,
)
from ffmem.cells import Cell
from ffmem.indexing.store import Index
from ffmem.patterns.labels import LABELS, KeyCounts, labels
from ffmem.patterns.store import MIN_TRIGGERS, Patterns, open_patterns
from ffmem.stats import bootstrap_interval, bootstrap_weights, number, ratio, with_interval

Row = dict[str, Any]

NOTHING = "No item was judged by two people."
ALIKE = "All answers are the same, so agreement by chance is complete."


# Measures


def kappa(confusion: Shaped[ndarray, "*draw label label"]) -> Shaped[ndarray, "*draw"]:
    """Return Cohen's κ of a table of counts; NaN where undefined."""
    counts = np.asarray(confusion, np.float64)
    n = counts.sum((-2, -1))
    equal = ratio(np.trace(counts, axis1=-2, axis2=-1), n)
    chance = ratio((counts.sum(-1) * counts.sum(-2)).sum(-1), n * n)
    # Weighted counts leave 1e-17 where 1 − e should be 0.
    return ratio(equal - chance, np.where(1 - chance < 1e-12, 0.0, 1 - chance))


def alpha(coincidences: Shaped[ndarray, "*draw label label"]) -> Shaped[ndarray, "*draw"]:
    """Return Krippendorff's α of coincidences; NaN where undefined."""
    found = np.asarray(coincidences, np.float64)
    each = found.sum(-1)
    n = each.sum(-1)
    apart = n - np.trace(found, axis1=-2, axis2=-1)
    expected = n * n - (each * each).sum(-1)
    expected = np.where(expected < 1e-9 * n * n, 0.0, expected)
    return np.asarray(1 - ratio((n - 1) * apart, expected))


# Pairs of sheets


class Pair(NamedTuple):
    """Two sheets of one item."""

    left: Judgment
    right: Judgment
    weight: float

    @property
    def names(self) -> tuple[str, str]:
        """Whose sheets they are."""
        return self.left.annotator, self.right.annotator

    @property
    def n(self) -> int:
        """How many texts were judged."""
        return max(len(self.left.item.texts), len(self.right.item.texts))


def by_item(judgments: Iterable[Judgment]) -> dict[str, list[Judgment]]:
    """Return the sheets of each item, ordered by key and name."""
    found: dict[str, list[Judgment]] = {}
    for one in sorted(judgments, key=lambda one: (one.item.key, one.role, one.annotator)):
        found.setdefault(one.item.key, []).append(one)
    return found


def pairs(people: Iterable[Judgment]) -> list[list[Pair]]:
    """Return the pairs of sheets of each item that two or more people judged.

    Each of m sheets is in m − 1 pairs, so a pair weighs 1 / (m − 1): α counts every answer once.
    """
    return [
        [Pair(one, other, 1 / (len(sheets) - 1)) for one, other in combinations(sheets, 2)]
        for sheets in by_item(people).values()
        if len(sheets) > 1
    ]


def pairs_between(machine: Iterable[Judgment], people: Iterable[Judgment]) -> list[list[Pair]]:
    """Return the pairs of a program's sheets with people's, by item."""
    own, others = by_item(machine), by_item(people)
    return [
        [Pair(one, other, 1 / len(others[key])) for one in sheets for other in others[key]]
        for key, sheets in own.items()
        if key in others
    ]


def chance_pairs(items: Sequence[Sequence[Pair]]) -> list[list[Pair]]:
    """Return the same people's sheets of different items, paired: what chance would give."""
    by_names: dict[tuple[str, str], list[Pair]] = {}
    for pair in (pair for item in items for pair in item):
        by_names.setdefault(pair.names, []).append(pair)
    return [
        [one._replace(right=following.right)]
        for own in by_names.values()
        if len(own) > 1
        for one, following in zip(own, [*own[1:], own[0]], strict=True)
    ]


# Questions: what two sheets of an item say, as a table of counts


Confusion = Callable[[Sheet, Sheet, int], Int[ndarray, "label label"]]
"""The counts of two sheets about n texts: rows are the first's answers, columns the second's."""


def coverage_confusion(one: Sheet, other: Sheet, n: int) -> Int[ndarray, "label label"]:
    """Return whether each trigger shows any pattern: no, yes."""
    mine, theirs = (
        [name != "uncovered" for name in sheet_labels(sheet, n)] for sheet in (one, other)
    )
    return count_answers(mine, theirs, 2)


def type_confusion(one: Sheet, other: Sheet, n: int) -> Int[ndarray, "label label"]:
    """Return which of the four labels each trigger has."""
    mine, theirs = (
        [LABELS.index(name) for name in sheet_labels(sheet, n)] for sheet in (one, other)
    )
    return count_answers(mine, theirs, len(LABELS))


def related_confusion(one: Sheet, other: Sheet, n: int) -> Int[ndarray, "label label"]:
    """Return whether a case of composition goes to a related word: no, yes."""
    return count_answers([bool(one.related)], [bool(other.related)], 2)


def sheet_labels(sheet: Sheet, n: int) -> list[str]:
    """Return the label of each of n triggers by a sheet that was handed in."""
    return labels(n, [(str(pattern.kind), pattern.marks) for pattern in sheet.patterns])


def count_answers(
    one: Sequence[int], other: Sequence[int], size: int
) -> Int[ndarray, "label label"]:
    """Return how often two people gave each pair of answers to the same units."""
    counts = np.zeros((size, size), np.int64)
    np.add.at(counts, (np.array(one, np.int64), np.array(other, np.int64)), 1)
    return counts


# Matching of patterns


class MatchedPatterns(NamedTuple):
    """A pattern of each side, by place, and how alike their marks are."""

    left: int
    right: int
    jaccard: float


def jaccard(one: SheetPattern, other: SheetPattern) -> float:
    """Return |marks of both| / |marks of either|."""
    union = one.marks | other.marks
    return len(one.marks & other.marks) / len(union) if union else 0.0


def match(left: Sequence[SheetPattern], right: Sequence[SheetPattern]) -> list[MatchedPatterns]:
    """Return the one-to-one matching of largest sum; patterns that share no mark stay alone."""
    if not left or not right:
        return []
    from scipy.optimize import linear_sum_assignment

    scores = np.array([[jaccard(one, other) for other in right] for one in left])
    rows, columns = linear_sum_assignment(scores, maximize=True)
    return [
        MatchedPatterns(i, j, float(scores[i, j]))
        for i, j in zip(rows.tolist(), columns.tolist(), strict=True)
        if scores[i, j] > 0
    ]


def likeness(one: Sheet, other: Sheet) -> float:
    """Return how alike two sheets are: 2·Σ J / (patterns of both); 1 if both have none."""
    n = len(one.patterns) + len(other.patterns)
    found = match(one.patterns, other.patterns)
    return 2 * sum(matched.jaccard for matched in found) / n if n else 1.0


def marks_confusion(one: Sheet, other: Sheet, n: int) -> Int[ndarray, "label label"]:
    """Return in how many cells (text × pattern) one and the other marked: no, yes.

    A matched pair of patterns is one column. A pattern without a match is a column against nothing,
    so it counts against agreement.
    """
    found = match(one.patterns, other.patterns)
    nothing = frozenset[int]()
    columns = [(one.patterns[m.left].marks, other.patterns[m.right].marks) for m in found]
    left, right = {m.left for m in found}, {m.right for m in found}
    columns += [(p.marks, nothing) for i, p in enumerate(one.patterns) if i not in left]
    columns += [(nothing, p.marks) for i, p in enumerate(other.patterns) if i not in right]
    counts = np.zeros((2, 2), np.int64)
    for mine, theirs in columns:
        both, either = len(mine & theirs), len(mine | theirs)
        counts += np.array([[n - either, len(theirs) - both], [len(mine) - both, both]])
    return counts


# Agreement


def agreement(items: Sequence[Sequence[Pair]], confusion: Confusion, seed: int = 0) -> Row:
    """Return κ and α on one question, with intervals; None where undefined, with the reason.

    κ is the mean over the pairs of people for whom it is defined; α takes everybody at once.
    """
    counted = [[(p, confusion(p.left.sheet, p.right.sheet, p.n)) for p in item] for item in items]
    counted = [item for item in counted if any(counts.any() for _, counts in item)]
    names = sorted({pair.names for item in counted for pair, _ in item})
    size = len(counted[0][0][1]) if counted else 2
    by_names = np.zeros((len(names), len(counted), size, size))
    coincidences = np.zeros((len(counted), size, size))
    for place, item in enumerate(counted):
        for pair, counts in item:
            by_names[names.index(pair.names), place] += counts
            coincidences[place] += pair.weight * (counts + counts.T)
    drawn = bootstrap_weights(len(counted), seed)
    measured = {
        "kappa": (
            _mean_kappa(by_names.sum(1)),
            _mean_kappa(np.einsum("di,pilk->pdlk", drawn, by_names)),
        ),
        "alpha": (alpha(coincidences.sum(0)), alpha(np.tensordot(drawn, coincidences, 1))),
    }
    total = by_names.sum((0, 1))
    row: Row = {"agreeing": number(ratio(np.trace(total), total.sum()))}
    for name, (value, draws) in measured.items():
        known = number(value)
        low, high = (None, None) if known is None else bootstrap_interval(draws)
        why = (ALIKE if counted else NOTHING) if known is None else None
        row |= {name: known, f"{name}_low": low, f"{name}_high": high, f"{name}_why": why}
    return row | {
        "pairs": len(names),
        "items": len(counted),
        "comparisons": int(total.sum()),
    }


def agreements(items: Sequence[Sequence[Pair]], seed: int = 0) -> Row:
    """Return the agreement on lists of triggers, question by question.

    The best matching of patterns finds likeness in anything; `chance` says how much, from the same
    people's sheets of different items.
    """
    across = chance_pairs(items)
    chance = _matched(across, seed) | agreement(across, marks_confusion, seed)
    return {
        "coverage": agreement(items, coverage_confusion, seed),
        "type": agreement(items, type_confusion, seed),
        "marks": {
            **_matched(items, seed),
            **agreement(items, marks_confusion, seed),
            "chance": {
                name: chance[name] for name in ("matched_share", "mean_jaccard", "kappa", "alpha")
            },
        },
    }


def _matched(items: Sequence[Sequence[Pair]], seed: int) -> Row:
    """Return which share of patterns has a match, and how alike the matched ones are."""
    sums = np.zeros((len(items), 3))  # patterns, matched patterns, sum of their likeness
    for place, item in enumerate(items):
        for pair in item:
            left, right = pair.left.sheet.patterns, pair.right.sheet.patterns
            found = match(left, right)
            total = 2 * sum(one.jaccard for one in found)
            sums[place] += (len(left) + len(right), 2 * len(found), total)
    patterns, matched, alike = sums.T
    weights = bootstrap_weights(len(items), seed)
    return {
        **with_interval("matched_share", matched, patterns, weights),
        **with_interval("mean_jaccard", alike, matched, weights),
        "matches": int(matched.sum()) // 2,
    }


def _mean_kappa(confusions: Float[ndarray, "pair *draw label label"]) -> Float[ndarray, "*draw"]:
    found = kappa(confusions)
    known = np.isfinite(found)
    return ratio(np.where(known, found, 0.0).sum(0), known.sum(0))


# What counts of an item


def counting_sheets(judgments: Iterable[Judgment]) -> dict[str, list[Judgment]]:
    """Return the sheets that count for each item: the adjudicated one, or all annotators'."""
    return {
        key: [one for one in sheets if one.role == ADJUDICATOR] or sheets
        for key, sheets in by_item(judgments).items()
    }


def count_keys(judgments: Iterable[Judgment]) -> KeyCounts:
    """Count the lists of triggers that were judged."""
    return KeyCounts.of(
        [(sheet_labels(one.sheet, len(one.item.texts)), len(one.sheet.patterns)) for one in sheets]
        for sheets in counting_sheets(judgments).values()
    )


# Programs beside people


def machine_judgments(index: Index, items: Iterable[Item]) -> list[Judgment]:
    """Return the automatic labels of the lists that people judged, as sheets."""
    asked = [item for item in items if item.kind == TRIGGERS]
    return [
        Judgment(item, patterns.source, _machine_sheet(patterns, item), MACHINE)
        for patterns in open_patterns(index)
        if patterns.source != "human"
        for item in _examined(patterns, asked)
    ]


def _examined(patterns: Patterns, items: list[Item]) -> list[Item]:
    """Return the items whose list of triggers a source examined."""
    layers = {Cell.parse(str(item.cell)).layer for item in items}
    lists = {
        (str(one.cell), one.sign)
        for layer in layers
        if layer < patterns.layout.n_layers
        for one in patterns.lists(layer)
    }
    return [item for item in items if (str(Cell.parse(str(item.cell))), item.sign) in lists]


def _machine_sheet(patterns: Patterns, item: Item) -> Sheet:
    """Return a source's patterns of an item, in the triggers that people saw.

    What fewer than three of those show is no pattern by the rule that people follow.
    """
    found = []
    for one in patterns.of(str(item.cell)):
        marks = frozenset(rank for rank in one.ranks if rank <= len(item.texts))
        if one.sign == item.sign and len(marks) >= MIN_TRIGGERS:
            kind: Any = one.kind  # one of KINDS
            found.append(SheetPattern(f"{one.number}", one.description, kind, marks))
    return Sheet(tuple(found), no_pattern=not found, done=True)
