"""Patterns by hand, for tests of what shows and searches them."""

from ffmem.cells import Cell
from ffmem.indexing.store import Index
from ffmem.patterns.store import TOP_TRIGGERS, ExaminedList, Pattern, PatternWriter


def pattern(cell, number=1, description="ends with a date", kind="shallow", sign=1, **fields):
    """Return a pattern of the first three triggers."""
    plain = {"rule": "last-token", "what": "", "ranks": (1, 2, 3)}
    return Pattern(Cell.parse(cell), sign, number, kind, description, **(plain | fields))


def plant(index: Index, source: str, *patterns: Pattern) -> None:
    """Keep some patterns as those of a source, every list of theirs examined."""
    writing = PatternWriter(index, source)
    for layer in range(index.n_layers):
        here = [one for one in patterns if one.cell.layer == layer]
        lists = set()
        for one in here:
            memory = index[str(one.cell)]
            triggers = memory.triggers if one.sign > 0 else memory.negative_triggers
            lists.add(ExaminedList(one.cell, one.sign, min(TOP_TRIGGERS, len(triggers))))
        writing.layer(layer, lists, here)
    writing.commit({})
