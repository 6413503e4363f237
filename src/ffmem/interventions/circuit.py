"""Which memories a prediction comes through, and which of them feed which.

    node   a memory at a position        edge   what flows from one to another, past no third node

One backward pass by linear rules (`relevance.py`) gives the relevance of every memory at every
position for the target's logit; the largest are the nodes. Then gradients are cut at the nodes, and
one backward pass from each gives its edges. What flows through memories that are no nodes is a part
of the edges, so nothing is lost. Law, exact, where memories are ablated to 0:

    m of a node = Σ edges into it, from nodes and tokens, + biases
    logit       = Σ edges into the target + biases

Everything shown is then measured by passes in which coefficients are set to their baseline, which
is the mean in the index, or 0:

    node   logit − logit with the node ablated
    edge   m − m with the source ablated and all other nodes held at their coefficients
    faithfulness   (L(nodes alone) − L(none)) / (L − L(none))
    completeness   (L − L(all but the nodes)) / (L − L(none))

The start token is the same in every prompt, so its coefficients are their own mean: they are never
nodes, and stay as they are.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.cells import Layout
from ffmem.errors import FfmemError
from ffmem.indexing.store import Index, output_folder
from ffmem.interventions.circuit_ablations import (
    NEGLIGIBLE,
    RANDOM_SETS,
    CircuitQuestion,
    logit_slope,
    measure_edges,
    measure_faithfulness,
    run_sets,
    target_logit,
    zero_tokens,
)
from ffmem.interventions.circuit_results import (
    TARGET,
    CircuitEdge,
    CircuitNode,
    CircuitResult,
    NodeGroup,
    SwitchedOff,
    TokenEnd,
    token_id,
    write_circuit,
)
from ffmem.interventions.effect import read_predictions
from ffmem.interventions.estimates import rank_correlation
from ffmem.interventions.forward import (
    LoadedModel,
    Place,
    find_target,
    note_unknown,
    open_model,
    promoted_tokens,
)
from ffmem.interventions.partial_forward import PartialForward
from ffmem.interventions.relevance import GradientPass
from ffmem.interventions.results import NO_RELP
from ffmem.models.memories import Memories
from ffmem.progress import Progress, Step
from ffmem.signatures import check_arguments
from ffmem.stats import check_seed

MAX_NODES = 1_000
"""A graph of more cannot be read, and takes a backward pass for each."""

SHOWN_FLOW = 0.9
"""Share of the flow, Σ |relevance|, that the edges shown carry."""

EDGES_PER_NODE = 4
"""Maximum number of edges to show per node."""


@check_arguments
def circuit(
    model_or_index: LoadedModel | Memories | Index | str | Path,
    prompt: str,
    *,
    target: str | None = None,
    position: int | None = None,
    nodes: int = 64,
    ablation: str = "auto",
    groups: Mapping[str, Sequence[str]] | None = None,
    off: Sequence[str] = (),
    out: str | Path | None = None,
    seed: int = 0,
    start: str | None = None,
    model: Memories | str | Path | None = None,
    adapter: str | Path | None = None,
    dtype: str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> CircuitResult:
    """Return the memories that lead to the next token, and which of them feed which.

    Args:
        model_or_index: A model, or an index, which knows the mean of each memory.
        prompt: The text.
        target: Token to explain. Default: the model's own next token.
        position: Position to read. Default: the last.
        nodes: Maximum number of nodes (memories at positions).
        ablation: Value of ablated coefficients: "mean" (of the index), "zero", or "auto".
        groups: Nodes, such as "L5N12@3", by a name; each group is ablated together.
        off: Groups to switch off all at once.
        out: Folder for circuit.json, circuit.svg and circuit-tracer.json. Default: none.
        seed: Random seed of the random circuits to compare with.
        start: "auto", "none", "bos", "eos", or a token. Default: as the index, or "auto".
        model: The model of an index, or where it is now. Default: the one that the index names.
        adapter: Adapter to merge into the model, or where that of an index is now.
        dtype: Number format of the model. Default: as the index, or "float32".
        device: Where the model runs.
        progress: Where progress is shown. Default: nowhere.
    """
    if not 1 <= nodes <= MAX_NODES:
        raise FfmemError(f"A circuit has 1 to {MAX_NODES:,} nodes; {nodes!r} were requested.")
    check_seed(seed)
    groups = groups or {}
    _check_off(off, groups)
    loaded = open_model(model_or_index, start, model, adapter, dtype, device, progress)
    id = None if target is None else find_target(loaded.memories, target)
    at = -1 if position is None else position
    question = CircuitQuestion.of(loaded, prompt, id, at, ablation)
    _group_places(question, groups, loaded.memories.layout)  # raises before the work
    found = _find_circuit(loaded, question, nodes, seed, progress or Progress(quiet=True))
    found = measure_groups(loaded, found, groups, off, question)
    if out is not None:
        with output_folder(Path(out)):
            write_circuit(found, Path(out))
    return found


def measure_groups(
    loaded: LoadedModel,
    found: CircuitResult,
    groups: Mapping[str, Sequence[str]],
    off: Sequence[str] = (),
    question: "CircuitQuestion | None" = None,
) -> CircuitResult:
    """Return a circuit with groups of nodes, each ablated together, and those in `off` at once."""
    _check_off(off, groups)
    if not groups:
        return found
    if question is None:
        asked = (found.target.id, found.position, found.ablation)
        question = CircuitQuestion.of(loaded, found.prompt, *asked)
    layout = loaded.memories.layout
    places = _group_places(question, groups, layout)
    names = {name: [_node_id(layout, place) for place in of] for name, of in places.items()}
    sets = [*places.values(), [place for name in off for place in places[name]]]
    outputs = run_sets(question, [(False, places) for places in sets])
    logits = target_logit(loaded.memories.head, outputs, question.target).tolist()
    switched_off = None
    if off:
        target, top = read_predictions(loaded.memories, outputs[-1:], question.target)
        switched_off = SwitchedOff(list(off), logits[-1], target.probability, target.rank, top)
    measured = [
        NodeGroup(name, names[name], found.logit - logit, name in off)
        for name, logit in zip(places, logits, strict=False)
    ]
    return replace(found, groups=measured, switched_off=switched_off)


def _check_off(off: Sequence[str], groups: Collection[str]) -> None:
    """Raise unless the groups to switch off are given."""
    unknown = [name for name in off if name not in groups]
    if unknown:
        known = ", ".join(groups) or "none"
        raise FfmemError(f"There is no group {unknown[0]!r} to switch off. Groups: {known}.")


def _group_places(
    question: CircuitQuestion, groups: Mapping[str, Sequence[str]], layout: Layout
) -> dict[str, list[Place]]:
    """Return the places of each group's nodes; raise if there is no such node."""
    return {name: [question.place(node, layout) for node in of] for name, of in groups.items()}


