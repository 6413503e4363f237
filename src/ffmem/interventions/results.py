"""The results of traces and effects: plain dataclasses whose fields are their JSON.

One result is printed by the command, returned by Python, sent by the API and shown by the page. A
field that was not requested is None. This module loads no torch, so the API can describe them.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from ffmem.indexing.memory import NO_VALUES, visible, visible_token
from ffmem.interventions.edits import Edit
from ffmem.text import MISSING, format_number, format_share, html_table, pluralize

ESTIMATES = ("gradient", "direct", "relp", "integrated")

NO_DIRECT = (
    "direct is not defined: this model's layers do more than add y to one stream, so no part of"
    " them reaches the vocabulary by itself."
)
NO_RELP = (
    "relp is not defined: this model has steps that its linear rules do not cover, such as"
    " state-space layers, attention without a softmax, or feed-forward parts next to the memories."
)
INPUT_VALUES = (
    f"{NO_VALUES} The tokens listed for a memory are what those vectors promote here; ff is their"
    " sum, what"
    " the static keys read."
)
"""Said of lambda layers, whose results have `values` = "input"."""


@dataclass(frozen=True)
class TokenProbability:
    """A token and its probability."""

    token: str
    id: int
    probability: float


class TableResult:
    """A result that displays as lines, a table with a header, and more lines."""

    def parts(self) -> tuple[list[str], list[list[str]], list[str]]:
        """Return the lines above the table, its rows (the header first), and the lines below.

        A table of no rows is not shown.
        """
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        found: dict[str, Any] = as_json(self)
        return found

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.parts()[0][0]}>"

    def __str__(self) -> str:
        above, table, below = self.parts()
        shown = [*align_columns(table), ""] if table[1:] else []
        return "\n".join([*above, "", *shown, *below])

    def _repr_html_(self) -> str:
        above, (header, *rows), below = self.parts()
        before, after = ("<br>".join(map(html.escape, lines)) for lines in (above, below))
        return f"<p>{before}</p>{html_table(rows, header) if rows else ''}<p>{after}</p>"


def as_json(value: Any) -> Any:
    """Return dataclasses as dicts, in lists and dicts too; ten times as fast as `asdict`."""
    if is_dataclass(value):
        return {name: as_json(one) for name, one in vars(value).items()}
    if isinstance(value, list):
        return [as_json(one) for one in value]
    return {key: as_json(one) for key, one in value.items()} if isinstance(value, dict) else value


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines of plain text, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def mark_position(tokens: Sequence[str], position: int) -> str:
    """Return the tokens of a prompt, with brackets around the one where it was read."""
    shown = [visible_token(token) for token in tokens]
    shown[position] = f"[{shown[position]}]"
    return " ".join(shown)


def format_tokens(tokens: Sequence[TokenProbability], n: int = 5) -> str:
    """Return the first tokens with their probabilities."""
    return "  ".join(f"{visible_token(t.token)} {t.probability:.3f}" for t in tokens[:n])


# Traces


@dataclass(frozen=True)
class MemoryContribution:
    """One memory at the position."""

    cell: str
    coefficient: float
    """m; in an expert, w · m."""
    contribution: float
    """|m| · ‖v‖; in blocks with a post-norm, divided by the norm's divisor."""
    share: float
    """Share of the contributions of all memories of the layer."""
    percentile: float | None
    """Share of the index's sampled prefixes whose coefficient is not larger; None without index."""
    value_top: list[str]
    """The tokens that m · v promotes most; none if v is all zeros."""
    weight: float | None = None
    """w of the memory's expert; None if it is not in an expert."""
    m: float | None = None
    """m of a memory in an expert, without w; where w multiplies the expert's input, with it."""


@dataclass(frozen=True)
class ExpertWeight:
    """An expert that ran at the position."""

    expert: str
    """Its name, such as L5E12, or L5S if every token reaches it."""
    weight: float
    """The router's weight, or that of the shared expert's gate; 1 if it has none."""


