"""An index as plain files for other programs.

jsonl         one line per memory, as `ffmem show --json` prints it
csv           one row per trigger, with the top tokens of the value; texts that a spreadsheet would
              take for a formula get an apostrophe in front
neuronpedia   a folder in the layout that Neuronpedia exports and imports
"""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

from ffmem.errors import FfmemError
from ffmem.files import check_output_file, committing, csv_row
from ffmem.indexing.memory import Kind, Memory
from ffmem.indexing.neuronpedia import export_neuronpedia
from ffmem.indexing.store import Index
from ffmem.progress import Step

FORMATS = ("jsonl", "csv", "neuronpedia")

COLUMNS = [
    *("cell", "layer", "memory", "list", "rank", "coefficient", "gate", "sentence", "length"),
    *("prefix", "last_token", "next_token", "value_top", "value_bottom"),
]


def columns(kind: Kind) -> list[str]:
    """Return the columns of a CSV; some kinds of memory have more of them."""
    own = [*COLUMNS]
    if kind.head_slot(0) is not None:
        own.append("place")
    if not kind.has_values:
        own.append("value_note")
    return own


def export(index: Index, to: str, out: Path, step: Step) -> None:
    """Write every memory of an index to a file, or to a folder for Neuronpedia."""
    if to not in FORMATS:
        raise FfmemError(f"--to {to}: unknown format. Give one of {', '.join(FORMATS)}.")
    if to == "neuronpedia":
        export_neuronpedia(index, out, step)
        return
    check_output_file(out)
    # Line ends within a text must not be translated; a CSV writes its own between rows.
    with committing(out) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        if to == "jsonl":
            for memory in _memories(index, step):
                file.write(json.dumps(memory.to_dict(), ensure_ascii=False) + "\n")
            return
        rows = csv.DictWriter(file, columns(index.manifest.model.kind))
        rows.writeheader()
        for memory in _memories(index, step):
            rows.writerows(map(csv_row, _rows(memory)))


def _memories(index: Index, step: Step) -> Iterator[Memory]:
    for layer in range(index.n_layers):
        for memory in index.memories(layer):
            yield memory
            step(1)


def _rows(memory: Memory) -> Iterator[dict[str, object]]:
    """Yield a row per trigger of a memory, or one without a trigger if it has none."""
    ends = {
        "value_top": " ".join(
            json.dumps(t.token, ensure_ascii=False) for t in memory.value.top[:10]
        ),
        "value_bottom": " ".join(
            json.dumps(t.token, ensure_ascii=False) for t in memory.value.bottom[:10]
        ),
    }
    name: dict[str, object] = {
        "cell": str(memory.cell),
        "layer": memory.cell.layer,
        "memory": memory.cell.memory,
    }
    if memory.head_slot is not None:
        name["place"] = str(memory.head_slot)
    if not memory.kind.has_values:
        name["value_note"] = memory.value.note
    lists = (("positive", memory.triggers), ("negative", memory.negative_triggers))
    if not any(triggers for _, triggers in lists):
        yield {**name, **ends}
    for kind, triggers in lists:
        for trigger in triggers:
            shown = trigger._asdict()
            del shown["rest"]
            yield {**name, "list": kind, **shown, **ends}
