"""Which memories feed a memory: those below whose values match its keys, and those that do in fact.

By weights alone. A key reads the stream through a norm, so the norm's gain and centering are folded
into it, and it can be compared with the values of the layers below as they reach the stream:

    x · k = γ ⊙ (h − mean(h)) · k / σ + …  =  h · k̃ / σ + …,        k̃ = center(γ ⊙ k)

A memory with m · v below adds m · (v · k̃) / σ to the product, as long as nothing changes it on the
way. On a prompt, the change is exact:

    change = m of the memory with a lower one off − m        negative: the lower one fed it
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from ffmem.cells import Cell
from ffmem.errors import FfmemError, NoStaticValues
from ffmem.indexing.store import Index
from ffmem.interventions.coefficients import coefficients_along
from ffmem.interventions.edits import resolve_position
from ffmem.interventions.estimates import rank_correlation
from ffmem.interventions.forward import (
    BankRows,
    Change,
    LoadedModel,
    Place,
    Prompt,
    note_unknown,
    open_model,
    read_prompt,
)
from ffmem.interventions.partial_forward import PartialForward, run_copies, switch_off
from ffmem.interventions.relevance import GradientPass, is_pattern
from ffmem.interventions.results import PromptSource, SourcesResult, WeightSource
from ffmem.models.keys import find_input_norms
from ffmem.models.memories import Memories
from ffmem.progress import Progress
from ffmem.signatures import check_arguments

NO_NORM = (
    "No norm was folded into the keys: this layer does not read a norm of the stream directly."
)
PLAIN_GRADIENT = (
    "Candidates were chosen by plain gradients: the linear rules of relp do not reach every step"
    " here, or hold this memory's coefficient fixed."
)
NORMED_STREAM = (
    "This model's layers norm the stream itself; what these norms do to a value on its way is not"
    " folded in."
)


@check_arguments
def sources(
    model_or_index: LoadedModel | Memories | Index | str | Path,
    cell: str | tuple[int, int] | Cell,
    *,
    prompt: str | None = None,
    position: int | None = None,
    n: int = 10,
    candidates: int = 200,
    seconds: float | None = None,
    start: str | None = None,
    model: Memories | str | Path | None = None,
    adapter: str | Path | None = None,
    dtype: str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> SourcesResult:
    """Return the lower memories that feed a memory: by weights and, on a prompt, measured.

    Args:
        model_or_index: A model, or an index.
        cell: The memory.
        prompt: A text on which to measure which lower memories change its coefficient.
        position: Where to read the coefficient. Default: where it is largest.
        n: Memories to return.
        candidates: Memories to measure on the prompt, chosen by estimates.
        start: "auto", "none", "bos", "eos", or a token. Default: as the index, or "auto".
        model: The model of an index, or where it is now. Default: the one that the index names.
        adapter: Adapter to merge into the model, or where that of an index is now.
        dtype: Number format of the model. Default: as the index, or "float32".
        device: Where the model runs.
        progress: Where progress is shown. Default: nowhere.
        seconds: Stop the search by weights after this time. Default: search all layers below.
    """
    cell = Cell.of(cell)
    loaded = open_model(model_or_index, start, model, adapter, dtype, device, progress)
    memories = loaded.memories
    cell = memories.layout.resolve(cell)
    for name, number in (("n", n), ("candidates", candidates)):
        if number < 1:
            raise FfmemError(f"{name} must be 1 or more; got {number!r}.")
    if position is not None and prompt is None:
        raise FfmemError("A position needs a prompt.")
    matches = match_values(memories, cell, n, seconds)
    found = SourcesResult(
        cell=str(cell),
        by_weights=matches.found,
        layers_searched=matches.layers,
        gated=memories.gated,
        notes=matches.notes,
    )
    if prompt is None:
        return found
    on_prompt = measure_sources(
        loaded, cell, prompt, position, n, candidates, progress or Progress(quiet=True)
    )
    notes = [*found.notes, *on_prompt.pop("notes")]
    return replace(found, **on_prompt, notes=notes)


# By weights


class Matches(NamedTuple):
    """The values that match the keys of a memory best, and the layers that were searched."""

    found: list[WeightSource]
    layers: list[int]
    """All below, unless the search ran out of time."""
    notes: list[str]


@torch.no_grad()
def match_values(memories: Memories, cell: Cell, n: int, seconds: float | None = None) -> Matches:
    """Return the lower memories of largest |cosine| with one of a memory's keys.

    Layers are searched from the nearest down, one at a time, until the time is over.
    """
    if not memories.has_values:
        raise NoStaticValues("The sources of a memory are lower memories by their values.")
    norm = find_input_norms(memories, cell.layer).get(memories.banks[cell.layer].at(cell.memory))
    notes = [] if memories.rows[cell.layer].output_norm is None else [NORMED_STREAM]
    notes += [NO_NORM] if norm is None else []
    keys = [memories.keys(cell.layer)[cell.memory]]
    if memories.gated:
        keys.append(memories.up_keys(cell.layer)[cell.memory])
    folded = torch.stack(keys).float()
    folded = folded if norm is None else norm.fold_keys(folded)
    found: list[WeightSource] = []
    searched: list[int] = []
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    for layer in reversed(range(cell.layer)):
        if searched and time.monotonic() > deadline:
            break
        searched.append(layer)
        values = memories.output_directions(layer).float()
        if not len(values):
            continue
        products = (values @ folded.T.to(values.device)).cpu()
        sizes = values.norm(dim=1, keepdim=True).cpu() * folded.norm(dim=1).cpu()
        cosines = torch.where(sizes > 0, products / sizes, 0)
        best = cosines.abs().amax(dim=1).sort(descending=True, stable=True).indices[:n].tolist()
        found += [
            WeightSource(
                cell=str(memories.layout.cell(layer, memory)),
                cosine=float(cosines[memory, 0]),
                product=float(products[memory, 0]),
                up_cosine=float(cosines[memory, 1]) if memories.gated else None,
                up_product=float(products[memory, 1]) if memories.gated else None,
            )
            for memory in best
        ]
    found = [one for one in found if one.strength > 0]
    found.sort(key=lambda one: -one.strength)  # stable: the nearest layer first
    return Matches(found[:n], sorted(searched), notes)


# On a prompt


def measure_sources(
    loaded: LoadedModel,
    cell: Cell,
    prompt: str,
    position: int | None,
    n: int,
    candidates: int,
    progress: Progress,
) -> dict[str, Any]:
    """Return the fields of `SourcesResult` that come from a prompt."""
    memories, layout = loaded.memories, loaded.memories.layout
    read = read_prompt(loaded, prompt)
    at = _find_position(loaded, cell, read, position)
    forward = PartialForward(memories, read.ids, at)
    m = float(forward.layers[cell.layer].coefficients[0, cell.memory])
    estimates, notes = _estimate(forward, cell, at)
    below = estimates[: layout.starts[cell.layer]]
    chosen = below.abs().sort(descending=True, stable=True).indices[:candidates]
    cells = [layout.at(number) for number in chosen.tolist() if below[number] != 0]
    changes = _ablate(forward, cell, m, cells, progress)
    order = changes.abs().sort(descending=True, stable=True).indices[:n].tolist()
    picked = torch.tensor([float(below[layout.number(one)]) for one in cells])
    return {
        "prompt": read.text,
        "tokens": read.tokens,
        "position": at,
        "coefficient": m,
        "candidates": len(cells),
        "correlation": rank_correlation(picked, changes),
        "on_prompt": [
            PromptSource(
                cell=str(cells[number]),
                change=float(changes[number]),
                estimate=float(picked[number]),
                coefficient=float(
                    forward.layers[cells[number].layer].coefficients[0, cells[number].memory]
                ),
            )
            for number in order
        ],
        "notes": note_unknown(read.unknown) + notes,
    }


def _find_position(loaded: LoadedModel, cell: Cell, read: Prompt, position: int | None) -> int:
    """Return the position to read: the given one, or that of largest |m| after the start token."""
    if position is not None:
        return resolve_position(position, len(read.ids))
    before = 0 if loaded.start is None else 1
    (along,) = coefficients_along(loaded.memories, cell, [read.ids[before:]], loaded.start)
    return before + max(range(len(along)), key=lambda place: abs(along[place]))


def _estimate(forward: PartialForward, cell: Cell, at: int) -> tuple[Tensor, list[str]]:
    """Return −Σ m · ∂m_cell/∂m of every memory, by linear rules where they reach every step."""
    memories = forward.memories
    any_slope = functional.normalize(forward.output[0].float(), dim=0)
    linear = not is_pattern(memories, cell.layer) and GradientPass(forward).is_complete(any_slope)
    run = GradientPass(forward, linear=linear, cut=[Place(cell.layer, cell.memory, at)])
    # Without a gradient it is not routed there, and nothing feeds it.
    slopes = run.slopes_of_place(0) if run.computed[0].requires_grad else []
    return -run.sum_by_memory(slopes), [] if linear else [PLAIN_GRADIENT]


@torch.no_grad()
def _ablate(
    forward: PartialForward, cell: Cell, m: float, cells: Sequence[Cell], progress: Progress
) -> Float[Tensor, " cell"]:
    """Return the change of a memory's coefficient at the position for each lower memory off."""
    found = torch.zeros(len(cells), dtype=torch.float64)  # 0 where it is not routed
    n_tokens = forward.n_tokens

    def changes(copies: list[int]) -> dict[int, Change]:
        def read(rows: BankRows) -> Tensor:
            if cell.memory in rows.memories:
                last = (rows.tokens % n_tokens == n_tokens - 1).nonzero()[:, 0]
                own = rows.coefficients[last, cell.memory - rows.memories.start]
                found[torch.tensor(copies)[(rows.tokens[last] // n_tokens).cpu()]] = (
                    own.double().cpu()
                )
            return rows.coefficients

        off = switch_off([cells[number] for number in copies], n_tokens, None)
        return off | {cell.layer: read}

    with progress.bar("Ablating", len(cells), "memories") as step:
        layers = [one.layer for one in cells]
        for _ in run_copies(forward, layers, changes, step, cell.layer + 1):
            pass
    return found - m
