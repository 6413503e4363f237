"""Patterns kept in an index without looking at its texts, for tests."""

import shutil

from ffmem.cells import Cell
from ffmem.indexing.store import Index
from ffmem.patterns.store import TOP_TRIGGERS, ExaminedList, Pattern, PatternWriter, main_sign


def copied(index, folder):
    """Return a copy of an index that a test may change."""
    return Index(shutil.copytree(index.folder, folder))


def listed(index, cell, sign):
    memory = index.memory(Cell(*cell))
    return (memory.triggers if sign > 0 else memory.negative_triggers)[:TOP_TRIGGERS]


def keep(index, source, seen, settings=None):
    """Keep `seen(cell, sign, n)`, a list of (kind, ranks), of both lists of every memory."""
    writing = PatternWriter(index, source)
    for layer in range(index.n_layers):
        examined, found = [], []
        for memory in range(index.layout.widths[0]):
            cell = Cell(layer, memory)
            for sign in (1, -1) if index.manifest.model.gated else (1,):
                n = len(listed(index, cell, sign))
                examined.append(ExaminedList(cell, sign, n))
                for number, (kind, ranks) in enumerate(seen(cell, sign, n), start=1):
                    words = f"{kind} {number} of {cell}"
                    ranks = tuple(sorted(ranks))
                    found.append(Pattern(cell, sign, number, kind, words, "last-token", "w", ranks))
        writing.layer(layer, examined, found)
    writing.commit(settings or {"detector": 1})


def first_three(cell, sign, n):
    """See a shallow pattern in the first three triggers of every list, + a semantic one of odd."""
    if n < 3:
        return []
    both = [("shallow", range(1, 4)), ("semantic", range(2, n + 1))]
    return both if cell.memory % 2 and n > 3 else both[:1]


def signs(index):
    return [main_sign(index, layer) for layer in range(index.n_layers)]
