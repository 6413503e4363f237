"""A prompt through a model, layer by layer: what each layer predicts, which memories contribute.

    r → residual_top        y → ff_top        o = r + y → output_top        contribution = |m| · ‖v‖

r and o are read as the model reads its last layer, y folded (`models.head`). In output-normed
blocks a value is divided by what the norm divides y by, so that the parts add up to y.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.cells import Cell
from ffmem.errors import FfmemError, ModelError
from ffmem.interventions.coefficients import coefficients_along
from ffmem.interventions.edits import Edits, resolve_position
from ffmem.interventions.forward import (
    HEAD_ROWS,
    LoadedModel,
    Prompt,
    apply_edits,
    note_unknown,
    post_norm_sigma,
    promoted_tokens,
    read_prompt,
    record_values,
)
from ffmem.interventions.redirect import solve_redirects
from ffmem.interventions.results import (
    INPUT_VALUES,
    ExpertWeight,
    Grid,
    GridPoint,
    MemoryContribution,
    OutputChange,
    Sampling,
    TokenProbability,
    TracedLayer,
    TraceResult,
)
from ffmem.models.banks import ExpertBank
from ffmem.models.memories import Memories
from ffmem.models.trace import LayerTrace
from ffmem.stats import check_seed

CASES = {
    (True, False): "residual",
    (True, True): "agreement",
    (False, True): "ffn",
    (False, False): "composition",
}
"""By whether the output's top token is the residual's, and whether it is the feed-forward's."""

T = TypeVar("T")
Remember = Callable[[tuple[Hashable, ...], int, Callable[[], T]], T]
"""Returns the cached value of a key, or computes it; the number is its approximate size."""

Sample = Callable[[Cell], np.ndarray]
"""Returns the coefficients of a memory on the index's sampled prefixes."""


def trace(
    loaded: LoadedModel,
    prompt: object,
    edits: Edits | None = None,
    *,
    chat: bool = False,
    position: int = -1,
    top: int = 10,
    generate: int = 0,
    temperature: float | None = None,
    seed: int = 0,
    grid: bool = False,
    remember: Remember[Any] = lambda key, size, compute: compute(),
) -> TraceResult:
    """Return what every layer does at a position of a prompt, with and without edits.

    With `chat`, the prompt is a conversation: a user's text, or messages. With `grid`, also return
    what every layer predicts at every position. `remember` lets a server keep
    parts of a trace: another edit does not change the unedited run, another position not the grid.
    """
    for name, number, least in (("top", top, 1), ("generate", generate, 0)):
        if number < least:
            raise FfmemError(f"{name} must be {least} or more; got {number!r}.")
    check_sampling(temperature, seed)
    memories, index = loaded.memories, loaded.index
    read = read_prompt(loaded, prompt, chat)
    at = resolve_position(position, len(read.ids))
    edits = (edits or Edits()).resolve(memories.layout, len(read.ids))
    edits = solve_redirects(memories, edits)

    def sample(cell: Cell) -> Any:
        assert index is not None
        return remember(("sample", cell), 4, lambda: index.sample(cell))

    def run(under: Edits) -> tuple[RunResult, Continuation | None, Grid | None]:
        def part(name: str, key: tuple[Hashable, ...], size: int, compute: Callable[[], T]) -> T:
            def compute_edited() -> T:
                with apply_edits(memories, under):
                    return compute()

            found: T = remember((name, tuple(read.ids), under, *key), size, compute_edited)
            return found

        percentiles = None if index is None else sample
        size = memories.n_layers * 4 * top + memories.vocabulary // 100
        result = part(
            *("layers", (at, top), size),
            lambda: read_layers(memories, read.ids, at, top, percentiles, under),
        )
        continuation = points = None
        if generate:
            continuation = part(
                *("continuation", (generate, temperature, seed), generate),
                lambda: continue_prompt(memories, read, generate, temperature, seed),
            )
        if grid:
            size = memories.n_layers * len(read.ids)
            points = part("grid", (), size, lambda: read_grid(memories, read.ids))
        return result, continuation, points

    plain, continuation, points = run(Edits())
    found = TraceResult(
        prompt=read.text,
        tokens=read.tokens,
        position=at,
        answer=read.answer,
        layers=plain.layers,
        output_top=plain.output_top,
        saturation=_saturation(plain.layers),
        output_changes=_output_changes(plain, plain),
        grid=points,
        generated=None if continuation is None else continuation.text,
        generated_ended=None if continuation is None else continuation.ended,
        sampling=Sampling(temperature, seed) if generate and temperature is not None else None,
        values="static" if memories.has_values else "input",
        notes=_notes(loaded, read, at, edits, generate),
    )
    if not edits:
        return found
    edited, continuation, points = run(edits)
    if edited.output_top == plain.output_top:
        found.notes.extend(_note_inactive(loaded, read, edits))
    return replace(
        found,
        output_changes=_output_changes(plain, edited),
        edits=list(edits),
        positions=None if edits.positions is None else list(edits.positions),
        edited_layers=edited.layers,
        edited_output_top=edited.output_top,
        edited_saturation=_saturation(edited.layers),
        edited_grid=points,
        edited_generated=None if continuation is None else continuation.text,
        edited_generated_ended=None if continuation is None else continuation.ended,
    )


