"""Exact ablations for circuits: many sets of memories at positions, each in a copy of the prompt.

Ablated coefficients become their baseline: the mean in the index, or 0. Copies share the passes
below their lowest changed layer. The start token's coefficients stay as they are.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffmem.cells import Layout
from ffmem.errors import FfmemError
from ffmem.interventions.circuit_results import FaithfulnessPoint, parse_node
from ffmem.interventions.edits import resolve_position
from ffmem.interventions.effect import read_predictions
from ffmem.interventions.estimates import output_slope
from ffmem.interventions.forward import (
    HEAD_ROWS,
    BankRows,
    Change,
    LoadedModel,
    Place,
    Prompt,
    read_prompt,
)
from ffmem.interventions.partial_forward import PartialForward, run_copies, uncapped_logits
from ffmem.models.head import Head
from ffmem.models.modules import first_tensor
from ffmem.progress import Progress, Step

NEGLIGIBLE = 1e-6
"""Relative to the largest number; anything smaller is rounding."""

RANDOM_SETS = 5
"""Random sets of nodes that a set is compared with."""


class CircuitQuestion(NamedTuple):
    """A prompt, run once; its target; and what coefficients become when they are ablated."""

    prompt: Prompt
    position: int
    forward: PartialForward
    target: int
    baseline: list[Float[Tensor, " memory"]]
    """Ablated coefficients, by layer."""
    ablation: str
    fixed: int
    """Positions at the beginning that are no part of a circuit: the start token's."""

    @classmethod
    def of(
        cls, loaded: LoadedModel, prompt: str, target: int | None, position: int, ablation: str
    ) -> "CircuitQuestion":
        """Run a prompt; raise if it, its position or the ablation make no sense."""
        if ablation not in ("auto", "mean", "zero"):
            raise FfmemError(f"There is no ablation {ablation!r}. Use auto, mean or zero.")
        if ablation == "mean" and loaded.index is None:
            raise FfmemError(
                "Mean ablation needs an index, which has the means; you passed a model."
            )
        if ablation == "auto":
            ablation = "zero" if loaded.index is None else "mean"
        memories = loaded.memories
        read = read_prompt(loaded, prompt)
        at = resolve_position(position, len(read.ids))
        fixed = 0 if loaded.start is None else 1
        if at < fixed:
            raise FfmemError(
                "Position 0 is the start token, whose memories are never ablated. Use a later one."
            )
        forward = PartialForward(memories, read.ids, at)
        if target is None:
            target = read_predictions(memories, forward.output, None)[0].id
        layers = range(memories.n_layers)
        if ablation == "mean":
            baseline = [torch.tensor(_means(loaded, layer)) for layer in layers]
        else:
            baseline = [torch.zeros(memories.layout.widths[layer]) for layer in layers]
        return cls(read, at, forward, target, baseline, ablation, fixed)

    def place(self, node: object, layout: Layout) -> Place:
        """Return the place of a node's name; raise if there is none."""
        cell, position = parse_node(node)
        cell = layout.resolve(cell)
        if not self.fixed <= position <= self.position:
            raise FfmemError(
                f"{node} is at position {position}; a node is at {self.fixed} to {self.position}."
            )
        return Place(cell.layer, cell.memory, position)


def _means(loaded: LoadedModel, layer: int) -> np.ndarray:
    """Return the means of a layer's memories; in an expert, over the prefixes that reach it."""
    assert loaded.index is not None
    if not loaded.memories.layout.widths[layer]:
        return np.zeros(0, np.float32)
    columns = loaded.index.columns("stats", layer)
    means = columns["mean"].astype(np.float64)
    if "routed" in columns:
        means = means * loaded.index.n_prefixes / np.maximum(columns["routed"], 1)
    return means.astype(np.float32)


# The target's logit


def target_logit(
    head: Head, stream: Float[Tensor, "row hidden"], target: int
) -> Float[Tensor, " row"]:
    """Return the logit of a token minus the mean over the vocabulary, which softmax ignores.

    With an adaptive softmax, which has no logits, log p.
    """
    return torch.cat([_logit(head, rows, target, None) for rows in stream.split(HEAD_ROWS)]).cpu()


def _logit(head: Head, stream: Tensor, target: int, sigma: Tensor | None) -> Tensor:
    """Return it as a linear function of the stream if σ is given: norm and cap are held."""
    z = uncapped_logits(head, stream, sigma)
    if head.adaptive:
        return z[:, target]
    if head.cap is not None:
        capped = head.cap * (z / head.cap).tanh()
        z = capped if sigma is None else z * torch.where(z == 0, 1, capped / z).detach()
    return z[:, target] - z.mean(dim=1)


def logit_slope(forward: PartialForward, target: int) -> Float[Tensor, " hidden"]:
    """Return the gradient of the target's logit at the last layer's output, σ and cap held."""
    head = forward.memories.head
    return output_slope(forward, lambda h, sigma: _logit(head, h, target, sigma))


# Exact ablations


