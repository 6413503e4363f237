"""Which memories a prediction hangs on: exact ablations of the memories that estimates point at.

    change = log p(target | m → 0) − log p(target)

Estimates see every memory in a pass or two, and choose whom to measure; they are reported beside
the exact change, with their rank correlation, so that one sees how far to trust them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.causal.ablation import ablation
from ffmem.causal.affected import Effect, MemoryEffect, Target
from ffmem.causal.candidates import candidates, named_cells, rank_correlation
from ffmem.causal.edits import place
from ffmem.causal.estimates import NAMES, NO_DIRECT, Estimates, estimates
from ffmem.causal.likelihood import log_probabilities
from ffmem.causal.parts import promoted
from ffmem.causal.prompt import Prompt, target_id
from ffmem.causal.prompt_values import source_of
from ffmem.causal.source import INPUT_VALUES
from ffmem.causal.tabled import TokenChance
from ffmem.causal.upward import Upward
from ffmem.cells import Cell, Layout
from ffmem.errors import FfmemError
from ffmem.models.memories import Memories
from ffmem.progress import Progress

PREDICTED = 5
"""How many of the model's own predictions are reported."""


class Choice(NamedTuple):
    """Which memories are measured, and how many are reported."""

    top: int = 20
    candidates: int = 200
    cells: object = ()
    integrated: bool = False
    steps: int = 20

    def checked(self) -> "Choice":
        """Return the choice itself, if its numbers can be asked for."""
        for name, least in (("top", 1), ("steps", 1), ("candidates", 0)):
            number = getattr(self, name)
            if not isinstance(number, int) or number < least:
                raise FfmemError(f"{name} {number!r} was asked for. Give {least} or more.")
        return self

    @property
    def integration(self) -> int | None:
        """How many steps integrated gradients take; None: they are not asked for."""
        return self.steps if self.integrated else None


class Asked(NamedTuple):
    """A prompt run once, and the token that is watched."""

    upward: Upward
    target: Target
    top: list[TokenChance]


def effect(
    memories: Memories,
    prompt: Prompt,
    *,
    target: str | None = None,
    position: int = -1,
    positions: Sequence[int] | None = None,
    progress: Progress | None = None,
    **choice: Any,
) -> Effect:
    """Return the exact change of log p when memories are off, one at a time.

    The target is the model's own next token unless one is given; memories are off everywhere
    unless positions are named. `choice`: top, candidates, cells, integrated, steps.
    """
    choose = Choice(**choice).checked()
    named = named_cells(memories, choose.cells, choose.candidates)
    at = place(position, len(prompt.ids))
    off = None if positions is None else sorted({place(p, len(prompt.ids)) for p in positions})
    reached = None if off is None else [p for p in off if p <= at]  # no later one reaches it
    if reached is not None and not reached:
        raise FfmemError(
            f"Memories are to be off at {off}, which is behind position {at}, where the prompt is"
            " read: nothing can change there."
        )
    asked = ask(memories, prompt, target, at)
    say = progress or Progress(quiet=True)
    steps = choose.integration
    with say.bar(
        "Integrating", len(memories.layout.memory_layers) if steps else 0, "layers"
    ) as step:
        estimated = estimates(asked.upward, asked.target.id, reached, steps, step)
    cells = candidates(memories.layout, estimated, choose.candidates, named)
    with say.bar("Ablating", len(cells), "memories") as step:
        changes = ablation(asked.upward, asked.target.id, cells, reached, step)
    by_name = {"change": changes, **at_cells(memories.layout, estimated, cells)}
    return Effect(
        prompt.text,
        prompt.tokens,
        at,
        asked.target,
        asked.top,
        off,
        len(cells),
        {name: _correlation(by_name[name], changes) for name in NAMES},
        {name: None if of is None else float(of.sum()) for name, of in by_name.items()},
        _largest(asked.upward, cells, by_name, choose.top),
        notes(memories, estimated),
        source_of(memories),
    )


def notes(memories: Memories, estimated: Estimates) -> list[str]:
    """Return what a reader of effects should know."""
    found = [NO_DIRECT] if estimated.direct is None else []
    return found if memories.has_values else [*found, INPUT_VALUES]


def _largest(
    upward: Upward, cells: Sequence[Cell], by_name: dict[str, Tensor | None], top: int
) -> list[MemoryEffect]:
    """Return the memories of largest |change|, ties in the order of the candidates."""
    changes = by_name["change"]
    assert changes is not None, "it was measured"
    order = np.argsort(-changes.abs().numpy(), kind="stable")[:top].tolist()
    shown = [cells[number] for number in order]
    coefficients = [float(upward.layers[cell.layer].coefficients[0, cell.memory]) for cell in shown]
    tops = value_tops(upward.memories, upward.values.of, shown, coefficients)
    found = []
    for number, coefficient, tokens in zip(order, coefficients, tops, strict=True):
        said = {name: None if of is None else float(of[number]) for name, of in by_name.items()}
        found.append(
            MemoryEffect(cells[number], coefficient=coefficient, value_top=tokens, **said)  # type: ignore[arg-type]
        )
    return found


def ask(memories: Memories, prompt: Prompt, target: str | None, at: int) -> Asked:
    """Run a prompt, and return it with its target: the given token, or the model's own next."""
    wanted = None if target is None else target_id(memories, target)
    if wanted is not None and wanted >= memories.vocabulary:
        raise FfmemError(
            f"The target {target!r} is token {wanted}; the model knows {memories.vocabulary}."
        )
    upward = Upward(memories, prompt.ids, at)
    with torch.no_grad():
        numbers = log_probabilities(memories.head, upward.output)[0].cpu().numpy()
    order = np.argsort(-numbers, kind="stable")
    shown = memories.tokenizer.token_texts(memories.vocabulary)
    id = int(order[0]) if wanted is None else wanted
    rank = 1 + int(np.flatnonzero(order == id)[0])
    log_p = float(numbers[id])
    return Asked(
        upward,
        Target(shown[id], id, float(np.exp(log_p)), log_p, rank),
        [
            TokenChance(shown[best], best, float(np.exp(numbers[best])))
            for best in order[:PREDICTED].tolist()
        ],
    )


def at_cells(
    layout: Layout, estimated: Estimates, cells: Sequence[Cell]
) -> dict[str, Float[Tensor, " cell"] | None]:
    """Return what each estimate says of some memories."""
    numbers = torch.tensor([layout.number(cell) for cell in cells], dtype=torch.long)
    return {
        name: None if estimate is None else estimate[numbers]
        for name, estimate in estimated._asdict().items()
    }


@torch.no_grad()
def value_tops(
    memories: Memories,
    values_of_layer: Callable[[int], Tensor],
    cells: Sequence[Cell],
    coefficients: Sequence[float],
) -> list[list[str]]:
    """Return the tokens that each m · v promotes most; one that rests is read as v."""
    shown = memories.tokenizer.token_texts(memories.vocabulary)
    layers = {layer: values_of_layer(layer) for layer in {cell.layer for cell in cells}}
    if not cells:
        return []
    device = memories.device  # layers may lie on several
    values = torch.stack([layers[cell.layer][cell.memory].to(device) for cell in cells])
    return promoted(memories, values, torch.tensor(coefficients), shown)


def _correlation(estimate: Tensor | None, changes: Tensor) -> float | None:
    if estimate is None:
        return None
    return rank_correlation(estimate.tolist(), changes.tolist())
