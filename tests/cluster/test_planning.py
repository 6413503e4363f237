"""What a plan says is what a run takes."""

import json
from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ffmem.cli import cli
from ffmem.cluster.limits import duration, limits, size
from ffmem.cluster.planned import WORDS, count, planned, told
from ffmem.cluster.planning import Asked, index_bytes, plan, segment_bytes, tree_size
from ffmem.cluster.shape import NAMED, Shape, shape_of
from ffmem.cluster.shared import SharedFolder
from ffmem.errors import CorpusError, FfmemError, ModelError
from ffmem.indexing.found import Found
from ffmem.indexing.sample import Sample
from ffmem.indexing.segments import Segments
from ffmem.indexing.statistics import Statistics
from ffmem.indexing.tables import layer_file, read_columns
from ffmem.indexing.tree import Node, Tree
from ffmem.indexing.triggers import Triggers
from tests.conftest import OURS, text_model
from tests.tiny import tiny

PUBLIC = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "smollm2-135m": 134_515_008,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
}
"""Parameters of the public checkpoints."""

ASKED = Asked(shape=NAMED["gpt2"], tokens=10**9, workers=100, rate=1000.0)


@pytest.mark.parametrize("name", NAMED)
def test_named_shapes_have_the_parameters_of_the_public_models(name):
    assert NAMED[name].parameters == pytest.approx(PUBLIC[name], rel=1.5e-3)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "phi3", "opt"])
def test_a_folder_has_the_shape_of_its_model(name, tmp_path):
    model = tiny(name)
    model.config.save_pretrained(tmp_path)
    shape = shape_of(str(tmp_path))

    assert shape.parameters == sum(weight.numel() for weight in model.parameters())
    assert shape.layers == model.config.num_hidden_layers
    assert shape.hidden == 16
    assert shape.memories == 24
    assert shape.gated == (name in {"llama", "gemma2", "phi3"})
    assert 0 < shape.embedding_parameters < shape.parameters


@pytest.mark.parametrize("name", OURS.values())
def test_values_are_planned_for_where_there_are_any(name, tmp_path):
    tiny(name).config.save_pretrained(tmp_path)
    shape = shape_of(str(tmp_path))
    assert shape.has_values == (name != OURS["lambda"]) == (index_bytes(shape, 5)["values"] > 0)


def test_a_shape_that_nobody_knows_is_named_beside_the_known_ones(tmp_path):
    with pytest.raises(ModelError, match=r"no shape 'gpt9'.* gpt2, gpt2-xl"):
        shape_of("gpt9")


def test_the_numbers_of_a_real_index_have_the_bytes_that_were_planned(index):
    shape = shape_of_index(index)
    parts = index_bytes(shape, index.manifest.t)

    for kind in ("triggers", "values", "stats"):
        columns = [read_columns(index.folder / layer_file(kind, i)) for i in range(shape.layers)]
        found = sum(column.nbytes for layer in columns for column in layer.values())
        assert found == parts[kind], kind
    sampled = [read_columns(index.folder / layer_file("samples", i)) for i in range(shape.layers)]
    found = sum(column.nbytes for layer in sampled for column in layer.values())
    n_sampled = sampled[0]["coefficient"].shape[1]
    assert found == shape.all_memories * (4 + 4 * n_sampled)  # 512 in all but tiny corpora
    assert n_sampled <= 512


def shape_of_index(index):
    model = index.manifest.model
    return Shape(
        name="tiny",
        layers=model.layers,
        memories=model.memories,
        hidden=model.hidden,
        heads=2,
        key_heads=2,
        head_size=8,
        vocabulary=model.vocabulary,
        gated=model.gated,
        tied=True,
    )


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("filled", "sampled"), [(50, 512), (10, 3), (0, 0)])
def test_a_real_segment_has_the_bytes_that_were_planned(gated, filled, sampled, tmp_path):
    shape = replace(NAMED["gpt2"], layers=3, memories=500, gated=gated)
    segments = Segments(SharedFolder.at(tmp_path), "run", 50, gated)
    segments.commit(Node(0, 0), found(shape, 50, filled, sampled).layers())

    real = (tmp_path / segments.name(Node(0, 0))).stat().st_size
    assert segment_bytes(shape, shape.lists * filled, sampled) == pytest.approx(real, rel=0.1)