@dataclass(frozen=True)
class TracedLayer:
    """One layer at the position: what its vectors predict, and the memories that contribute."""

    layer: int
    residual_top: list[TokenProbability]
    ff_top: list[TokenProbability]
    """Empty if the layer has no memories."""
    output_top: list[TokenProbability]
    case: str
    """Where the layer's prediction comes from: residual, agreement, ffn or composition."""
    active: float | None
    """Share of active memories: m > 0, in gated models those with an open gate; None without."""
    memories: list[MemoryContribution]
    experts: list[ExpertWeight] | None = None
    """The experts that ran, by weight; None in a layer without experts."""


@dataclass(frozen=True)
class TraceRun:
    """One run of the model over a prompt, edited or not, read at one position."""

    layers: list[TracedLayer]
    output_top: list[TokenProbability]
    """The model's own prediction."""
    saturation: int
    """The layer from which on the prediction is the model's final one."""


@dataclass(frozen=True)
class GridPoint:
    """One layer at one position: the top tokens of r, y and o."""

    residual: TokenProbability
    ff: TokenProbability | None
    """None if the layer has no memories."""
    output: TokenProbability
    case: str


Grid = list[list[GridPoint]]
"""By layer, then by position."""


@dataclass(frozen=True)
class Sampling:
    """How a continuation was sampled."""

    temperature: float
    seed: int


@dataclass(frozen=True)
class OutputChange:
    """A token among the most probable ones of either run, with its probability in both."""

    token: str
    id: int
    probability: float
    edited_probability: float


@dataclass(frozen=True, repr=False)
class TraceResult(TableResult):
    """The trace of a prompt, and a second one with edits if there are any."""

    prompt: str
    tokens: list[str]
    position: int
    layers: list[TracedLayer]
    output_top: list[TokenProbability]
    """What the unedited model predicts."""
    saturation: int
    """The layer from which on the unedited prediction no longer changes."""
    output_changes: list[OutputChange]
    """The most probable tokens of both runs, those of the edited run first."""
    answer: int | None = None
    """In a conversation: the position that predicts the first token of the answer."""
    edits: list[Edit] = field(default_factory=list)
    positions: list[int] | None = None
    """Where the edits act. None: everywhere."""
    edited_layers: list[TracedLayer] | None = None
    edited_output_top: list[TokenProbability] | None = None
    edited_saturation: int | None = None
    grid: Grid | None = None
    """Every layer at every position: grid[layer][position]."""
    edited_grid: Grid | None = None
    generated: str | None = None
    """What the model writes after the prompt."""
    generated_ended: str | None = None
    """length: as long as requested; end: the model ended the text; context: the context is full."""
    edited_generated: str | None = None
    edited_generated_ended: str | None = None
    sampling: Sampling | None = None
    """How continuations were sampled. None: greedily."""
    values: str = "static"
    """input: a lambda layer computes the values from the prompt."""
    notes: list[str] = field(default_factory=list)

    @property
    def plain(self) -> TraceRun:
        """The unedited run."""
        return TraceRun(self.layers, self.output_top, self.saturation)

    @property
    def edited(self) -> TraceRun | None:
        """The edited run."""
        layers, top, saturation = self.edited_layers, self.edited_output_top, self.edited_saturation
        if layers is None or top is None or saturation is None:
            return None
        return TraceRun(layers, top, saturation)

    def parts(self) -> tuple[list[str], list[list[str]], list[str]]:
        """Return the prompt; the layers of the unedited run; predictions, grids and notes."""
        header = ["layer", "residual", "ff", "output", "case", "active"]
        has_experts = any(layer.experts is not None for layer in self.layers)
        header += ["experts", "top memories"] if has_experts else ["top memories"]
        below = _format_run(self.plain)
        if self.edited is not None:
            at = ", ".join(map(str, self.positions or ()))
            where = f" at position {at} only" if at else ""
            edits = ", ".join(map(str, self.edits))
            below += ["", f"edited    {edits}{where}", *_format_run(self.edited)]
            if self.edited.output_top == self.plain.output_top:
                below.append("No change: the edited coefficients already had these values here.")
        ends = {"end": " ∎", "context": " … (the context is full)", "length": " …"}
        for name, text, ended in (
            ("continues", self.generated, self.generated_ended),
            ("edited   ", self.edited_generated, self.edited_generated_ended),
        ):
            if text is not None:
                below.append(f"{name}  {visible(text)}{ends[ended or 'length']}")
        for title, grid in (("", self.grid), (", edited", self.edited_grid)):
            if grid is not None:
                below += ["", f"Top token of each layer's output at each position{title}:", ""]
                tokens = [
                    [str(layer), *(visible_token(point.output.token) for point in points)]
                    for layer, points in enumerate(grid)
                ]
                below += align_columns([["layer", *map(visible_token, self.tokens)], *tokens])
        below += ["", *self.notes] if self.notes else []
        above = [mark_position(self.tokens, self.position), *_format_answer(self)]
        rows = [_format_layer(layer, has_experts) for layer in self.layers]
        return above, [header, *rows], below


