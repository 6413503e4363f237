"""Figure 3 (§3.2): how much of a coefficient depends on the first, the last, a random token?

    change = (c′ − c) / c,    c = the memory's coefficient at the end of its trigger t₀ … t_{p−1}
                              c′ = the same at the end of the trigger without, or with another, tᵢ

Removing a token also shifts the positions of all later ones; replacing one does not, and serves as
a control. In a mixture of experts, c′ = 0 where the changed text no longer reaches the memory's
expert: a change of −100 %; `unrouted` is the share of these. The start token always stays in front.
Triggers of fewer than two tokens are left out, and so are replacements that have no candidate.

Attention is causal, so a trigger without its last token is read from the same run as the whole
trigger. Every run stops at the memory's layer.
"""

from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import altair as alt
import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from ffmem.experiments import charts
from ffmem.experiments.base import (
    Evidence,
    Experiment,
    ExperimentResult,
    Panel,
    PaperValue,
    claim,
)
from ffmem.experiments.context import ExperimentContext
from ffmem.experiments.rows import NOTHING, Row, halves, layer_of, mean, smallest_n
from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.triggers import NONE, corpus_tokens, trigger_table
from ffmem.stats import share, spread
from ffmem.text import format_number, format_share

if TYPE_CHECKING:
    from ffmem.models.memories import Memories

TOKENS, HOWS = ("first", "last", "random"), ("removed", "replaced")
CHANGES = list(product(HOWS, TOKENS))
"""What is done to a trigger; the reads of a trial are the trigger itself, then these."""

DRAWN = "drawn from the corpus"

BATCH_TOKENS = 1024
"""Tokens per forward pass. A layer has few sequences, of all lengths: larger batches have more
padding (4,096 tokens: 20 %; 1,024: 5 %)."""

COLORS = {"first": charts.SKY, "random": charts.ORANGE, "last": charts.BLUE}


class Trials(NamedTuple):
    """The triggers of one layer's drawn memories, and the random draws for each."""

    layer: int
    memory: Int64[ndarray, " trial"]
    prefix: Int64[ndarray, " trial"]
    position: Int64[ndarray, " trial"]
    """Position of the random token: 0 … p − 1."""
    replacements: Int64[ndarray, "trial token"]
    """What the first, last and random token are replaced with; NONE where nothing can be."""
    length: Int64[ndarray, " trial"]
    excluded: int
    """Triggers of less than two tokens."""

    @property
    def interior(self) -> Bool[ndarray, " trial"]:
        """Which random tokens are neither the first nor the last of their trigger."""
        return (self.position > 0) & (self.position < self.length - 1)

    @property
    def work(self) -> int:
        """How many coefficients are read, times the layers that each run passes."""
        n_reads = (1 + len(TOKENS)) * len(self.prefix) + int((self.replacements != NONE).sum())
        return n_reads * (self.layer + 1)


class Read(NamedTuple):
    """A coefficient to read: at the end of a trial's trigger, or of a changed one."""

    trial: int
    column: int
    """0 for the trigger itself, then those of CHANGES."""
    length: int
    """Tokens of the sequence up to where it is read."""


class Coefficients(NamedTuple):
    """Coefficients, pre-activations of the same memories' keys, and which reads reach their bank.

    A row is a trial, a column what is read of it.
    """

    coefficients: Float64[ndarray, "*trial read"]
    """NaN where there is nothing to read."""
    raw: Float64[ndarray, "*trial read"]
    """x · k + b; NaN in gated models, where a memory has two keys."""
    reached: Float64[ndarray, "*trial read"]
    """1 if the token reaches the memory's bank, else 0; NaN in layers without experts."""


