"""Writes docs/results/small-relu, -gelu, -swiglu and -moe: four kinds of memory, one report each.

    PYTHONPATH=. .venv/bin/python docs/small_models.py WORK

Models that differ in nothing but the kind of their memories: equal active parameters, the same
tokens in the same order, each kind at its best learning rate in docs/results/memory-kinds. Each is
trained, indexed, searched for patterns and measured in full. What is finished in WORK is not made
again; what was interrupted resumes.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

import ffmem
from docs import memory_kinds
from docs.result_pages import table, write_sections
from ffmem.files import write_text
from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.triggers import trigger_table
from ffmem.patterns.store import open_patterns
from ffmem.progress import Progress
from ffmem.training.config import TrainConfig
from ffmem.training.train import train

RESULTS = Path(__file__).parent / "results"
OUT = RESULTS / "small-models"
KINDS = ("relu", "gelu", "swiglu", "moe")
LAYERS = 8
"""Enough for claims about depth, which take at least 6."""
SENTENCES = 30_000
"""Sentences of the training set that are indexed."""
Row = dict[str, Any]


def config(kind: str) -> TrainConfig:
    """Return the options of a model's training."""
    tuned = json.loads((memory_kinds.OUT / "results.json").read_text("utf-8"))
    return TrainConfig(
        memory=kind,
        match=None if kind == "relu" else "relu",
        learning_rate=memory_kinds.best_rate(tuned, kind),
        **memory_kinds.SETTINGS | {"layers": LAYERS},
    )


def measure(kind: str) -> Row:
    """Train, index and measure one model in this folder; put its report beside the others."""
    name = f"small-{kind}"
    corpora = ffmem.Corpus("wikitext-2:train"), ffmem.Corpus("wikitext-2:valid")
    trained = train(config(kind), corpora[0], Path(name), corpora[1], progress=Progress())
    corpus = ffmem.Corpus("wikitext-2:train", limit=SENTENCES)
    index = ffmem.index(name, corpus, f"{name}-index", threads=1, progress=Progress())
    if not open_patterns(index):
        ffmem.detect(index, progress=Progress())
    report = Path(f"{name}-report")
    ffmem.report(index, report, corpora[1], threads=1, progress=Progress())
    copy_report(report, RESULTS / name)
    return {
        "kind": kind,
        "parameters": trained.plan.parameters,
        "active_parameters": trained.plan.active_parameters,
        "memories": trained.plan.memories,
        "learning_rate": config(kind).learning_rate,
        "tokens": trained.tokens,
        "valid_perplexity": trained.last_valid_perplexity,
        "indexed_tokens": index.manifest.corpus.tokens,
        "all_memories": len(index),
        "with_full_list": count_full(index),
    }


def count_full(index: ffmem.Index) -> int:
    """Count the memories that enough sentences trigger to fill their list of triggers."""
    signs = (1, -1) if index.manifest.model.gated else (1,)
    full = 0
    for layer in index.layout.memory_layers:
        lists = [trigger_table(index, layer, sign).prefixes[:, -1] for sign in signs]
        full += int((np.stack(lists) != NO_PREFIX).any(axis=0).sum())
    return full


def copy_report(report: Path, folder: Path) -> None:
    """Copy a report without its page: Markdown, and JSON, SVG and PDF of its experiments."""
    folder.mkdir(exist_ok=True)
    for path in report.iterdir():
        if path.suffix in (".md", ".json", ".svg", ".pdf"):
            shutil.copy(path, folder)


def sections(found: Row) -> dict[str, str]:
    """Return the tables of the page."""
    head = ["model", "active parameters", "all", "memories per layer", "rate", "perplexity"]
    head += ["memories with 50 triggers"]
    rows = [head]
    for model in found["models"]:
        kind = model["kind"]
        rows.append(
            [
                f"[small-{kind}](../small-{kind}/report.md)",
                f"{model['active_parameters']:,}",
                f"{model['parameters']:,}",
                memory_kinds.memories_shown(kind, model),
                f"{model['learning_rate']:g}",
                f"{model['valid_perplexity']:.1f}",
                f"{model['with_full_list']:,} of {model['all_memories']:,}",
            ]
        )
    return {"models": table(rows)}


def main() -> None:
    """Make what is missing, then write the page."""
    work = Path(sys.argv[1])
    work.mkdir(parents=True, exist_ok=True)
    os.chdir(work)  # so that the results name no folder of this machine
    found = {"models": [measure(kind) for kind in KINDS]}
    OUT.mkdir(exist_ok=True)
    write_text(OUT / "results.json", json.dumps(found, indent=1) + "\n")
    write_sections(OUT / "README.md", sections(found))


if __name__ == "__main__":
    main()