def found(shape, t, filled, sampled):
    """Return what a lease might have found: some slots filled, some prefixes of the sample."""
    random = np.random.default_rng(0)
    lists = []
    for _ in range(shape.lists):
        one = Triggers.empty(shape.layers, shape.memories, t)
        one.coefficients[..., :filled] = 1.0
        one.prefixes[..., :filled] = random.integers(0, 10**9, one.prefixes[..., :filled].shape)
        lists.append(one)
    numbers = np.arange(sampled)
    coefficients = random.random((shape.layers, shape.memories, sampled), np.float32)
    return Found(
        lists[0],
        lists[1] if shape.gated else None,
        Statistics.empty(shape.layers, shape.memories),
        Sample(numbers.astype(np.uint64), numbers, coefficients),
    )


@given(st.integers(1, 3000))
def test_a_tree_has_the_levels_and_merges_that_were_planned(leases):
    tree = Tree(leases)
    merges = 0
    below = [tree.root]
    while below:
        merges += sum(node.level > 0 for node in below)
        below = [child for node in below if node.level > 0 for child in tree.children(node)]

    assert tree_size(leases) == (tree.root.level, merges)


def test_segments_of_a_real_run_are_written_as_planned(tmp_path, tokenizer, monkeypatch):
    """A run of many leases, whose segments shrink as thresholds rise."""
    import ffmem

    text = tmp_path / "text.txt"
    random = np.random.default_rng(0)
    rows = random.choice(["cat", "mat", "while", "birds", "flew", "over", "old", "green"], (600, 6))
    text.write_text("\n".join(" ".join(row) for row in rows) + "\n")
    written = []
    commit = Segments.commit

    def counting(self, node, layers):
        commit(self, node, layers)
        written.append((node.level, (self.shared.path / self.name(node)).stat().st_size))

    monkeypatch.setattr(Segments, "commit", counting)
    memories = ffmem.load(text_model("gpt2"), tokenizer)
    corpus = ffmem.Corpus(str(text), unit="line")
    made = ffmem.index(memories, corpus, tmp_path / "index", t=4, threads=1, lease_tokens=100)

    shape = shape_of_index(made)
    known = made.manifest.corpus
    asked = Asked(
        shape=shape,
        tokens=known.tokens,
        lease_tokens=ceil(known.tokens / sum(level == 0 for level, _ in written)),
        t=4,
        sentence_tokens=known.tokens / known.sentences,
    )
    foreseen = plan(asked)
    assert foreseen.leases == sum(level == 0 for level, _ in written)
    assert foreseen.merges == sum(level > 0 for level, _ in written)
    leases = sum(n for level, n in written if level == 0)
    assert foreseen.traffic["segments_of_leases"] == pytest.approx(leases, rel=0.25)
    merged = sum(n for level, n in written if level > 0)
    assert foreseen.traffic["merges_written"] == pytest.approx(merged, rel=0.25)


def test_more_of_anything_never_takes_less():
    base = plan(ASKED)
    for change in ({"tokens": 10**10}, {"t": 100}, {"shape": NAMED["gpt2-xl"]}):
        more = plan(replace(ASKED, **change))
        assert more.disk["index"] >= base.disk["index"], change
        assert more.traffic["merges_read"] >= base.traffic["merges_read"], change
        assert more.memory["worker"] >= base.memory["worker"], change
        assert more.seconds["in_all"] >= base.seconds["in_all"], change


def test_more_workers_read_faster_and_the_worker_and_the_index_stay_as_they_are():
    few, many = plan(replace(ASKED, workers=10)), plan(replace(ASKED, workers=1000))

    assert few.seconds["reading"] == pytest.approx(100 * many.seconds["reading"])
    assert few.memory["worker"] == many.memory["worker"]
    assert few.disk["index"] == many.disk["index"]
    assert few.disk["shared_folder"] < many.disk["shared_folder"]


