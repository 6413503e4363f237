"""Figures 4 and 5 (§4): do values predict the next token of their memory's top trigger?

    rate = #{i: top(vᵢ) = wᵢ} / n,    wᵢ = next token of memory i's top trigger,    n = #{wᵢ}
    permutation = Σ_w P(top = w) · P(next = w): the rate that chance gives to the same tokens

The published script compares with the last token of the trigger: `last_token_rate`.
"""

from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Shaped
from numpy import ndarray

from ffmem.experiments.context import ExperimentContext
from ffmem.experiments.result import Result, Row
from ffmem.experiments.top_triggers import TopTriggers
from ffmem.experiments.value_readings import ValueReadings
from ffmem.models.memories import Memories
from ffmem.stats import share, spread, wilson

UNIGRAM_OVER = "every token of the index's corpus"


def agreement(context: ExperimentContext) -> Result:
    """Return how often the values of each layer predict the next token of their top trigger."""
    commonest = int(context.frequencies.argmax())
    unigram = share(int(context.frequencies[commonest]), int(context.frequencies.sum()))
    baselines = {"uniform": 1 / context.memories.vocabulary, "unigram": unigram}
    rows = [
        {
            "layer": layer,
            **agreement_row(
                context.top_triggers[layer], context.values[layer], context.memories, baselines
            ),
        }
        for layer in context.index.layout.memory_layers
    ]
    also = {"unigram_token": context.index.token(commonest), "unigram_over": UNIGRAM_OVER}
    return Result("agreement", "Fig. 4", context.settings(), rows, also)


def next_token_rank(context: ExperimentContext) -> Result:
    """Return where the values of each layer rank the next token of their top trigger, from 0."""
    rows = [
        {
            "layer": layer,
            **rank_row(context.top_triggers[layer], context.values[layer], context.memories),
        }
        for layer in context.index.layout.memory_layers
    ]
    return Result("next-token-rank", "Fig. 5", context.settings(), rows)


def agrees(top_triggers: TopTriggers, values: ValueReadings) -> Bool[ndarray, " memory"]:
    """Return which memories' values have the next token of their top trigger as top token."""
    agreeing: ndarray = top_triggers.exists & (values.top == top_triggers.next_token)
    return agreeing


def agreement_row(
    top_triggers: TopTriggers, values: ValueReadings, memories: Memories, baselines: dict[str, Any]
) -> Row:
    """Return the rate of one layer, its interval, and what chance would give."""
    exists, agreeing = top_triggers.exists, agrees(top_triggers, values)
    n, part = int(exists.sum()), int(agreeing.sum())
    low, high = wilson(part, n)
    band = head_band(memories)
    in_band = exists & (top_triggers.next_token < (band or 0))
    return {
        "rate": share(part, n),
        "low": low,
        "high": high,
        "n": n,
        "no_next": int(top_triggers.no_next.sum()),
        "no_trigger": int(top_triggers.no_trigger.sum()),
        **baselines,
        "permutation": permutation(values.top[exists], top_triggers.next_token[exists]),
        "last_token_rate": share(
            int((values.top[exists] == top_triggers.last_token[exists]).sum()), n
        ),
        "rate_at_10": share(int((exists & (values.next_rank < 10)).sum()), n),
        **_of_sign("positive", top_triggers.sign == 1, agreeing, memories.gated),
        **_of_sign("negative", top_triggers.sign == -1, agreeing, memories.gated),
        "head_band_share": None if band is None else share(int(in_band.sum()), n),
    }


def rank_row(top_triggers: TopTriggers, values: ValueReadings, memories: Memories) -> Row:
    """Return the spread of one layer's ranks, and their median where no band is in the way."""
    band = head_band(memories)
    in_band = top_triggers.exists & (top_triggers.next_token < (band or 0))
    median = None if band is None else spread(values.next_rank[in_band])["median"]
    return {**spread(values.next_rank[top_triggers.exists]), "head_band_median": median}


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
    """Return the rate among top triggers of one sign; None in ungated models, with one sign."""
    n = int(mask.sum())
    rate = share(int((agreeing & mask).sum()), n)
    return {f"{name}_rate": rate if gated else None, f"{name}_n": n if gated else None}
