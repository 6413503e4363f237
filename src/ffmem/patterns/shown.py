"""Patterns of one memory as people and programs read them: in lines, and as JSON."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from ffmem.indexing.memory import Memory, visible
from ffmem.patterns.kept import Patterns
from ffmem.patterns.pattern import SCORES, TOP, Pattern

WHO = {"human": "people", "explained": "language model", "automatic": "detected"}
"""Who saw a pattern, by source, in words."""

NOTES = {
    "explained": "Described by a language model; not the paper's protocol.",
    "automatic": "Found by a program; not the paper's protocol.",
}
"""What must be said of a source."""


class Seen(NamedTuple):
    """A pattern of a memory, who saw it, and in how many triggers they looked."""

    source: str
    pattern: Pattern
    of: int
    """Triggers of its list, of the first TOP."""


def seen(memory: Memory, several: Iterable[Patterns]) -> list[Seen]:
    """Return the patterns of a memory, people's first, of each source the positive list's first."""
    sizes = {1: len(memory.triggers), -1: len(memory.negative_triggers)}
    return [
        Seen(patterns.source, one, min(TOP, sizes[one.sign]))
        for patterns in several
        for one in patterns.of(memory.cell)
    ]


def scores(one: Seen) -> str:
    """Return in words in how many triggers a pattern is seen, and how far that is from chance."""
    pattern = one.pattern
    n_shown = sum(rank <= one.of for rank in pattern.ranks)
    said = f"shown by {n_shown} of the first {one.of} triggers"
    if pattern.held:
        said += f", {len(pattern.held_ranks)} of {pattern.held} held out"
    lift = finite(pattern.lift)
    if lift is None and pattern.base == 0 and pattern.recall:
        return f"{said}; by no random prefix"
    if lift is None:
        return said
    if lift >= 1.05:
        return f"{said}; {_times(lift)} × more often than by chance"
    return f"{said}; no more often than by chance"


def to_dict(one: Seen) -> dict[str, Any]:
    """Return a pattern as `show --json` prints it; numbers that nobody measured are null."""
    fields = one.pattern._asdict()
    del fields["cell"]
    fields |= {name: finite(fields[name]) for name in SCORES}
    fields |= {name: list(fields[name]) for name in ("ranks", "held_ranks")}
    return {"source": one.source, **fields, "of": one.of}


def lines(several: list[Seen], gated: bool) -> list[str]:
    """Return what `ffmem show` prints of a memory's patterns; nothing where there are none."""
    said: list[str] = []
    for source in dict.fromkeys(one.source for one in several):
        note = f". {NOTES[source]}" if source in NOTES else ""
        said += ["", f"Patterns, source: {source}{note}"]
        for one in (one for one in several if one.source == source):
            sign = f"m {'>' if one.pattern.sign > 0 else '<'} 0, " if gated else ""
            said.append(
                f"{one.pattern.number:4d}  {visible(one.pattern.description)}"
                f" ({sign}{one.pattern.kind}): {scores(one)}"
            )
    return said


def finite(number: float | None) -> float | None:
    """Return a number that JSON has; None for those that it has not."""
    return number if number is not None and math.isfinite(number) else None


def _times(lift: float) -> str:
    return f"{lift:,.0f}" if lift >= 9.95 else f"{lift:.1f}"