def _saturation(layers: list[TracedLayer]) -> int:
    """Return the layer from which on the prediction is the final one."""
    tops = [layer.output_top[0].id for layer in layers]
    return max((layer + 1 for layer, top in enumerate(tops) if top != tops[-1]), default=0)


def _output_changes(plain: "RunResult", edited: "RunResult") -> list[OutputChange]:
    """Return the most probable tokens of both runs, those of the edited run first."""
    tokens = {one.id: one.token for one in [*edited.output_top, *plain.output_top]}
    before, after = plain.probabilities, edited.probabilities
    return [
        OutputChange(token, id, float(before[id]), float(after[id])) for id, token in tokens.items()
    ]


def _notes(loaded: LoadedModel, read: Prompt, at: int, edits: Edits, generate: int) -> list[str]:
    """Return what a reader of a trace should know."""
    found = note_unknown(read.unknown)
    if generate and at != len(read.ids) - 1:
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
        if read.answer is not None:
            if not all(source.conversations for source in manifest.corpus.sources):
                found.append("Percentiles come from an index of plain text, not of conversations.")
        elif loaded.start != manifest.start.id:
            token = manifest.start.token
            how = f"start with {token}" if token else "have no start token"
            found.append(f"Percentiles come from an index whose sentences {how}.")
        dtype = str(loaded.memories.dtype).removeprefix("torch.")
        if dtype != manifest.dtype:
            found.append(
                f"Percentiles come from an index in {manifest.dtype}; this trace is in {dtype}."
            )
    return found


def _overflow(memories: Memories) -> ModelError:
    dtype = str(memories.dtype).removeprefix("torch.")
    return ModelError(
        f"Activations overflow {dtype}. If you set or scale coefficients, use smaller numbers."
    )


def _note_inactive(loaded: LoadedModel, read: Prompt, edits: Edits) -> list[str]:
    """Return which memories that are off have the coefficient 0 on all of the prompt anyway."""
    cells = [Cell.of(edit.cell) for edit in edits if edit.how == "off" and "N" in edit.cell]
    found = [
        str(cell)
        for cell in cells
        if not any(coefficients_along(loaded.memories, cell, [read.ids], None)[0])
    ]
    if not found:
        return []
    return [f"The coefficient is 0 at every position of this prompt anyway: {', '.join(found)}."]


# One run


class RunResult(NamedTuple):
    """What every layer does at one position, and the model's own prediction there."""

    layers: list[TracedLayer]
    output_top: list[TokenProbability]
    probabilities: Float[np.ndarray, " vocab"]
    """The probability of every token, by id."""


