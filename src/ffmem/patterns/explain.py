"""A language model as annotator: the paper's protocol, asked of a machine, and tested blind.

It sees the first 25 triggers of a memory's main list, numbered, and names patterns. Then, for each
pattern, it is asked which texts of a mixed list show it: the triggers of ranks 26 to 50 and as many
random prefixes, in a drawn order that it is not told (blind_test.py has the scores).

    patterns(memory) = answers(questions(its main list));    the same answers, the same patterns

Everything that it names is kept with these scores, as source `explained`: a reader judges.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ffmem.cells import Cell
from ffmem.errors import FfmemError
from ffmem.indexing.memory import Trigger
from ffmem.indexing.store import Index
from ffmem.indexing.tables import read_columns
from ffmem.patterns.answers import Answers
from ffmem.patterns.blind_test import scored, with_q_values
from ffmem.patterns.endpoint import Endpoint, NoAnswer, Unreachable
from ffmem.patterns.kept import Patterns, Writing, fingerprint, folder, is_stale
from ffmem.patterns.main_list import NO_SIGN, main_sign
from ffmem.patterns.named import read_numbers, read_patterns
from ffmem.patterns.pattern import LEAST, TOP, Examined, Pattern
from ffmem.patterns.prompts import Question, describe, prompts
from ffmem.patterns.prompts import score as scoring
from ffmem.progress import Progress

SOURCE = "explained"

PATIENCE = 3
"""Memories in a row for which the endpoint does not answer at all, before a run is given up."""

Answer = TypeVar("Answer")


class Explained(NamedTuple):
    """What a run came to."""

    patterns: int
    memories: int
    """That the model gave a usable answer for."""
    failed: dict[str, str]
    """Memories without one, and why."""
    unscored: int
    """Patterns without a usable answer to the blind test."""
    below_least: int
    """Patterns that it saw in fewer than three triggers, which are none."""

    def __str__(self) -> str:
        lines = [
            f"source: explained\n{self.patterns:,} patterns of {self.memories:,}"
            f" {'memory' if self.memories == 1 else 'memories'};"
            f" {self.below_least:,} more were seen in fewer than {LEAST} triggers and are none",
        ]
        if self.unscored:
            lines.append(f"{self.unscored:,} have no usable answer to the blind test")
        lines += [f"{cell}: no usable answer. {why}" for cell, why in self.failed.items()]
        return "\n".join(lines)


def explain(
    index: Index,
    endpoint: Endpoint,
    cells: Iterable[str | tuple[int, int]] = (),
    per_layer: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Explained:
    """Ask a language model for the patterns of some memories, or of some drawn from each layer."""
    said = progress or Progress(quiet=True)
    chosen = _chosen(index, cells, per_layer, seed)
    run = {
        **endpoint.settings,
        "prompts": prompts()["hash"],
        "index": fingerprint(index),
        "mixed_by": seed,
    }
    answers = Answers(folder(index, SOURCE).with_name(".explained.jsonl"), run)
    if answers.left:
        said.say(f"Earlier answers are not used: {answers.left}. Starting anew.")
    elif len(answers):
        said.say(f"{len(answers):,} answers of an earlier run are used.")
    asking = _Asking(index, endpoint, answers, seed)
    with said.bar("Explaining", len(chosen), "memories") as step:
        for cell in chosen:
            asking.memory(cell)
            step(1)
    for name, why in asking.failed.items():
        said.say(f"{name}: {why}")
    asking.keep(run)
    return asking.result()


class _Asking:
    """A run: questions, answers, and what was counted."""

    def __init__(self, index: Index, endpoint: Endpoint, answers: Answers, seed: int) -> None:
        self._index = index
        self._endpoint = endpoint
        self._answers = answers
        self._seed = seed
        drawn = read_columns(index.folder / "samples/prefixes.parquet", ["prefix"])
        self._sample: list[int] = drawn["prefix"].tolist()
        self.patterns: list[Pattern] = []
        self.examined: list[Examined] = []
        self.failed: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._silent = 0
        self._signs = cache(lambda layer: main_sign(index, layer))

    def memory(self, cell: Cell) -> None:
        """Ask for the patterns of one memory, and how far each of them holds."""
        memory = self._index[cell]
        sign = int(self._signs(cell.layer)[cell.memory])
        if sign == NO_SIGN:
            self.failed[str(cell)] = "nothing triggers it, so there is nothing to explain."
            return
        triggers = memory.triggers if sign > 0 else memory.negative_triggers
        first, held = triggers[:TOP], triggers[TOP : 2 * TOP]
        try:
            named = self._ask(describe(first), lambda answer: read_patterns(answer, len(first)))
        except NoAnswer as error:
            self.failed[str(cell)] = str(error)
            self._silent = self._silent + 1 if isinstance(error, Unreachable) else 0
            if self._silent == PATIENCE:
                raise FfmemError(
                    f"{self._endpoint.host} did not answer for {PATIENCE} memories in a row."
                    f" {error} What it answered before is kept: the same command goes on."
                ) from None
            return
        self._silent = 0
        self.examined.append(Examined(cell, sign, len(first)))
        kept = [one for one in named if len(one.ranks) >= LEAST]
        self._counts["below_least"] += len(named) - len(kept)
        for number, one in enumerate(kept, start=1):
            pattern = Pattern(cell, sign, number, one.kind, one.description, SOURCE, "", one.ranks)
            self.patterns.append(self._scored(pattern, triggers, held))

    def _scored(
        self, pattern: Pattern, triggers: Sequence[Trigger], held: Sequence[Trigger]
    ) -> Pattern:
        """Return a pattern with the outcome of its blind test, if there was one."""
        order = random.Random(f"{self._seed} {pattern.cell} {pattern.number}")
        others = self._random(triggers, len(held), order)
        if not held or not others:
            self._counts["untestable"] += 1
            return pattern
        mixed = [*((one, True) for one in held), *((one, False) for one in others)]
        order.shuffle(mixed)
        question = scoring(pattern.description, [one for one, _ in mixed])
        try:
            shows = self._ask(question, lambda answer: read_numbers(answer, "shows", len(mixed)))
        except NoAnswer:
            self._counts["unscored"] += 1
            return pattern
        found = [mixed[number - 1] for number in shows]
        ranks = tuple(sorted(one.rank for one, is_held in found if is_held))
        return scored(pattern, ranks, len(held), len(found) - len(ranks), len(others))

    def _random(self, triggers: Sequence[Trigger], n: int, order: random.Random) -> list[Trigger]:
        """Return some prefixes of the sample, none of a sentence that triggers the memory."""
        owners = self._index.sentences.at(self._sample)
        taken = {one.sentence for one in triggers}
        free = [prefix for prefix in self._sample if owners[prefix].sentence not in taken]
        found = []
        for prefix in order.sample(free, min(n, len(free))):
            sentence = owners[prefix]
            length = prefix - sentence.offset
            text, rest, last, following = self._index.prefix_text(sentence, length)
            found.append(
                Trigger(0, 0.0, sentence.sentence, length, text, last, following, rest, None)
            )
        return found

    def _ask(self, question: Question, read: Callable[[Any], Answer]) -> Answer:
        """Return the answer to a question: the kept one, or the model's, which is then kept."""
        if question.key in self._answers:
            return read(self._answers[question.key])

        def reading(answer: Any) -> Answer:
            valid = read(answer)
            self._answers.keep(question.key, answer)
            return valid

        return self._endpoint.ask(question, reading)

    def keep(self, run: dict[str, Any]) -> None:
        """Write the patterns, beside those of other memories that the same model named."""
        patterns, examined = self._with_earlier(run)
        writing = Writing(self._index, SOURCE)
        for layer in sorted({one.cell.layer for one in examined}):
            writing.layer(
                layer,
                [one for one in examined if one.cell.layer == layer],
                [one for one in with_q_values(patterns) if one.cell.layer == layer],
            )
        outcome = {**self._counts, "failed": self.failed}
        writing.commit({"run": run, "prompts": prompts(), "outcome": outcome})

    def _with_earlier(self, run: dict[str, Any]) -> tuple[list[Pattern], list[Examined]]:
        patterns, examined = self.patterns, self.examined
        manifest = folder(self._index, SOURCE) / "manifest.json"
        if not manifest.exists() or is_stale(self._index, SOURCE):
            return patterns, examined
        before = Patterns(self._index, SOURCE)
        if before.settings.get("run") != run:
            return patterns, examined
        new = {one.cell for one in examined}
        for layer in range(self._index.n_layers):
            examined = examined + [one for one in before.lists(layer) if one.cell not in new]
            for several in before.layer(layer).values():
                patterns = patterns + [one for one in several if one.cell not in new]
        return patterns, examined

    def result(self) -> Explained:
        """Return what the run came to."""
        return Explained(
            len(self.patterns),
            len(self.examined),
            self.failed,
            self._counts["unscored"],
            self._counts["below_least"],
        )


def _chosen(
    index: Index,
    cells: Iterable[str | tuple[int, int]],
    per_layer: int | None,
    seed: int,
) -> list[Cell]:
    """Return the memories to explain: those that are named, or some of each layer."""
    named = [index.layout.resolve(cell) for cell in cells]
    if bool(named) == (per_layer is not None):
        raise FfmemError(
            "Say which memories a language model should explain: name some (L5N1234 …), or give a"
            " number to draw from each layer (--per-layer 10)."
        )
    if per_layer is not None and per_layer < 1:
        raise FfmemError(f"--per-layer counts memories, from 1; {per_layer} was given.")
    for layer in range(index.n_layers) if per_layer is not None else ():
        able = np.flatnonzero(main_sign(index, layer) != NO_SIGN).tolist()
        drawn = random.Random(f"{seed} {layer}").sample(able, min(per_layer or 0, len(able)))
        named += [index.layout.cell(layer, memory) for memory in sorted(drawn)]
    return list(dict.fromkeys(named))
