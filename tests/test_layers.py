"""Imports point down: a module imports only what stands above it in this list."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "ffmem"

ORDER = [
    *("errors", "cells", "files", "progress", "records", "registry"),
    *("models.argument", "models.tokenizer"),
    *("corpus.sources", "corpus.sentences", "corpus.wikitext", "corpus.corpus"),
    *("models.adaptive", "models.fairseq", "models.families", "models.structure", "models.head"),
    *(
        "models.modules",
        "models.trace",
        "models.memories",
        "models.selfcheck",
        "models.describe",
        "models.load",
        "models.neighbours",
    ),
    *("indexing.tables", "indexing.sentences", "indexing.memory", "indexing.manifest"),
    *("indexing.store", "indexing.triggers", "indexing.statistics", "indexing.sample"),
    *("indexing.found", "indexing.contents", "indexing.hashes", "indexing.leases"),
    *("indexing.values", "indexing.options", "indexing.settings", "indexing.finished"),
    "indexing.segments",
    *("indexing.start", "indexing.running", "indexing.scan", "indexing.build", "indexing.merge"),
    *("indexing.extend", "indexing.expression", "indexing.words", "indexing.excerpt"),
    *("indexing.searchable", "indexing.search", "indexing.neuronpedia", "indexing.export"),
    "indexing.verify",
    *(
        "experiments.names",
        "experiments.depth",
        "experiments.quoted",
        "experiments.spread",
        "experiments.result",
    ),
    *("experiments.vocabulary", "experiments.drawn", "experiments.heads"),
    *("experiments.value_readings", "experiments.value_tops", "experiments.activity"),
    *("experiments.softmax_memory", "experiments.predictions", "experiments.votes"),
    *("experiments.inference", "experiments.cost", "experiments.study", "experiments.agreement"),
    *("experiments.predictive", "experiments.removal", "experiments.section5"),
    *("experiments.composition", "experiments.catalogue"),
    *("reporting.numbers", "reporting.markdown", "reporting.limits", "reporting.style"),
    *("reporting.marks", "reporting.key_charts", "reporting.mixing_charts", "reporting.charts"),
    *("reporting.key_findings", "reporting.mixing_findings", "reporting.judges"),
    *("reporting.claims", "reporting.findings", "reporting.drawing", "reporting.commands"),
    *("reporting.examples", "reporting.page", "reporting.report"),
    *("causal.edits", "causal.editing", "causal.prompt", "causal.generation", "causal.tabled"),
    *("causal.grid", "causal.traced"),
    *("causal.parts", "causal.along"),
    *("causal.trace", "causal.opened", "causal.upward", "causal.likelihood", "causal.ablation"),
    *("causal.estimates", "causal.candidates", "causal.affected", "causal.effect"),
    *("causal.facts", "causal.known", "causal.knowledge"),
    *("causal.weights", "causal.patch", "causal.checkpoint", "causal.side_effects", "causal.kept"),
    *("comparing.overlap", "comparing.matching", "comparing.value_change", "comparing.changes"),
    *("comparing.changed", "comparing.comparison", "comparing.chart", "comparing.compare"),
    *("web.limits", "web.answers", "web.state", "web.library", "web.worker", "web.site"),
    *("web.vega", "web.layer_table", "web.specs", "web.figures", "web.layers", "web.home"),
    *("web.snippets", "web.memory_view", "web.memory_page", "web.grouped", "web.searching"),
    *("web.runs", "web.trace_answers", "web.traced_page", "web.tracing", "web.tray"),
    *("web.interface", "web.guard", "web.app", "web.serving"),
    *("api", "acting", "commands.options", "commands.edit_options", "commands.indexing"),
    *("commands.looking", "commands.measuring", "commands.tracing", "commands.effects"),
    *("commands.editing", "commands.comparing", "commands.serving"),
    *("demo", "cli", "__main__", "__init__"),
]

UPWARDS = {("models.memories", "models.selfcheck")}
"""Memories check themselves when they are made: the one circle, within a function."""


def room(path):
    """Return the dotted name of a module below ffmem."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def imported(path):
    """Return the modules of ffmem that a file imports, at its top, in functions, or for types."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ffmem":
            below = (node.module or "").removeprefix("ffmem").removeprefix(".")
            for alias in node.names:
                inner = f"{below}.{alias.name}".removeprefix(".")
                yield inner if inner in ORDER else below
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "ffmem" for alias in node.names), path


FILES = [path for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]


@pytest.mark.parametrize("path", [*FILES, SOURCE / "__init__.py"], ids=room)
def test_a_module_imports_only_modules_below_it(path):
    for below in imported(path):
        if (room(path), below) in UPWARDS:
            continue
        assert ORDER.index(below) < ORDER.index(room(path)), f"{room(path)} imports {below}"


def test_every_module_has_its_place():
    assert sorted(map(room, FILES)) == sorted(ORDER[:-1])
    assert len(set(ORDER)) == len(ORDER)


def test_no_file_is_longer_than_400_lines():
    for path in FILES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, path
