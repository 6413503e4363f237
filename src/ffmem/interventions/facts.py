"""Which memories a set of facts depends on: ablations over many prompts (knowledge neurons).

    mean change of a memory = mean over prompts of log p(target | m → 0) − log p(target)

Estimates, averaged over the prompts, choose the memories; each is then measured exactly on every
prompt. Some memories matter for any text: a file of control prompts tells them apart, by
difference = mean change here − mean change there.

    .jsonl   {"prompt": "…", "target": "…"}        .tsv   prompt⇥target        .txt   prompt

Without a target, the model's own next token is measured. Empty lines are counted; a line that
cannot be read is an error that names it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.cells import Cell
from ffmem.errors import CorpusError, FfmemError
from ffmem.indexing.memory import visible_token
from ffmem.interventions.effect import (
    Target,
    ablate,
    available_estimates,
    check_request,
    effect_notes,
    format_correlations,
    read_predictions,
    values_of_cells,
)
from ffmem.interventions.estimates import (
    NAMES,
    Estimates,
    choose_candidates,
    estimate,
    rank_correlation,
)
from ffmem.interventions.forward import PartialForward, promoted_tokens
from ffmem.interventions.prompts import LoadedModel, Prompt, find_target, read_prompt
from ffmem.interventions.results import INPUT_VALUES, TableResult, format_change
from ffmem.models.memories import Memories
from ffmem.progress import Progress
from ffmem.text import format_share

# Files of prompts


class Fact(NamedTuple):
    """One line of a file of prompts."""

    line: int
    """Counted from 1."""
    prompt: str
    target: str | None
    """None: the model's own next token."""


class FactsFile(NamedTuple):
    """The prompts of a file, in its order."""

    path: Path
    facts: list[Fact]
    empty_lines: int

    def to_dict(self) -> dict[str, Any]:
        """Return what `effect --json` says of the file."""
        return {
            "file": str(self.path),
            "prompts": len(self.facts),
            "empty_lines": self.empty_lines,
        }

    def __str__(self) -> str:
        ignored = f" ({self.empty_lines} empty lines ignored)" if self.empty_lines else ""
        return f"{len(self.facts)} prompts of {self.path}{ignored}"


def read_facts(path: str | Path) -> FactsFile:
    """Return the prompts of a .jsonl, .tsv or .txt file."""
    path = Path(path)
    if path.suffix not in READERS:
        raise CorpusError(
            f"{path} is not a file of prompts. Give one whose name ends in {', '.join(READERS)}."
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"Cannot read the prompts of {path}: {error}.") from None
    facts, empty = [], 0
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        if not line.strip():
            empty += 1
            continue
        try:
            prompt, target = READERS[path.suffix](line.removesuffix("\r"))
            if not prompt.strip():
                raise ValueError("its prompt is empty")
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"Cannot read line {number} of {path}: {error}.") from None
        facts.append(Fact(number, prompt, target))
    if not facts:
        raise CorpusError(f"{path} has no prompts. Give one prompt per line.")
    return FactsFile(path, facts, empty)


def _read_json(line: str) -> tuple[str, str | None]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise ValueError('it is not {"prompt": text, "target": token}')
    target = row.get("target")
    if not (target is None or (isinstance(target, str) and target)):
        raise ValueError(f"its target is {target!r}, not a token")
    return row["prompt"], target


def _read_columns(line: str) -> tuple[str, str | None]:
    columns = line.split("\t")
    if len(columns) != 2 or not columns[1]:
        raise ValueError(f"it is not a prompt, one tab and a target ({len(columns)} columns)")
    return columns[0], columns[1]


READERS: dict[str, Callable[[str], tuple[str, str | None]]] = {
    ".jsonl": _read_json,
    ".tsv": _read_columns,
    ".txt": lambda line: (line, None),
}


# Results


