"""Which memories a prediction depends on: exact ablations of those that estimates point at.

    change of a memory = log p(target | m → 0) − log p(target)        negative: it supported it

Estimates see every memory in a pass or two and choose which to measure. They are reported beside
the exact change, with their rank correlation, so that you see how far to trust them.

Only m becomes 0: where coefficients are weights of a softmax (neural and persistent memory), the
others do not grow to sum to 1 again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.cells import Cell
from ffmem.errors import FfmemError
from ffmem.indexing.memory import visible_token
from ffmem.interventions.edits import parse_cells, resolve_position
from ffmem.interventions.estimates import (
    NAMES,
    NO_DIRECT,
    Estimates,
    choose_candidates,
    estimate,
    rank_correlation,
)
from ffmem.interventions.forward import (
    Change,
    PartialForward,
    log_probabilities,
    log_probability,
    promoted_tokens,
)
from ffmem.interventions.prompts import LoadedModel, find_target, read_prompt
from ffmem.interventions.results import (
    INPUT_VALUES,
    TableResult,
    TokenProbability,
    format_change,
    format_tokens,
    mark_position,
)
from ffmem.models.memories import Memories
from ffmem.progress import Progress, Step
from ffmem.text import format_number

PREDICTIONS = 5
"""The model's own predictions to report."""

OVERHEAD = 40
"""What a batch costs in each layer beside its tokens, in tokens. Measured on SmolLM2-135M, one
core: a prompt of 20 tokens takes 117 ms alone and 54 ms in a batch; the head comes on top."""


class Target(NamedTuple):
    """The token whose log p is measured, and what the unchanged model gives it."""

    token: str
    id: int
    probability: float
    log_probability: float
    rank: int
    """1 is the model's own next token."""