@torch.inference_mode()
def read_layers(
    memories: Memories,
    ids: list[int],
    at: int,
    top: int,
    sample: Sample | None = None,
    edits: Edits | None = None,
) -> RunResult:
    """Run a prompt and read every layer at one position, under whatever edits are applied.

    `sample` gives a memory's sampled coefficients, for percentiles; `edits` are those that are
    applied, so that redirected memories show their new values.
    """
    tokens = torch.tensor([ids[: at + 1]])  # later tokens cannot reach the position
    acts_here = edits is None or edits.positions is None or at in edits.positions
    with record_values(memories, edits if acts_here else None) as values:
        traces = memories.trace(tokens, torch.tensor([[0, at]]))
    for trace in traces:
        # Norms square their input.
        if not float(trace.layer_output.abs().max()) < 1e18:
            raise _overflow(memories)
    tops, probabilities = _top_tokens(
        memories, [(trace.residual, trace.ff_output, trace.layer_output) for trace in traces], top
    )
    contributions = _contributions(memories, traces, values, top, sample)
    layers = []
    for layer, (trace, (r, y, o)) in enumerate(zip(traces, tops, strict=True)):
        working = trace.coefficients if trace.gate is None else trace.gate
        active = None
        if working.numel():
            active = float((working > 0).double().mean())
        else:
            y = []
        case = _case(r[0], y[0] if y else None, o[0])
        experts = _experts(memories, layer, trace)
        layers.append(TracedLayer(layer, r, y, o, case, active, contributions[layer], experts))
    return RunResult(layers, layers[-1].output_top, probabilities)


@torch.inference_mode()
def read_grid(memories: Memories, ids: list[int]) -> Grid:
    """Return what every layer predicts at every position, under whatever edits are applied."""
    vectors = []

    def read(_: int, trace: LayerTrace) -> None:
        vectors.append((trace.residual, trace.ff_output, trace.layer_output))

    tokens, n = torch.tensor([ids]), len(ids)
    positions = torch.tensor([[0, position] for position in range(n)])
    with memories.trace_layers(read, tokens, positions):
        memories.forward(tokens)
    tops, _ = _top_tokens(memories, vectors, 1)
    grid: Grid = []
    for layer, width in enumerate(memories.layout.widths):
        row = []
        for (r,), (ff,), (o,) in tops[layer * n : (layer + 1) * n]:
            y = ff if width else None
            row.append(GridPoint(r, y, o, _case(r, y, o)))
        grid.append(row)
    return grid


def _case(r: TokenProbability, y: TokenProbability | None, o: TokenProbability) -> str:
    """Return where a prediction comes from, by the top tokens of r, y and o = r + y."""
    return "residual" if y is None else CASES[o.id == r.id, o.id == y.id]


Tops = list[TokenProbability]


def _top_tokens(
    memories: Memories, vectors: list[tuple[Tensor, Tensor, Tensor]], n: int
) -> tuple[list[tuple[Tops, Tops, Tops]], Float[np.ndarray, " vocab"]]:
    """Return the n most probable tokens of each r, y and o, and all probabilities of the last o.

    All layers are projected to the vocabulary together: reading its weights costs more than the
    arithmetic of a row.
    """
    shown, head = memories.tokenizer.token_texts(memories.vocabulary), memories.head
    columns: list[list[Tops]] = []
    projections: list[Callable[[Tensor], Tensor]] = [head.logits, head.folded, head.logits]
    for kind, project in enumerate(projections):
        rows = torch.cat([of_layer[kind].to(vectors[0][kind].device) for of_layer in vectors])
        column = []
        for part in rows.split(HEAD_ROWS):
            logits = project(part).cpu()
            totals = logits.logsumexp(dim=1).numpy()
            for row, total in zip(logits.numpy(), totals, strict=True):
                best = largest(row, n)
                chances = np.exp(row[best] - total).tolist()
                column.append(
                    [TokenProbability(shown[i], i, p) for i, p in zip(best, chances, strict=True)]
                )
        columns.append(column)
    return list(zip(*columns, strict=True)), np.exp(row - total)


def _experts(memories: Memories, layer: int, trace: LayerTrace) -> list[ExpertWeight] | None:
    """Return the experts that ran, those of largest weight first; None if the layer has none."""
    if trace.weights is None:
        return None
    names = [memories.layout.cell(layer, bank.offset) for bank in memories.banks[layer]]
    found = [
        ExpertWeight(f"L{layer}{cell.bank}", weight)
        for cell, weight in zip(names, trace.weights[0].tolist(), strict=True)
        if weight
    ]
    return sorted(found, key=lambda one: -one.weight)