def _format_answer(result: "TraceResult | EffectResult") -> list[str]:
    """Return where the answer of a conversation begins."""
    if result.answer is None:
        return []
    given = len(result.tokens) - 1 - result.answer
    begun = f"; its first {given} tokens are given" if given else ""
    read = "read here" if result.position == result.answer else f"read at {result.position}"
    return [f"The answer begins after position {result.answer}{begun}; {read}."]


def _format_run(run: TraceRun) -> list[str]:
    if run.saturation == len(run.layers) - 1:
        settled = "The prediction appears in the last layer only."
    else:
        settled = f"The prediction is final from layer {run.saturation} on."
    return [f"predicts  {format_tokens(run.output_top)}", settled]


def _format_layer(layer: TracedLayer, has_experts: bool) -> list[str]:
    tops = []
    for tokens in (layer.residual_top, layer.ff_top, layer.output_top):
        best = [f"{visible_token(one.token)} {one.probability:.2f}" for one in tokens[:1]]
        tops.append("".join(best) or MISSING)
    memories = []
    for memory in layer.memories[:3]:
        rank = "" if memory.percentile is None else f" p{100 * memory.percentile:.0f}"
        token = visible_token(memory.value_top[0]) if memory.value_top else MISSING
        m = format_number(memory.coefficient, signed=True)
        if memory.weight is not None:
            m += f" = {format_number(memory.weight)} · {format_number(memory.m, signed=True)}"
        memories.append(f"{memory.cell} {m}{rank} {token}")
    active = MISSING if layer.active is None else f"{layer.active:.0%}"
    experts = [f"{one.expert} {format_number(one.weight)}" for one in layer.experts or ()]
    found = [str(layer.layer), *tops, layer.case, active]
    found += [", ".join(experts) or MISSING] if has_experts else []
    return [*found, "  ".join(memories)]


# Effects


@dataclass(frozen=True)
class Target(TokenProbability):
    """The token whose log p is measured, and its probability in the unchanged model."""

    log_probability: float
    rank: int
    """1 is the model's own next token."""


@dataclass(frozen=True)
class MemoryEffect:
    """One memory: the exact change of log p(target) when it is off, next to the estimates.

    Over a file of prompts, all numbers are means.
    """

    cell: str
    change: float
    gradient: float
    direct: float | None
    relp: float | None
    integrated: float | None
    coefficient: float
    """m at the position."""
    value_top: list[str]
    """The tokens that m · v promotes most; none if v is all zeros."""


@dataclass(frozen=True)
class FactsEffect(MemoryEffect):
    """One memory over a file of prompts: how the changes differ between prompts."""

    median: float
    lowers: float
    """Share of prompts whose target becomes less likely without the memory."""
    largest: float
    """The largest change by absolute value."""
    largest_prompt: int
    """The prompt on which it occurs, counted from 0."""
    against: float | None
    """The mean change on the control prompts."""
    difference: float | None
    """change − against"""


