"""Which memories a set of facts hangs on: ablations over many prompts (knowledge neurons).

    mean change of a memory = mean over prompts of log p(target | m → 0) − log p(target)

Estimates, averaged over the prompts, choose the memories; each is then measured exactly on every
prompt. A memory that matters for any text at all is told from one that matters for these facts by
a second set of prompts: difference = mean change here − mean change there.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.causal.ablation import ablation
from ffmem.causal.affected import Target
from ffmem.causal.candidates import candidates, named_cells, rank_correlation
from ffmem.causal.effect import Choice, ask, at_cells, notes, value_tops
from ffmem.causal.estimates import NAMES, Estimates, estimates
from ffmem.causal.facts import Facts, read_facts
from ffmem.causal.known import FactsRead, Knowledge, KnownFact, KnownMemory
from ffmem.causal.parts import promoted
from ffmem.causal.prompt import Prompt, read_prompt, target_id
from ffmem.causal.prompt_values import source_of
from ffmem.cells import Cell
from ffmem.errors import CorpusError, FfmemError
from ffmem.models.memories import Memories
from ffmem.progress import Progress


class _Question(NamedTuple):
    prompt: Prompt
    target: str | None


def effect_of_facts(
    memories: Memories,
    prompts: str | Path,
    start: int | None,
    *,
    against: str | Path | None = None,
    progress: Progress | None = None,
    **choice: Any,
) -> Knowledge:
    """Return the memories that a file of prompts hangs on, at the last token of each.

    `against` is a file of control prompts. `choice`: top, candidates, cells, integrated, steps.
    """
    choose = Choice(**choice).checked()
    named = named_cells(memories, choose.cells, choose.candidates)
    read = {path: read_facts(path) for path in (prompts, against) if path is not None}
    asked = {path: _questions(memories, facts, start) for path, facts in read.items()}
    measure = _Measure(memories, progress or Progress(quiet=True))
    averaged, mean, targets = measure.estimates(asked[prompts], choose.integration)
    layout = memories.layout
    cells = candidates(layout, averaged, choose.candidates, named)
    changes = measure.changes(asked[prompts], cells)
    control = None if against is None else measure.changes(asked[against], cells).mean(dim=0)
    rows = _rows(cells, changes, control, at_cells(layout, averaged, cells))
    by_mean = np.argsort([row.sorted_by for row in rows], kind="stable")[: choose.top].tolist()
    shown = [rows[number] for number in by_mean]
    coefficients = [float(mean[layout.number(row.cell)]) for row in shown]
    tops = measure.tops(asked[prompts], [row.cell for row in shown], coefficients)
    overall = changes.mean(dim=0).tolist()
    return Knowledge(
        FactsRead.of(read[prompts]),
        None if against is None else FactsRead.of(read[against]),
        [
            KnownFact(question.prompt.text, *target)
            for question, target in zip(asked[prompts], targets, strict=True)
        ],
        len(cells),
        {
            name: None if of is None else rank_correlation(of.tolist(), overall)
            for name, of in at_cells(layout, averaged, cells).items()
        },
        [
            row._replace(coefficient=m, value_top=tokens)
            for row, m, tokens in zip(shown, coefficients, tops, strict=True)
        ],
        notes(memories, averaged),
        source_of(memories),
    )


class _Measure:
    """Runs prompts, one after the other, so that no more than one is held."""

    def __init__(self, memories: Memories, progress: Progress) -> None:
        self.memories = memories
        self.progress = progress

    def estimates(
        self, questions: list[_Question], steps: int | None
    ) -> tuple[Estimates, Float[Tensor, " memory"], list[Target]]:
        """Return estimates and coefficients averaged over prompts, and every prompt's target."""
        sums: dict[str, Tensor | None] = {}
        targets = []
        with self.progress.bar("Estimating", len(questions), "prompts") as step:
            for prompt, target in questions:
                asked = ask(self.memories, prompt, target, len(prompt.ids) - 1)
                found = estimates(asked.upward, asked.target.id, None, steps)._asdict()
                m = [layer.coefficients[0].double().cpu() for layer in asked.upward.layers]
                for name, part in {**found, "coefficient": torch.cat(m)}.items():
                    before = sums.get(name)
                    sums[name] = part if before is None else before + part
                targets.append(asked.target)
                step(1)
        means = {
            name: None if total is None else total / len(questions) for name, total in sums.items()
        }
        coefficients = means.pop("coefficient")
        assert coefficients is not None, "there is a prompt"
        return Estimates(**means), coefficients, targets  # type: ignore[arg-type]

    def changes(
        self, questions: list[_Question], cells: Sequence[Cell]
    ) -> Float[Tensor, "prompt cell"]:
        """Return the exact change of log p of every prompt's target for every memory."""
        found = []
        total = len(questions) * len(cells)
        with self.progress.bar("Ablating", total, "memories") as step:
            for prompt, target in questions:
                asked = ask(self.memories, prompt, target, len(prompt.ids) - 1)
                found.append(ablation(asked.upward, asked.target.id, cells, step=step))
        return torch.stack(found)

    @torch.no_grad()
    def tops(
        self, questions: list[_Question], cells: Sequence[Cell], coefficients: Sequence[float]
    ) -> list[list[str]]:
        """Return the tokens that m · v, averaged over the prompts, promotes most."""
        memories = self.memories
        if memories.has_values:  # the mean of m · v is v times the mean of m
            return value_tops(memories, memories.output_directions, cells, coefficients)
        total = torch.zeros(len(cells), memories.hidden, device=memories.device)
        for prompt, target in questions:
            upward = ask(memories, prompt, target, len(prompt.ids) - 1).upward
            for row, cell in enumerate(cells):
                m = upward.layers[cell.layer].coefficients[0, cell.memory]
                total[row] += m * upward.values.of(cell.layer)[cell.memory]
        shown = memories.tokenizer.token_texts(memories.vocabulary)
        return promoted(memories, total / len(questions), torch.ones(len(cells)), shown)


def _questions(memories: Memories, facts: Facts, start: int | None) -> list[_Question]:
    """Return the prompts of a file as the model reads them; an error names its line."""
    found = []
    for fact in facts.facts:
        try:
            found.append(_Question(read_prompt(memories, fact.prompt, start), fact.target))
            if fact.target is not None:
                target_id(memories, fact.target)
        except FfmemError as error:
            raise CorpusError(f"Line {fact.line} of {facts.path}: {error}") from None
    return found


def _rows(
    cells: Sequence[Cell],
    changes: Float[Tensor, "prompt cell"],
    control: Float[Tensor, " cell"] | None,
    estimated: dict[str, Tensor | None],
) -> list[KnownMemory]:
    """Return what the prompts say of every memory."""
    rows = []
    for number, cell in enumerate(cells):
        change = changes[:, number].numpy()
        mean, farthest = float(change.mean()), int(np.abs(change).argmax())
        there = None if control is None else float(control[number])
        said = (estimated[name] for name in NAMES)
        rows.append(
            KnownMemory(
                cell,
                mean,
                float(np.median(change)),
                float((change < 0).mean()),
                float(change[farthest]),
                farthest,
                there,
                None if there is None else mean - there,
                *(None if of is None else float(of[number]) for of in said),  # type: ignore[arg-type]
            )
        )
    return rows
