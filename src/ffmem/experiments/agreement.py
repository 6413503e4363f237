"""Figures 4 and 5 (§4): do values predict the next token of their memory's top trigger?

    rate = #{i: top(vᵢ) = wᵢ} / n,    wᵢ = next token of memory i's head,    n = memories with one
    permutation = Σ_w P(top = w) · P(next = w): the rate that chance gives to the same tokens

The published script compares with the last token of the trigger: `last_token_rate`.
"""

from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Shaped
from numpy import ndarray

from ffmem.experiments.heads import Heads
from ffmem.experiments.result import Result, Row
from ffmem.experiments.spread import share, spread, wilson
from ffmem.experiments.study import Study
from ffmem.experiments.value_readings import ValueReadings
from ffmem.models.memories import Memories

UNIGRAM_OVER = "every token of the index's corpus"


def agreement(study: Study) -> Result:
    """Return how often the values of each layer predict the next token of their head."""
    commonest = int(study.frequencies.argmax())
    unigram = share(int(study.frequencies[commonest]), int(study.frequencies.sum()))
    baselines = {"uniform": 1 / study.memories.vocabulary, "unigram": unigram}
    rows = [
        {"layer": layer, **agreement_row(heads, values, study.memories, baselines)}
        for layer, (heads, values) in enumerate(zip(study.heads, study.values, strict=True))
    ]
    also = {"unigram_token": study.index.token(commonest), "unigram_over": UNIGRAM_OVER}
    return Result("agreement", "Fig. 4", study.settings(), rows, also)


def next_token_rank(study: Study) -> Result:
    """Return where the values of each layer rank the next token of their head, 0 for the top."""
    rows = [
        {"layer": layer, **rank_row(heads, values, study.memories)}
        for layer, (heads, values) in enumerate(zip(study.heads, study.values, strict=True))
    ]
    return Result("next-token-rank", "Fig. 5", study.settings(), rows)


def agrees(heads: Heads, values: ValueReadings) -> Bool[ndarray, " memory"]:
    """Return which memories' values have the next token of their head as top token."""
    agreeing: ndarray = heads.exists & (values.top == heads.next_token)
    return agreeing


def agreement_row(
    heads: Heads, values: ValueReadings, memories: Memories, baselines: dict[str, Any]
) -> Row:
    """Return the rate of one layer, its interval, and what chance would give."""
    exists, agreeing = heads.exists, agrees(heads, values)
    n, part = int(exists.sum()), int(agreeing.sum())
    low, high = wilson(part, n)
    band = head_band(memories)
    in_band = exists & (heads.next_token < (band or 0))
    return {
        "rate": share(part, n),
        "low": low,
        "high": high,
        "n": n,
        "no_next": int(heads.no_next.sum()),
        "no_trigger": int(heads.no_trigger.sum()),
        **baselines,
        "permutation": permutation(values.top[exists], heads.next_token[exists]),
        "last_token_rate": share(int((values.top[exists] == heads.last_token[exists]).sum()), n),
        "rate_at_10": share(int((exists & (values.next_rank < 10)).sum()), n),
        **_of_sign("positive", heads.sign == 1, agreeing, memories.gated),
        **_of_sign("negative", heads.sign == -1, agreeing, memories.gated),
        "head_band_share": None if band is None else share(int(in_band.sum()), n),
    }


def rank_row(heads: Heads, values: ValueReadings, memories: Memories) -> Row:
    """Return the spread of one layer's ranks, and their median where no band is in the way."""
    band = head_band(memories)
    in_band = heads.exists & (heads.next_token < (band or 0))
    median = None if band is None else spread(values.next_rank[in_band])["median"]
    return {**spread(values.next_rank[heads.exists]), "head_band_median": median}


def head_band(memories: Memories) -> int | None:
    """Return how many tokens the head band of an adaptive softmax holds; None without one.

    With coefficient 1 words of other bands hardly ever win: they rank behind most of the head.
    """
    return int(memories.config.band_sizes[0]) if memories.head.adaptive else None


def permutation(tops: Shaped[ndarray, " n"], nexts: Shaped[ndarray, " n"]) -> float | None:
    """Return the expected rate if next tokens were dealt out anew among the same memories."""
    if not len(tops):
        return None
    size = int(max(tops.max(), nexts.max())) + 1
    pairs: Int[ndarray, " vocab"] = np.bincount(tops, minlength=size) * np.bincount(
        nexts, minlength=size
    )
    return int(pairs.sum()) / len(tops) ** 2


def _of_sign(
    name: str, mask: Bool[ndarray, " memory"], agreeing: Bool[ndarray, " memory"], gated: bool
) -> Row:
    """Return the rate among heads of one sign; None in ungated models, which have one sign."""
    n = int(mask.sum())
    rate = share(int((agreeing & mask).sum()), n)
    return {f"{name}_rate": rate if gated else None, f"{name}_n": n if gated else None}