@dataclass(frozen=True, repr=False)
class EffectResult(TableResult):
    """A prompt, its next token, and the memories that matter most for it."""

    prompt: str
    tokens: list[str]
    position: int
    target: Target
    top: list[TokenProbability]
    """What the unchanged model predicts."""
    positions: list[int] | None
    """Where memories were off. None: everywhere."""
    candidates: int
    """Memories that were measured; those with the largest changes are listed."""
    correlation: dict[str, float | None]
    """Spearman's correlation of each estimate with the exact change, over the candidates."""
    sum: dict[str, float | None]
    """Sums of the exact change and of each estimate, over the candidates."""
    memories: list[MemoryEffect]
    ablation: str = "off"
    values: str = "static"
    """input: a lambda layer computes the values from the prompt."""
    answer: int | None = None
    """In a conversation: the position that predicts the first token of the answer."""
    notes: list[str] = field(default_factory=list)

    def parts(self) -> tuple[list[str], list[list[str]], list[str]]:
        """Return prompt, prediction and target; the memories; what the numbers mean."""
        target = self.target
        above = [
            mark_position(self.tokens, self.position),
            *_format_answer(self),
            f"predicts  {format_tokens(self.top)}",
            f"target    {visible_token(target.token)}, p {format_number(target.probability)},"
            f" log p {format_number(target.log_probability)}, rank {target.rank:,}",
        ]
        numbers = ["change", *_known_estimates(self.memories)]
        table = [["memory", *numbers, "m", "value promotes"]]
        for memory in self.memories:
            table.append(_format_effect(memory, [*numbers, "coefficient"]))
        where = "everywhere" if self.positions is None else f"at {self.positions}"
        sums = [f"{name} {format_number(self.sum[name], signed=True)}" for name in numbers]
        below = [
            f"change: of log p(target) with the memory off ({where}), exact; negative: it supported"
            " the target.",
            f"{pluralize(self.candidates, 'memories')} measured, showing the {len(self.memories)}"
            " with the largest |change|.",
            f"rank correlation with the exact change: {_format_correlation(self)};"
            f" sums: {', '.join(sums)}.",
        ]
        return above, table, below + self.notes


@dataclass(frozen=True)
class PromptFile:
    """A file of prompts."""

    path: str
    prompts: int
    empty_lines: int

    def __str__(self) -> str:
        ignored = f" ({self.empty_lines} empty lines ignored)" if self.empty_lines else ""
        return f"{self.prompts} prompts of {self.path}{ignored}"


@dataclass(frozen=True)
class FactTarget(Target):
    """The target of one prompt of a file."""

    prompt: str


@dataclass(frozen=True, repr=False)
class FactsResult(TableResult):
    """A file of prompts, and the memories that matter most for it."""

    file: PromptFile
    against: PromptFile | None
    """The control prompts."""
    facts: list[FactTarget]
    candidates: int
    """Memories that were measured, each on every prompt."""
    correlation: dict[str, float | None]
    """Spearman's correlation of each mean estimate with the mean change."""
    sorted_by: str
    """change, or difference if there are control prompts; the most negative first."""
    memories: list[FactsEffect]
    ablation: str = "off"
    values: str = "static"
    """input: a lambda layer computes the values from the prompt."""
    notes: list[str] = field(default_factory=list)

    def parts(self) -> tuple[list[str], list[list[str]], list[str]]:
        """Return the files; the memories; what the numbers mean."""
        first = sum(fact.rank == 1 for fact in self.facts)
        above = [str(self.file), f"The model's own next token is the target in {first} of them."]
        numbers = ["change", "median", "largest"]
        if self.against is not None:
            above.append(f"against {self.against}")
            numbers += ["against", "difference"]
        numbers += _known_estimates(self.memories)
        table = [["memory", *numbers, "lowers", "value promotes"]]
        for memory in self.memories:
            name, *cells, promoted = _format_effect(memory, numbers)
            table.append([name, *cells, format_share(memory.lowers), promoted])
        below = [
            "change: of log p(target) with the memory off, exact, mean over the prompts; negative:"
            " it supported the targets. lowers: the share of prompts in which it did.",
            f"{pluralize(self.candidates, 'memories')} measured on every prompt,"
            f" {len(self.memories)} listed, the lowest {self.sorted_by} first.",
            "rank correlation of the mean estimates with the mean change:"
            f" {_format_correlation(self)}.",
        ]
        return above, table, below + self.notes


