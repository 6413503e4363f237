"""Idle memories: which one a fact may overwrite.

    contribution = mean of |m| · ‖v‖ over the sampled prefixes of the index

A memory is idle if it contributes at most half of what the median memory of its bank does, and is
active no more often than the median.
"""

from typing import NamedTuple

import numpy as np

from ffmem.cells import Cell
from ffmem.errors import FfmemError, ModelError, NoStaticValues
from ffmem.indexing.store import Index
from ffmem.interventions.forward import LoadedModel
from ffmem.interventions.partial_forward import PartialForward
from ffmem.interventions.written import Activity
from ffmem.models.banks import Bank
from ffmem.models.memories import Memories

IDLE = 0.5
"""An idle memory contributes at most this share of what the median one of its bank does."""
N_LAYERS = 4
"""Layers to try by default."""


class WritePlace(NamedTuple):
    """A memory that may be overwritten."""

    cell: Cell
    bank: Bank
    activity: Activity | None
    """None without an index."""


def choose_places(
    loaded: LoadedModel, run: PartialForward, cell: object, layer: int | None, force: bool
) -> list[WritePlace]:
    """Return the memories to try: the given one, or the idlest of a layer or of some layers."""
    memories, layout = loaded.memories, loaded.memories.layout
    if not memories.has_values:
        raise NoStaticValues("No fact can be written into this model.")
    if cell is not None:
        own = layout.resolve(cell)
        if layer not in (None, own.layer):
            raise FfmemError(f"{own} is not in layer {layer}. Pass either a cell or a layer.")
        return [_given_place(loaded, run, own, force)]
    if loaded.index is None:
        raise FfmemError(
            "Only an index knows which memories are idle: build one with `ffmem index` and pass"
            " its folder instead of the model; or choose a memory with --cell and --force."
        )
    if layer is not None:
        layout.check_layer(layer)
        if layer not in layout.memory_layers:
            listed = ", ".join(map(str, layout.memory_layers))
            raise FfmemError(f"Layer {layer} has no memories. Layers with some: {listed}.")
    layers = _layers_to_try(layout.memory_layers) if layer is None else [layer]
    found = []
    for one in layers:
        bank = _reached_bank(memories, run, one)
        idle = idle_memories(loaded.index, memories, bank)
        if idle:
            number, activity = idle[0]
            found.append(WritePlace(layout.cell(one, number), bank, activity))
    if not found:
        raise FfmemError(
            f"No memory of layer {', '.join(map(str, layers))} is idle: none contributes less than"
            f" {IDLE:g} × the median. Choose another layer, or a memory with --cell and --force."
        )
    return found


def _layers_to_try(layers: list[int]) -> list[int]:
    """Return some layers, evenly spaced over the second half."""
    half = layers[len(layers) // 2 :]
    places = np.linspace(0, len(half) - 1, min(N_LAYERS, len(half)))
    return [half[round(place)] for place in places.tolist()]


def _given_place(loaded: LoadedModel, run: PartialForward, cell: Cell, force: bool) -> WritePlace:
    """Return the memory that the user chose; raise if it is not idle, unless forced."""
    memories, index = loaded.memories, loaded.index
    bank = memories.banks[cell.layer].at(cell.memory)
    _check_bank(memories, run, bank)
    if index is None:
        if not force:
            raise FfmemError(
                f"Only an index knows whether {cell} is idle. Pass the folder of an index instead"
                " of"
                " the model, or --force to overwrite it anyway."
            )
        return WritePlace(cell, bank, None)
    activity = activities(index, memories, bank)[cell.memory - bank.offset]
    if not (activity.is_idle or force):
        idle = idle_memories(index, memories, bank)[:3]
        named = ", ".join(str(memories.layout.cell(cell.layer, number)) for number, _ in idle)
        raise FfmemError(
            f"{cell} is not idle: {activity}. What it does would be lost. Choose an idle one"
            f" ({named or 'layer ' + str(cell.layer) + ' has none'}), or overwrite it with --force."
        )
    return WritePlace(cell, bank, activity)


def _reached_bank(memories: Memories, run: PartialForward, layer: int) -> Bank:
    """Return the bank to write into: one that all tokens reach, else the expert of most weight."""
    banks = memories.banks[layer]
    bank: Bank = banks.dense[0] if banks.dense else banks.routed[0]
    if not banks.dense:
        weights = run.layers[layer].weights
        assert weights is not None
        bank = banks.banks[int(weights[0].argmax())]
    _check_bank(memories, run, bank)
    return bank


def _check_bank(memories: Memories, run: PartialForward, bank: Bank) -> None:
    """Raise if nothing can be written into a bank, or the prompt does not reach it."""
    if memories.rows[bank.layer].softmax_groups is not None:
        raise ModelError(
            "The coefficients of this model are softmax weights: a new key would take weight from"
            " all others. Facts can only be written into feed-forward memories."
        )
    if not router_weight(memories, run, bank):
        name = memories.layout.cell(bank.layer, bank.offset).bank
        raise FfmemError(
            f"The prompt's last token does not reach expert L{bank.layer}{name}. Choose a memory of"
            " an expert that it is routed to; `ffmem trace` lists them."
        )


def router_weight(memories: Memories, run: PartialForward, bank: Bank) -> float:
    """Return w of a bank at the prompt's last token; 1 in layers without experts."""
    weights = run.layers[bank.layer].weights
    if weights is None:
        return 1.0
    return float(weights[0, memories.banks[bank.layer].banks.index(bank)])


def activities(index: Index, memories: Memories, bank: Bank) -> list[Activity]:
    """Return what each memory of a bank did on the corpus of an index."""
    own = bank.memories
    sample = np.abs(index.columns("samples", bank.layer, ["coefficient"])["coefficient"][own])
    values = memories.to_directions(bank.layer)(bank.value_rows().float())
    contribution = sample.astype(np.float64).mean(axis=1) * values.norm(dim=1).cpu().numpy()
    share = index.columns("stats", bank.layer, ["active"])["active"][own] / index.n_prefixes
    typical, usual = float(np.median(contribution)), float(np.median(share))
    relative = contribution / max(typical, np.finfo(np.float64).tiny)
    idle = (relative <= IDLE) & (share <= usual)
    columns = (share, contribution, relative, idle)
    return [Activity(*row) for row in zip(*(one.tolist() for one in columns), strict=True)]


def idle_memories(index: Index, memories: Memories, bank: Bank) -> list[tuple[int, Activity]]:
    """Return the idle memories of a bank by their number in the layer, the idlest first."""
    found = [
        (bank.offset + number, activity)
        for number, activity in enumerate(activities(index, memories, bank))
        if activity.is_idle
    ]
    return sorted(found, key=lambda one: (one[1].contribution, one[0]))
