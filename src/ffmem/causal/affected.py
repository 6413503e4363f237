"""What switching memories off does to one prediction, as people read it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ffmem.causal.source import STATIC, said
from ffmem.causal.tabled import Tabled, TokenChance, listed, number, placed
from ffmem.cells import Cell
from ffmem.indexing.memory import visible_token


class Target(NamedTuple):
    """The token whose log p is watched, and what the unchanged model gives it."""

    token: str
    id: int
    probability: float
    log_probability: float
    rank: int
    """1 is the model's own next token."""


class MemoryEffect(NamedTuple):
    """One memory: the exact change of log p(target) when it is off, beside the estimates."""

    cell: Cell
    change: float
    """log p(target | m → 0) − log p(target): negative where the memory supported the target."""
    gradient: float
    direct: float | None
    integrated: float | None
    coefficient: float
    """m at the position."""
    value_top: list[str]
    """The tokens that m · v promotes most; none where v is all zeros."""

    def to_dict(self) -> dict[str, Any]:
        """Return what `effect --json` prints."""
        return {**self._asdict(), "cell": str(self.cell)}


@dataclass(frozen=True, repr=False)
class Effect(Tabled):
    """A prompt, its next token, and the memories that matter most for it."""

    prompt: str
    tokens: list[str]
    position: int
    target: Target
    top: list[TokenChance]
    """What the unchanged model predicts."""
    positions: list[int] | None
    """Where memories were switched off; None: everywhere."""
    candidates: int
    """How many memories were measured; the largest changes are shown."""
    correlation: dict[str, float | None]
    """Spearman's, of each estimate with the exact change, over the candidates."""
    sums: dict[str, float | None]
    """Of the exact change and of each estimate, over the candidates."""
    memories: list[MemoryEffect]
    notes: list[str] = field(default_factory=list)
    values: str = STATIC
    """Where values come from: static, or input."""

    def to_dict(self) -> dict[str, Any]:
        """Return what `effect --json` prints."""
        return {
            "prompt": self.prompt,
            "tokens": self.tokens,
            "position": self.position,
            "target": self.target._asdict(),
            "top": [chance._asdict() for chance in self.top],
            "ablation": "off",
            "positions": self.positions,
            "candidates": self.candidates,
            "correlation": self.correlation,
            "sum": self.sums,
            "memories": [memory.to_dict() for memory in self.memories],
            **said(self.values),
            "notes": self.notes,
        }

    def above(self) -> list[str]:
        """Return the prompt with the position at which it was read, and its target."""
        target = self.target
        return [
            placed(self.tokens, self.position),
            f"predicts  {listed(self.top)}",
            f"target    {visible_token(target.token)}, p {target.probability:.3g},"
            f" log p {target.log_probability:.3f}, rank {target.rank:,}",
        ]

    def table(self) -> list[Sequence[str]]:
        """Return the memories of largest change."""
        names = shown_estimates(self.memories)
        rows: list[Sequence[str]] = [["memory", "change", *names, "m", "value promotes"]]
        for memory in self.memories:
            rows.append(
                [
                    str(memory.cell),
                    number(memory.change),
                    *(number(getattr(memory, name)) for name in names),
                    number(memory.coefficient, "+.2f"),
                    " ".join(map(visible_token, memory.value_top)),
                ]
            )
        return rows

    def below(self) -> list[str]:
        """Return what the numbers mean, correlations, sums and notes."""
        names = shown_estimates(self.memories)
        where = "everywhere" if self.positions is None else f"at {self.positions}"
        correlations = ", ".join(
            f"{name} {number(self.correlation[name], '.2f')}" for name in names
        )
        sums = ", ".join(f"{name} {number(self.sums[name], '+.3f')}" for name in ("change", *names))
        return [
            "change: of log p(target) with the memory off"
            f" ({where}), exact; negative: it supported the target.",
            f"{self.candidates} memories measured, the {len(self.memories)} of largest |change|"
            " shown.",
            f"rank correlation with the exact change: {correlations}; sums: {sums}.",
            *self.notes,
        ]


def shown_estimates(memories: Sequence[Any]) -> list[str]:
    """Return the estimates that there are."""
    return [
        name
        for name in ("gradient", "direct", "integrated")
        if any(getattr(memory, name) is not None for memory in memories)
    ]
