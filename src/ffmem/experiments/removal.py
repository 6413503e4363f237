"""Figure 3 (§3.2): how much of a coefficient hangs on the first, the last, a random token?

    change = (c′ − c) / c,    c = the memory's coefficient at the end of its trigger t₀ … t_{p−1}
                              c′ = the same at the end of the trigger without, or with another, tᵢ

Removing a token also moves all behind it to other positions; replacing one does not, and stands
beside it as a control. The start token always stays in front. Triggers of less than two tokens
have nothing left to compare and are left out; so is a replacement where there is none to put.

What is run is planned first, so that its progress can be shown. Positions see nothing
behind them: a trigger without its last token is read from the same run as the whole trigger.
"""

from itertools import product
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from ffmem.experiments.context import ExperimentContext
from ffmem.experiments.result import Result, Row
from ffmem.experiments.sequences import Measured, Sequences, measure
from ffmem.experiments.top_triggers import NONE, CorpusTokens, corpus_tokens, listed
from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.store import Index
from ffmem.stats import spread

TOKENS, HOWS = ("first", "last", "random"), ("removed", "replaced")
CHANGES = list(product(HOWS, TOKENS))
"""What is done to a trigger; the reads of a trial are the trigger itself, then these."""

DRAWN = "drawn from the corpus"


class Trials(NamedTuple):
    """The triggers of one layer's chosen memories, and the random draws for each."""

    layer: int
    memory: Int64[ndarray, " trial"]
    prefix: Int64[ndarray, " trial"]
    position: Int64[ndarray, " trial"]
    """Of the random token: 0 … p − 1."""
    replacements: Int64[ndarray, "trial token"]
    """What the first, last and random token are replaced with; NONE where nothing can be."""
    excluded: int
    """Triggers of less than two tokens."""


class Plan(NamedTuple):
    """Everything that will be run."""

    layers: list[Trials]
    corpus: CorpusTokens
    start: int | None
    """The token in front of everything, if there is one."""


def token_removal(context: ExperimentContext) -> Result:
    """Return how coefficients change when tokens of triggers are removed or replaced."""
    plan = planned(context)
    rows: list[Row] = []
    interior: list[Row] = []
    with context.progress.bar("token removal", n_token_layers(plan), "token-layers") as step:
        for trials in plan.layers:
            found = measure(context.memories, sequences_of(plan, trials), plan.start, step)
            rows += [_row(trials.layer, token, how, found) for token, how in product(TOKENS, HOWS)]
            inside = Measured(*(column[_interior(plan, trials)] for column in found))
            interior += [_row(trials.layer, "interior", how, inside) for how in HOWS]
    unk = _unknown(context)
    excluded = {trials.layer: trials.excluded for trials in plan.layers}
    also = {
        "interior": interior,
        "excluded": [excluded.get(layer, 0) for layer in range(context.index.n_layers)],
        "replacement": DRAWN if unk is None else context.index.token(unk),
    }
    settings = context.settings(per_layer=context.per_layer, triggers=context.triggers)
    return Result("token-removal", "Fig. 3", settings, rows, also)


def planned(context: ExperimentContext) -> Plan:
    """Return what `token_removal` will run."""
    index, unk = context.index, _unknown(context)
    layers = [
        trials_of(
            index,
            layer,
            context.frequencies,
            unk,
            context.per_layer,
            context.triggers,
            context.seed,
        )
        for layer in index.layout.memory_layers
    ]
    return Plan(layers, corpus_tokens(index), index.manifest.start.id)


def n_token_layers(plan: Plan) -> int:
    """Return how many layers all tokens of the plan run through, summed over tokens."""
    extra = 0 if plan.start is None else 1
    return sum(
        (len(ids) + extra) * (trials.layer + 1)
        for trials in plan.layers
        for ids in sequences_of(plan, trials).ids
    )


def _unknown(context: ExperimentContext) -> int | None:
    """Return the token for unknown words, unless it also marks where texts start or end."""
    tokenizer = context.memories.tokenizer
    marks = {tokenizer.bos, tokenizer.eos, context.index.manifest.start.id}
    return None if tokenizer.unk in marks else tokenizer.unk


