"""The banks of a layer with experts: how many tokens each takes, and which.

    share = prefixes that are routed to the bank / all prefixes,    mean weight = mean w over these

A prefix is routed by its last token. Which tokens an expert takes is read from two places:

    sample     the index's sampled prefixes, drawn at random: those on which some coefficient of the
               expert is not 0 are routed to it
    triggers   every trigger of one of its memories is routed to it: these are many more, but the
               strongest ones, so their number is the least that it can be

    lift = share of the prefixes that end with a token which go to the expert
           / share of all prefixes which go to the expert

Tokens are ranked by n · log(lift), with n such prefixes: many and unusual ones come first.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from ffmem.cells import BankRange
from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.store import Index
from ffmem.indexing.triggers import NONE, corpus_tokens
from ffmem.web.layer_table import check_layer, finite, layer_stats

N_TOKENS = 12
"""Tokens that a page shows of each list."""


@dataclass(frozen=True)
class BankRow:
    """One bank of a layer with experts."""

    bank: str
    """E12, or S and S1 for shared experts."""
    kind: str
    """expert or shared."""
    memories: int
    share: float | None
    """Share of all prefixes that are routed to it."""
    mean_weight: float | None
    """Mean router weight over these; None if there are none."""


@dataclass(frozen=True)
class ExpertToken:
    """A token, and how often an expert takes it."""

    token: str
    id: int
    routed: int
    """Prefixes that end with it and are routed to the expert."""
    of: int
    """Prefixes that end with it."""
    lift: float
    """How much more often than prefixes in general."""


@lru_cache(maxsize=64)
def bank_rows(index: Index, layer: int) -> list[BankRow]:
    """Return the banks of a layer; none if it has no experts."""
    check_layer(index, layer)
    banks = [bank for bank in index.layout.banks(layer) if bank.name]
    if not banks:
        return []
    stats = layer_stats(index, layer)
    shares, weights = (stats[name].to_numpy() for name in ("routed_share", "mean_weight"))
    return [
        BankRow(
            bank=bank.name,
            kind=bank.kind,
            memories=bank.size,
            share=finite(shares[bank.offset]),
            mean_weight=finite(weights[bank.offset]) if shares[bank.offset] else None,
        )
        for bank in banks
    ]


@lru_cache(maxsize=64)
def sampled_tokens(index: Index, layer: int, bank: BankRange) -> list[ExpertToken]:
    """Return what an expert takes most, by the sampled prefixes; none of an unfinished index."""
    if index.live is not None:
        return []
    coefficients = index.rows("samples", layer, bank.memories)["coefficient"]
    last = corpus_tokens(index).at(index.sampled_prefixes).last
    return _rank_tokens(index, last[(coefficients != 0).any(axis=0)], last)


@lru_cache(maxsize=64)
def trigger_tokens(index: Index, layer: int, bank: BankRange) -> list[ExpertToken]:
    """Return what an expert takes most, by the different triggers of its memories."""
    columns = index.rows("triggers", layer, bank.memories)
    names = [name for name in ("prefix", "negative_prefix") if name in columns]
    prefixes = np.unique(np.concatenate([columns[name].reshape(-1) for name in names]))
    corpus = corpus_tokens(index)
    every = corpus.ids.astype(np.int64)
    if index.manifest.compat:  # the last token of a sentence ends no prefix
        lengths = np.diff(np.append(corpus.offsets, len(every) + len(corpus.offsets))) - 1
        every = np.delete(every, np.cumsum(lengths) - 1)
    return _rank_tokens(index, corpus.at(prefixes[prefixes != NO_PREFIX]).last, every)


def _rank_tokens(
    index: Index, routed: Int64[ndarray, " routed"], every: Int64[ndarray, " prefix"]
) -> list[ExpertToken]:
    """Return the tokens that end routed prefixes more often than others, ranked."""
    n_tokens = index.manifest.model.vocabulary
    taken, there = (
        np.bincount(tokens[tokens != NONE], minlength=n_tokens) for tokens in (routed, every)
    )
    if not taken.sum():
        return []
    overall = int(taken.sum()) / int(there.sum())
    found = []
    for id in np.flatnonzero(taken).tolist():
        n, of = int(taken[id]), int(there[id])
        lift = n / of / overall
        if lift > 1:
            found.append(ExpertToken(index.token(id), id, n, of, lift))
    return sorted(found, key=lambda one: (-one.routed * math.log(one.lift), one.id))[:N_TOKENS]
