"""One memory: its triggers, the tokens its value promotes, its statistics, and its kind."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from ffmem.cells import Cell

NO_VALUE = (
    "This memory has no static value: a lambda layer multiplies its coefficient by a vector that it"
    " computes from the input."
)

NO_VALUE_YET = "The values of this layer are not computed yet. The index is unfinished."

ZERO_VALUE = (
    "This memory's value gives every token the same logit, like a zero value: it promotes and"
    " suppresses nothing."
)

NO_KEYS_YET = "The keys of this layer are not computed yet. The index is unfinished."

NO_KEY_TOKENS = (
    "ffmem cannot tell how this model's input embedding reaches the residual stream, so no tokens"
    " are listed for its keys."
)

ZERO_KEY = "This memory's key gives every token the same score, like a zero key."

NO_VALUES = (
    "These memories have no static values: a lambda layer multiplies their coefficients by vectors"
    " computed from the input."
)

_DEFINITIONS = {
    "softmax": "m = softmax(x·Kᵀ) over the memories of a layer, the input of the value map;"
    " active: m > 0, which every weight of a softmax is",
    "persistent": "m = attention weight on the slot, of one softmax over the tokens and the slots"
    " of its head, the input of the value map; active: m > 0, which every weight of a softmax is",
    "lambda": "m = q·E, a head's query times its static key for a distance, 0 where no token is so"
    " far back; it multiplies that token's vector, there is no static value; active: m > 0",
}

_NOTES = {
    "softmax": "The coefficient is the memory's weight in a softmax over all memories of its"
    " layer: it is above 0, and so active, on every prefix, unless it rounds to 0.",
    "persistent": "The coefficient is the attention weight on the slot, in one softmax with the"
    " tokens: it is above 0, and so active, on every prefix, unless it rounds to 0.",
    "lambda": "The coefficient is a head's query times its static key for a distance: it can have"
    " either sign, and is 0 where no token is that far back. Only prefixes on which it is above 0"
    " are triggers.",
}

_EXPERT_NOTE = (
    "In an expert, the coefficient is the router's weight times m; it is 0 on prefixes that are not"
    " routed to the expert. Shares are of all prefixes unless they say “routed”."
)

_SLOT_NAMES = {"persistent": "slot", "lambda": "distance"}

_TITLES = {
    "persistent": "Persistent memories",
    "lambda": "Memories of lambda layers",
}

_UNITS = {
    "persistent": "one slot of one attention head",
    "lambda": "one static key of one head, for one distance",
}


class HeadSlot(NamedTuple):
    """The head that owns a memory, and the memory's slot or distance within that head."""

    head: int
    name: str
    """`slot`, or `distance` (how many tokens back)."""
    number: int

    def __str__(self) -> str:
        return f"head {self.head}, {self.name} {self.number}"

    def to_dict(self) -> dict[str, int]:
        """Return what `show --json` prints."""
        return {"head": self.head, self.name: self.number}


