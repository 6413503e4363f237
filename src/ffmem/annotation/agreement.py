"""How far people agree: Cohen's κ over couples, Krippendorff's α over all, with intervals.

κ is the mean over the couples of people for whom it is defined; α takes everybody at once. Both are
functions of counts that add up over items, so intervals come from drawing items anew.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ffmem.annotation.alpha import alpha
from ffmem.annotation.bootstrap import as_number, interval, ratio, weights
from ffmem.annotation.couple import Couple, crossed
from ffmem.annotation.kappa import kappa
from ffmem.annotation.matching import Score, jaccard, jaccard_of_kind, marks_confusion, match
from ffmem.annotation.questions import Confusion, coverage_confusion, type_confusion

Row = dict[str, Any]

NOTHING = "Nothing was judged by two."
ALIKE = "Only one answer was ever given: chance explains all of it."


def agreement(items: Sequence[Sequence[Couple]], confusion: Confusion, seed: int = 0) -> Row:
    """Return κ and α with their intervals; None where undefined, with the reason."""
    counted = [[(c, confusion(c.left.sheet, c.right.sheet, c.n)) for c in item] for item in items]
    counted = [item for item in counted if any(counts.any() for _, counts in item)]
    names = sorted({couple.names for item in counted for couple, _ in item})
    size = len(counted[0][0][1]) if counted else 2
    each = np.zeros((len(names), len(counted), size, size))
    whole = np.zeros((len(counted), size, size))
    for place, item in enumerate(counted):
        for couple, counts in item:
            each[names.index(couple.names), place] += counts
            whole[place] += couple.weight * (counts + counts.T)
    drawn = weights(len(counted), seed)
    total = each.sum((0, 1))
    kappas = _mean_kappa(np.einsum("di,pilk->pdlk", drawn, each))
    alphas = alpha(np.tensordot(drawn, whole, 1))
    why = ALIKE if counted else NOTHING
    return {
        "agreeing": as_number(ratio(np.trace(total), total.sum())),
        **_stated("kappa", _mean_kappa(each.sum(1)), kappas, why),
        **_stated("alpha", alpha(whole.sum(0)), alphas, why),
        "couples": len(names),
        "items": len(counted),
        "comparisons": int(total.sum()),
    }


def agreements(items: Sequence[Sequence[Couple]], seed: int = 0) -> Row:
    """Return the agreement on the triggers of keys, question by question."""
    return {
        "coverage": agreement(items, coverage_confusion, seed),
        "type": agreement(items, type_confusion, seed),
        "marks": marks_agreement(items, seed=seed),
        "marks_of_kind": marks_agreement(items, jaccard_of_kind, seed),
    }


def marks_agreement(
    items: Sequence[Sequence[Couple]], score: Score = jaccard, seed: int = 0
) -> Row:
    """Return how far patterns and their marks agree, beside the same over different items.

    The best matching finds likeness in anything: `chance` says how much.
    """
    confusion = partial(marks_confusion, score=score)
    across = crossed([list(item) for item in items])
    chance = _matched(across, score, seed) | agreement(across, confusion, seed)
    compared = ("matched_share", "mean_jaccard", "kappa", "alpha")
    return {
        **_matched(items, score, seed),
        **agreement(items, confusion, seed),
        "chance": {name: chance[name] for name in compared},
    }


def _matched(items: Sequence[Sequence[Couple]], score: Score, seed: int) -> Row:
    """Return which share of patterns has a match, and how alike the matched ones are."""
    sums = np.zeros((len(items), 3))  # patterns, matched patterns, sum of their likeness
    matches = 0
    for place, item in enumerate(items):
        for couple in item:
            left, right = couple.left.sheet.patterns, couple.right.sheet.patterns
            found = match(left, right, score)
            matches += len(found)
            alike = 2 * sum(one.jaccard for one in found)
            sums[place] += (len(left) + len(right), 2 * len(found), alike)
    all_, drawn = sums.sum(0), weights(len(items), seed) @ sums
    result: Row = {}
    for name, above, below in (("matched_share", 1, 0), ("mean_jaccard", 2, 1)):
        low, high = interval(ratio(drawn[:, above], drawn[:, below]))
        known = as_number(ratio(all_[above], all_[below]))
        result |= {name: known, f"{name}_low": low, f"{name}_high": high}
    return result | {"matches": matches}


def _mean_kappa(confusions: Float[ndarray, "couple *draw label label"]) -> Float[ndarray, "*draw"]:
    """Return the mean over couples of people, those aside for whom κ is not defined."""
    found = kappa(confusions)
    there = np.isfinite(found)
    return ratio(np.where(there, found, 0.0).sum(0), there.sum(0))


def _stated(name: str, value: Float[ndarray, ""], draws: Float[ndarray, " draw"], why: str) -> Row:
    """Return a measure of agreement with its interval, or with the reason why there is none."""
    known = as_number(value)
    low, high = interval(draws) if known is not None else (None, None)
    reason = why if known is None else None
    return {name: known, f"{name}_low": low, f"{name}_high": high, f"{name}_why": reason}