class MemoryEffectOnFacts(NamedTuple):
    """One memory over all prompts: changes of log p(target) when it is off."""

    cell: Cell
    mean: float
    median: float
    lowers: float
    """Share of prompts whose target becomes less likely without the memory."""
    largest: float
    """The change of largest size."""
    largest_prompt: int
    """The prompt on which it occurs, counted from 0."""
    against: float | None
    """The mean change on the control prompts."""
    difference: float | None
    """mean − against"""
    gradient: float
    direct: float | None
    integrated: float | None
    coefficient: float
    """The mean of m at the last token of the prompts."""
    value_top: list[str]
    """The tokens that the mean of m · v promotes most; none if it is all zeros."""

    def to_dict(self) -> dict[str, Any]:
        """Return what `effect --json` prints."""
        return {**self._asdict(), "cell": str(self.cell)}


@dataclass(frozen=True, repr=False)
class FactsResult(TableResult):
    """A file of prompts, and the memories that matter most for it."""

    file: FactsFile
    against: FactsFile | None
    targets: list[Target]
    """The target of every prompt."""
    candidates: int
    """Memories that were measured, each on every prompt."""
    correlation: dict[str, float | None]
    """Spearman's, of each mean estimate with the mean change, over the candidates."""
    memories: list[MemoryEffectOnFacts]
    notes: list[str] = field(default_factory=list)

    @property
    def sorted_by(self) -> str:
        """The column by which rows are sorted, the most negative first."""
        return "mean" if self.against is None else "difference"

    def to_dict(self) -> dict[str, Any]:
        """Return what `effect --json` prints."""
        pairs = zip(self.file.facts, self.targets, strict=True)
        return {
            **self.file.to_dict(),
            "against": None if self.against is None else self.against.to_dict(),
            "facts": [{"prompt": fact.prompt, **target._asdict()} for fact, target in pairs],
            "ablation": "off",
            "candidates": self.candidates,
            "correlation": self.correlation,
            "sorted_by": self.sorted_by,
            "memories": [memory.to_dict() for memory in self.memories],
            **({"values": "input"} if INPUT_VALUES in self.notes else {}),
            "notes": self.notes,
        }

    def above(self) -> list[str]:
        """Return what was read, and how much of it the model predicts."""
        first = sum(target.rank == 1 for target in self.targets)
        lines = [str(self.file), f"The model's own next token is the target in {first} of them."]
        return lines if self.against is None else [*lines, f"against {self.against}"]

    def table(self) -> list[Sequence[str]]:
        """Return the memories."""
        numbers = ["mean", "median", "largest"]
        if self.against is not None:
            numbers += ["against", "difference"]
        numbers += available_estimates(self.memories)
        rows: list[Sequence[str]] = [["memory", *numbers, "lowers", "value promotes"]]
        for memory in self.memories:
            rows.append(
                [
                    str(memory.cell),
                    *(format_change(getattr(memory, name)) for name in numbers),
                    format_share(memory.lowers),
                    " ".join(map(visible_token, memory.value_top)),
                ]
            )
        return rows

    def below(self) -> list[str]:
        """Return what the numbers mean, correlations and notes."""
        names = available_estimates(self.memories)
        return [
            "mean, median, largest: change of log p(target) with the memory off, exact; negative:"
            " it supported the target. lowers: the share of prompts in which it did.",
            f"{self.candidates} memories measured on every prompt, {len(self.memories)} listed,"
            f" the lowest {self.sorted_by} first.",
            "rank correlation of the mean estimates with the mean change:"
            f" {format_correlations(self.correlation, names)}.",
            *self.notes,
        ]


# Measurement


class _Question(NamedTuple):
    prompt: Prompt
    target: int | None