def measure(context: ExperimentContext) -> tuple[list[Row], Row]:
    """Measure how coefficients change when tokens of triggers are removed or replaced."""
    unk = unknown_token(context)
    layers = [draw_trials(context, layer, unk) for layer in context.index.layout.memory_layers]
    rows: list[Row] = []
    interior: list[Row] = []
    excluded = [0] * context.index.n_layers
    total = sum(trials.work for trials in layers)
    with context.progress.bar("token removal", total, "steps") as step:
        for trials in layers:
            layer = trials.layer
            found = run_trials(context, trials, step)
            rows += [_row(layer, token, how, found) for token, how in product(TOKENS, HOWS)]
            inside = Coefficients(*(column[trials.interior] for column in found))
            interior += [_row(layer, "interior", how, inside) for how in HOWS]
            excluded[layer] = trials.excluded
    replacement = DRAWN if unk is None else context.index.token(unk)
    return rows, {"interior": interior, "excluded": excluded, "replacement": replacement}


def unknown_token(context: ExperimentContext) -> int | None:
    """Return the token for unknown words, unless it also marks where texts start or end."""
    tokenizer = context.memories.tokenizer
    marks = {tokenizer.bos, tokenizer.eos, context.index.manifest.start.id}
    return None if tokenizer.unk in marks else tokenizer.unk


def draw_trials(context: ExperimentContext, layer: int, unk: int | None) -> Trials:
    """Return random memories of a layer, some triggers of each, and the draws for each trigger."""
    config, index = context.config, context.index
    rng = np.random.default_rng((config.seed, layer))
    both = [trigger_table(index, layer, sign) for sign in (1, -1)]
    strengths = [np.abs(side.coefficients[:, 0]) for side in both]  # 0 where nothing triggers
    alive = np.flatnonzero(np.maximum(*strengths))
    drawn = np.sort(rng.choice(alive, min(config.per_layer, len(alive)), replace=False))
    positive = (strengths[0] >= strengths[1])[drawn, None]
    prefixes, lengths = (
        np.where(positive, *(getattr(side, name)[drawn, : config.triggers] for side in both))
        for name in ("prefixes", "lengths")
    )
    kept = lengths >= 2
    prefix, length = prefixes[kept], lengths[kept]
    position = rng.integers(0, length)
    places = np.stack([np.zeros_like(length), length - 1, position], axis=1)
    before = (prefix - length)[:, None] + places  # each token is the next one of what precedes it
    tokens = corpus_tokens(index).at(before.ravel()).next.reshape(before.shape)
    if unk is None:
        replacements = other_tokens(tokens, context.frequencies, rng)
    else:
        replacements = np.where(tokens == unk, NONE, unk)
    memory = np.broadcast_to(drawn[:, None], kept.shape)[kept]
    excluded = int(((prefixes != NO_PREFIX) & ~kept).sum())
    return Trials(layer, memory, prefix, position, replacements, length, excluded)


def other_tokens(
    tokens: Int64[ndarray, "trial token"],
    frequencies: Int64[ndarray, " vocab"],
    rng: np.random.Generator,
) -> Int64[ndarray, "trial token"]:
    """Return for each token another one, drawn by its frequency in the corpus."""
    past = frequencies.cumsum()
    others = past[-1] - frequencies[tokens]
    # A place among all occurrences but the token's own: those behind it move up by as many.
    place = rng.integers(0, np.maximum(others, 1))
    place += np.where(place >= past[tokens] - frequencies[tokens], frequencies[tokens], 0)
    return np.where(others > 0, np.searchsorted(past, place, side="right"), NONE)


def sequences_of(context: ExperimentContext, trials: Trials) -> dict[tuple[int, ...], list[Read]]:
    """Return the sequences that a layer's trials run, without the start token, and their reads."""
    corpus = corpus_tokens(context.index)
    found: dict[tuple[int, ...], list[Read]] = {}
    for trial, prefix in enumerate(trials.prefix.tolist()):
        ids = tuple(corpus.prefix(prefix).tolist())
        places = (0, len(ids) - 1, int(trials.position[trial]))
        others = trials.replacements[trial].tolist()
        triggers = [ids, *(ids[:place] + ids[place + 1 :] for place in places)]
        triggers += [
            (*ids[:place], other, *ids[place + 1 :])
            for place, other in zip(places, others, strict=True)
        ]
        for column, trigger in enumerate(triggers):
            if NONE not in trigger:
                run = ids if trigger == ids[: len(trigger)] else trigger
                found.setdefault(run, []).append(Read(trial, column, len(trigger)))
    return found


