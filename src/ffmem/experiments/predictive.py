"""Figure 6 and Table 2 (§4): the surer a value, the more often it agrees with its triggers.

    precision = triggers whose next token is top(v) / triggers that have a next token

The paper looks at the 100 values of highest probability and their 50 triggers. Beside them stand
as many random values of the upper layers, without which neither number says much.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Int64
from numpy import ndarray

from ffmem.experiments.agreement import agrees
from ffmem.experiments.context import ExperimentContext
from ffmem.experiments.depth import first_of
from ffmem.experiments.result import Result, Row
from ffmem.experiments.top_triggers import NONE, listed
from ffmem.indexing.store import Index
from ffmem.stats import share, wilson

BINS = 8
"""Of equal width, over the range of the probabilities that were found."""

UPPER = 11
"""The first of the paper's upper layers."""

MOST = 100
"""How many of the most probable values are looked at."""


def max_probability(context: ExperimentContext) -> Result:
    """Return how often values agree with their top triggers, by their top token's probability."""
    exists = np.concatenate([top_triggers.exists for top_triggers in context.top_triggers])
    probability = np.concatenate([values.probability for values in context.values])[exists]
    agreeing = np.concatenate(
        [
            agrees(top_triggers, values)
            for top_triggers, values in zip(context.top_triggers, context.values, strict=True)
        ]
    )[exists]
    also = {"auc": auc(probability, agreeing)}
    rows = bins(probability, agreeing)
    return Result("max-probability", "Fig. 6", context.settings(), rows, also)


def bins(probability: Float[ndarray, " n"], agreeing: Bool[ndarray, " n"]) -> list[Row]:
    """Return the rate in bins of equal width; one bin if all probabilities are equal."""
    if not len(probability):
        return []
    exact = probability.astype(np.float64)
    low, high = float(exact.min()), float(exact.max())
    edges = np.linspace(low, high, BINS + 1) if low < high else np.array([low, high])
    place = np.searchsorted(edges, exact, side="right") - 1
    place = place.clip(0, len(edges) - 2)  # the last bin holds its upper edge
    rows = []
    for number, (left, right) in enumerate(pairwise(edges)):
        inside = place == number
        n, part = int(inside.sum()), int(agreeing[inside].sum())
        low_rate, high_rate = wilson(part, n)
        rows.append(
            {
                "low": float(left),
                "high": float(right),
                "n": n,
                "rate": share(part, n),
                "low_rate": low_rate,
                "high_rate": high_rate,
            }
        )
    return rows


def auc(probability: Float[ndarray, " n"], agreeing: Bool[ndarray, " n"]) -> float | None:
    """Return how well the probability tells agreeing values from others; None without both."""
    if agreeing.all() or not agreeing.any():
        return None
    from sklearn.metrics import roc_auc_score  # half a second that other experiments do not need

    return float(roc_auc_score(agreeing, probability))


class Precision(NamedTuple):
    """Of some values: how many of their triggers could agree, and how many do."""

    n_triggers: Int64[ndarray, " value"]
    agreeing: Int64[ndarray, " value"]

    def mean(self) -> float | None:
        """Return the mean precision of the values that have one; None if none has."""
        some = self.n_triggers > 0
        return float((self.agreeing[some] / self.n_triggers[some]).mean()) if some.any() else None

    def n_agreeing(self) -> int:
        """Return how many values have an agreeing trigger."""
        return int((self.agreeing > 0).sum())


def predictive_values(context: ExperimentContext) -> Result:
    """Return the most probable values of all layers, and how often their triggers agree."""
    layout, n_layers = context.index.layout, context.index.n_layers
    sign, top, probability = (
        np.concatenate([getattr(values, name) for values in context.values])
        for name in ("sign", "top", "probability")
    )
    cells = most_probable(probability, MOST)
    named = [layout.at(cell) for cell in cells.tolist()]
    layers = np.array([cell.layer for cell in named], np.int64)
    upper_from = first_of(n_layers, UPPER)
    found = precision(context.index, cells, sign, top)
    rows = [
        {
            "cell": str(cell),
            "layer": cell.layer,
            "memory": cell.memory,
            "sign": int(sign[number]),
            "token": context.index.token(int(top[number])),
            "token_id": int(top[number]),
            "probability": float(probability[number]),
            "precision": share(agreeing, n),
            "n_triggers": n,
            "agreeing": agreeing,
        }
        for cell, number, n, agreeing in zip(
            named, cells.tolist(), *map(ndarray.tolist, found), strict=True
        )
    ]
    also = {
        "n": len(cells),
        "upper_from": upper_from,
        "upper_share": share(int((layers >= upper_from).sum()), len(cells)),
        "with_agreeing_trigger": found.n_agreeing(),
        "mean_precision": found.mean(),
        "layer_histogram": np.bincount(layers, minlength=n_layers).tolist(),
        "random_control": _random_control(context, upper_from, len(cells), sign, top),
    }
    return Result("predictive-values", "Sec. 4, Table 2", context.settings(), rows, also)


def _random_control(
    context: ExperimentContext,
    upper_from: int,
    n: int,
    sign: Int[ndarray, " cell"],
    top: Int[ndarray, " cell"],
) -> Row:
    """Return the same statistics of random values of the upper layers."""
    first, past = context.index.layout.starts[upper_from], len(context.index)
    drawn = np.random.default_rng(context.seed).choice(
        past - first, min(n, past - first), replace=False
    )
    found = precision(context.index, np.sort(drawn) + first, sign, top)
    return {
        "n": len(drawn),
        "with_agreeing_trigger": found.n_agreeing(),
        "mean_precision": found.mean(),
    }


def most_probable(probability: Float[ndarray, " cell"], n: int) -> Int64[ndarray, " value"]:
    """Return the n cells of highest probability, highest first, ties to the lower cell."""
    return np.argsort(-probability, kind="stable")[:n]


def precision(
    index: Index,
    cells: Int64[ndarray, " value"],
    sign: Int[ndarray, " cell"],
    top: Int[ndarray, " cell"],
) -> Precision:
    """Return how many triggers of some values, of the sign that was read, agree with them."""
    starts = np.array(index.layout.starts)
    layers = np.searchsorted(starts, cells, side="right") - 1
    places = cells - starts[layers]
    found = Precision(np.zeros(len(cells), np.int64), np.zeros(len(cells), np.int64))
    for layer in np.unique(layers).tolist():
        for side in (1, -1):
            chosen = np.flatnonzero((layers == layer) & (sign[cells] == side))
            if len(chosen):
                following = listed(index, layer, side).next[places[chosen]]
                agreeing = following == top[cells[chosen]][:, None]
                found.n_triggers[chosen] = (following != NONE).sum(axis=1)
                found.agreeing[chosen] = agreeing.sum(axis=1)
    return found
