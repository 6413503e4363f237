"""Figure 3 (§3.2): how much of a coefficient depends on the first, the last, a random token?

    change = (c′ − c) / c,    c = the memory's coefficient at the end of its trigger t₀ … t_{p−1}
                              c′ = the same at the end of the trigger without, or with another, tᵢ

Removing a token also moves all behind it to other positions; replacing one does not, and stands
beside it as a control. The start token always stays in front. Triggers of less than two tokens
have nothing left to compare and are left out; so is a replacement where there is none to put.

What is run is planned first, so that its progress can be shown. Positions see nothing behind them:
a trigger without its last token is read from the same run as the whole trigger.
"""

from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import altair as alt
import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from ffmem.experiments.base import (
    LAMBDA,
    PERSISTENT,
    SOFTMAX,
    ClaimCheck,
    Evidence,
    Experiment,
    ExperimentResult,
    Measurement,
    PaperValue,
    Row,
)
from ffmem.experiments.charts import (
    BLUE,
    ORANGE,
    SKY,
    Chart,
    figure_rows,
    layer_axis,
    layered,
    plot,
    quantity,
    same_axis,
    series_color,
)
from ffmem.experiments.rows import (
    NOTHING,
    count_layers,
    format_halves,
    known,
    mean,
    means_below_and_above,
    smallest_n,
)
from ffmem.experiments.triggers import NONE, CorpusTokens, corpus_tokens, trigger_table
from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.store import Index
from ffmem.stats import spread
from ffmem.text import format_number, format_share

if TYPE_CHECKING:
    from ffmem.experiments.context import ExperimentContext
    from ffmem.models.memories import Memories

TOKENS, HOWS = ("first", "last", "random"), ("removed", "replaced")
CHANGES = list(product(HOWS, TOKENS))
"""What is done to a trigger; the reads of a trial are the trigger itself, then these."""

DRAWN = "drawn from the corpus"

BATCH_TOKENS = 1024
"""In a forward pass. A layer has few sequences, of all lengths: larger batches are mostly padding
(4,096 tokens: a fifth of them; 1,024: a twentieth)."""

COLORS = {"first": SKY, "random": ORANGE, "last": BLUE}


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


class Sequences(NamedTuple):
    """What a layer's trials run, each sequence once, and where each trial reads it."""

    layer: int
    memory: Int64[ndarray, " trial"]
    ids: list[tuple[int, ...]]
    sequence: Int64[ndarray, "trial read"]
    """NONE where there is nothing to read."""
    length: Int64[ndarray, "trial read"]
    """How many tokens of the sequence have been seen where it is read."""


class Coefficients(NamedTuple):
    """Coefficients, and pre-activations of the same memories' keys: of reads, or trials of them."""

    coefficients: Float64[ndarray, "*trial read"]
    """NaN where there is nothing to read."""
    raw: Float64[ndarray, "*trial read"]
    """x · k + b; NaN in gated models, where a memory has two keys."""


class Plan(NamedTuple):
    """Everything that will be run."""

    layers: list[Trials]
    corpus: CorpusTokens
    start: int | None
    """The token in front of everything, if there is one."""


def measure(context: "ExperimentContext") -> Measurement:
    """Measure how coefficients change when tokens of triggers are removed or replaced."""
    plan = make_plan(context)
    rows: list[Row] = []
    interior: list[Row] = []
    with context.progress.bar("token removal", n_token_layers(plan), "token-layers") as step:
        for trials in plan.layers:
            found = run_sequences(context.memories, sequences_of(plan, trials), plan.start, step)
            rows += [_row(trials.layer, token, how, found) for token, how in product(TOKENS, HOWS)]
            inside = Coefficients(*(column[_interior(plan, trials)] for column in found))
            interior += [_row(trials.layer, "interior", how, inside) for how in HOWS]
    unk = _unknown(context)
    excluded = {trials.layer: trials.excluded for trials in plan.layers}
    also = {
        "interior": interior,
        "excluded": [excluded.get(layer, 0) for layer in range(context.index.n_layers)],
        "replacement": DRAWN if unk is None else context.index.token(unk),
    }
    return Measurement(rows, also)


