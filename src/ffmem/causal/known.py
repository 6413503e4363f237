"""The memories that a set of facts hangs on, as people read them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ffmem.causal.affected import shown_estimates
from ffmem.causal.facts import Facts
from ffmem.causal.source import STATIC, said
from ffmem.causal.tabled import Tabled, number
from ffmem.cells import Cell
from ffmem.indexing.memory import visible_token


class FactsRead(NamedTuple):
    """A file of prompts, and what was read of it."""

    file: str
    prompts: int
    empty_lines: int

    @classmethod
    def of(cls, facts: Facts) -> "FactsRead":
        """Return what was read."""
        return cls(str(facts.path), len(facts.facts), facts.empty)

    def __str__(self) -> str:
        ignored = f" ({self.empty_lines} empty lines ignored)" if self.empty_lines else ""
        return f"{self.prompts} prompts of {self.file}{ignored}"


class KnownFact(NamedTuple):
    """A prompt, and what the unchanged model gives its target."""

    prompt: str
    token: str
    id: int
    probability: float
    log_probability: float
    rank: int
    """1 is the model's own next token."""


class KnownMemory(NamedTuple):
    """One memory over all prompts: changes of log p(target) when it is off."""

    cell: Cell
    mean: float
    median: float
    lowers: float
    """The share of prompts whose target becomes less likely without the memory."""
    largest: float
    """The change of largest size."""
    largest_prompt: int
    """On which prompt, counted from 0 in `prompts`."""
    against: float | None
    """The mean change on the control prompts."""
    difference: float | None
    """mean − against"""
    gradient: float
    direct: float | None
    integrated: float | None
    coefficient: float = 0.0
    """The mean of m at the last token of the prompts."""
    value_top: Sequence[str] = ()
    """The tokens that the mean of m · v promotes most; none where it is all zeros."""

    @property
    def sorted_by(self) -> float:
        """What rows are sorted by: the difference where there is one, else the mean."""
        return self.mean if self.difference is None else self.difference

    def to_dict(self) -> dict[str, Any]:
        """Return what `effect --json` prints."""
        return {**self._asdict(), "cell": str(self.cell)}


@dataclass(frozen=True, repr=False)
class Knowledge(Tabled):
    """A file of prompts, and the memories that matter most for it."""

    read: FactsRead
    against: FactsRead | None
    prompts: list[KnownFact]
    candidates: int
    """How many memories were measured, each on every prompt."""
    correlation: dict[str, float | None]
    """Spearman's, of each mean estimate with the mean change, over the candidates."""
    memories: list[KnownMemory]
    notes: list[str] = field(default_factory=list)
    values: str = STATIC
    """Where values come from: static, or input."""

    @property
    def sorted_by(self) -> str:
        """What rows are sorted by, the most negative first."""
        return "mean" if self.against is None else "difference"

    def to_dict(self) -> dict[str, Any]:
        """Return what `effect --json` prints."""
        return {
            **self.read._asdict(),
            "against": None if self.against is None else self.against._asdict(),
            "facts": [fact._asdict() for fact in self.prompts],
            "ablation": "off",
            "candidates": self.candidates,
            "correlation": self.correlation,
            "sorted_by": self.sorted_by,
            "memories": [memory.to_dict() for memory in self.memories],
            **said(self.values),
            "notes": self.notes,
        }

    def above(self) -> list[str]:
        """Return what was read, and how much of it the model knows."""
        first = sum(fact.rank == 1 for fact in self.prompts)
        lines = [str(self.read), f"the target is the model's own next token in {first} of them"]
        return lines if self.against is None else [*lines, f"against {self.against}"]

    def table(self) -> list[Sequence[str]]:
        """Return the memories."""
        numbers = ["mean", "median", "largest"]
        if self.against is not None:
            numbers += ["against", "difference"]
        numbers += shown_estimates(self.memories)
        rows: list[Sequence[str]] = [["memory", *numbers, "lowers", "value promotes"]]
        for memory in self.memories:
            rows.append(
                [
                    str(memory.cell),
                    *(number(getattr(memory, name)) for name in numbers),
                    f"{memory.lowers:.0%}",
                    " ".join(map(visible_token, memory.value_top)),
                ]
            )
        return rows

    def below(self) -> list[str]:
        """Return what the numbers mean, correlations and notes."""
        names = shown_estimates(self.memories)
        closeness = ", ".join(f"{name} {number(self.correlation[name], '.2f')}" for name in names)
        return [
            "mean, median, largest: change of log p(target) with the memory off, exact; negative:"
            " it supported the target. lowers: the share of prompts in which it did.",
            f"{self.candidates} memories measured on every prompt, {len(self.memories)} shown,"
            f" the lowest {self.sorted_by} first.",
            f"rank correlation of the mean estimates with the mean change: {closeness}.",
            *self.notes,
        ]