def _row(layer: int, token: str, how: str, found: Coefficients) -> Row:
    """Return the spread of one kind of change; `interior` is a part of the random ones."""
    read = 1 + CHANGES.index((how, "random" if token == "interior" else token))
    raw = spread(_relative(found.raw, read))
    reached = found.reached[:, read]
    reached = reached[~np.isnan(reached)]
    return {
        "layer": layer,
        "token": token,
        "how": how,
        **spread(_relative(found.coefficients, read)),
        "raw_mean": raw["mean"],
        "raw_median": raw["median"],
        **({"unrouted": share(int((reached == 0).sum()), len(reached))} if len(reached) else {}),
    }


def _relative(numbers: Float64[ndarray, "trial read"], read: int) -> Float64[ndarray, " change"]:
    """Return (c′ − c) / c of the trials in which both were read."""
    before, after = numbers[:, 0], numbers[:, read]
    kept = ~np.isnan(after) & (before != 0)
    changes: ndarray = (after[kept] - before[kept]) / before[kept]
    return changes


def run_trials(context: ExperimentContext, trials: Trials, step: Any) -> Coefficients:
    """Return the coefficients of a layer's trials, each run stopped at the layer."""
    import torch

    from ffmem.indexing.chunks import batches

    layer, start = trials.layer, context.index.manifest.start.id
    sequences = sequences_of(context, trials)
    reads = list(sequences.values())
    shape = (len(trials.prefix), 1 + len(CHANGES))
    found = Coefficients(*(np.full(shape, np.nan) for _ in Coefficients._fields))
    for batch in batches(enumerate(map(list, sequences)), start, BATCH_TOKENS):
        places = [(row, *one) for row, number in enumerate(batch.offsets) for one in reads[number]]
        row, trial, column, length = np.array(places).T
        position = length - (1 if start is None else 0)
        at = torch.from_numpy(np.stack([row, position], axis=1))
        memory = torch.from_numpy(trials.memory[trial])
        parts = _read(context.memories, layer, batch.tokens, at, memory)
        for into, part in zip(found, parts, strict=True):
            into[trial, column] = part
        step(len(places) * (layer + 1))
    return found


def _read(memories: "Memories", layer: int, tokens: Any, at: Any, memory: Any) -> Coefficients:
    """Return the coefficient, and x · k + b, of one memory at each (row, position) `at`."""
    found = Coefficients(*(np.full(len(memory), np.nan) for _ in Coefficients._fields))

    first = [bank.offset for bank in memories.layout.banks(layer)]
    bank = np.searchsorted(first, memory.numpy(), side="right") - 1

    def read(number: int, trace: Any) -> None:
        if number < layer:
            return
        if trace.weights is not None:
            found.reached[:] = (trace.weights.cpu()[np.arange(len(bank)), bank] != 0).numpy()
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


def chart(result: ExperimentResult) -> charts.Chart:
    """Draw how the coefficient changes without a token."""
    rows = charts.figure_rows(result.rows, ["median"], ["how", "token"])
    dashes = alt.Scale(domain=list(HOWS), range=[[1, 0], [4, 3]])
    y = charts.quantity("median", "median change in coefficient (%)")
    base = charts.plot(rows).encode(
        x=charts.layer_axis(result.n_layers),
        y=y,
        color=charts.series_color(COLORS, "token"),
        detail="how:N",
    )
    # A second legend beside the first would overlap it in a browser: the title explains the dashes.
    lines = base.mark_line().encode(strokeDash=alt.StrokeDash("how:N", scale=dashes, legend=None))
    zero = charts.plot([{"at": 0}]).mark_rule(style="soft").encode(y=charts.same_axis(y, "at"))
    title = "solid: token removed, dashed: token replaced"
    return charts.layered(zero, lines, base.mark_point()).properties(title=title)