def make_plan(context: "ExperimentContext") -> Plan:
    """Return what will be run."""
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


def _unknown(context: "ExperimentContext") -> int | None:
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
    both = [trigger_table(index, layer, sign) for sign in (1, -1)]
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


def _row(layer: int, token: str, how: str, found: Coefficients) -> Row:
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


def run_sequences(
    memories: "Memories", sequences: Sequences, start: int | None, step: Any
) -> Coefficients:
    """Return the coefficients of a layer's trials, each run stopped at the layer."""
    import torch

    from ffmem.indexing.chunks import batches

    flat, length = sequences.sequence.ravel(), sequences.length.ravel()
    memory = sequences.memory.repeat(sequences.sequence.shape[1])
    found = Coefficients(*(np.full(flat.shape, np.nan) for _ in Coefficients._fields))
    order = np.argsort(flat, kind="stable")
    bounds = np.searchsorted(flat[order], np.arange(len(sequences.ids) + 1))
    extra = 0 if start is None else 1
    runs = ((number, list(ids)) for number, ids in enumerate(sequences.ids))
    for batch in batches(runs, start, BATCH_TOKENS):
        reads = [order[bounds[number] : bounds[number + 1]] for number in batch.offsets]
        row = np.arange(len(reads)).repeat([len(part) for part in reads])
        read = np.concatenate(reads)
        at = torch.from_numpy(np.stack([row, length[read] - 1 + extra], axis=1))
        parts = _read(memories, sequences.layer, batch.tokens, at, torch.from_numpy(memory[read]))
        for into, part in zip(found, parts, strict=True):
            into[read] = part
        step((sum(batch.lengths) + len(reads) * extra) * (sequences.layer + 1))
    return Coefficients(*(column.reshape(sequences.sequence.shape) for column in found))


def _read(memories: "Memories", layer: int, tokens: Any, at: Any, memory: Any) -> Coefficients:
    """Return the coefficient, and x · k + b, of one memory at each (row, position) `at`."""
    found = Coefficients(*(np.full(len(memory), np.nan) for _ in Coefficients._fields))

    def read(number: int, trace: Any) -> None:
        if number < layer:
            return
        coefficients = trace.coefficients.cpu().gather(1, memory[:, None])
        found.coefficients[:] = coefficients.squeeze(1).double().numpy()
        if not memories.gated:
            key, bias = (
                weights[memory.to(weights.device)].cpu().double()
                for weights in (memories.keys(layer), memories.key_bias(layer))
            )
            found.raw[:] = ((trace.ff_input.cpu().double() * key).sum(1) + bias).numpy()

    with memories.trace_layers(read, tokens, at):
        memories.forward(tokens, layers=layer + 1)
    return found


def chart(result: ExperimentResult, center: str = "median") -> Chart:
    """Draw how the coefficient changes without a token; `center` may be "mean"."""
    rows = [
        numbers | {"how": row["how"], "token": row["token"]}
        for row, numbers in zip(result.rows, figure_rows(result.rows, [center]), strict=True)
        if row["token"] in COLORS
    ]
    dashes = alt.Scale(domain=list(HOWS), range=[[1, 0], [4, 3]])
    y = quantity(center, f"{center} change in coefficient (%)")
    base = plot(rows).encode(
        x=layer_axis(count_layers(result)),
        y=y,
        color=series_color(COLORS, "token"),
        detail="how:N",
    )
    # A second legend beside the first would run into it in a browser: the title tells instead.
    lines = base.mark_line().encode(strokeDash=alt.StrokeDash("how:N", scale=dashes, legend=None))
    zero = plot([{"at": 0}]).mark_rule(style="soft").encode(y=same_axis(y, "at"))
    title = "solid: token removed, dashed: token replaced"
    return layered(zero, lines, base.mark_point()).properties(title=title)


