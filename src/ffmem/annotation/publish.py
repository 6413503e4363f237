"""A study's patterns into its index: `DIR/patterns/human`, where pages, search and Figure 2 are.

Of each memory one sheet counts: the adjudicated one; where there is none, that of the annotator who
agrees best with the others (largest mean likeness, ties to the first name). So every pattern was
written by a person, and none is put together by a program.
"""

from collections.abc import Iterable
from typing import Any

from ffmem.annotation.coverage import voices
from ffmem.annotation.item import TRIGGERS, Judged
from ffmem.annotation.matching import likeness
from ffmem.annotation.study import AnnotationStudy
from ffmem.annotation.summary import summarise
from ffmem.cells import Cell
from ffmem.errors import StoreError
from ffmem.indexing.store import Index
from ffmem.patterns.store import Examined, Pattern, Patterns, PatternWriter, fingerprint

RULE = (
    "Of each memory the adjudicated sheet; where there is none, that of the annotator who agrees"
    " best with the others."
)


def publish(study: AnnotationStudy, index: Index) -> Patterns:
    """Write what people saw into the index, with their control and their agreement."""
    refuse_other_index(study, index)
    judged = study.judged()
    sheets = published(judged)
    if not sheets:
        raise StoreError(
            f"Nobody has handed in a memory of the study {study.name} yet: there is nothing to"
            " publish. `ffmem annotate status` tells how far everybody is."
        )
    writing = PatternWriter(index, "human")
    for layer in range(index.n_layers):
        own = [one for one in sheets if _cell(one).layer == layer]
        examined = [Examined(_cell(one), one.item.sign, len(one.item.texts)) for one in own]
        writing.layer(layer, examined, [pattern for one in own for pattern in patterns_of(one)])
    writing.commit(_settings(study, judged, sheets))
    return Patterns(index, "human")


def refuse_other_index(study: AnnotationStudy, index: Index) -> None:
    """Refuse an index whose triggers are not those that people saw."""
    theirs, ours = study.settings["index"]["fingerprint"], fingerprint(index)
    if theirs != ours:
        raise StoreError(
            f"The study {study.name} is of another state of an index ({theirs[:12]}) than"
            f" {index.folder} ({ours[:12]}): its ranks would name other triggers. Give the index"
            " that the study was drawn from."
        )


def published(judged: Iterable[Judged]) -> list[Judged]:
    """Return the one sheet of each memory that counts."""
    found = voices(one for one in judged if one.item.kind == TRIGGERS)
    return [_central(sheets) for sheets in found.values()]


def patterns_of(judged: Judged) -> list[Pattern]:
    """Return a sheet's patterns as an index keeps them, the most marked first."""
    ordered = sorted(judged.sheet.patterns, key=lambda one: -len(one.marks))
    return [
        Pattern(
            cell=_cell(judged),
            sign=judged.item.sign,
            number=number,
            kind=str(one.kind),
            description=one.description.strip(),
            rule="person",
            what="",
            ranks=tuple(sorted(one.marks)),
        )
        for number, one in enumerate(ordered, start=1)
    ]


def _central(sheets: list[Judged]) -> Judged:
    """Return the sheet that is most like the others."""
    return max(
        sheets,
        key=lambda one: sum(likeness(one.sheet, other.sheet) for other in sheets),
    )


def _settings(study: AnnotationStudy, judged: list[Judged], sheets: list[Judged]) -> dict[str, Any]:
    """Return what readers need to judge the patterns; people's names are not among it."""
    found = summarise(judged)
    asked = study.settings["asked"]
    kept = {name: asked.get(name) for name in ("per_layer", "top", "controls", "overlap", "seed")}
    return {
        "protocol": "people",
        "rule": RULE,
        "study": kept,
        "counts": found["counts"],
        "adjudicated": sum(one.role == "adjudicator" for one in sheets),
        "control": found["control"],
        "agreement": found["agreement"]["people"],
    }


def _cell(judged: Judged) -> Cell:
    return Cell.parse(str(judged.item.cell))