def _known_estimates(memories: Sequence[MemoryEffect]) -> list[str]:
    """Return the names of the estimates that some rows have."""
    return [name for name in ESTIMATES if any(getattr(row, name) is not None for row in memories)]


def _format_effect(memory: MemoryEffect, numbers: Sequence[str]) -> list[str]:
    shown = [format_number(getattr(memory, name), signed=True) for name in numbers]
    return [memory.cell, *shown, " ".join(map(visible_token, memory.value_top))]


def _format_correlation(result: EffectResult | FactsResult) -> str:
    names = _known_estimates(result.memories)
    return ", ".join(f"{name} {format_number(result.correlation[name], 2)}" for name in names)


# Sources: the lower memories that feed one


@dataclass(frozen=True)
class WeightSource:
    """A lower memory whose value matches a memory's keys, as they read the stream."""

    cell: str
    cosine: float
    """Cosine of its value with the key; in gated models, with the gate's."""
    product: float
    """What a coefficient of 1 adds to the product x · k, times σ of the norm before it."""
    up_cosine: float | None
    """The same for the other key of a gated memory."""
    up_product: float | None

    @property
    def strength(self) -> float:
        """The larger |cosine|, by which sources are ranked."""
        return max(abs(self.cosine), abs(self.up_cosine or 0.0))


@dataclass(frozen=True)
class PromptSource:
    """A lower memory that changes a memory's coefficient on a prompt."""

    cell: str
    change: float
    """Exact change of the coefficient with the lower memory off everywhere; for a coefficient above
    0, negative: it fed the memory."""
    estimate: float
    """The change estimated by relp, or by a plain gradient (see notes)."""
    coefficient: float
    """Its own coefficient at the position."""


@dataclass(frozen=True, repr=False)
class SourcesResult(TableResult):
    """The lower memories that feed a memory: by weights alone and, on a prompt, measured."""

    cell: str
    by_weights: list[WeightSource]
    layers_searched: list[int]
    gated: bool
    prompt: str | None = None
    tokens: list[str] | None = None
    position: int | None = None
    coefficient: float | None = None
    """The memory's coefficient at the position."""
    candidates: int = 0
    """Lower memories that were measured on the prompt."""
    correlation: float | None = None
    """Spearman's correlation of the estimated changes with the exact ones."""
    on_prompt: list[PromptSource] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def parts(self) -> tuple[list[str], list[list[str]], list[str]]:
        """Return a title; the matches by weights; what the prompt shows."""
        names = ["cosine", "product", *(["up_cosine", "up_product"] if self.gated else [])]
        table = [["memory", *(name.replace("up_", "up ") for name in names)]]
        for one in self.by_weights:
            shown = [format_number(getattr(one, name), signed=True) for name in names]
            table.append([one.cell, *shown])
        below: list[str] = []
        if self.tokens is not None and self.position is not None:
            m = format_number(self.coefficient, signed=True)
            below += [f"On the prompt, m = {m} at {mark_position(self.tokens, self.position)}"]
        if self.on_prompt:
            rows = [["memory", "change", "estimate", "m there"]]
            for source in self.on_prompt:
                numbers = (source.change, source.estimate, source.coefficient)
                rows.append([source.cell, *(format_number(one, signed=True) for one in numbers)])
            below += ["", *align_columns(rows), ""]
            below.append(
                f"change: of m of {self.cell} with the lower memory off, exact; {self.candidates}"
                f" measured, rank correlation {format_number(self.correlation, 2)}."
            )
        title = f"Lower memories whose values match the keys of {self.cell}"
        above = [title if self.by_weights else f"No memory below feeds {self.cell}"]
        return above, table, [*below, *self.notes]
