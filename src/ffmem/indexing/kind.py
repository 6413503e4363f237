"""The kind of a model's memories: what a coefficient is, and which head a memory belongs to.

    persistent   memory = head · slots + slot
    lambda       memory = head · distances + distance

It follows from the manifest alone, so reading an index needs no model.
"""

from dataclasses import dataclass
from typing import NamedTuple

NO_VALUE = (
    "This memory has no static value: a lambda layer multiplies its coefficient by a vector that it"
    " computes from the input."
)

ZERO_VALUE = (
    "This memory's value gives every token the same logit, like a value of zeros: it promotes and"
    " suppresses nothing."
)

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
    "softmax": "The coefficient is the memory's weight in a softmax over all memories of its layer:"
    " it is above 0, so active, on every prefix but where it rounds to 0.",
    "persistent": "The coefficient is the attention weight on the slot, in one softmax with the"
    " tokens: it is above 0, so active, on every prefix but where it rounds to 0.",
    "lambda": "The coefficient is a head's query times its static key for a distance: of either"
    " sign, and 0 where no token is so far back. Prefixes on which it is above 0 trigger.",
}

_SEATS = {"persistent": "slot", "lambda": "distance"}

_CALLED = {
    "persistent": ("Persistent memories", "one slot of one attention head"),
    "lambda": ("Memories of lambda layers", "one static key of one head, for one distance"),
}


class Seat(NamedTuple):
    """Which head a memory belongs to, and which slot or distance of it the memory is."""

    head: int
    name: str
    """`slot`, or `distance` (how many tokens back)."""
    number: int

    def __str__(self) -> str:
        return f"head {self.head}, {self.name} {self.number}"

    def to_dict(self) -> dict[str, int]:
        """Return it as JSON."""
        return {"head": self.head, self.name: self.number}


@dataclass(frozen=True)
class Kind:
    """A kind of memory, and how many of them a layer and its heads have."""

    name: str | None = None
    """relu, gelu, swiglu, softmax, persistent or lambda; None in other families."""
    gated: bool = False
    memories: int = 1
    """Per layer."""
    groups: int = 1
    """Heads, which own equal ranges of them in order."""
    has_values: bool = True

    @property
    def definition(self) -> str:
        """What the coefficient is, and when a memory is active; for the manifest."""
        if self.gated:
            return "m = f(g·x)·(u·x), the input of the value map; active: g·x > 0"
        plain = "m = f(k·x + b), the input of the value map; active: m > 0"
        return _DEFINITIONS.get(self.name or "", plain)

    @property
    def note(self) -> str | None:
        """How to read the numbers, if the coefficient is not an activation; else None."""
        return _NOTES.get(self.name or "")

    @property
    def called(self) -> str:
        """What its memories are called."""
        return _CALLED.get(self.name or "", ("Feed-forward memories", ""))[0]

    @property
    def unit(self) -> str:
        """What one memory is."""
        usual = "one key with its value, one unit of a feed-forward layer"
        return _CALLED.get(self.name or "", ("", usual))[1]

    @property
    def told(self) -> list[str]:
        """What to know about these memories, a sentence each; nothing for feed-forward ones."""
        found = [self.note] if self.note else []
        if self.name in _SEATS:
            size = self.memories // self.groups
            found.append(
                f"Memory i of a layer is {_SEATS[self.name]} i mod {size} of head i ÷ {size}."
            )
        return found if self.has_values else [*found, NO_VALUES]

    @property
    def is_weight(self) -> bool:
        """Whether the coefficient is a softmax weight: small, and never negative."""
        return self.name in ("softmax", "persistent")

    def seat(self, memory: int) -> Seat | None:
        """Return the head and slot of a memory; None if memories belong to no head."""
        if self.name not in _SEATS:
            return None
        head, number = divmod(memory, self.memories // self.groups)
        return Seat(head, _SEATS[self.name], number)
