"""Which memories a prediction depends on: exact ablations of those that estimates point at.

    change of a memory = log p(target | m → 0) − log p(target)        negative: it supported it

Estimates see every memory in a pass or two and choose which to measure. They are reported beside
the exact change, with their rank correlation, so that you see how far to trust them.

Over a file of prompts (knowledge neurons), estimates averaged over the prompts choose the memories,
and each is measured on every prompt. Some memories matter for any text: a file of control prompts
tells them apart, by difference = mean change here − mean change there.

Only m becomes 0: where coefficients are weights of a softmax (neural and persistent memory), the
others do not grow to sum to 1 again.
"""

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.cells import Cell
from ffmem.errors import CorpusError, FfmemError
from ffmem.interventions.edits import parse_cells, resolve_position
from ffmem.interventions.estimates import (
    Estimates,
    choose_candidates,
    estimate,
    rank_correlation,
)
from ffmem.interventions.forward import (
    Change,
    LoadedModel,
    find_target,
    note_unknown,
    promoted_tokens,
    read_prompt,
)
from ffmem.interventions.partial_forward import (
    PartialForward,
    log_probabilities,
    log_probability,
    run_copies,
    switch_off,
)
from ffmem.interventions.results import (
    INPUT_VALUES,
    NO_DIRECT,
    NO_RELP,
    EffectResult,
    FactsEffect,
    FactsResult,
    FactTarget,
    MemoryEffect,
    PromptFile,
    Target,
    TokenProbability,
)
from ffmem.models.chat import check_messages
from ffmem.models.memories import Memories
from ffmem.progress import Progress, Step

PREDICTIONS = 5
"""The model's own predictions to report."""