class MemoryEffect(NamedTuple):
    """One memory: the exact change of log p(target) when it is off, beside the estimates."""

    cell: Cell
    change: float
    gradient: float
    direct: float | None
    integrated: float | None
    coefficient: float
    """m at the position."""
    value_top: list[str]
    """The tokens that m · v promotes most; none if v is all zeros."""

    def to_dict(self) -> dict[str, Any]:
        """Return what `effect --json` prints."""
        return {**self._asdict(), "cell": str(self.cell)}


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
    """Spearman's, of each estimate with the exact change, over the candidates."""
    sums: dict[str, float | None]
    """Of the exact change and of each estimate, over the candidates."""
    memories: list[MemoryEffect]
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return what `effect --json` prints."""
        return {
            "prompt": self.prompt,
            "tokens": self.tokens,
            "position": self.position,
            "target": self.target._asdict(),
            "top": [token._asdict() for token in self.top],
            "ablation": "off",
            "positions": self.positions,
            "candidates": self.candidates,
            "correlation": self.correlation,
            "sum": self.sums,
            "memories": [memory.to_dict() for memory in self.memories],
            **({"values": "input"} if INPUT_VALUES in self.notes else {}),
            "notes": self.notes,
        }

    def above(self) -> list[str]:
        """Return the prompt, what the model predicts, and the target."""
        target = self.target
        return [
            mark_position(self.tokens, self.position),
            f"predicts  {format_tokens(self.top)}",
            f"target    {visible_token(target.token)}, p {format_number(target.probability)},"
            f" log p {format_number(target.log_probability)}, rank {target.rank:,}",
        ]

    def table(self) -> list[Sequence[str]]:
        """Return the memories with the largest changes."""
        names = available_estimates(self.memories)
        rows: list[Sequence[str]] = [["memory", "change", *names, "m", "value promotes"]]
        for memory in self.memories:
            numbers = [memory.change, *(getattr(memory, name) for name in names)]
            rows.append(
                [
                    str(memory.cell),
                    *map(format_change, [*numbers, memory.coefficient]),
                    " ".join(map(visible_token, memory.value_top)),
                ]
            )
        return rows

    def below(self) -> list[str]:
        """Return what the numbers mean, correlations, sums and notes."""
        names = available_estimates(self.memories)
        where = "everywhere" if self.positions is None else f"at {self.positions}"
        sums = ", ".join(f"{name} {format_change(self.sums[name])}" for name in ("change", *names))
        correlations = format_correlations(self.correlation, names)
        return [
            f"change: of log p(target) with the memory off ({where}), exact; negative: it supported"
            " the target.",
            f"{self.candidates} memories measured, the {len(self.memories)} of largest |change|"
            " listed.",
            f"rank correlation with the exact change: {correlations}; sums: {sums}.",
            *self.notes,
        ]


def available_estimates(memories: Sequence[Any]) -> list[str]:
    """Return the names of the estimates that some rows have."""
    return [name for name in NAMES if any(getattr(row, name) is not None for row in memories)]


def format_correlations(correlation: dict[str, float | None], names: Sequence[str]) -> str:
    """Return the correlations of some estimates."""
    return ", ".join(f"{name} {format_number(correlation[name], 2)}" for name in names)


def effect(
    loaded: LoadedModel,
    prompt: str,
    *,
    target: str | None = None,
    position: int = -1,
    positions: Sequence[int] | None = None,
    top: int = 20,
    candidates: int = 200,
    cells: Sequence[object] = (),
    integrated: bool = False,
    steps: int = 20,
    progress: Progress | None = None,
) -> EffectResult:
    """Return the exact change of log p(target) when memories are off, one at a time.

    The target is the model's own next token unless one is given. `cells` are measured beside the
    candidates that estimates choose.
    """
    memories, layout = loaded.memories, loaded.memories.layout
    named = check_request(memories, cells, top, candidates, steps)
    read = read_prompt(loaded, prompt)
    at = resolve_position(position, len(read.ids))
    off = None
    if positions is not None:
        off = sorted({resolve_position(one, len(read.ids)) for one in positions})
    reaching = None if off is None else [one for one in off if one <= at]
    if reaching == []:
        raise FfmemError(
            f"Memories cannot have an effect: they would be off at {off}, after position {at},"
            " where the prompt is read. Choose earlier positions, or a later --position."
        )
    wanted = None if target is None else find_target(memories, target)
    forward = PartialForward(memories, read.ids, at)
    measured, predicted = read_predictions(forward, wanted)
    say = progress or Progress(quiet=True)
    with say.bar("Integrating", integrated * len(layout.memory_layers), "layers") as step:
        estimates = estimate(forward, measured.id, reaching, steps if integrated else None, step)
    chosen = choose_candidates(layout, estimates, candidates, named)
    with say.bar("Ablating", len(chosen), "memories") as step:
        changes = ablate(forward, measured.id, chosen, reaching, step)
    estimated = estimates.at(layout, chosen)
    columns: dict[str, Tensor | None] = {"change": changes, **estimated}
    return EffectResult(
        read.text,
        read.tokens,
        at,
        measured,
        predicted,
        off,
        len(chosen),
        {name: rank_correlation(estimated[name], changes) for name in NAMES},
        {name: None if of is None else float(of.sum()) for name, of in columns.items()},
        _largest_effects(forward, chosen, columns, top),
        effect_notes(memories, estimates),
    )


def check_request(
    memories: Memories, cells: object, top: int, candidates: int, steps: int
) -> list[Cell]:
    """Return the memories requested by name; raise if the numbers make no sense."""
    for name, number, least in (
        ("top", top, 1),
        ("steps", steps, 1),
        ("candidates", candidates, 0),
    ):
        if not isinstance(number, int) or number < least:
            raise FfmemError(f"{name} must be {least} or more; got {number!r}.")
    named = [memories.layout.resolve(cell) for cell in parse_cells("cells", cells)]
    if not (candidates or named):
        raise FfmemError("There is nothing to measure: give at least one candidate or cell.")
    return named


def effect_notes(memories: Memories, estimates: Estimates) -> list[str]:
    """Return what a reader of effects should know."""
    found = [NO_DIRECT] if estimates.direct is None else []
    return found if memories.has_values else [*found, INPUT_VALUES]


@torch.no_grad()
def read_predictions(
    forward: PartialForward, target: int | None
) -> tuple[Target, list[TokenProbability]]:
    """Return the target, the model's own next token by default, and what the model predicts."""
    memories = forward.memories
    logs = log_probabilities(memories.head, forward.output)[0].cpu().numpy()
    order = np.argsort(-logs, kind="stable")
    shown = memories.tokenizer.token_texts(memories.vocabulary)
    id = int(order[0]) if target is None else target
    rank = 1 + int(np.flatnonzero(order == id)[0])
    top = [
        TokenProbability(shown[best], best, float(np.exp(logs[best])))
        for best in order[:PREDICTIONS].tolist()
    ]
    return Target(shown[id], id, float(np.exp(logs[id])), float(logs[id]), rank), top


