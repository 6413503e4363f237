"""What a detection comes to, in numbers and for the terminal."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ffmem.patterns.pattern import KINDS


@dataclass
class Detected:
    """How many lists were examined and what was found in them."""

    shuffled: bool
    lists: int = 0
    """With at least one trigger."""
    too_short: int = 0
    """Of these, lists with too few fresh held-out triggers: nothing can be kept."""
    memories: int = 0
    lists_with_pattern: int = 0
    memories_with_pattern: int = 0
    tested: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    """Patterns by rule."""
    lists_by_kind: Counter[str] = field(default_factory=Counter)
    p_limit: float = 0.0
    """Largest p-value that false-discovery control let pass; 0: none."""
    control: dict[str, int] | None = None
    """Of shuffled lists under the same limit: lists, lists_with_pattern."""

    @property
    def share(self) -> float | None:
        """Return the share of lists with a pattern."""
        return self.lists_with_pattern / self.lists if self.lists else None

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as JSON."""
        return {
            "source": "automatic",
            "shuffled": self.shuffled,
            "lists": self.lists,
            "lists_too_short_to_test": self.too_short,
            "lists_with_pattern": self.lists_with_pattern,
            "share_of_lists": self.share,
            "memories": self.memories,
            "memories_with_pattern": self.memories_with_pattern,
            "lists_by_kind": {kind: self.lists_by_kind[kind] for kind in KINDS},
            "tested": dict(sorted(self.tested.items())),
            "kept": dict(sorted(self.kept.items())),
            "p_limit": self.p_limit,
            "shuffled_control": self.control,
        }

    def __str__(self) -> str:
        share = f"{self.share:.1%}" if self.share is not None else "none"
        kinds = ", ".join(f"{kind} in {self.lists_by_kind[kind]:,}" for kind in KINDS)
        lines = [
            f"source: automatic{', of SHUFFLED triggers (a control)' if self.shuffled else ''}",
            f"{self.lists_with_pattern:,} of {self.lists:,} lists of triggers have a pattern"
            f" ({share}): {kinds}",
            f"{self.memories_with_pattern:,} of {self.memories:,} memories have one",
            f"{self.too_short:,} lists have too few different triggers to test a pattern; they"
            " have none",
        ]
        if self.lists and self.too_short == self.lists:
            return "\n".join(
                [
                    *lines,
                    "Nothing could be tested: a list needs ten triggers of even rank, of different"
                    " sentences. Index more sentences, or with a larger -t.",
                ]
            )
        lines += [
            f"{rule:14} {self.kept[rule]:9,} kept of {tested:9,} tested"
            for rule, tested in sorted(self.tested.items())
        ]
        if self.control is not None and self.control["lists"]:
            found, n = self.control["lists_with_pattern"], self.control["lists"]
            lines.append(
                f"control: {found:,} of {n:,} lists of shuffled triggers have one ({found / n:.2%})"
            )
        return "\n".join(lines)