def _find_rows(rows: BankRows, n_tokens: int, place: Place) -> tuple[Tensor, int] | None:
    """Return the rows of a bank at a place's position, in every copy; None if in another bank."""
    if place.memory not in rows.memories:
        return None
    at = (rows.tokens % n_tokens == place.position).nonzero()[:, 0]
    return at, place.memory - rows.memories.start


@torch.no_grad()
def run_sets(
    question: CircuitQuestion,
    sets: Sequence[tuple[bool, Sequence[Place]]],
    step: Step = lambda n: None,
) -> Float[Tensor, "set hidden"]:
    """Return the last layer's output under each set: (True, kept alone) or (False, ablated)."""
    forward, layout = question.forward, question.forward.memories.layout
    first = [
        0 if keep else min((place.layer for place in places), default=layout.n_layers - 1)
        for keep, places in sets
    ]
    found = torch.zeros(len(sets), forward.memories.hidden, dtype=torch.float32)

    def changes(copies: list[int]) -> dict[int, Change]:
        by_layer = _by_layer([sets[number] for number in copies], layout)
        return {
            layer: partial(_change_sets, question, own, layer)
            for layer, own in by_layer.items()
            if layer >= first[copies[0]]
        }

    for copies, output in run_copies(forward, first, changes, step):
        found[copies] = output.float().cpu()
    return found


def _by_layer(
    sets: Sequence[tuple[bool, Sequence[Place]]], layout: Layout
) -> dict[int, list[tuple[bool, list[Place]]]]:
    """Return sets with the places of each layer that has memories."""
    found: dict[int, list[tuple[bool, list[Place]]]] = {
        layer: [(keep, []) for keep, _ in sets] for layer in layout.memory_layers
    }
    for number, (_, places) in enumerate(sets):
        for place in places:
            found[place.layer][number][1].append(place)
    return found