def _largest_effects(
    forward: PartialForward, cells: Sequence[Cell], columns: dict[str, Tensor | None], top: int
) -> list[MemoryEffect]:
    """Return the memories with the largest |change|, ties in the order of the candidates."""
    changes = columns["change"]
    assert changes is not None
    order = np.argsort(-changes.abs().numpy(), kind="stable")[:top].tolist()
    listed = [cells[number] for number in order]
    m = [float(forward.layers[cell.layer].coefficients[0, cell.memory]) for cell in listed]
    values = values_of_cells(forward.memories, forward.values.of_layer, listed)
    tokens = promoted_tokens(forward.memories, values, torch.tensor(m))
    found = []
    for number, coefficient, promoted in zip(order, m, tokens, strict=True):
        row: Any = {name: None if of is None else float(of[number]) for name, of in columns.items()}
        found.append(
            MemoryEffect(cells[number], coefficient=coefficient, value_top=promoted, **row)
        )
    return found


def values_of_cells(
    memories: Memories, values_of_layer: Callable[[int], Tensor], cells: Sequence[Cell]
) -> Float[Tensor, "cell hidden"]:
    """Return the values of some memories of any layers."""
    layers = {layer: values_of_layer(layer) for layer in {cell.layer for cell in cells}}
    device = memories.device  # layers may be on several
    return torch.stack([layers[cell.layer][cell.memory].to(device) for cell in cells])


# Exact ablations, many at once


@torch.no_grad()
def ablate(
    forward: PartialForward,
    target: int,
    cells: Sequence[Cell],
    positions: Sequence[int] | None = None,
    step: Step = lambda n: None,
) -> Float[Tensor, " cell"]:
    """Return the change of log p of the target for each memory, off at all or some positions.

    Each row of a batch is the prompt with another memory off. Rows are sorted by layer, so that a
    batch starts at the lowest of its layers, and rows with higher layers run clean until there.
    """
    head = forward.memories.head
    clean = log_probability(head, forward.output, target).cpu()
    found = torch.zeros(len(cells), dtype=torch.float64)
    order = sorted(range(len(cells)), key=lambda number: cells[number])
    layers = [cells[number].layer for number in order]
    cuts = cheapest_cuts(layers, forward.memories.n_layers, forward.n_tokens, forward.n_rows)
    for begin, end in pairwise(cuts):
        rows = order[begin:end]
        batch = [cells[number] for number in rows]
        output = forward.run(batch[0].layer, len(rows), _switch_off(batch, positions))
        found[rows] = log_probability(head, output, target).cpu() - clean
        step(len(rows))
    return found


def cheapest_cuts(layers: list[int], n_layers: int, n_tokens: int, max_rows: int) -> list[int]:
    """Return where to cut rows, sorted by layer, into batches of at most `max_rows`: 0, …, n.

    A batch of n rows from layer ℓ up costs (layers left + 1) · (n · tokens + OVERHEAD).
    """
    cheapest, before = [0.0], [0]
    for end in range(1, len(layers) + 1):
        first = max(0, end - max_rows)
        costs = [
            cheapest[begin] + (n_layers - layers[begin] + 1) * ((end - begin) * n_tokens + OVERHEAD)
            for begin in range(first, end)
        ]
        best = min(range(len(costs)), key=costs.__getitem__)
        cheapest.append(costs[best])
        before.append(first + best)
    cuts = [len(layers)]
    while cuts[-1] > 0:
        cuts.append(before[cuts[-1]])
    return cuts[::-1]


def _switch_off(cells: Sequence[Cell], positions: Sequence[int] | None) -> dict[int, Change]:
    """Return the changes that switch off, in row b of a batch, the b-th memory."""
    by_layer: dict[int, list[int]] = {}
    for row, cell in enumerate(cells):
        by_layer.setdefault(cell.layer, []).append(row)

    def of_layer(rows: list[int]) -> Change:
        def change(coefficients: Tensor) -> Tensor:
            changed = coefficients.clone()
            row = torch.tensor(rows)[:, None]
            place = torch.tensor(list(range(changed.shape[1]) if positions is None else positions))
            memory = torch.tensor([cells[row].memory for row in rows])[:, None]
            changed[row, place[None], memory] = 0
            return changed

        return change

    return {layer: of_layer(rows) for layer, rows in by_layer.items()}
