"""A prompt through a model, layer by layer: what each layer predicts, which memories contribute.

    r → residual_top        y → ff_top        o = r + y → output_top        contribution = |m| · ‖v‖

r and o are read as the model reads its last layer, y folded (`models.head`). In output-normed
blocks a value is divided by what the norm divides y by, so that the parts add up to y.

The command, `ffmem.trace`, `/api/trace` and the trace page all show one `TraceResult`.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.cells import Cell
from ffmem.errors import FfmemError, ModelError
from ffmem.indexing.memory import visible, visible_token
from ffmem.interventions.edits import Edits, resolve_position
from ffmem.interventions.forward import (
    PromptValues,
    apply_edits,
    post_norm_sigma,
    promoted_tokens,
)
from ffmem.interventions.prompts import LoadedModel, Prompt, read_prompt
from ffmem.interventions.results import (
    INPUT_VALUES,
    TableResult,
    TokenProbability,
    align_columns,
    format_tokens,
    mark_position,
)
from ffmem.models.memories import Memories
from ffmem.models.trace import LayerTrace
from ffmem.text import MISSING, format_number

CASES = {
    (True, False): "residual",
    (True, True): "agreement",
    (False, True): "ffn",
    (False, False): "composition",
}
"""By whether the output's top token is the residual's, and whether it is the feed-forward's."""

MAX_LOGITS = 1 << 22
"""Logits to hold at once."""

OVERFLOW = (
    "The model computes numbers that its dtype cannot hold. If coefficients are set or scaled, use"
    " smaller numbers."
)

T = TypeVar("T")
Remember = Callable[[tuple[Hashable, ...], int, Callable[[], T]], T]
"""Returns what is remembered under a key, of about so many numbers, or computes it."""


# Results


class MemoryContribution(NamedTuple):
    """One memory on one prompt."""

    cell: Cell
    coefficient: float
    contribution: float
    """|m| · ‖v‖; in output-normed blocks, what is left of it behind the norm."""
    share: float
    """Of the contributions of all memories of the layer."""
    percentile: float | None
    """Share of the index's sampled prefixes whose coefficient is not larger; None without index."""
    value_top: list[str]
    """The tokens that m · v promotes most; none if v is all zeros."""

    def to_dict(self) -> dict[str, Any]:
        """Return what `trace --json` prints."""
        return {**self._asdict(), "cell": str(self.cell)}


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

    def to_dict(self) -> dict[str, Any]:
        """Return what `trace --json` prints."""
        return {
            "layer": self.layer,
            "residual_top": _as_dicts(self.residual_top),
            "ff_top": _as_dicts(self.ff_top),
            "output_top": _as_dicts(self.output_top),
            "case": self.case,
            "active": self.active,
            "memories": [memory.to_dict() for memory in self.memories],
        }


@dataclass(frozen=True)
class TraceRun:
    """One run of the model over a prompt, edited or not, read at one position."""

    layers: list[TracedLayer]
    output_top: list[TokenProbability]
    """The model's own prediction."""
    probabilities: Float[np.ndarray, " vocab"] = field(repr=False, compare=False)
    """The probability of every token, by id."""

    @property
    def saturation(self) -> int:
        """The layer from which on the prediction is the model's final one."""
        final = self.output_top[0].id
        kept = len(self.layers)
        while kept > 0 and self.layers[kept - 1].output_top[0].id == final:
            kept -= 1
        return min(kept, len(self.layers) - 1)


class GridPoint(NamedTuple):
    """One layer at one position: the top tokens of r, y and o."""

    residual: TokenProbability
    ff: TokenProbability | None
    """None if the layer has no memories."""
    output: TokenProbability
    case: str

    def to_dict(self) -> dict[str, Any]:
        """Return what `trace --grid --json` prints."""
        return {
            "residual": self.residual._asdict(),
            "ff": None if self.ff is None else self.ff._asdict(),
            "output": self.output._asdict(),
            "case": self.case,
        }


Grid = list[list[GridPoint]]
"""By layer, then by position."""


class Continuation(NamedTuple):
    """What the model writes after a prompt."""

    text: str
    ids: list[int]
    ended: str
    """length: as long as requested; end: the model ended the text; context: the context is full."""


class Sampling(NamedTuple):
    """How a continuation was sampled."""

    temperature: float
    seed: int


class OutputChange(NamedTuple):
    """A token among the most probable ones of either run, with its probability in both."""

    token: str
    id: int
    probability: float
    edited_probability: float