def _node_id(layout: Layout, place: Place) -> str:
    return f"{layout.cell(place.layer, place.memory)}@{place.position}"


# Nodes and edges


def _find_circuit(
    loaded: LoadedModel, question: CircuitQuestion, budget: int, seed: int, say: Progress
) -> CircuitResult:
    memories, forward = loaded.memories, question.forward
    layout, head = memories.layout, memories.head
    target, top = read_predictions(memories, forward.output, question.target)
    logit = float(target_logit(head, forward.output, target.id)[0])

    chosen = choose_nodes(question, budget)
    places, m, linear = chosen.places, chosen.coefficients, chosen.linear
    base = torch.tensor([float(question.baseline[p.layer][p.memory]) for p in places]).double()
    n_tokens = forward.n_tokens
    with say.bar("Finding edges", len(places) + 1, "nodes") as step:
        estimated = _estimate_edges(forward, chosen.slope, linear, places, m - base, step)
    with say.bar("Ablating", 2 * len(places) + 2 * n_tokens, "passes") as step:
        alone = run_sets(question, [(False, [place]) for place in places], step)
        exact_nodes = logit - target_logit(head, alone, target.id)
        exact_tokens = logit - target_logit(head, zero_tokens(question, (), m, step)[0], target.id)
        measured = measure_edges(question, places, m, logit, step)
    curve, ablated = measure_faithfulness(question, places, logit, seed, say)

    # Edges by (source, end): sources are nodes, then tokens; ends are nodes, then the target.
    to_target = torch.cat([chosen.slopes, torch.ones(1).double()])
    relevance = estimated * to_target
    size = relevance.abs()
    is_edge = size > NEGLIGIBLE * max(abs(logit), float(size.max()) if size.numel() else 0.0)
    names = [_node_id(layout, place) for place in places]
    sources = [*names, *(token_id(position) for position in range(n_tokens))]
    order = _largest(size, is_edge, EDGES_PER_NODE * (len(places) + 1))
    edges = [
        CircuitEdge(
            sources[source],
            TARGET if end == len(places) else names[end],
            float(estimated[source, end]),
            float(measured[source, end]),
            float(relevance[source, end]),
        )
        for source, end in order
    ]
    promoted = promoted_tokens(memories, forward.values_of(places), m.float()) if places else []
    nodes = [
        CircuitNode(
            id=names[number],
            cell=str(layout.cell(place.layer, place.memory)),
            layer=place.layer,
            memory=place.memory,
            position=place.position,
            coefficient=float(m[number]),
            baseline=float(base[number]),
            estimate=float(chosen.estimates[number]),
            exact=float(exact_nodes[number]),
            value_top=promoted[number],
        )
        for number, place in enumerate(places)
    ]
    ends = [
        TokenEnd(
            token_id(position),
            position,
            question.prompt.tokens[position],
            float(chosen.of_tokens[position]),
            float(exact_tokens[position]),
        )
        for position in range(n_tokens)
    ]
    last = curve[-1] if curve else None
    return CircuitResult(
        prompt=question.prompt.text,
        tokens=question.prompt.tokens,
        token_ids=question.prompt.ids,
        position=question.position,
        model=memories.source,
        layers=memories.n_layers,
        target=target,
        measure="log p" if head.adaptive else "logit",
        logit=logit,
        ablated_logit=ablated,
        top=top,
        budget=budget,
        ablation=question.ablation,
        estimated_by="relp" if linear else "gradient",
        nodes=nodes,
        ends=ends,
        edges=edges,
        edges_found=int(is_edge.sum()),
        faithfulness=None if last is None else last.faithfulness,
        completeness=None if last is None else last.completeness,
        curve=curve,
        random_sets=RANDOM_SETS,
        correlation=rank_correlation(chosen.estimates, exact_nodes),
        edge_correlation=rank_correlation(
            torch.tensor([float(estimated[one]) for one in order]),
            torch.tensor([float(measured[one]) for one in order]),
        ),
        notes=note_unknown(question.prompt.unknown)
        + ([] if linear else [NO_RELP.replace("is not defined", "cannot estimate this circuit")]),
    )