def effect_of_facts(
    loaded: LoadedModel,
    prompts: str | Path,
    *,
    against: str | Path | None = None,
    top: int = 20,
    candidates: int = 200,
    cells: Sequence[object] = (),
    integrated: bool = False,
    steps: int = 20,
    progress: Progress | None = None,
) -> FactsResult:
    """Return the memories that a file of prompts depends on, at the last token of each.

    `against` is a file of control prompts.
    """
    memories, layout = loaded.memories, loaded.memories.layout
    named = check_request(memories, cells, top, candidates, steps)
    file = read_facts(prompts)
    control_file = None if against is None else read_facts(against)
    questions = _read_questions(loaded, file)
    controls = None if control_file is None else _read_questions(loaded, control_file)
    say = progress or Progress(quiet=True)
    estimates, targets = _mean_estimates(memories, questions, steps if integrated else None, say)
    chosen = choose_candidates(layout, estimates, candidates, named)
    changes, coefficients, parts = _ablate_all(memories, questions, chosen, say)
    mean = changes.mean(dim=0)
    control = None if controls is None else _ablate_all(memories, controls, chosen, say)[0].mean(0)
    key = mean if control is None else mean - control
    listed = np.argsort(key.numpy(), kind="stable")[:top].tolist()
    estimated = estimates.at(layout, chosen)
    tokens = promoted_tokens(memories, parts[listed], torch.ones(len(listed)))
    rows = []
    for number, value_top in zip(listed, tokens, strict=True):
        change = changes[:, number].numpy()
        largest = int(np.abs(change).argmax())
        row: Any = {
            name: None if of is None else float(of[number]) for name, of in estimated.items()
        }
        rows.append(
            MemoryEffectOnFacts(
                chosen[number],
                float(mean[number]),
                float(np.median(change)),
                float((change < 0).mean()),
                float(change[largest]),
                largest,
                None if control is None else float(control[number]),
                None if control is None else float(key[number]),
                coefficient=float(coefficients[number]),
                value_top=value_top,
                **row,
            )
        )
    return FactsResult(
        file,
        control_file,
        targets,
        len(chosen),
        {name: rank_correlation(estimated[name], mean) for name in NAMES},
        rows,
        effect_notes(memories, estimates),
    )


def _read_questions(loaded: LoadedModel, file: FactsFile) -> list[_Question]:
    """Return the prompts and targets of a file; an error names its line."""
    found = []
    for fact in file.facts:
        try:
            target = None if fact.target is None else find_target(loaded.memories, fact.target)
            found.append(_Question(read_prompt(loaded, fact.prompt), target))
        except FfmemError as error:
            raise CorpusError(f"Line {fact.line} of {file.path}: {error}") from None
    return found


def _mean_estimates(
    memories: Memories, questions: list[_Question], steps: int | None, progress: Progress
) -> tuple[Estimates, list[Target]]:
    """Return the estimates averaged over prompts, and every prompt's target."""
    sums: list[Tensor | None] = [None] * len(NAMES)
    targets = []
    with progress.bar("Estimating", len(questions), "prompts") as step:
        for prompt, wanted in questions:
            forward = PartialForward(memories, prompt.ids, len(prompt.ids) - 1)
            target, _ = read_predictions(forward, wanted)
            targets.append(target)
            for place, part in enumerate(estimate(forward, target.id, None, steps)):
                before = sums[place]
                sums[place] = part if before is None or part is None else before + part
            step(1)
    means: Any = [None if total is None else total / len(questions) for total in sums]
    return Estimates(*means), targets


def _ablate_all(
    memories: Memories, questions: list[_Question], cells: Sequence[Cell], progress: Progress
) -> tuple[Float[Tensor, "prompt cell"], Float[Tensor, " cell"], Float[Tensor, "cell hidden"]]:
    """Return the exact changes on every prompt, and the means of m and of m · v over prompts."""
    changes = []
    m_sum, part_sum = torch.zeros(len(cells)), torch.zeros(len(cells), memories.hidden)
    with progress.bar("Ablating", len(questions) * len(cells), "memories") as step:
        for prompt, wanted in questions:
            forward = PartialForward(memories, prompt.ids, len(prompt.ids) - 1)
            target, _ = read_predictions(forward, wanted)
            changes.append(ablate(forward, target.id, cells, step=step))
            layers = forward.layers
            m = torch.tensor([float(layers[c.layer].coefficients[0, c.memory]) for c in cells])
            values = values_of_cells(memories, forward.values.of_layer, cells).float().cpu()
            m_sum += m
            part_sum += m[:, None] * values
    return torch.stack(changes), m_sum / len(questions), part_sum / len(questions)