@dataclass(frozen=True, repr=False)
class TraceResult(TableResult):
    """A prompt traced, and traced again under edits if there are any."""

    prompt: str
    tokens: list[str]
    position: int
    plain: TraceRun
    edits: Edits = field(default_factory=Edits)
    edited: TraceRun | None = None
    generated: Continuation | None = None
    edited_generated: Continuation | None = None
    grid: Grid | None = None
    """Every layer at every position, if requested."""
    edited_grid: Grid | None = None
    sampling: Sampling | None = None
    """How continuations were sampled. None: greedily."""
    notes: list[str] = field(default_factory=list)

    @property
    def layers(self) -> list[TracedLayer]:
        """The layers of the unedited run."""
        return self.plain.layers

    @property
    def output_top(self) -> list[TokenProbability]:
        """What the unedited model predicts."""
        return self.plain.output_top

    @property
    def saturation(self) -> int:
        """The layer from which on the unedited prediction no longer changes."""
        return self.plain.saturation

    @property
    def output_changes(self) -> list[OutputChange]:
        """The most probable tokens of both runs, those of the edited run first."""
        edited = self.edited or self.plain
        tokens = {one.id: one.token for one in [*edited.output_top, *self.output_top]}
        return [
            OutputChange(
                token, id, float(self.plain.probabilities[id]), float(edited.probabilities[id])
            )
            for id, token in tokens.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return what `trace --json` prints."""
        found: dict[str, Any] = {
            "prompt": self.prompt,
            "tokens": self.tokens,
            "position": self.position,
            "layers": [layer.to_dict() for layer in self.layers],
            "saturation": self.saturation,
            "output_top": _as_dicts(self.output_top),
        }
        if self.edited is not None:
            positions = self.edits.positions
            found |= {
                "edits": [edit.to_dict() for edit in self.edits],
                "positions": None if positions is None else list(positions),
                "edited_layers": [layer.to_dict() for layer in self.edited.layers],
                "edited_saturation": self.edited.saturation,
                "edited_output_top": _as_dicts(self.edited.output_top),
                "output_changes": _as_dicts(self.output_changes),
            }
        for name, grid in (("grid", self.grid), ("edited_grid", self.edited_grid)):
            if grid is not None:
                found[name] = [[point.to_dict() for point in row] for row in grid]
        for name, written in (
            ("generated", self.generated),
            ("edited_generated", self.edited_generated),
        ):
            if written is not None:
                found |= {name: written.text, f"{name}_ended": written.ended}
        if self.generated is not None:
            found["sampling"] = None if self.sampling is None else self.sampling._asdict()
        if INPUT_VALUES in self.notes:
            found["values"] = "input"
        return found | {"notes": self.notes}

    def above(self) -> list[str]:
        """Return the prompt with the position at which it was read."""
        return [mark_position(self.tokens, self.position)]

    def table(self) -> list[Sequence[str]]:
        """Return the layers of the unedited run."""
        head = ("layer", "residual", "ff", "output", "case", "active", "top memories")
        return [head, *map(_format_layer, self.layers)]

    def below(self) -> list[str]:
        """Return predictions, saturation, continuations, grids and notes."""
        lines = [f"predicts  {format_tokens(self.output_top)}", _format_saturation(self.plain)]
        if self.edited is not None:
            positions = self.edits.positions
            where = "" if positions is None else f" at position {', '.join(map(str, positions))}"
            lines += [
                "",
                f"edited    {self.edits}{where}{' only' if where else ''}",
                f"predicts  {format_tokens(self.edited.output_top)}",
                _format_saturation(self.edited),
            ]
        ends = {"end": " ∎", "context": " … (the context is full)", "length": " …"}
        for name, written in (("continues", self.generated), ("edited   ", self.edited_generated)):
            if written is not None:
                lines.append(f"{name}  {visible(written.text)}{ends[written.ended]}")
        for title, grid in (("", self.grid), (", edited", self.edited_grid)):
            if grid is not None:
                lines += ["", f"Top token of each layer's output at each position{title}:", ""]
                lines += _format_grid(grid, self.tokens)
        return [*lines, "", *self.notes] if self.notes else lines


def _as_dicts(rows: Sequence[Any]) -> list[dict[str, Any]]:
    return [row._asdict() for row in rows]


def _format_layer(layer: TracedLayer) -> tuple[str, ...]:
    def best(tokens: list[TokenProbability]) -> str:
        if not tokens:
            return MISSING
        return f"{visible_token(tokens[0].token)} {tokens[0].probability:.2f}"

    memories = []
    for memory in layer.memories[:3]:
        rank = "" if memory.percentile is None else f" p{100 * memory.percentile:.0f}"
        token = visible_token(memory.value_top[0]) if memory.value_top else MISSING
        memories.append(
            f"{memory.cell} {format_number(memory.coefficient, signed=True)}{rank} {token}"
        )
    return (
        str(layer.layer),
        best(layer.residual_top),
        best(layer.ff_top),
        best(layer.output_top),
        layer.case,
        MISSING if layer.active is None else f"{layer.active:.0%}",
        "  ".join(memories),
    )


def _format_saturation(run: TraceRun) -> str:
    if run.saturation == len(run.layers) - 1:
        return "The prediction appears in the last layer only."
    return f"The prediction no longer changes from layer {run.saturation} on."


def _format_grid(grid: Grid, tokens: list[str]) -> list[str]:
    rows = [
        [str(layer), *(visible_token(point.output.token) for point in points)]
        for layer, points in enumerate(grid)
    ]
    return align_columns([["layer", *map(visible_token, tokens)], *rows])


# Tracing


def trace(
    loaded: LoadedModel,
    prompt: str,
    edits: Edits | None = None,
    *,
    position: int = -1,
    top: int = 10,
    generate: int = 0,
    temperature: float | None = None,
    seed: int = 0,
    grid: bool = False,
    remember: Remember[Any] = lambda key, size, compute: compute(),
) -> TraceResult:
    """Return what every layer does at a position of a prompt, with and without edits.

    With `grid`, also what every layer predicts at every position. `remember` lets a server keep
    parts of a trace: another edit does not change the unedited run, another position not the grid.
    """
    for name, number, least in (("top", top, 1), ("generate", generate, 0)):
        if not isinstance(number, int) or number < least:
            raise FfmemError(f"{name} must be {least} or more; got {number!r}.")
    check_sampling(temperature, seed)
    memories = loaded.memories
    read = read_prompt(loaded, prompt)
    at = resolve_position(position, len(read.ids))
    edits = (edits or Edits()).resolve(memories.layout, len(read.ids))

    index = loaded.index

    def sample(cell: Cell) -> Any:
        assert index is not None
        return remember(("sample", cell), 4, lambda: index.sample(cell))

    def run(under: Edits) -> tuple[TraceRun, Continuation | None, Grid | None]:
        def compute(
            part: str, size: int, key: tuple[Hashable, ...], read: Callable[[], Any]
        ) -> Any:
            def read_edited() -> Any:
                with apply_edits(memories, under):
                    return read()

            return remember((part, prompt, under, *key), size, read_edited)

        size = memories.n_layers * 4 * top + memories.vocabulary // 100
        percentiles = None if index is None else sample
        traced = compute(
            *("layers", size, (at, top)),
            lambda: read_layers(memories, read.ids, at, top, percentiles),
        )
        written = generate and compute(
            *("continuation", generate, (generate, temperature, seed)),
            lambda: continue_prompt(memories, read, generate, temperature, seed),
        )
        points = grid and compute(
            *("grid", memories.n_layers * len(read.ids), ()),
            lambda: read_grid(memories, read.ids),
        )
        return traced, written or None, points or None

    plain, generated, plain_grid = run(Edits())
    found = TraceResult(
        read.text,
        read.tokens,
        at,
        plain,
        generated=generated,
        grid=plain_grid,
        sampling=Sampling(temperature, seed) if generate and temperature is not None else None,
        notes=_notes(loaded, at, len(read.ids), edits, generate),
    )
    if not edits:
        return found
    edited, edited_generated, edited_grid = run(edits)
    return replace(
        found,
        edits=edits,
        edited=edited,
        edited_generated=edited_generated,
        edited_grid=edited_grid,
    )


def _notes(loaded: LoadedModel, at: int, n_tokens: int, edits: Edits, generate: int) -> list[str]:
    """Return what a reader of a trace should know."""
    found = []
    if generate and at != n_tokens - 1:
        found.append(
            f"The table is read at position {at}; the continuation follows the whole prompt."
        )
    if edits and edits.positions is not None and min(edits.positions) > at:
        found.append(
            f"All edited positions come after position {at}, where the table is read, so nothing"
            " changes there."
        )
    if not loaded.memories.has_values:
        found.append(INPUT_VALUES)
    if loaded.index is not None:
        manifest = loaded.index.manifest
        if loaded.start != manifest.start.id:
            token = manifest.start.token
            how = f"start with {token}" if token else "have no start token"
            found.append(f"Percentiles come from an index whose sentences {how}.")
        dtype = str(loaded.memories.dtype).removeprefix("torch.")
        if dtype != manifest.dtype:
            found.append(
                f"Percentiles come from an index in {manifest.dtype}; this trace is in {dtype}."
            )
    return found


@torch.inference_mode()
def read_layers(
    memories: Memories,
    ids: list[int],
    at: int,
    top: int,
    sample: Callable[[Cell], np.ndarray] | None = None,
) -> TraceRun:
    """Run a prompt and read every layer at one position, under whatever edits are applied.

    `sample` gives a memory's sampled coefficients, for percentiles. All layers are projected to the
    vocabulary together: reading its weights costs more than the arithmetic of a row.
    """
    values = PromptValues(memories)
    tokens = torch.tensor([ids[: at + 1]])  # later tokens cannot reach the position
    with values.record():
        traces = memories.trace(tokens, torch.tensor([[0, at]]))
    for trace in traces:
        # Norms square their input.
        if not float(trace.layer_output.abs().max()) < 1e18:
            raise ModelError(OVERFLOW)
    head = memories.head
    residual_tops, _ = _top_tokens(memories, head.logits, [t.residual for t in traces], top)
    ff_tops, _ = _top_tokens(memories, head.folded, [t.ff_output for t in traces], top)
    output_tops, probabilities = _top_tokens(
        memories, head.logits, [t.layer_output for t in traces], top
    )
    contributions = _contributions(memories, traces, values, top, sample)
    layers = []
    for layer, trace in enumerate(traces):
        r, y, o = residual_tops[layer], ff_tops[layer], output_tops[layer]
        working = trace.coefficients if trace.gate is None else trace.gate
        if working.numel():
            case = CASES[o[0].id == r[0].id, o[0].id == y[0].id]
            active = float((working > 0).double().mean())
            layers.append(TracedLayer(layer, r, y, o, case, active, contributions[layer]))
        else:
            layers.append(TracedLayer(layer, r, [], o, "residual", None, []))
    return TraceRun(layers, output_tops[-1], probabilities)


def _top_tokens(
    memories: Memories,
    logits: Callable[[Tensor], Tensor],
    vectors: list[Float[Tensor, "row hidden"]],
    n: int,
) -> tuple[list[list[TokenProbability]], Float[np.ndarray, " vocab"]]:
    """Return the n most probable tokens of each vector, and all probabilities of the last one."""
    shown = memories.tokenizer.token_texts(memories.vocabulary)
    rows = torch.cat([vector.to(vectors[0].device) for vector in vectors])
    found = []
    for part in rows.split(_rows_at_once(memories)):
        numbers = logits(part).cpu()
        totals = numbers.logsumexp(dim=1).numpy()
        for row, total in zip(numbers.numpy(), totals, strict=True):
            found.append(
                [
                    TokenProbability(shown[i], i, float(np.exp(row[i] - total)))
                    for i in largest(row, n)
                ]
            )
    return found, np.exp(row - total)


def _rows_at_once(memories: Memories) -> int:
    return max(1, MAX_LOGITS // memories.vocabulary)


def _contributions(
    memories: Memories,
    traces: Sequence[LayerTrace],
    prompt_values: PromptValues,
    n: int,
    sample: Callable[[Cell], np.ndarray] | None,
) -> list[list[MemoryContribution]]:
    """Return the memories of every layer that contribute most."""
    found: list[list[MemoryContribution]] = []
    vectors, coefficients = [], []
    for layer, trace in enumerate(traces):
        m = trace.coefficients[0].float().cpu()
        values = prompt_values.of_layer(layer)
        lengths = values.float().norm(dim=1).cpu()
        sizes = m.abs() * lengths / post_norm_sigma(memories, layer, trace)
        total = max(float(sizes.double().sum()), np.finfo(np.float64).tiny)
        best = largest(sizes.numpy(), n)
        of_layer = []
        for i in best:
            cell, number, size = memories.layout.cell(layer, i), float(m[i]), float(sizes[i])
            rank = None if sample is None else percentile(sample(cell), number)
            of_layer.append(MemoryContribution(cell, number, size, size / total, rank, []))
        found.append(of_layer)
        vectors.append(values[best].float())
        coefficients.append(m[best])
    rows = _rows_at_once(memories)
    of_all = torch.cat([vector.to(vectors[0].device) for vector in vectors])
    parts = zip(of_all.split(rows), torch.cat(coefficients).split(rows), strict=True)
    tokens = iter([row for part in parts for row in promoted_tokens(memories, *part)])
    return [[one._replace(value_top=next(tokens)) for one in of_layer] for of_layer in found]


def largest(numbers: Float[np.ndarray, " number"], n: int) -> list[int]:
    """Return the places of the n largest numbers, the largest first, ties to the lower place."""
    if n == 1:
        return [int(numbers.argmax())]
    places = np.arange(len(numbers))
    if n < len(numbers):
        places = np.flatnonzero(numbers >= np.partition(numbers, -n)[-n])
    found: list[int] = places[np.argsort(-numbers[places], kind="stable")][:n].tolist()
    return found


def percentile(sample: Sequence[float] | np.ndarray, coefficient: float) -> float | None:
    """Return the share of sampled coefficients that are not larger."""
    numbers = np.asarray(sample)
    return float((numbers <= coefficient).mean()) if len(numbers) else None


@torch.inference_mode()
def read_grid(memories: Memories, ids: list[int]) -> Grid:
    """Return what every layer predicts at every position, under whatever edits are applied."""
    head = memories.head
    waiting: list[LayerTrace] = []
    grid: Grid = []

    def read_waiting() -> None:
        """Read some layers together, and forget them."""
        r, y, o = (
            [top for (top,) in _top_tokens(memories, logits, vectors, 1)[0]]
            for logits, vectors in (
                (head.logits, [trace.residual for trace in waiting]),
                (head.folded, [trace.ff_output for trace in waiting]),
                (head.logits, [trace.layer_output for trace in waiting]),
            )
        )
        for number, trace in enumerate(waiting):
            row = []
            for i in range(number * len(ids), (number + 1) * len(ids)):
                if trace.coefficients.shape[1]:
                    case = CASES[o[i].id == r[i].id, o[i].id == y[i].id]
                    row.append(GridPoint(r[i], y[i], o[i], case))
                else:
                    row.append(GridPoint(r[i], None, o[i], "residual"))
            grid.append(row)
        waiting.clear()

    def read(layer: int, trace: LayerTrace) -> None:
        waiting.append(trace)
        is_last = layer == memories.n_layers - 1
        if is_last or len(waiting) * len(ids) >= _rows_at_once(memories):
            read_waiting()

    tokens = torch.tensor([ids])
    positions = torch.tensor([[0, position] for position in range(len(ids))])
    with memories.trace_layers(read, tokens, positions):
        memories.forward(tokens)
    return grid


# Continuations


def check_sampling(temperature: float | None, seed: int) -> None:
    """Raise unless a continuation can be sampled so."""
    if temperature is not None and not (
        isinstance(temperature, Real) and 1e-3 <= temperature <= 1e3
    ):
        raise FfmemError(
            f"Temperature {temperature} is out of range. Use 0.001 to 1000, or none for greedy"
            " decoding."
        )
    if not (isinstance(seed, int) and 0 <= seed < 2**63):
        raise FfmemError(f"Seed {seed} is out of range. Use a whole number from 0 to 2⁶³ − 1.")


@torch.inference_mode()
def continue_prompt(
    memories: Memories, prompt: Prompt, n: int, temperature: float | None = None, seed: int = 0
) -> Continuation:
    """Return up to n tokens after a prompt: greedy, ties to the lower id, or sampled.

    Edits that are applied act on the prompt and on every token after it, unless they have
    positions.
    """
    check_sampling(temperature, seed)
    generator = torch.Generator().manual_seed(seed)
    cache: Any = None
    written: list[int] = []
    ended = "length"
    while len(written) < n:
        if memories.context is not None and len(prompt.ids) + len(written) > memories.context:
            ended = "context"
            break
        # GPT-1 keeps no cache: it reads the whole text for every token.
        ids = [*prompt.ids, *written] if cache is None else written[-1:]
        past = {} if cache is None else {"past_key_values": cache}
        output = memories.model(torch.tensor([ids], device=memories.device), use_cache=True, **past)
        cache = getattr(output, "past_key_values", None)
        logits = output.logits[0, -1].float().cpu()
        if not torch.isfinite(logits).all():
            raise ModelError(OVERFLOW)
        if temperature is None:
            token = int(logits.numpy().argmax())
        else:
            probabilities = (logits / temperature).softmax(dim=0)
            token = int(torch.multinomial(probabilities, 1, generator=generator))
        if token == memories.tokenizer.eos:
            ended = "end"
            break
        written.append(token)
    return Continuation(memories.tokenizer.decode(written), written, ended)