class ChosenNodes(NamedTuple):
    """The places of largest |estimate|."""

    places: list[Place]
    estimates: Float[Tensor, " node"]
    """(m − baseline) · slope"""
    coefficients: Float[Tensor, " node"]
    slopes: Float[Tensor, " node"]
    """Slopes of the target's logit."""
    of_tokens: Float[Tensor, " token"]
    """The part of the logit that comes from each token's vector."""
    slope: Float[Tensor, " hidden"]
    """Slope of the target's logit at the last layer's output."""
    linear: bool
    """Whether by linear rules; otherwise by plain gradients."""


def choose_nodes(question: CircuitQuestion, budget: int) -> ChosenNodes:
    """Return the memories at positions of largest relevance for the target's logit."""
    slope = logit_slope(question.forward, question.target)
    whole = GradientPass(question.forward)
    linear = whole.is_complete(slope)
    if not linear:
        whole = GradientPass(question.forward, linear=False)
    found = []
    for bank, slopes in whole.slopes(slope):
        own = slice(bank.memories.start, bank.memories.stop)
        m, slopes = bank.used.detach().double().cpu(), slopes.double().cpu()
        parts = (m - question.baseline[bank.layer][own].double()) * slopes
        parts[bank.positions.cpu() < question.fixed] = 0
        best = parts.abs().flatten().sort(descending=True, stable=True).indices[:budget]
        row, memory = best // max(parts.shape[1], 1), best % max(parts.shape[1], 1)
        where = torch.full_like(best, bank.layer), own.start + memory, bank.positions.cpu()[row]
        numbers = (of[row, memory] for of in (parts, m, slopes))
        found.append(torch.stack([*(one.double() for one in where), *numbers], dim=1))
    table = torch.cat(found).numpy() if found else np.zeros((0, 6))
    order = np.lexsort((table[:, 2], table[:, 1], table[:, 0], -abs(table[:, 3])))[:budget]
    table = table[order]
    table = table[abs(table[:, 3]) > NEGLIGIBLE * max(abs(table[:1, 3]), default=0)]
    places = [Place(*(int(one) for one in row)) for row in table[:, :3]]
    estimates, coefficients, slopes = torch.tensor(table[:, 3:]).unbind(dim=1)
    _, of_tokens = whole.to_output(slope)
    return ChosenNodes(places, estimates, coefficients, slopes, of_tokens, slope, linear)


def _estimate_edges(
    forward: PartialForward,
    slope: Tensor,
    linear: bool,
    places: list[Place],
    sizes: Float[Tensor, " node"],
    step: Step,
) -> Float[Tensor, "source end"]:
    """Return the edges from nodes and tokens to nodes and the target, cut at the nodes."""
    cut = GradientPass(forward, linear=linear, cut=places)
    columns = []
    for number in range(len(places) + 1):
        is_target = number == len(places)
        at_nodes, by_token = cut.to_output(slope) if is_target else cut.to_place(number)
        columns.append(torch.cat([sizes * at_nodes, by_token]))
        step(1)
    return torch.stack(columns, dim=1)


def _largest(
    size: Float[Tensor, "source end"], is_edge: Tensor, most: int
) -> list[tuple[int, int]]:
    """Return the edges of largest size that together carry `SHOWN_FLOW`, at most `most`."""
    flat = torch.where(is_edge, size, 0).flatten()
    order = flat.sort(descending=True, stable=True).indices
    carried = flat[order].cumsum(0)
    n = min(int((carried < SHOWN_FLOW * flat.sum()).sum()) + 1, int(is_edge.sum()), most)
    width = max(size.shape[1], 1)
    return [(int(one) // width, int(one) % width) for one in order[:n]]