def summary(result: ExperimentResult) -> str:
    """Say what each token means to the coefficient."""
    removed = [row for row in known(result.rows, "median") if row["how"] == "removed"]
    last = [row for row in removed if row["token"] == "last"]
    if not last:
        return NOTHING

    def typical(token: str, how: str) -> str:
        rows = [r for r in known(result.rows, "median") if (r["token"], r["how"]) == (token, how)]
        return format_share(mean([row["median"] for row in rows]), signed=True)

    ends = f"{format_share(last[0]['median'], True)} in layer {last[0]['layer'] + 1}"
    if len(last) > 1:
        ends += f" and {format_share(last[-1]['median'], True)} in layer {last[-1]['layer'] + 1}"
    worst = min(removed, key=lambda row: (row["median"], row["layer"]))
    middle = ""
    if worst.get("q1") is not None and worst.get("q3") is not None:
        low, high = (format_share(worst[end], signed=True) for end in ("q1", "q3"))
        middle = f" (middle half {low} to {high})"
    return (
        f"Without its last token, a trigger's coefficient changes by {typical('last', 'removed')}"
        f" (mean over layers of the median; {ends}); without the first, by"
        f" {typical('first', 'removed')}; without a random one, by {typical('random', 'removed')}."
        f" Replacing the last token instead gives {typical('last', 'replaced')}. The largest drop"
        f" is that of the {worst['token']} token in layer {worst['layer'] + 1}:"
        f" {format_share(worst['median'], True)}{middle}, n = {format_number(worst['n'])}."
    )


def check_last_token(result: ExperimentResult) -> Evidence | None:
    """Check: the last token matters most, less so in upper layers."""
    removed = [row for row in known(result.rows, "median") if row["how"] == "removed"]
    medians = {(row["layer"], row["token"]): row["median"] for row in removed}
    rows = [
        {"layer": layer, "last": median, "most": median < min(others)}
        for (layer, token), median in medians.items()
        if token == "last"
        and (others := [medians[layer, o] for o in ("first", "random") if (layer, o) in medians])
    ]
    below, above = means_below_and_above(rows, "last", result, 10)
    if below is None or above is None:
        return None
    lower, upper = format_halves(result, 10)
    n = sum(row["most"] for row in rows)
    shown = (
        f"largest drop in {n} of {len(rows)} layers; {format_share(below, True)} in {lower},"
        f" {format_share(above, True)} in {upper}"
    )
    good = (n >= 0.8 * len(rows), above > below)
    return Evidence(shown, smallest_n(removed), "triggers per layer", all(good), any(good))


EXPERIMENT = Experiment(
    name="token-removal",
    paper="Fig. 3",
    title="Removing a token of a trigger",
    description="Relative change of a memory's coefficient m on its trigger when the first, the"
    " last or a random token is removed, or replaced in its place.",
    finding="The paper found that removing the last token changes the coefficient most, and less so"
    " in the upper layers.",
    measure=measure,
    chart=chart,
    summary=summary,
    options=("per_layer", "triggers"),
    paper_values=(
        PaperValue(
            "sample", "1,600 keys (100 per layer) × their top 50 prefixes", "Sec. 3.2, Fig. 3"
        ),
    ),
    claims=(
        ClaimCheck(
            claim="The last token matters most to a key, less so in upper layers",
            rule="removing the last token lowers the median most in at least 80 % of the layers,"
            " and less on average in the upper layers (the paper's 10–16); in part if one of the"
            " two",
            check=check_last_token,
            over_depth=True,
        ),
    ),
    notes={
        SOFTMAX: "A coefficient is a weight of a softmax over the layer's memories: it also"
        " changes where only the scores of others do. raw_mean and raw_median are of the memory's"
        " own score x·k.",
        PERSISTENT: "A coefficient is the attention on a slot, in one softmax with every token"
        " of the context: it depends on all of them, and what a token no longer takes is shared"
        " among the others and the slots. raw_mean and raw_median are of the slot's own score x·k.",
        LAMBDA: "A coefficient is x·k where a token lies at the key's distance, and 0"
        " where none does: a trigger that becomes too short loses it wholly (−100 %). raw_mean and"
        " raw_median are of x·k, whether there is a token or not.",
    },
)
