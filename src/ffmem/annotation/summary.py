"""All numbers of a study: Figure 2 of people, their control, their agreement, and the machines'.

summarise(judged, machine) → a dict that is JSON: layers from 0, shares 0–1, None where no number
"""

from collections.abc import Sequence
from typing import Any

from ffmem.annotation.agreement import agreement, agreements
from ffmem.annotation.couple import couples, couples_between
from ffmem.annotation.coverage import Key, difference, judged_keys, shares, voices
from ffmem.annotation.item import COMPOSITION, CONTROL, TRIGGERS, Judged
from ffmem.annotation.questions import related_confusion
from ffmem.experiments.last_layer_composition import PAPER_VALUES
from ffmem.stats import wilson

Row = dict[str, Any]

PROTOCOL = (
    "The paper's protocol asks people. Labels of programs (automatic, explained) are not that"
    " protocol; they stand beside people's for comparison."
)


def summarise(judged: Sequence[Judged], machine: Sequence[Judged] = (), seed: int = 0) -> Row:
    """Return everything that the sheets of a study come to."""
    people = [one for one in judged if one.role == "annotator"]
    real, control = _of_kind(judged, TRIGGERS), _of_kind(judged, CONTROL)
    return {
        "counts": _counts(judged),
        "voices": _voices(real),
        "figure2": [
            *_figure(real, "human", seed),
            *(
                row
                for source in _sources(machine)
                for row in _figure([m for m in machine if m.annotator == source], source, seed)
            ),
        ],
        "control": {
            "real": shares(judged_keys(real), seed),
            "control": shares(judged_keys(control), seed),
            "difference": difference(judged_keys(real), judged_keys(control), seed),
            "false_pattern_rate": shares(judged_keys(control), seed)["with_pattern"],
        },
        "annotators": [_annotator(people, name) for name in _names(people)],
        "agreement": {
            "people": agreements(couples(_of_kind(people, TRIGGERS)), seed),
            **_machines(machine, people, "people", seed),
            **_machines(machine, _adjudicated(real), "adjudicated", seed),
        },
        "composition": _composition(_of_kind(judged, COMPOSITION), seed),
        "protocol": PROTOCOL,
        "seed": seed,
    }


def _figure(judged: Sequence[Judged], source: str, seed: int) -> list[Row]:
    """Return Figure 2 of one source: a row per layer, and one (layer None) of all."""
    keys = judged_keys(judged)
    layers: list[tuple[int | None, list[Key]]] = [
        (layer, [key for key in keys if key.layer == layer])
        for layer in sorted({key.layer for key in keys})
    ]
    return [
        {"layer": layer, "source": source, **shares(own, seed)}
        for layer, own in [*layers, (None, keys)]
    ]


def _machines(
    machine: Sequence[Judged], people: Sequence[Judged], whom: str, seed: int
) -> dict[str, Row]:
    """Return how far each machine agrees with people; nothing where there is no such sheet."""
    real = _of_kind(people, TRIGGERS)
    found = {}
    for source in _sources(machine) if real else []:
        own = [one for one in machine if one.annotator == source]
        found[f"{source}_{whom}"] = agreements(couples_between(own, real), seed)
    return found


def _composition(judged: Sequence[Judged], seed: int) -> Row:
    """Return how many compositions go to a related word, beside the paper's."""
    cases = [
        sum(bool(one.sheet.related) for one in sheets) / len(sheets)
        for sheets in voices(judged).values()
    ]
    related, n = sum(cases), len(cases)
    low, high = wilson(round(related), n)
    people = [one for one in judged if one.role == "annotator"]
    return {
        "related": related / n if n else None,
        "related_low": low,
        "related_high": high,
        "distant": 1 - related / n if n else None,
        "n": n,
        "voices": _voices(judged),
        "agreement": agreement(couples(people), related_confusion, seed),
        "quoted": [value._asdict() for value in PAPER_VALUES],
    }


def _annotator(people: Sequence[Judged], name: str) -> Row:
    """Return what one person handed in, and what that person saw in controls."""
    own = [one for one in people if one.annotator == name]
    real = shares(judged_keys(_of_kind(own, TRIGGERS)))
    control = shares(judged_keys(_of_kind(own, CONTROL)))
    return {
        "name": name,
        "keys": real["keys"],
        "covered": real["covered"],
        "patterns_per_key": real["patterns_per_key"],
        "controls": control["keys"],
        "false_pattern_rate": control["with_pattern"],
        "compositions": len(_of_kind(own, COMPOSITION)),
    }


def _counts(judged: Sequence[Judged]) -> Row:
    keys = {kind: {one.item.key for one in _of_kind(judged, kind)} for kind in _KINDS}
    return {
        "annotators": len(_names([one for one in judged if one.role == "annotator"])),
        "adjudicators": len(_names(_adjudicated(judged))),
        "sheets": len(judged),
        "adjudicated": len({one.item.key for one in _adjudicated(judged)}),
        **{name: len(keys[kind]) for kind, name in _KINDS.items()},
    }


_KINDS = {TRIGGERS: "keys", CONTROL: "controls", COMPOSITION: "compositions"}


def _voices(judged: Sequence[Judged]) -> str:
    """Return in words whose sheets the numbers are from."""
    found = voices(judged).values()
    settled = sum(sheets[0].role == "adjudicator" for sheets in found)
    if not found:
        return "Nothing was handed in."
    return (
        f"{settled} of {len(found)} items count by their adjudicated sheet"
        f", {len(found) - settled} by the mean of their annotators."
    )


def _of_kind(judged: Sequence[Judged], kind: str) -> list[Judged]:
    return [one for one in judged if one.item.kind == kind]


def _adjudicated(judged: Sequence[Judged]) -> list[Judged]:
    return [one for one in judged if one.role == "adjudicator"]


def _names(judged: Sequence[Judged]) -> list[str]:
    return sorted({one.annotator for one in judged})


def _sources(machine: Sequence[Judged]) -> list[str]:
    return list(dict.fromkeys(one.annotator for one in machine))
