"""Studies in memory: sheets by hand, and simulated people who err at known rates."""

import random

from ffmem.annotation.study import (
    COMPOSITION,
    CONTROL,
    TRIGGERS,
    Item,
    Judgment,
    Sheet,
    SheetPattern,
    Text,
)


def item(key, layer=0, kind=TRIGGERS, n=25, memory=0, sign=1):
    """Return an item of n texts."""
    texts = tuple(Text(f"text {i} of {key}", f" {key}", " next", "") for i in range(1, n + 1))
    cell = None if kind == COMPOSITION else f"L{layer}N{memory}"
    return Item(key, kind, cell, sign, texts)


def sheet(*patterns):
    """Return a handed-in sheet of (kind, marks) or (kind, marks, description)."""
    listed = tuple(
        SheetPattern(f"p{i}", one[2] if len(one) > 2 else f"pattern {i}", one[0], frozenset(one[1]))
        for i, one in enumerate(patterns)
    )
    return Sheet(listed, no_pattern=not listed, done=True)


def judged(key, name, *patterns, role="annotator", **about):
    return Judgment(item(key, **about), name, sheet(*patterns), role)


def composed(key, name, related, role="annotator"):
    sheet = Sheet(related=related, done=True)
    return Judgment(item(key, kind=COMPOSITION, n=1), name, sheet, role)


def simulated(error, people=3, keys=60, controls=20, seed=0, n=25):
    """Return the sheets of people who see planted patterns, each mark wrong at a rate.

    Keys hold one shallow pattern in ranks 1–10 and one semantic pattern in ranks 8–17; controls
    hold nothing, and people describe a pattern there at the same rate.
    """
    chance = random.Random(seed)
    found = []
    for place in range(keys):
        for name in "abcdefgh"[:people]:
            marks = [
                {r for r in range(1, n + 1) if (r in true) != (chance.random() < error)}
                for true in (range(1, 11), range(8, 18))
            ]
            kinds = ["semantic" if chance.random() < error else "shallow"]
            kinds += ["shallow" if chance.random() < error else "semantic"]
            patterns = zip(kinds, marks, strict=True)
            found.append(judged(f"k{place:03}", name, *patterns, layer=place % 4, memory=place))
    for place in range(controls):
        for name in "abcdefgh"[:people]:
            patterns = [("shallow", {1, 2, 3})] if chance.random() < error else []
            about = {"layer": place % 4, "kind": CONTROL, "memory": place}
            found.append(judged(f"c{place:03}", name, *patterns, **about))
    return found