def effect(
    loaded: LoadedModel,
    prompt: object,
    *,
    chat: bool = False,
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

    With `chat`, the prompt is a conversation: a user's text, or messages. The target is the model's
    own next token unless one is given. `cells` are measured beside the
    candidates that estimates choose.
    """
    memories = loaded.memories
    named = _check_request(memories, cells, top, candidates, steps)
    read = read_prompt(loaded, prompt, chat)
    at = resolve_position(position, len(read.ids))
    off = None
    if positions is not None:
        off = sorted({resolve_position(one, len(read.ids)) for one in positions})
        if not off or off[0] > at:
            raise FfmemError(
                f"The memories cannot have an effect: they would be off at {off}, after position"
                f" {at},"
                " where the prompt is read. Choose earlier positions, or a later --position."
            )
    question = PromptTarget(
        read.ids[: at + 1],
        None if target is None else find_target(memories, target),
        None if off is None else tuple(one for one in off if one <= at),
        read.unknown,
    )
    found = measure(memories, [question], named, candidates, integrated * steps, progress)
    changes = found.changes[0]
    order = np.argsort(-changes.abs().numpy(), kind="stable")[:top].tolist()
    columns = {"change": changes, **found.estimates}
    return EffectResult(
        prompt=read.text,
        tokens=read.tokens,
        position=at,
        target=found.targets[0],
        top=found.predictions,
        positions=off,
        candidates=len(found.cells),
        correlation=_correlation(found),
        sum={name: None if of is None else float(of.sum()) for name, of in columns.items()},
        memories=[MemoryEffect(**row) for row in _rows(memories, found, order)],
        values="static" if memories.has_values else "input",
        answer=read.answer,
        notes=_notes(memories, found, [question]),
    )


def effect_of_facts(
    loaded: LoadedModel,
    prompts: str | Path,
    *,
    chat: bool = False,
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
    memories = loaded.memories
    named = _check_request(memories, cells, top, candidates, steps)
    file, facts = read_prompt_file(prompts, chat)
    questions = _read_questions(loaded, file, facts, chat)
    control_file, controls = None, None
    if against is not None:
        control_file, control_facts = read_prompt_file(against, chat)
        controls = _read_questions(loaded, control_file, control_facts, chat)
    found = measure(memories, questions, named, candidates, integrated * steps, progress)
    means = found.changes.mean(dim=0)
    control = difference = None
    if controls is not None:
        say = progress or Progress(quiet=True)
        control = ablate_on_all(memories, controls, found.cells, say)[0].mean(dim=0)
        difference = means - control
    key = means if difference is None else difference
    order = np.argsort(key.numpy(), kind="stable")[:top].tolist()
    rows = []
    for number, row in zip(order, _rows(memories, found, order), strict=True):
        change = found.changes[:, number].numpy()
        largest = int(np.abs(change).argmax())
        rows.append(
            FactsEffect(
                **row,
                median=float(np.median(change)),
                lowers=float((change < 0).mean()),
                largest=float(change[largest]),
                largest_prompt=largest,
                against=None if control is None else float(control[number]),
                difference=None if difference is None else float(difference[number]),
            )
        )
    targets = zip(found.targets, facts, strict=True)
    return FactsResult(
        file=file,
        against=control_file,
        facts=[FactTarget(**vars(target), prompt=fact.shown) for target, fact in targets],
        candidates=len(found.cells),
        correlation=_correlation(found),
        sorted_by="change" if control is None else "difference",
        memories=rows,
        values="static" if memories.has_values else "input",
        notes=_notes(memories, found, [*questions, *(controls or ())]),
    )


def _check_request(
    memories: Memories, cells: object, top: int, candidates: int, steps: int
) -> list[Cell]:
    """Return the memories requested by name; raise if the numbers make no sense."""
    for name, number, least in (
        ("top", top, 1),
        ("steps", steps, 1),
        ("candidates", candidates, 0),
    ):
        if number < least:
            raise FfmemError(f"{name} must be {least} or more; got {number!r}.")
    named = [memories.layout.resolve(cell) for cell in parse_cells("cells", cells)]
    if not (candidates or named):
        raise FfmemError("There is nothing to measure: pass at least one candidate or cell.")
    return named


# Files of prompts


class Fact(NamedTuple):
    """One line of a file of prompts."""

    line: int
    """Counted from 1."""
    prompt: str | list[Any]
    """A text; or messages, in a file of conversations."""
    target: str | None
    """None: the model's own next token."""

    @property
    def shown(self) -> str:
        """The prompt as text."""
        is_text = isinstance(self.prompt, str)
        return str(self.prompt) if is_text else json.dumps(self.prompt, ensure_ascii=False)


def read_prompt_file(path: str | Path, chat: bool = False) -> tuple[PromptFile, list[Fact]]:
    """Return the prompts of a file; a line that cannot be read is an error that names it.

        .jsonl   {"prompt": "…", "target": "…"}        .tsv   prompt⇥target        .txt   prompt

    With `chat`, a line of .jsonl may have `messages` instead of a prompt. Empty lines are counted.
    """
    path = Path(path)
    if path.suffix not in READERS:
        raise CorpusError(
            f"{path} is not a file of prompts. Use one whose name ends in {', '.join(READERS)}."
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
            if not isinstance(prompt, str):
                if not chat:
                    raise ValueError("it has messages, which need --chat")
                check_messages(prompt)
            elif not prompt.strip():
                raise ValueError("its prompt is empty")
        except CorpusError as error:
            raise CorpusError(f"Cannot read line {number} of {path}: {error}") from None
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"Cannot read line {number} of {path}: {error}.") from None
        facts.append(Fact(number, prompt, target))
    if not facts:
        raise CorpusError(f"{path} has no prompts. Write one prompt per line.")
    return PromptFile(str(path), len(facts), empty), facts


def _read_json(line: str) -> tuple[str | list[Any], str | None]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    prompt = row.get("prompt", row.get("messages")) if isinstance(row, dict) else None
    if not isinstance(prompt, str | list):
        raise ValueError('it is not {"prompt": text, "target": token}')
    target = row.get("target")
    if not (target is None or (isinstance(target, str) and target)):
        raise ValueError(f"its target is {target!r}, not a token")
    return prompt, target


def _read_columns(line: str) -> tuple[str, str | None]:
    columns = line.split("\t")
    if len(columns) != 2 or not columns[1]:
        raise ValueError(f"it is not a prompt, one tab and a target ({len(columns)} columns)")
    return columns[0], columns[1]


READERS: dict[str, Callable[[str], tuple[str | list[Any], str | None]]] = {
    ".jsonl": _read_json,
    ".tsv": _read_columns,
    ".txt": lambda line: (line, None),
}


def _read_questions(
    loaded: LoadedModel, file: PromptFile, facts: list[Fact], chat: bool
) -> "list[PromptTarget]":
    """Return the prompts and targets of a file; an error names its line."""
    found = []
    for fact in facts:
        try:
            target = None if fact.target is None else find_target(loaded.memories, fact.target)
            read = read_prompt(loaded, fact.prompt, chat)
            found.append(PromptTarget(read.ids, target, unknown=read.unknown))
        except FfmemError as error:
            raise CorpusError(f"Line {fact.line} of {file.path}: {error}") from None
    return found


# Measurement


class PromptTarget(NamedTuple):
    """A prompt up to the position where it is read, and the token to measure there."""

    ids: list[int]
    target: int | None
    """None: the model's own next token."""
    off: tuple[int, ...] | None = None
    """Positions at which memories are off. None: all."""
    unknown: tuple[str, ...] = ()
    """Words that the tokenizer does not know."""


class Measurement(NamedTuple):
    """The measured memories over all prompts."""

    targets: list[Target]
    predictions: list[TokenProbability]
    """What the unchanged model predicts after the last prompt."""
    cells: list[Cell]
    estimates: Estimates
    """Estimates for these memories: means over the prompts."""
    changes: Float[Tensor, "prompt cell"]
    coefficients: Float[Tensor, " cell"]
    """The mean of m at the last token."""
    outputs: Float[Tensor, "cell hidden"]
    """The mean of m · v there; of v if m is always 0."""


def measure(
    memories: Memories,
    questions: Sequence[PromptTarget],
    named: Sequence[Cell],
    candidates: int,
    steps: int = 0,
    progress: Progress | None = None,
) -> Measurement:
    """Estimate all memories, choose candidates, and ablate these and named ones on every prompt.

    Without `steps`, integrated gradients are left out.
    """
    say, layout = progress or Progress(quiet=True), memories.layout
    forward = _forwards(memories, questions)
    targets: list[Target] = []
    predictions: list[TokenProbability] = []
    sums: Estimates = {}
    n_steps = len(layout.memory_layers) if steps else 1
    with say.bar("Estimating", n_steps * len(questions), "steps") as step:
        for number, question in enumerate(questions):
            output = forward(number).output
            target, predictions = read_predictions(memories, output, question.target)
            targets.append(target)
            parts = estimate(forward(number), target.id, question.off, steps, step)
            for name, part in parts.items():
                before = sums.get(name)
                sums[name] = part if part is None or before is None else before + part
    means = {name: None if of is None else of / len(questions) for name, of in sums.items()}
    choosing = {name: of for name, of in means.items() if name != "relp"}
    cells = choose_candidates(layout, choosing, candidates, named)
    numbers = torch.tensor([layout.number(cell) for cell in cells], dtype=torch.long)
    estimates = {name: None if of is None else of[numbers] for name, of in means.items()}
    ablations = ablate_on_all(memories, questions, cells, say, forward)
    return Measurement(targets, predictions, cells, estimates, *ablations)


def ablate_on_all(
    memories: Memories,
    questions: Sequence[PromptTarget],
    cells: Sequence[Cell],
    progress: Progress,
    forward: "Callable[[int], PartialForward] | None" = None,
) -> tuple[Float[Tensor, "prompt cell"], Float[Tensor, " cell"], Float[Tensor, "cell hidden"]]:
    """Return the exact changes on every prompt, and the means of m and of m · v over prompts."""
    forward = forward or _forwards(memories, questions)
    changes, device = [], memories.device  # layers may be on several
    coefficients = torch.zeros(len(cells), device=device)
    outputs, values_only = torch.zeros(2, len(cells), memories.hidden, device=device)
    with progress.bar("Ablating", len(questions) * len(cells), "memories") as step:
        for number, question in enumerate(questions):
            run = forward(number)
            target, _ = read_predictions(memories, run.output, question.target)
            changes.append(ablate(run, target.id, cells, question.off, step))
            v = run.values_of(cells)
            m = torch.stack(
                [run.layers[c.layer].coefficients[0, c.memory].float().to(device) for c in cells]
            )
            coefficients += m / len(questions)
            outputs += m[:, None] * v / len(questions)
            values_only += v / len(questions)
    outputs = torch.where(outputs.any(dim=1, keepdim=True), outputs, values_only)
    return torch.stack(changes), coefficients.cpu(), outputs


def _forwards(
    memories: Memories, questions: Sequence[PromptTarget]
) -> Callable[[int], PartialForward]:
    """Return the passes over prompts by number: one prompt runs once, of many one is held."""

    @lru_cache(maxsize=1)
    def forward(number: int) -> PartialForward:
        ids = questions[number].ids
        return PartialForward(memories, ids, len(ids) - 1)

    return forward


@torch.no_grad()
def read_predictions(
    memories: Memories, output: Float[Tensor, "1 hidden"], target: int | None
) -> tuple[Target, list[TokenProbability]]:
    """Return the target, the most probable token by default, and what the model predicts."""
    logs = log_probabilities(memories.head, output)[0].cpu().numpy()
    order = np.argsort(-logs, kind="stable")
    shown = memories.tokenizer.token_texts(memories.vocabulary)
    id = int(order[0]) if target is None else target
    rank = 1 + int(np.flatnonzero(order == id)[0])
    top = [
        TokenProbability(shown[best], best, float(np.exp(logs[best])))
        for best in order[:PREDICTIONS].tolist()
    ]
    return Target(shown[id], id, float(np.exp(logs[id])), float(logs[id]), rank), top


def _rows(memories: Memories, found: Measurement, order: list[int]) -> list[dict[str, Any]]:
    """Return the fields of `MemoryEffect` for some of the measured memories."""
    tokens = promoted_tokens(memories, found.outputs[order], torch.ones(len(order)))
    columns = {"change": found.changes.mean(dim=0), **found.estimates}
    return [
        {
            "cell": str(found.cells[number]),
            **{name: None if of is None else float(of[number]) for name, of in columns.items()},
            "coefficient": float(found.coefficients[number]),
            "value_top": promoted,
        }
        for number, promoted in zip(order, tokens, strict=True)
    ]


def _correlation(found: Measurement) -> dict[str, float | None]:
    """Return Spearman's correlation of each mean estimate with the mean change."""
    changes = found.changes.mean(dim=0)
    return {name: rank_correlation(of, changes) for name, of in found.estimates.items()}


def _notes(memories: Memories, found: Measurement, questions: Sequence[PromptTarget]) -> list[str]:
    notes = note_unknown(word for question in questions for word in question.unknown)
    notes += [NO_DIRECT] if found.estimates["direct"] is None else []
    notes += [NO_RELP] if found.estimates["relp"] is None else []
    return notes if memories.has_values else [*notes, INPUT_VALUES]


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

    Each copy of the prompt has another memory off.
    """
    head = forward.memories.head
    clean = log_probability(head, forward.output, target).cpu()
    found = torch.zeros(len(cells), dtype=torch.float64)

    def changes(rows: list[int]) -> dict[int, Change]:
        return switch_off([cells[row] for row in rows], forward.n_tokens, positions)

    for rows, output in run_copies(forward, [cell.layer for cell in cells], changes, step):
        found[rows] = log_probability(head, output, target).cpu() - clean
    return found