def trials_of(
    index: Index,
    layer: int,
    frequencies: Int64[ndarray, " vocab"],
    unk: int | None,
    per_layer: int,
    triggers: int,
    seed: int,
) -> Trials:
    """Return random memories of a layer, some triggers of each, and the draws for each trigger."""
    rng = np.random.default_rng((seed, layer))
    both = [listed(index, layer, sign) for sign in (1, -1)]
    strengths = [np.abs(side.coefficients[:, 0]) for side in both]  # 0 where nothing triggers
    alive = np.flatnonzero(np.maximum(*strengths))
    chosen = np.sort(rng.choice(alive, min(per_layer, len(alive)), replace=False))
    positive = (strengths[0] >= strengths[1])[chosen, None]
    prefixes, lengths = (
        np.where(positive, *(getattr(side, name)[chosen, :triggers] for side in both))
        for name in ("prefixes", "lengths")
    )
    kept = lengths >= 2
    prefix, length = prefixes[kept], lengths[kept]
    position = rng.integers(0, length)
    places = np.stack([np.zeros_like(length), length - 1, position], axis=1)
    before = (prefix - length)[:, None] + places  # each token is the next one of what precedes it
    tokens = corpus_tokens(index).at(before.ravel()).next.reshape(before.shape)
    if unk is None:
        replacements = other_tokens(tokens, frequencies, rng)
    else:
        replacements = np.where(tokens == unk, NONE, unk)
    memory = np.broadcast_to(chosen[:, None], kept.shape)[kept]
    excluded = int(((prefixes != NO_PREFIX) & ~kept).sum())
    return Trials(layer, memory, prefix, position, replacements, excluded)


def other_tokens(
    tokens: Int64[ndarray, "trial token"],
    frequencies: Int64[ndarray, " vocab"],
    rng: np.random.Generator,
) -> Int64[ndarray, "trial token"]:
    """Return for each token another one, drawn as often as it stands in the corpus."""
    past = frequencies.cumsum()
    others = past[-1] - frequencies[tokens]
    # A place among all occurrences but the token's own: those behind it move up by as many.
    place = rng.integers(0, np.maximum(others, 1))
    place += np.where(place >= past[tokens] - frequencies[tokens], frequencies[tokens], 0)
    return np.where(others > 0, np.searchsorted(past, place, side="right"), NONE)


def sequences_of(plan: Plan, trials: Trials) -> Sequences:
    """Return the sequences of a layer's trials, without the start token."""
    numbers: dict[tuple[int, ...], int] = {}
    shape = (len(trials.prefix), 1 + len(CHANGES))
    sequence, length = np.full(shape, NONE, np.int64), np.zeros(shape, np.int64)
    for trial, prefix in enumerate(trials.prefix.tolist()):
        ids = tuple(plan.corpus.prefix(prefix).tolist())
        places = (0, len(ids) - 1, int(trials.position[trial]))
        reads: list[tuple[int, ...] | None] = [ids]
        reads += [ids[:place] + ids[place + 1 :] for place in places]
        for place, other in zip(places, trials.replacements[trial].tolist(), strict=True):
            reads.append(None if other == NONE else (*ids[:place], other, *ids[place + 1 :]))
        whole = numbers.setdefault(ids, len(numbers))
        for read, changed in enumerate(reads):
            if changed is not None:
                begins = changed == ids[: len(changed)]
                sequence[trial, read] = (
                    whole if begins else numbers.setdefault(changed, len(numbers))
                )
                length[trial, read] = len(changed)
    return Sequences(trials.layer, trials.memory, list(numbers), sequence, length)


def _interior(plan: Plan, trials: Trials) -> Bool[ndarray, " trial"]:
    """Return which random tokens are neither the first nor the last of their trigger."""
    length = plan.corpus.at(trials.prefix).length
    return (trials.position > 0) & (trials.position < length - 1)


def _row(layer: int, token: str, how: str, found: Measured) -> Row:
    """Return the spread of one kind of change; `interior` is a part of the random ones."""
    read = 1 + CHANGES.index((how, "random" if token == "interior" else token))
    raw = spread(_relative(found.raw, read))
    return {
        "layer": layer,
        "token": token,
        "how": how,
        **spread(_relative(found.coefficients, read)),
        "raw_mean": raw["mean"],
        "raw_median": raw["median"],
    }


def _relative(numbers: Float64[ndarray, "trial read"], read: int) -> Float64[ndarray, " change"]:
    """Return (c′ − c) / c of the trials in which both were read."""
    before, after = numbers[:, 0], numbers[:, read]
    kept = ~np.isnan(after) & (before != 0)
    changes: ndarray = (after[kept] - before[kept]) / before[kept]
    return changes
