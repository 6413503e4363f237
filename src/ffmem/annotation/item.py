"""What people are asked about: a list of prefixes, or a case of composition; and their answers.

An item knows more than those who judge it may see: which memory it is of, and whether it is a
control, whose prefixes were drawn at random. `key` is the only name that leaves the server before
the study ends.
"""

from typing import NamedTuple

from ffmem.annotation.sheet import Sheet

TRIGGERS, CONTROL, COMPOSITION = "triggers", "control", "composition"
"""The kinds of items."""


class Shown(NamedTuple):
    """A text as an item shows it: a prefix, its last token marked, and what follows."""

    prefix: str
    last_token: str | None
    next_token: str | None
    rest: str


class Item(NamedTuple):
    """One thing to judge."""

    key: str
    """A random name that tells nothing."""
    kind: str
    """TRIGGERS, CONTROL or COMPOSITION."""
    cell: str | None
    """The memory, for TRIGGERS; the memory whose place a CONTROL takes; None for COMPOSITION."""
    sign: int
    """Of the list's coefficients."""
    texts: tuple[Shown, ...]
    """In the order of their ranks; the one prefix of a case of composition."""
    words: tuple[str, ...] = ()
    """Of a case of composition: top tokens of residual, feed-forward part and output."""


class Judged(NamedTuple):
    """An item, and what somebody says about it."""

    item: Item
    annotator: str
    sheet: Sheet
    role: str = "annotator"
    """`annotator`, `adjudicator` or `machine`."""