def _change_sets(
    question: CircuitQuestion,
    sets: Sequence[tuple[bool, Sequence[Place]]],
    layer: int,
    rows: BankRows,
) -> Tensor:
    """Return the coefficients of a bank, in copy b of the prompt under set b."""
    n_tokens = question.forward.n_tokens
    m = rows.coefficients
    own = slice(rows.memories.start, rows.memories.stop)
    base = question.baseline[layer][own].to(m)
    alone = torch.tensor([keep for keep, _ in sets], device=m.device)[rows.tokens // n_tokens]
    alone &= rows.tokens % n_tokens >= question.fixed
    changed = torch.where(alone[:, None], base, m)
    row_of = torch.full((len(sets) * n_tokens,), -1, device=m.device)
    row_of[rows.tokens] = torch.arange(len(m), device=m.device)
    for number, (keep, places) in enumerate(sets):
        at = [(one.memory, one.position) for one in places if one.memory in rows.memories]
        if not at:
            continue
        memory, position = torch.tensor(at, device=m.device).T
        row, memory = row_of[number * n_tokens + position], memory - own.start
        row, memory = row[row >= 0], memory[row >= 0]  # the others are not routed to this bank
        changed[row, memory] = m[row, memory] if keep else base[memory]
    return changed


@torch.no_grad()
def measure_edges(
    question: CircuitQuestion, places: list[Place], m: Tensor, logit: float, step: Step
) -> Float[Tensor, "source end"]:
    """Return what ablating a source changes at every end, the other nodes held as they were."""
    forward, head = question.forward, question.forward.memories.head
    found = torch.zeros(len(places) + forward.n_tokens, len(places) + 1, dtype=torch.float64)
    read = torch.zeros(0)

    def changes(copies: list[int]) -> dict[int, Change]:
        nonlocal read
        read = m.repeat(len(copies), 1)
        return _hold_nodes(question, places, m, copies, places[copies[0]].layer, read)

    for copies, output in run_copies(forward, [place.layer for place in places], changes, step):
        found[copies, :-1] = m - read
        found[copies, -1] = logit - target_logit(head, output.float(), question.target)
    output, read = zero_tokens(question, places, m, step)
    found[len(places) :, :-1] = m - read
    found[len(places) :, -1] = logit - target_logit(head, output, question.target)
    return found


def _hold_nodes(
    question: CircuitQuestion,
    places: Sequence[Place],
    m: Tensor,
    ablated: Sequence[int | None],
    first_layer: int,
    read: Float[Tensor, "copy node"],
) -> dict[int, Change]:
    """Return changes that hold the nodes at m, but for one ablated in each copy of the prompt.

    What a node's coefficient would have been is written to `read`: 0 if the router no longer
    chooses its expert.
    """
    n_tokens = question.forward.n_tokens
    read[:, [number for number, place in enumerate(places) if place.layer >= first_layer]] = 0

    def change(layer: int, rows: BankRows) -> Tensor:
        changed = rows.coefficients.clone()
        for number, place in enumerate(places):
            at = _find_rows(rows, n_tokens, place) if place.layer == layer else None
            if at is None:
                continue
            row, memory = at
            copy = (rows.tokens[row] // n_tokens).tolist()
            read[copy, number] = rows.coefficients[row, memory].double().cpu()
            base = float(question.baseline[layer][place.memory])
            given = [base if ablated[one] == number else float(m[number]) for one in copy]
            changed[row, memory] = torch.tensor(given).to(changed)
        return changed

    layers = {place.layer for place in places if place.layer >= first_layer}
    return {layer: partial(change, layer) for layer in layers}


@torch.no_grad()
def zero_tokens(
    question: CircuitQuestion, places: Sequence[Place], m: Tensor, step: Step
) -> tuple[Float[Tensor, "token hidden"], Float[Tensor, "token node"]]:
    """Return the output, and what nodes would be, with each token's vector 0 and nodes held."""
    forward = question.forward
    n_tokens, block = forward.n_tokens, forward.memories.blocks[0]
    outputs, reads = [], []
    for tokens in torch.arange(n_tokens).split(forward.n_rows):
        read = m.repeat(len(tokens), 1)[:, : len(places)]
        changes = _hold_nodes(question, places, m, [None] * len(tokens), 0, read)

        def zero(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tokens: Tensor = tokens
        ) -> tuple[Any, Any]:
            x = first_tensor(args, kwargs).clone()
            by_token = forward.memories.streams.by_token(x)
            by_token[torch.arange(len(tokens)), tokens] = 0
            if args:
                return (x, *args[1:]), kwargs
            return args, kwargs | {next(iter(kwargs)): x}

        with ExitStack() as hooks:
            handle = block.register_forward_pre_hook(zero, with_kwargs=True)
            hooks.callback(handle.remove)
            outputs.append(forward.run(0, len(tokens), changes).float().cpu())
        reads.append(read)
        step(len(tokens))
    return torch.cat(outputs), torch.cat(reads)


# Faithfulness


def measure_faithfulness(
    question: CircuitQuestion, places: list[Place], logit: float, seed: int, say: Progress
) -> tuple[list[FaithfulnessPoint], float]:
    """Return the curve over 1, 2, 4, … nodes, and the logit with every memory ablated."""
    head = question.forward.memories.head
    n = len(places)
    sizes = sorted({min(2**power, n) for power in range(n.bit_length() + 1)}) if n else []
    draw = _random_nodes(question, places, np.random.default_rng(seed))
    random_sets = [draw() for _ in range(RANDOM_SETS)]
    sets: list[tuple[bool, Sequence[Place]]] = [(True, [])]
    for size in sizes:
        for of in (places, *random_sets):
            sets += [(True, of[:size]), (False, of[:size])]
    with say.bar("Measuring faithfulness", len(sets), "passes") as step:
        logits = target_logit(head, run_sets(question, sets, step), question.target)
    ablated, rest = float(logits[0]), logits[1:].reshape(len(sizes), 1 + RANDOM_SETS, 2)
    whole = logit - ablated
    if abs(whole) <= NEGLIGIBLE * max(abs(logit), abs(ablated), 1e-12):
        return [FaithfulnessPoint(k, None, None, None, None) for k in sizes], ablated
    alone, without = (rest[..., 0] - ablated) / whole, (logit - rest[..., 1]) / whole
    curve = [
        FaithfulnessPoint(
            size,
            float(alone[number, 0]),
            float(without[number, 0]),
            float(alone[number, 1:].mean()),
            float(without[number, 1:].mean()),
        )
        for number, size in enumerate(sizes)
    ]
    return curve, ablated


def _random_nodes(
    question: CircuitQuestion, places: list[Place], rng: np.random.Generator
) -> Callable[[], list[Place]]:
    """Return a function that draws other nodes: same layers and positions, other active memories.

    Where too few others are active, any others of the layer are drawn; where the nodes are more
    than half of the layer, any of it.
    """
    wanted: dict[tuple[int, int], list[int]] = {}
    for number, place in enumerate(places):
        wanted.setdefault((place.layer, place.position), []).append(number)
    active = _active_memories(question, wanted)
    widths = question.forward.memories.layout.widths

    def draw() -> list[Place]:
        found = list(places)
        for (layer, position), numbers in wanted.items():
            own = [places[number].memory for number in numbers]
            among = np.setdiff1d(active[layer, position], own)
            if len(among) < len(numbers):
                among = np.setdiff1d(np.arange(widths[layer]), own)
            if len(among) < len(numbers):
                among = np.arange(widths[layer])
            chosen = rng.choice(among, len(numbers), replace=False)
            for number, memory in zip(numbers, chosen.tolist(), strict=True):
                found[number] = Place(layer, memory, position)
        return found

    return draw


@torch.no_grad()
def _active_memories(
    question: CircuitQuestion, wanted: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], np.ndarray]:
    """Return the memories whose coefficient is not 0, at some layers and positions."""
    found: dict[tuple[int, int], list[np.ndarray]] = {place: [] for place in wanted}

    def read(layer: int, rows: BankRows) -> Tensor:
        for one, position in found:
            if one == layer:
                m = rows.coefficients[rows.tokens == position]
                memories = m.any(dim=0).nonzero()[:, 0].cpu().numpy() + rows.memories.start
                found[one, position].append(memories)
        return rows.coefficients

    layers = {layer for layer, _ in found}
    question.forward.run(0, 1, {layer: partial(read, layer) for layer in layers})
    return {
        place: np.concatenate(parts) if parts else np.zeros(0, int)
        for place, parts in found.items()
    }
