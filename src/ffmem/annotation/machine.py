"""What programs say about the items that people judged, in the form of people's sheets.

The detector's patterns (`automatic`) and a language model's (`explained`) of the same lists of
triggers. Automatic labels are not the paper's protocol, which asks people: they stand beside it.
"""

from collections.abc import Iterable
from typing import Any

from ffmem.annotation.agreement import agreements
from ffmem.annotation.couple import couples_between
from ffmem.annotation.item import TRIGGERS, Item, Judged, Shown
from ffmem.annotation.sheet import Sheet, SheetPattern
from ffmem.cells import Cell
from ffmem.indexing.store import Index
from ffmem.patterns.store import LEAST, Patterns, open_patterns

Row = dict[str, Any]

_NO_TEXT = Shown("", None, None, "")


def machine_judged(index: Index, items: Iterable[Item]) -> list[Judged]:
    """Return the machines' sheets of those items whose list they examined."""
    asked = [item for item in items if item.kind == TRIGGERS]
    return [
        Judged(item, patterns.source, _sheet(patterns, item), "machine")
        for patterns in open_patterns(index)
        if patterns.source != "human"
        for item in _examined(patterns, asked)
    ]


def kept_agreements(index: Index, seed: int = 0) -> dict[str, Row]:
    """Return how far each machine's kept patterns agree with people's, where an index has both."""
    sources = {found.source: found for found in open_patterns(index)}
    people = sources.get("human")
    if people is None:
        return {}
    items = [
        Item(f"{one.cell} {one.sign}", TRIGGERS, str(one.cell), one.sign, (_NO_TEXT,) * one.n)
        for layer in range(index.n_layers)
        for one in people.lists(layer)
    ]
    judged = [Judged(item, "human", _sheet(people, item), "adjudicator") for item in items]
    machine = machine_judged(index, items)
    found = {}
    for source in sources:
        own = [one for one in machine if one.annotator == source]
        if own:
            found[f"{source}_human"] = agreements(couples_between(own, judged), seed)
    return found


def _examined(patterns: Patterns, items: list[Item]) -> list[Item]:
    """Return the items whose list of triggers a source examined."""
    layers = {Cell.parse(str(item.cell)).layer for item in items}
    lists = {
        (str(one.cell), one.sign)
        for layer in layers
        if layer < patterns.layout.n_layers
        for one in patterns.lists(layer)
    }
    return [item for item in items if (str(Cell.parse(str(item.cell))), item.sign) in lists]


def _sheet(patterns: Patterns, item: Item) -> Sheet:
    """Return a source's patterns of an item, in the triggers that people saw.

    What fewer than three of those show is no pattern by the rule that people follow.
    """
    found = []
    for one in patterns.of(str(item.cell)):
        marks = frozenset(rank for rank in one.ranks if rank <= len(item.texts))
        if one.sign == item.sign and len(marks) >= LEAST:
            found.append(SheetPattern(f"{one.number}", one.description, one.kind, marks))
    return Sheet(tuple(found), no_pattern=not found, done=True)