def summary(result: ExperimentResult) -> str:
    """Say what each token means to the coefficient."""
    removed = result.rows_with("median", how="removed")
    last = result.rows_with("median", how="removed", token="last")
    if not last:
        return NOTHING

    def typical(token: str, how: str) -> str:
        rows = result.rows_with("median", token=token, how=how)
        return format_share(mean([row["median"] for row in rows]), signed=True)

    ends = " and ".join(
        f"{format_share(row['median'], signed=True)} in {layer_of(row)}"
        for row in (last if len(last) < 2 else [last[0], last[-1]])
    )
    worst = min(removed, key=lambda row: (row["median"], row["layer"]))
    middle, low, high = (
        format_share(worst.get(name), signed=True) for name in ("median", "q1", "q3")
    )
    return (
        f"Without its last token, a trigger's coefficient changes by {typical('last', 'removed')}"
        f" (mean over layers of the median; {ends}); without the first, by"
        f" {typical('first', 'removed')}; without a random one, by {typical('random', 'removed')}."
        f" Replacing the last token instead gives {typical('last', 'replaced')}. The largest drop"
        f" is that of the {worst['token']} token in {layer_of(worst)}: {middle} (middle half {low}"
        f" to {high}), n = {format_number(worst['n'])}."
    )


@claim(
    "The last token matters most to a key, less so in upper layers",
    "removing the last token lowers the median most in at least 80 % of the layers, and less on"
    " average in the upper layers (the paper's 10–16); in part if only one is true",
    over_depth=True,
)
def _last_token(result: ExperimentResult) -> Evidence | None:
    removed = result.rows_with("median", how="removed")
    medians = {(row["layer"], row["token"]): row["median"] for row in removed}
    rows = [
        {"layer": layer, "last": median, "most": median < min(others)}
        for (layer, token), median in medians.items()
        if token == "last"
        and (others := [medians[layer, o] for o in ("first", "random") if (layer, o) in medians])
    ]
    parts = halves(rows, "last", result.n_layers, 10)
    if parts is None:
        return None
    n = sum(row["most"] for row in rows)
    shown = (
        f"largest drop in {n} of {len(rows)} layers; {format_share(parts.below, True)} in"
        f" {parts.lower}, {format_share(parts.above, True)} in {parts.upper}"
    )
    good = n >= 0.8 * len(rows), parts.above > parts.below
    return Evidence(shown, smallest_n(removed), "triggers per layer", all(good), any(good))


def _panel(token: str, how: str) -> Panel:
    """Return the median change of a coefficient when one token is removed or replaced."""
    return Panel(
        title=f"median change of the coefficient, {token} token {how}",
        value="median",
        rows=lambda result: result.rows_with(token=token, how=how),
    )


EXPERIMENT = Experiment(
    name="token-removal",
    paper="Fig. 3",
    title="Removing a token of a trigger",
    description="Relative change of a memory's coefficient m on its trigger when the first, the"
    " last or a random token is removed, or replaced.",
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
    claims=(_last_token,),
    panels=(
        _panel("last", "removed"),
        _panel("last", "replaced"),
        _panel("random", "removed"),
        _panel("first", "removed"),
    ),
    notes={
        "softmax": "A coefficient is a softmax weight over the layer's memories: it also changes"
        " if only the scores of other memories do. raw_mean and raw_median are for the memory's"
        " own score x·k.",
        "persistent": "A coefficient is the attention on a slot, in one softmax with every token"
        " of the context: it depends on all of them, and the attention of a removed token goes to"
        " the others and the slots. raw_mean and raw_median are for the slot's own score x·k.",
        "lambda": "A coefficient is x·k where a token is at the key's distance, and 0 elsewhere:"
        " a trigger that becomes too short loses all of it (−100 %). raw_mean and raw_median are"
        " for x·k, with or without such a token.",
    },
)