@dataclass(frozen=True)
class Kind:
    """A kind of memory: what its coefficient is, and how memories belong to heads.

        persistent   memory = head · slots + slot
        lambda       memory = head · distances + distance

    It follows from the manifest, so reading an index needs no model.
    """

    name: str | None = None
    """relu, gelu, swiglu, softmax, persistent, lambda or moe; None in other families."""
    gated: bool = False
    memories: int = 1
    """Memories per layer."""
    groups: int = 1
    """Heads, which own equal ranges of the layer's memories, in order."""
    has_values: bool = True
    experts: bool = False

    @property
    def definition(self) -> str:
        """What the coefficient is and when a memory is active, as the manifest says it."""
        if self.experts:
            m, active = ("f(g·x)·(u·x)", "g·x") if self.gated else ("f(k·x + b)", "m")
            return (
                f"w·m with m = {m}, the input of the value map, and the router's weight w; 0 where"
                f" the prefix is not routed to the memory's expert; active: {active} > 0"
            )
        if self.gated:
            return "m = f(g·x)·(u·x), the input of the value map; active: g·x > 0"
        plain = "m = f(k·x + b), the input of the value map; active: m > 0"
        return _DEFINITIONS.get(self.name or "", plain)

    @property
    def note(self) -> str | None:
        """How to read the coefficient if it is not an activation; else None."""
        return _EXPERT_NOTE if self.experts else _NOTES.get(self.name or "")

    @property
    def title(self) -> str:
        """What headings call these memories."""
        return _TITLES.get(self.name or "", "Feed-forward memories")

    @property
    def unit(self) -> str:
        """What one memory is."""
        usual = "one key with its value, one unit of a feed-forward layer"
        return _UNITS.get(self.name or "", usual)

    @property
    def notes(self) -> list[str]:
        """What readers should know about these memories; empty for feed-forward ones."""
        notes = [self.note] if self.note else []
        if self.name in _SLOT_NAMES:
            size = self.memories // self.groups
            slot = _SLOT_NAMES[self.name]
            notes.append(f"Memory i of a layer is {slot} i mod {size} of head i ÷ {size}.")
        return notes if self.has_values else [*notes, NO_VALUES]

    @property
    def is_weight(self) -> bool:
        """Whether the coefficient is a softmax weight: small, and never negative."""
        return self.name in ("softmax", "persistent")

    def head_slot(self, memory: int) -> HeadSlot | None:
        """Return the head and slot of a memory; None if no head owns it."""
        if self.name not in _SLOT_NAMES:
            return None
        head, number = divmod(memory, self.memories // self.groups)
        return HeadSlot(head, _SLOT_NAMES[self.name], number)


class Trigger(NamedTuple):
    """One trigger example, with the text around it."""

    rank: int
    coefficient: float
    sentence: int
    length: int
    """p, the number of tokens in the prefix."""
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


class ValueToken(NamedTuple):
    """A token at one end of a value's distribution."""

    token: str
    id: int
    probability: float
    logit: float


class Value(NamedTuple):
    """Both ends of a value's distribution over the vocabulary, the most extreme token first."""

    projection: str
    top: list[ValueToken]
    bottom: list[ValueToken]
    note: str | None = None
    """Why both ends are empty (no static value, or a zero value); else None."""


class KeyToken(NamedTuple):
    """An input token that a memory's key matches."""

    token: str
    id: int
    score: float
    """k · N(e) of the token's input embedding e, without biases; in gated models, the gate's."""
    up: float | None
    """Gated models: u · N(e) of the other key. With a score above 0, its sign is that of m."""


class Keys(NamedTuple):
    """The key side of a memory: what it reads, and how that compares with what it writes."""

    tokens: list[KeyToken]
    """Best match first."""
    cosines: dict[str, float]
    """Between key (gate, up) and value, as they act on the residual stream."""
    weight_class: str | None
    """Follows from the cosines (`indexing/weights.py`); None without static values."""
    note: str | None = None
    """Why no tokens are listed; else None."""

    def to_dict(self) -> dict[str, Any]:
        """Return what `show --json` prints."""
        tokens = [
            {name: value for name, value in token._asdict().items() if value is not None}
            for token in self.tokens
        ]
        note = {} if self.note is None else {"note": self.note}
        return {"tokens": tokens, **self.cosines, "weight_class": self.weight_class, **note}


@dataclass(frozen=True)
class SignCase:
    """One of the four sign cases of a gated memory."""

    gate: int
    """1 if the gate is open (its pre-activation is above 0), −1 if not."""
    sign: int
    """1 if m > 0, −1 if not."""
    count: int
    """Prefixes of the corpus in this case, of those that reach the memory's bank; exact."""
    share: float
    triggers: list[Trigger]
    """The memory's stored triggers in this case."""

    @property
    def name(self) -> str:
        """A description of the case."""
        return f"gate {'open' if self.gate > 0 else 'closed'}, m {'>' if self.sign > 0 else '≤'} 0"

    @property
    def note(self) -> str | None:
        """How much of the case the triggers cover."""
        n = len(self.triggers)
        if n == self.count:
            return None
        sign = "m > 0" if self.sign > 0 else "m < 0"
        stored = f"{n} of the stored triggers" if n else "none of the stored triggers"
        verb = "is" if n <= 1 else "are"
        return (
            f"{self.count:,} prefixes; {stored} (the strongest with {sign}) {verb} in this group."
        )

    def to_dict(self, triggers: bool = False) -> dict[str, Any]:
        """Return what `show --json` prints, with the triggers on request."""
        found: dict[str, Any] = {"gate": self.gate, "sign": self.sign}
        found |= {"count": self.count, "share": self.share, "kept": len(self.triggers)}
        if triggers:
            found["triggers"] = [trigger.to_dict() for trigger in self.triggers]
        return found


def is_flat(top: ndarray, bottom: ndarray) -> ndarray:
    """Return which values, by the logits [..., token] at both ends, give all tokens the same logit.

    A value of zeros does; listing its ends would show the first tokens of the vocabulary. So do
    lists without tokens, of layers that an unfinished index has no values of. (No jaxtyping here:
    importing it would double the time that `ffmem show` takes.)
    """
    if not top.shape[-1]:
        return np.ones(top.shape[:-1], bool)
    return np.asarray((top[..., 0] == top[..., -1]) & (bottom[..., 0] == bottom[..., -1]))


NOTHING_READ = "No prefix has been read yet, so there are no triggers and statistics."
"""Said at the start of an unfinished index."""


class ExpertStats(NamedTuple):
    """How the prefixes of the corpus reach the expert that has a memory."""

    share: float
    """Share of all prefixes that are routed to it."""
    mean_weight: float
    """Mean router weight over these."""
    active_share: float
    """Share of these on which the memory is active."""


class MemoryStats(NamedTuple):
    """Statistics of a memory's coefficient over all prefixes of the corpus.

    A prefix that is not routed to the memory's expert counts, with the coefficient 0.
    """

    active_share: float
    max: float
    min: float
    mean: float
    quantiles: dict[str, float]
    """Over the sampled prefixes."""
    expert: ExpertStats | None = None
    """None if the memory is not in an expert."""

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics for `show --json`."""
        found = self._asdict()
        found.pop("expert")
        return found if self.expert is None else found | {"expert": self.expert._asdict()}


@dataclass(frozen=True)
class Memory:
    """A memory of an indexed model."""

    cell: Cell
    triggers: list[Trigger]
    negative_triggers: list[Trigger]
    value: Value
    stats: MemoryStats
    kind: Kind
    keys: Keys
    case_counts: tuple[int, int, int, int] | None = None
    """Prefixes with an open gate and m > 0, open and m ≤ 0, closed and m > 0, closed and m ≤ 0;
    None in ungated models."""
    has_statistics: bool = True
    """Whether a prefix of the corpus has been read; False at the start of an unfinished index."""

    def triggers_of(self, sign: int) -> list[Trigger]:
        """Return the triggers of one sign of the coefficient; without a gate, none are negative."""
        return self.triggers if sign > 0 else self.negative_triggers

    @property
    def sign_cases(self) -> list[SignCase]:
        """The four sign cases with their stored triggers; empty in ungated models."""
        if self.case_counts is None:
            return []
        cases = [(1, 1), (1, -1), (-1, 1), (-1, -1)]
        total = max(sum(self.case_counts), 1)
        return [
            SignCase(
                *(gate, sign, count, count / total),
                [one for one in self.triggers_of(sign) if one.gate == gate],
            )
            for (gate, sign), count in zip(cases, self.case_counts, strict=True)
        ]

    @property
    def gated(self) -> bool:
        """Whether coefficients of both signs trigger."""
        return self.kind.gated

    @property
    def head_slot(self) -> HeadSlot | None:
        """The head that owns it, and its slot there; None if no head does."""
        return self.kind.head_slot(self.cell.memory)

    def to_dict(self, cases: bool = False) -> dict[str, Any]:
        """Return what `show --json` prints; with `cases`, triggers by sign case too."""
        slot = self.head_slot
        sign_cases = [case.to_dict(cases) for case in self.sign_cases]
        return {
            "cell": str(self.cell),
            "layer": self.cell.layer,
            "memory": self.cell.memory,
            **({"bank": self.cell.bank} if self.cell.bank else {}),
            **({"place": slot.to_dict()} if slot else {}),
            "triggers": [trigger.to_dict() for trigger in self.triggers],
            "negative_triggers": [trigger.to_dict() for trigger in self.negative_triggers],
            **self._value(),
            "key": self.keys.to_dict(),
            "stats": self.stats.to_dict() if self.has_statistics else None,
            **({"sign_cases": sign_cases} if sign_cases else {}),
            **({"coefficient_note": self.kind.note} if self.kind.note else {}),
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
        return self.format()

    __repr__ = __str__  # what a terminal shows

    def format(self, n: int = 10) -> str:
        """Return the memory as text, with the first n entries of every list."""
        return "\n".join(_lines(self, n))

    def format_cases(self, n: int = 10) -> str:
        """Return the memory as text, with a list of triggers for each sign case."""
        lines = [*_heading(self), *_key_lines(self, n)]
        for case in self.sign_cases if self.has_statistics else ():
            lines += ["", f"{case.name}: {case.share:.1%} of prefixes"]
            lines += [case.note] if case.note else []
            lines += [
                _trigger_line(trigger, _format(self, trigger.coefficient))
                for trigger in case.triggers[:n]
            ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return what a notebook shows, with all text from model and corpus escaped."""
        name, *about = _heading(self)
        about += [self.value.note] if self.value.note is not None else []
        parts = [f"<h4>{html.escape(name)}</h4>"]
        parts += [f"<p>{'<br>'.join(map(html.escape, about))}</p>"]
        has_value = self.value.note is None
        if self.keys.tokens:
            which = "gate" if self.gated else "key"
            parts.append(f"<p>{which} matches {_tokens_html(self.keys.tokens)}</p>")
        if self.gated:
            lists = [("m > 0", self.triggers, self.value.top)]
            lists += [("m < 0", self.negative_triggers, self.value.bottom)]
            for sign, triggers, tokens in lists:
                promotes = f" promotes {_tokens_html(tokens)}" if has_value else ""
                parts.append(f"<h5>{html.escape(sign)}{promotes}</h5>")
                parts.append(self._triggers_html(triggers))
        else:
            if has_value:
                top, bottom = _tokens_html(self.value.top), _tokens_html(self.value.bottom)
                parts.append(f"<p>promotes {top}<br>suppresses {bottom}</p>")
            parts.append(self._triggers_html(self.triggers))
        return "".join(parts)

    def _triggers_html(self, triggers: list[Trigger], n: int = 10) -> str:
        if not triggers:
            return "<p>No prefix of the corpus triggers it.</p>" if self.has_statistics else ""
        rows = [
            f"<tr><td style='text-align:right'>{_format(self, trigger.coefficient)}</td>"
            f"<td style='text-align:left'>{_trigger_html(trigger)}</td></tr>"
            for trigger in triggers[:n]
        ]
        more = f"<p>The first {n} of {len(triggers)} triggers.</p>" if len(triggers) > n else ""
        return f"<table>{''.join(rows)}</table>{more}"


_SIGNS = {"\n": "↵", "\r": "␍", "\t": "⇥"}


def visible(text: str) -> str:
    """Return a text on one line, with signs for line ends and tabs."""
    if text.isprintable():  # nearly all are, and a page shows a hundred
        return text
    return "".join(_SIGNS.get(c, c if c.isprintable() else f"⟨{ord(c):02x}⟩") for c in text)


def visible_token(token: str | None) -> str:
    """Return a token with signs for its spaces; ∎ for the end of a sentence."""
    return "∎" if token is None else visible(token).replace(" ", "␣")


def from_visible(token: str) -> str:
    """Return the token that a text copied from the screen stands for."""
    for character, sign in (*_SIGNS.items(), (" ", "␣")):
        token = token.replace(sign, character)
    return token


def _lines(memory: Memory, n: int) -> list[str]:
    """Return a memory as lines of plain text, with the first n entries of every list.

    In a gated model, coefficients of either sign trigger, and each list comes with what the value
    promotes under that sign.
    """
    value = memory.value
    lines = _heading(memory)
    positive, negative = (
        [_trigger_line(trigger, _format(memory, trigger.coefficient)) for trigger in triggers[:n]]
        for triggers in (memory.triggers, memory.negative_triggers)
    )
    top, bottom = _join_tokens(value.top[:n]), _join_tokens(value.bottom[:n])
    if value.note is not None:
        lines.append(value.note)
    elif not memory.gated:
        lines += [f"promotes    {top}", f"suppresses  {bottom}"]
    lines += _key_lines(memory, n)
    if memory.gated:
        promotes = value.note is None
        lines += ["", f"m > 0 promotes  {top}" if promotes else "m > 0", *positive]
        lines += ["", f"m < 0 promotes  {bottom}" if promotes else "m < 0", *negative]
    else:
        lines += ["", *positive]
    return lines + _footer(memory, n)


def _key_lines(memory: Memory, n: int) -> list[str]:
    """Return the tokens that the key matches, and the class of the weights."""
    keys = memory.keys
    matched = _join_tokens(keys.tokens[:n]) if keys.tokens else keys.note or ""
    lines = [f"{'gate' if memory.gated else 'key'} matches  {matched}"]
    if keys.cosines:
        cosines = [
            f"cos({', '.join(name.split('_')[1:])}) {cosine:+.2f}".replace("-", "−")
            for name, cosine in keys.cosines.items()
        ]
        lines.append(f"weights      {keys.weight_class}: {' · '.join(cosines)}")
    return lines


def _heading(memory: Memory) -> list[str]:
    """Return the memory's name, its head, and the statistics of its coefficient."""
    stats = memory.stats
    mean = _format(memory, stats.mean) if memory.kind.is_weight else f"{stats.mean:.4f}"
    lines = [f"{memory.cell}   layer {memory.cell.layer}, memory {memory.cell.memory}"]
    lines += [f"place: {memory.head_slot}"] if memory.head_slot else []
    lines += [memory.kind.note] if memory.kind.note else []
    if not memory.has_statistics:
        return [*lines, NOTHING_READ]
    active = "gate open" if memory.gated else "active"
    if stats.expert is not None:
        share, weight, active_share = stats.expert
        kind, number = ("shared expert", "expert")[memory.cell.bank[0] == "E"], memory.cell.bank[1:]
        lines.append(
            f"{kind} {number}".rstrip() + f": reached by {share:.1%} of tokens"
            f" · mean weight {weight:.3f} · {active} on {active_share:.1%} of them"
        )
    lines.append(
        f"{active} on {stats.active_share:.1%} of prefixes"
        f" · max {_format(memory, stats.max)} · min {_format(memory, stats.min)} · mean {mean}"
    )
    cases = [f"{case.name} {case.share:.1%}" for case in memory.sign_cases]
    return [*lines, " · ".join(cases)] if cases else lines


def _format(memory: Memory, coefficient: float) -> str:
    """Return a coefficient as text; softmax weights are small and need significant digits."""
    return f"{coefficient:.3g}" if memory.kind.is_weight else f"{coefficient:.3f}"


def _footer(memory: Memory, n: int) -> list[str]:
    """Return how many triggers the first n leave out."""
    lists = [memory.triggers, memory.negative_triggers]
    if not memory.has_statistics:
        return []
    if not any(lists):
        return ["No prefix of the corpus triggers this memory."]
    if max(map(len, lists)) <= n:
        return []
    counts = " and ".join(str(len(triggers)) for triggers in lists if triggers)
    return ["", f"The first {n} of {counts} triggers; for more, --top N or .format(N)."]


def _trigger_line(trigger: Trigger, coefficient: str, width: int = 72) -> str:
    prefix = visible(trigger.prefix)
    shown = prefix if len(prefix) <= width else "…" + prefix[1 - width :]
    following = visible_token(trigger.next_token)
    return f"{trigger.rank:4d} {coefficient:>9}  {shown} → {following}"


def _join_tokens(tokens: Sequence[ValueToken | KeyToken]) -> str:
    return "  ".join(visible_token(token.token) for token in tokens)


def _tokens_html(tokens: Sequence[ValueToken | KeyToken], n: int = 10) -> str:
    return " ".join(
        f"<code>{html.escape(visible_token(token.token))}</code>" for token in tokens[:n]
    )


def _trigger_html(trigger: Trigger) -> str:
    """Return a trigger's text with its last token in bold and its rest pale, both shortened."""
    last = trigger.last_token or ""
    before = trigger.prefix.removesuffix(last) if last else trigger.prefix
    bold = trigger.prefix[len(before) :]
    before = before if len(before) <= 200 else f"…{before[-200:]}"
    rest = trigger.rest if len(trigger.rest) <= 60 else f"{trigger.rest[:60]}…"
    return (
        f"{html.escape(visible(before))}<b>{html.escape(visible(bold))}</b>"
        f"<span style='opacity:.5'>{html.escape(visible(rest))}</span>"
    )
