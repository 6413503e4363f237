"""Imports point down: a module imports only what stands above it in this list."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "ffmem"

ORDER = [
    *("errors", "cells", "counted", "files", "progress", "records", "registry"),
    *("cluster.task", "cluster.schedule", "cluster.shared", "cluster.object_store"),
    *(
        "cluster.orders",
        "cluster.pieces",
        "cluster.crew",
        "cluster.here",
        "cluster.process",
        "cluster.processes",
    ),
    *("cluster.ray_connection", "cluster.ray_worker", "cluster.ray_crew", "cluster.hiring"),
    *("cluster.status", "cluster.leader", "cluster.telling", "cluster.simulated"),
    *("mini_wiki.folder", "models.argument", "models.tokenizer"),
    *("corpus.sources", "corpus.sentences", "corpus.wikitext", "corpus.corpus"),
    *("networks.config", "networks.drawn", "networks.slots", "networks.seen", "networks.stream"),
    *("networks.bands", "networks.attention", "networks.memory", "networks.feed_forward"),
    *("networks.persistent", "networks.lambda_layer", "networks.layer", "networks.model"),
    "networks.exact_view",
    *("models.fairseq", "models.families", "models.split", "models.threads"),
    *("models.structure", "models.head"),
    *(
        "models.modules",
        "models.trace",
        "models.memories",
        "models.selfcheck",
        "models.describe",
        "models.load",
        "models.neighbours",
    ),
    *(
        "indexing.kind",
        "indexing.tables",
        "indexing.sentences",
        "indexing.memory",
        "indexing.manifest",
    ),
    *("indexing.store", "indexing.standing"),
    *("indexing.triggers", "indexing.statistics", "indexing.sample"),
    *("indexing.found", "indexing.contents", "indexing.hashes", "indexing.leases"),
    *("indexing.values", "indexing.options", "indexing.settings", "indexing.finished"),
    *("indexing.tree", "indexing.segments", "indexing.orders", "indexing.suspect"),
    *("indexing.work", "indexing.start", "indexing.prepare", "indexing.running", "indexing.scan"),
    *("indexing.worker", "indexing.build", "indexing.merge"),
    *("cluster.shape", "cluster.planning", "cluster.limits", "cluster.planned"),
    *("indexing.extend", "indexing.expression", "indexing.words", "indexing.excerpt"),
    *("indexing.searchable", "indexing.search", "indexing.neuronpedia", "indexing.export"),
    "indexing.verify",
    *("patterns.pattern", "patterns.kept", "patterns.main_list", "patterns.shown"),
    *("patterns.searching", "patterns.export", "patterns.significance", "patterns.units"),
    *("patterns.shapes", "patterns.chunk", "patterns.code_table", "patterns.vocabulary"),
    *("patterns.corpus_view", "patterns.lists", "patterns.shallow", "patterns.alternatives"),
    *("patterns.selection", "patterns.topics", "patterns.lsa", "patterns.embeddings"),
    *("patterns.around", "patterns.closeness", "patterns.describing", "patterns.examining"),
    *("patterns.layer_worker", "patterns.detected", "patterns.telling", "patterns.detect"),
    *("patterns.prompts", "patterns.endpoint", "patterns.answers", "patterns.named"),
    *("patterns.blind_test", "patterns.explain"),
    *(
        "experiments.kinds",
        "experiments.names",
        "experiments.depth",
        "experiments.quoted",
        "experiments.spread",
        "experiments.result",
        "experiments.settings",
        "experiments.softmax_view",
    ),
    *("annotation.sheet", "annotation.item", "annotation.judges", "annotation.plan"),
    *("annotation.database", "annotation.schema", "annotation.migrations.env"),
    *(f"annotation.migrations.versions.{step}" for step in ("v0001_lists", "v0002_composition")),
    *("annotation.tables", "annotation.founding", "annotation.revisions", "annotation.rows"),
    *("annotation.study", "annotation.exchange", "annotation.bootstrap", "annotation.kappa"),
    *("annotation.alpha", "annotation.matching", "annotation.questions", "annotation.couple"),
    *("annotation.agreement", "annotation.coverage", "annotation.machine"),
    *("annotation.summary", "annotation.publish", "experiments.pattern_shares"),
    *("experiments.reading", "experiments.prompt_sample", "experiments.top_triggers"),
    *("experiments.value_readings", "experiments.value_tops", "experiments.activity"),
    *("experiments.softmax_memory", "experiments.predictions", "experiments.projector"),
    "experiments.token_hits",
    *("experiments.evaluation", "experiments.sequences"),
    *("experiments.context", "experiments.agreement"),
    *("experiments.predictive", "experiments.removal", "experiments.section5"),
    *("experiments.composition", "experiments.catalogue"),
    *("reporting.numbers", "reporting.markdown", "reporting.limits", "reporting.style"),
    *("reporting.marks", "reporting.key_charts", "reporting.mixing_charts", "reporting.charts"),
    *("reporting.key_findings", "reporting.mixing_findings", "reporting.judges"),
    "reporting.pattern_judges",
    *("reporting.claims", "reporting.findings", "reporting.drawing", "reporting.commands"),
    *("reporting.examples", "reporting.pattern_examples", "reporting.page", "reporting.report"),
    "annotation.report",
    *("training.settings", "training.schedule", "training.optimizer", "training.blocks"),
    *("training.trigram", "training.curve", "training.live", "training.evaluation"),
    *("training.checkpoint", "training.loop", "training.run", "training.network"),
    *("training.matching", "training.vocabulary", "training.stream", "training.record"),
    *("training.place", "training.telling", "training.card", "training.chart"),
    *("training.finish", "training.train", "mini_wiki.publish"),
    *("causal.source", "causal.dictionary", "causal.rows", "causal.prompt_values"),
    *("causal.edits", "causal.editing", "causal.prompt", "causal.generation", "causal.tabled"),
    *("causal.grid", "causal.traced"),
    *("causal.parts", "causal.along"),
    *("causal.trace", "causal.opened", "causal.upward", "causal.likelihood", "causal.ablation"),
    *("causal.estimates", "causal.candidates", "causal.affected", "causal.effect"),
    *("causal.facts", "causal.known", "causal.knowledge"),
    *("causal.weights", "causal.patch", "causal.checkpoint", "causal.side_effects", "causal.kept"),
    *("comparing.overlap", "comparing.matching", "comparing.value_change", "comparing.changes"),
    *("comparing.changed", "comparing.comparison", "comparing.chart", "comparing.compare"),
    *("web.layer_spread", "web.limits", "web.answers", "web.state", "web.library", "web.worker"),
    *("web.studies", "web.site", "web.pattern_view"),
    *("web.vega", "web.layer_table", "web.specs", "web.figures", "web.layers", "web.home"),
    *("web.snippets", "web.memory_view", "web.memory_page", "web.grouped", "web.searching"),
    *("web.runs", "web.trace_answers", "web.traced_page", "web.tracing", "web.tray"),
    *("web.entry", "web.answering", "web.item_view", "web.guide", "web.sheet_form"),
    *("web.sending", "web.entrance", "web.annotating", "web.aligned", "web.adjudicating"),
    *("web.interface", "web.guard", "web.app", "web.serving"),
    *(
        "api",
        "measuring",
        "acting",
        "patterning",
        "commands.options",
        "commands.edit_options",
        "commands.indexing",
    ),
    *("commands.looking", "commands.measuring", "commands.tracing", "commands.effects"),
    *("commands.editing", "commands.comparing", "commands.serving"),
    *("commands.patterning", "commands.planning", "commands.annotating", "commands.training"),
    *("demo", "cli", "__main__", "__init__"),
]

UPWARDS = {
    ("models.memories", "models.selfcheck"),
    ("cluster.shared", "cluster.object_store"),
}
"""The circles, each within a function: memories check themselves when they are made, and a URL
gives the other kind of shared folder."""


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
