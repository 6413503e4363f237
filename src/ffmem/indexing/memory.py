"""One memory, as people look at it: what triggers it, what its value promotes, how it behaves."""

import html
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from ffmem.cells import Cell
from ffmem.indexing.kind import Kind, Seat


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
    note: str | None = None
    """Why nothing stands at its ends: no static value, or one of zeros; None where much does."""


def is_flat(top: ndarray, bottom: ndarray) -> ndarray:
    """Return which values say nothing, by the logits at their ends: no token stands out at either.

    So does a value of zeros; its ends would be the first tokens of the vocabulary. Both ends are
    "*memory token"; plain annotations, for jaxtyping would double the time that `ffmem show` takes.
    """
    return np.asarray((top[..., 0] == top[..., -1]) & (bottom[..., 0] == bottom[..., -1]))


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
    kind: Kind

    @property
    def gated(self) -> bool:
        """Whether a coefficient of either sign triggers."""
        return self.kind.gated

    @property
    def seat(self) -> Seat | None:
        """Where it sits in its layer; None where no head owns it."""
        return self.kind.seat(self.cell.memory)

    def to_dict(self) -> dict[str, Any]:
        """Return what `show --json` prints."""
        place = {} if self.seat is None else {"place": self.seat.to_dict()}
        return {
            "cell": str(self.cell),
            "layer": self.cell.layer,
            "memory": self.cell.memory,
            **({"bank": self.cell.bank} if self.cell.bank else {}),
            **place,
            "triggers": [trigger.to_dict() for trigger in self.triggers],
            "negative_triggers": [trigger.to_dict() for trigger in self.negative_triggers],
            **self._value(),
            "stats": self.stats._asdict(),
            **({} if self.kind.note is None else {"coefficient_note": self.kind.note}),
        }

    def _value(self) -> dict[str, Any]:
        if self.value.note is not None:
            return {"value": None, "value_note": self.value.note}
        ends = {
            side: [token._asdict() for token in getattr(self.value, side)]
            for side in ("top", "bottom")
        }
        return {"value": {"projection": self.value.projection, **ends}}

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        """Return what a notebook shows; everything from model or corpus is escaped."""
        names = ("promotes", "suppresses", "active")
        if self.gated:
            names = ("m &gt; 0 promotes", "m &lt; 0 promotes", "gate open")
        value = (
            f"{names[0]} {_chips(self.value.top)}<br>{names[1]} {_chips(self.value.bottom)}"
            if self.value.note is None
            else html.escape(self.value.note)
        )
        about = [str(self.seat)] if self.seat else []
        about += [html.escape(self.kind.note)] if self.kind.note else []
        rows = [
            f"<tr><td style='text-align:right'>{_number(self, trigger.coefficient)}</td>"
            f"<td style='text-align:left'>{_marked(trigger)}</td></tr>"
            for trigger in (*self.triggers[:10], *self.negative_triggers[:10])
        ]
        return (
            f"<h4>{self.cell}</h4><p>{''.join(f'{line}<br>' for line in (*about, value))}"
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
    value = memory.value
    lines = _about(memory)
    positive, negative = (
        [_line(trigger, _number(memory, trigger.coefficient)) for trigger in triggers[:n]]
        for triggers in (memory.triggers, memory.negative_triggers)
    )
    if memory.gated and value.note is not None:
        return [
            *lines,
            value.note,
            "",
            "m > 0",
            *positive,
            "",
            "m < 0",
            *negative,
            *_more(memory, n),
        ]
    if memory.gated:
        lines += ["", f"m > 0 promotes  {_listed(value.top[:n])}", *positive]
        lines += ["", f"m < 0 promotes  {_listed(value.bottom[:n])}", *negative]
        return lines + _more(memory, n)
    if value.note is not None:
        lines.append(value.note)
    else:
        lines.append(f"promotes    {_listed(value.top[:n])}")
        lines.append(f"suppresses  {_listed(value.bottom[:n])}")
    return [*lines, "", *positive, *_more(memory, n)]


def _about(memory: Memory) -> list[str]:
    """Return which memory it is, where it sits, and how its coefficient behaves."""
    stats, is_weight = memory.stats, memory.kind.is_weight
    mean = _number(memory, stats.mean) if is_weight else f"{stats.mean:.4f}"
    lines = [f"{memory.cell}   layer {memory.cell.layer}, memory {memory.cell.memory}"]
    lines += [f"place: {memory.seat}"] if memory.seat else []
    lines += [memory.kind.note] if memory.kind.note else []
    return [
        *lines,
        f"{'gate open' if memory.gated else 'active'} on {stats.active_share:.1%} of prefixes"
        f" · max {_number(memory, stats.max)} · min {_number(memory, stats.min)} · mean {mean}",
    ]


def _number(memory: Memory, coefficient: float) -> str:
    """Return a coefficient as it is shown; the weights of a softmax over many are small."""
    return f"{coefficient:.3g}" if memory.kind.is_weight else f"{coefficient:.3f}"


def _more(memory: Memory, n: int) -> list[str]:
    """Return what a list of the first n triggers leaves out, in words."""
    lists = [memory.triggers, memory.negative_triggers]
    if not any(lists):
        return ["No prefix of the corpus triggers this memory."]
    if max(map(len, lists)) <= n:
        return []
    counts = " and ".join(str(len(triggers)) for triggers in lists if triggers)
    return ["", f"The first {n} of {counts} triggers; --json gives all."]


def _line(trigger: Trigger, number: str, width: int = 72) -> str:
    prefix = visible(trigger.prefix)
    shown = prefix if len(prefix) <= width else "…" + prefix[1 - width :]
    following = visible_token(trigger.next_token)
    return f"{trigger.rank:4d} {number:>9}  {shown} → {following}"


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
