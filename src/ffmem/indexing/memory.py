"""One memory, as people look at it: what triggers it, what its value promotes, how it behaves."""

import html
from dataclasses import dataclass
from typing import Any, NamedTuple

from ffmem.cells import Cell


class Trigger(NamedTuple):
    """One trigger example, with the text around it."""

    rank: int
    coefficient: float
    sentence: int
    length: int
    """p: tokens of the prefix."""
    prefix: str
    last_token: str | None
    next_token: str | None
    rest: str
    gate: int | None
    """Sign of the gate's pre-activation; None in ungated models."""

    def to_dict(self) -> dict[str, Any]:
        """Return what `show --json` prints."""
        fields = self._asdict()
        if self.gate is None:
            del fields["gate"]
        return fields


class TokenShare(NamedTuple):
    """A token at one end of a value's distribution."""

    token: str
    id: int
    probability: float
    logit: float


class Value(NamedTuple):
    """Both ends of a value's distribution over the vocabulary, the outermost first."""

    projection: str
    top: list[TokenShare]
    bottom: list[TokenShare]


class Behaviour(NamedTuple):
    """A memory's coefficient over all prefixes of the corpus."""

    active_share: float
    max: float
    min: float
    mean: float
    quantiles: dict[str, float]
    """Of the sample of prefixes."""


@dataclass(frozen=True)
class Memory:
    """A memory of an indexed model."""

    cell: Cell
    triggers: list[Trigger]
    negative_triggers: list[Trigger]
    value: Value
    stats: Behaviour
    gated: bool

    def to_dict(self) -> dict[str, Any]:
        """Return what `show --json` prints."""
        ends = {
            side: [token._asdict() for token in getattr(self.value, side)]
            for side in ("top", "bottom")
        }
        return {
            "cell": str(self.cell),
            "layer": self.cell.layer,
            "memory": self.cell.memory,
            "triggers": [trigger.to_dict() for trigger in self.triggers],
            "negative_triggers": [trigger.to_dict() for trigger in self.negative_triggers],
            "value": {"projection": self.value.projection, **ends},
            "stats": self.stats._asdict(),
        }

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        """Return what a notebook shows; everything from model or corpus is escaped."""
        names = ("promotes", "suppresses", "active")
        if self.gated:
            names = ("m &gt; 0 promotes", "m &lt; 0 promotes", "gate open")
        rows = [
            f"<tr><td style='text-align:right'>{trigger.coefficient:.3f}</td>"
            f"<td style='text-align:left'>{_marked(trigger)}</td></tr>"
            for trigger in (*self.triggers[:10], *self.negative_triggers[:10])
        ]
        return (
            f"<h4>{self.cell}</h4><p>{names[0]} {_chips(self.value.top)}<br>"
            f"{names[1]} {_chips(self.value.bottom)}<br>"
            f"{names[2]} on {self.stats.active_share:.1%} of prefixes</p>"
            f"<table>{''.join(rows)}</table>"
        )


_SIGNS = {"\n": "↵", "\r": "␍", "\t": "⇥"}


def unshown(token: str) -> str:
    """Return what a token that was copied from the screen stands for."""
    for character, sign in (*_SIGNS.items(), (" ", "␣")):
        token = token.replace(sign, character)
    return token


def visible(text: str) -> str:
    """Return a text on one line: line ends and tabs as signs."""
    if text.isprintable():  # nearly all are, and a page shows a hundred
        return text
    return "".join(_SIGNS.get(c, c if c.isprintable() else f"⟨{ord(c):02x}⟩") for c in text)


def visible_token(token: str | None) -> str:
    """Return a token so that its spaces are seen; the end of a sentence as ∎."""
    return "∎" if token is None else visible(token).replace(" ", "␣")


def _lines(memory: Memory, n: int = 10) -> list[str]:
    """Return a memory as lines of plain text, the first n of every list.

    In a gated model a coefficient of either sign triggers, and the value is read for that sign.
    """
    stats, value = memory.stats, memory.value
    lines = [
        f"{memory.cell}   layer {memory.cell.layer}, memory {memory.cell.memory}",
        f"{'gate open' if memory.gated else 'active'} on {stats.active_share:.1%} of prefixes"
        f" · max {stats.max:.3f} · min {stats.min:.3f} · mean {stats.mean:.4f}",
    ]
    if memory.gated:
        lines += ["", f"m > 0 promotes  {_listed(value.top[:n])}"]
        lines += map(_line, memory.triggers[:n])
        lines += ["", f"m < 0 promotes  {_listed(value.bottom[:n])}"]
        lines += map(_line, memory.negative_triggers[:n])
        return lines + _more(memory, n)
    lines += [f"promotes    {_listed(value.top[:n])}", f"suppresses  {_listed(value.bottom[:n])}"]
    return [*lines, "", *map(_line, memory.triggers[:n]), *_more(memory, n)]


def _more(memory: Memory, n: int) -> list[str]:
    """Return what a list of the first n triggers leaves out, in words."""
    lists = [memory.triggers, memory.negative_triggers]
    if not any(lists):
        return ["No prefix of the corpus triggers this memory."]
    if max(map(len, lists)) <= n:
        return []
    counts = " and ".join(str(len(triggers)) for triggers in lists if triggers)
    return ["", f"The first {n} of {counts} triggers; --json gives all."]


def _line(trigger: Trigger, width: int = 72) -> str:
    prefix = visible(trigger.prefix)
    shown = prefix if len(prefix) <= width else "…" + prefix[1 - width :]
    following = visible_token(trigger.next_token)
    return f"{trigger.rank:4d} {trigger.coefficient:9.3f}  {shown} → {following}"


def _listed(tokens: list[TokenShare]) -> str:
    return "  ".join(visible_token(token.token) for token in tokens)


def _chips(tokens: list[TokenShare], n: int = 10) -> str:
    return " ".join(
        f"<code>{html.escape(visible_token(token.token))}</code>" for token in tokens[:n]
    )


def _marked(trigger: Trigger) -> str:
    """Return a trigger's text with its last token marked and its rest pale."""
    last = trigger.last_token or ""
    before = trigger.prefix.removesuffix(last) if last else trigger.prefix
    marked = trigger.prefix[len(before) :]
    return (
        f"{html.escape(visible(before[-200:]))}<b>{html.escape(visible(marked))}</b>"
        f"<span style='opacity:.5'>{html.escape(visible(trigger.rest[:60]))}</span>"
    )
