"""One memory as its page shows it: triggers with their last token marked, those alike folded.

Two prefixes are alike that end in the same five words, whatever figures stand in them: what an
encyclopedia says of every county would otherwise fill the whole list.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from ffmem.indexing.memory import Memory, Trigger, visible
from ffmem.indexing.sentences import StoredSentence

WORDS = 5
"""Words at the end of a prefix that tell whether two are alike."""

BEFORE, AFTER = 220, 70
"""Characters shown of a sentence before and after the place."""

BINS = 40
"""Bars of the picture of a memory's coefficients."""


class Piece(NamedTuple):
    """A part of a prefix, with the shade of its coefficient."""

    text: str
    shade: str
    title: str


class Shown(NamedTuple):
    """One trigger as it is shown."""

    trigger: Trigger
    before: str
    last: str
    rest: str
    width: str
    """|m| against the list's largest, in per cent."""
    percentile: str
    """Per cent of sampled prefixes on which the memory is not stronger in this direction."""
    pieces: list[Piece] | None = None
    """The prefix token by token, where the model was asked."""


class Fold(NamedTuple):
    """A trigger, and those further down the list that are like it."""

    shown: Shown
    alike: list[Shown]


class Side(NamedTuple):
    """The triggers of one sign."""

    sign: int
    folds: list[Fold]
    n: int
    followed: int
    """How many are followed by the token that sign(m) · v promotes most."""
    with_next: int
    """Of how many; 0 where there is no static value to compare with."""


def side(
    memory: Memory, sign: int, sample: ndarray, pieces: dict[int, list[Piece]] | None = None
) -> Side:
    """Return a memory's triggers of one sign; `pieces` by rank, where the model was asked."""
    triggers = memory.triggers if sign > 0 else memory.negative_triggers
    end = memory.value.top if sign > 0 else memory.value.bottom
    largest = max((abs(trigger.coefficient) for trigger in triggers), default=1.0) or 1.0
    strengths = np.asarray([sign * trigger.coefficient for trigger in triggers], np.float32)
    weaker = np.searchsorted(np.sort(sign * sample), strengths, side="right").tolist()
    shown = [
        _shown(trigger, largest, below / len(sample) if len(sample) else None, pieces or {})
        for trigger, below in zip(triggers, weaker, strict=True)
    ]
    following = [trigger.next_token for trigger in triggers if trigger.next_token is not None]
    best = end[0].token if end else None
    return Side(
        sign,
        folded(shown),
        len(triggers),
        sum(token == best for token in following),
        len(following) if best is not None else 0,
    )


def folded(shown: Sequence[Shown]) -> list[Fold]:
    """Return triggers in their order, each with all later ones that are like it."""
    folds: dict[object, Fold] = {}
    for one in shown:
        key = ending(one.trigger.prefix)
        if key in folds:
            folds[key].alike.append(one)
        else:
            folds[key] = Fold(one, [])
    return list(folds.values())


def ending(prefix: str) -> tuple[str, ...]:
    """Return what two prefixes must share to be alike: their last words, any figures."""
    words = prefix.rsplit(maxsplit=WORDS)[-WORDS:]
    return tuple(re.sub(r"\d+", "0", word.casefold()) for word in words)


def _shown(
    trigger: Trigger, largest: float, weaker: float | None, pieces: dict[int, list[Piece]]
) -> Shown:
    prefix, last = trigger.prefix, trigger.last_token or ""
    # A token that is part of a character is shown as bytes, which the prefix ends in too.
    before = prefix[: len(prefix) - len(last)] if last and prefix.endswith(last) else prefix
    marked = prefix[len(before) :]
    rest = trigger.rest.removeprefix(trigger.next_token or "")  # which stands before it
    return Shown(
        trigger,
        _clipped(before),
        visible(marked),
        visible(rest[:AFTER]) + ("…" if len(rest) > AFTER else ""),
        f"{100 * abs(trigger.coefficient) / largest:.1f}",
        "" if weaker is None else f"{100 * weaker:.4g}",
        pieces.get(trigger.rank),
    )


def _clipped(text: str) -> str:
    return visible(text) if len(text) <= BEFORE else "…" + visible(text[1 - BEFORE :])


def pieces_of(
    sentence: StoredSentence,
    length: int,
    coefficients: Sequence[float],
    shown: Callable[[int], str],
) -> list[Piece]:
    """Return a prefix token by token, shaded by the coefficient of each against the largest."""
    largest = max(map(abs, coefficients), default=0.0) or 1.0
    text, starts, ends = sentence.text, sentence.starts, sentence.ends
    found: list[Piece] = []
    reached = starts[0] if starts else 0
    for place in range(length):
        if text is None or ends is None:
            part = shown(sentence.ids[place])
        else:  # what a token adds to the text: nothing inside a character
            part, reached = text[reached : ends[place]], max(reached, ends[place])
        number = coefficients[place]
        tenth = round(10 * min(1.0, abs(number) / largest))
        shade = f"{'p' if number >= 0 else 'm'}{tenth}" if tenth else ""
        found.append(Piece(visible(part), shade, f"{number:+.3g}"))
    return found


def histogram(sample: ndarray) -> list[tuple[float, ...]]:
    """Return bars (x, y, width, height) of a memory's sampled coefficients, in a box of 100 × 30.

    Heights are of the root of the count: a memory is silent on most prefixes, and the few on which
    it is not should be seen.
    """
    if not len(sample):
        return []
    counts, _ = np.histogram(sample, bins=BINS)
    heights = 30 * np.sqrt(counts / counts.max())
    width = 100 / BINS
    return [
        (round(place * width, 2), round(30 - height, 2), round(width * 0.86, 2), round(height, 2))
        for place, height in enumerate(heights.tolist())
        if height > 0
    ]