def _contributions(
    memories: Memories,
    traces: Sequence[LayerTrace],
    values_of: Callable[[int], Iterable[Tensor]],
    n: int,
    sample: Sample | None,
) -> list[list[MemoryContribution]]:
    """Return the memories of every layer that contribute most."""
    best_memories, vectors = [], []
    for layer, trace in enumerate(traces):
        m = trace.coefficients[0].float().cpu()
        sizes, sigma = torch.zeros_like(m), post_norm_sigma(memories, layer, trace)
        places: list[int] = []
        rows: list[Tensor] = []
        first = 0
        for values in values_of(layer):
            own = slice(first, first + len(values))
            if m[own].any():  # values of experts that do not run are not read
                sizes[own] = m[own].abs() * values.float().norm(dim=1).cpu() / sigma
            best = largest(sizes[own].numpy(), n)  # the best of the layer are among these
            places += [first + place for place in best]
            rows.append(values[best].float().to(memories.device))
            first = own.stop
        if not rows:
            continue
        total = max(float(sizes.double().sum()), np.finfo(np.float64).tiny)
        order = largest(sizes[places].numpy(), n)
        vectors.append(torch.cat(rows)[order])
        for place in (places[i] for i in order):
            cell, size = memories.layout.cell(layer, place), float(sizes[place])
            best_memories.append((cell, float(m[place]), size, size / total))
    promoted = promoted_tokens(
        memories, torch.cat(vectors), torch.tensor([m for _, m, _, _ in best_memories])
    )
    found: list[list[MemoryContribution]] = [[] for _ in traces]
    for (cell, number, size, share), tokens in zip(best_memories, promoted, strict=True):
        rank = None if sample is None else percentile(sample(cell), number)
        weight, m_alone = _without_weight(memories, traces[cell.layer], cell, number)
        found[cell.layer].append(
            MemoryContribution(str(cell), number, size, share, rank, tokens, weight, m_alone)
        )
    return found


def _without_weight(
    memories: Memories, trace: LayerTrace, cell: Cell, coefficient: float
) -> tuple[float | None, float | None]:
    """Return w and m of a memory in an expert; of other memories None."""
    if trace.weights is None:
        return None, None
    banks = memories.banks[cell.layer]
    bank = banks.at(cell.memory)
    weight = float(trace.weights[0, banks.banks.index(bank)])
    if isinstance(bank, ExpertBank) and bank.experts.scales_input:
        return weight, coefficient / bank.factor
    return weight, coefficient / weight if weight else 0.0


def largest(numbers: Float[np.ndarray, " number"], n: int) -> list[int]:
    """Return the places of the n largest numbers, the largest first, ties to the lower place."""
    if n == 1 and len(numbers):
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


# Continuations


class Continuation(NamedTuple):
    """What the model writes after a prompt."""

    text: str
    ids: list[int]
    ended: str
    """length: as long as requested; end: the model ended the text; context: the context is full."""


def check_sampling(temperature: float | None, seed: int) -> None:
    """Raise unless a continuation can be sampled so."""
    if temperature is not None and not 1e-3 <= temperature <= 1e3:
        raise FfmemError(
            f"Temperature {temperature} is out of range. Use 0.001 to 1000, or drop --temperature"
            " for greedy decoding."
        )
    check_seed(seed)


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
    new_ids: list[int] = []
    ended = "length"
    while len(new_ids) < n:
        if memories.context is not None and len(prompt.ids) + len(new_ids) > memories.context:
            ended = "context"
            break
        # GPT-1 keeps no cache: it reads the whole text for every token.
        ids = [*prompt.ids, *new_ids] if cache is None else new_ids[-1:]
        past = {} if cache is None else {"past_key_values": cache}
        output = memories.model(torch.tensor([ids], device=memories.device), use_cache=True, **past)
        cache = getattr(output, "past_key_values", None)
        logits = output.logits[0, -1].float().cpu()
        if not torch.isfinite(logits).all():
            raise _overflow(memories)
        if temperature is None:
            token = int(logits.numpy().argmax())
        else:
            probabilities = (logits / temperature).softmax(dim=0)
            token = int(torch.multinomial(probabilities, 1, generator=generator))
        if token in prompt.stops:
            ended = "end"
            break
        new_ids.append(token)
    text = memories.tokenizer.decode_after(prompt.ids[-1], new_ids)
    return Continuation(text, new_ids, ended)