def test_the_speed_follows_from_the_operations_where_it_is_not_given():
    shape = NAMED["llama-8b"]
    asked = Asked(shape=shape, tokens=10**9, flops=1e14, sentence_tokens=32.0)

    assert asked.tokens_per_second == pytest.approx(1e14 / shape.flops(16.0))
    assert replace(asked, rate=7.0).tokens_per_second == 7.0


def test_a_trillion_tokens_break_the_sentences_first_and_longer_leases_spare_the_leader():
    asked = replace(ASKED, tokens=10**12, workers=10_000, rate=1e5)
    said = limits(asked, plan(asked))

    assert said[0].startswith("sentences.parquet would have 244,140,625 row groups")
    assert "--lease-tokens 524288" in said[1]
    longer = replace(asked, lease_tokens=524_288)
    assert not any("leader" in one for one in limits(longer, plan(longer)))


def test_a_laptops_run_has_nothing_to_beware_of():
    asked = Asked(shape=NAMED["smollm2-135m"], tokens=10**6, rate=750.0)

    assert limits(asked, plan(asked)) == []


def test_a_corpus_is_taken_by_name_number_index_or_count(index, corpus_file, model_folder):
    assert count("wikitext-103", None, "gpt2").tokens == int(WORDS["wikitext-103"] * 1.15)
    assert count("1e12", None, "gpt2").tokens == 10**12
    assert count(None, 5.0, "gpt2").tokens == 5
    assert count(str(index.folder), None, "gpt2").tokens == index.manifest.corpus.tokens
    counted = count(str(corpus_file), None, str(model_folder))
    assert counted.how == "counted"
    assert counted.tokens > 0
    assert "words, counted" in count(str(corpus_file), None, "gpt2").how
    with pytest.raises(CorpusError, match="Of which corpus"):
        count(None, None, "gpt2")
    with pytest.raises(CorpusError, match="at least 1"):
        count(None, 0.0, "gpt2")


def test_the_speed_of_a_model_is_measured_on_request(model_folder):
    found = planned(str(model_folder), "1e6", measure=True)

    assert found.asked.rate > 100
    assert "measured here" in found.speed
    with pytest.raises(ModelError, match="'gpt2' is only a shape"):
        planned("gpt2", "1e6", measure=True)


def test_without_a_speed_the_time_is_said_to_be_unknown():
    found = planned("gpt2", "wikitext-2")

    assert found.plan.seconds == {}
    assert "Time     unknown: give --tokens-per-second, --flops or --measure." in told(found)


@pytest.mark.parametrize("option", ["tokens_per_second", "flops", "bandwidth"])
def test_a_speed_of_nothing_is_refused(option):
    with pytest.raises(FfmemError, match="0 was given"):
        planned("gpt2", "1e6", **{option: 0.0})


def test_the_command_prints_lines_or_json():
    arguments = ["llama-70b", "1e12", "--flops", "4e14", "--workers", "10000", "-t", "50"]
    lines = CliRunner().invoke(cli, ["plan", *arguments])
    assert lines.exit_code == 0
    assert "Longest  preparing" in lines.output

    printed = json.loads(CliRunner().invoke(cli, ["plan", *arguments, "--json"]).output)
    assert printed["leases"] == ceil(10**12 / 65_536)
    assert printed["model"]["memories"] == 28_672
    assert set(printed) >= {"memory", "disk", "traffic", "seconds", "bottleneck", "limits"}


def test_sizes_and_times_are_written_as_people_do():
    assert [size(n) for n in (12, 1_150_000_000, 999_900, 3.1e18)] == [
        *("12 B", "1.15 GB", "1 MB", "3,100 PB")
    ]
    assert [duration(n) for n in (90, 600, 36_000, 86_400 * 10, 86_400 * 3652.5)] == [
        *("90 s", "10 min", "10 h", "10 days", "10 years")
    ]
