"""The effect of memories on one prompt: ablations that share passes against one whole pass each."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import ffmem
from ffmem.cells import Cell
from ffmem.cli import cli
from ffmem.errors import CorpusError, FfmemError, ModelError, UnknownCell
from ffmem.interventions import partial_forward as module
from ffmem.interventions.edits import Edits
from ffmem.interventions.effect import ablate, effect
from ffmem.interventions.forward import apply_edits, read_prompt
from ffmem.interventions.partial_forward import PartialForward
from tests.interventions.planted import planted, with_start
from tests.tiny import TINY, read, tiny, tiny_tokenizer

IDS = [0, 5, 9, 2, 17, 30, 8]
TARGET = 11


@pytest.fixture(scope="module", params=list(TINY))
def memories(request):
    return read(request.param)


def one_by_one(memories, cells, at, positions=None):
    """One whole forward pass per memory."""
    clean, found = log_p(memories, IDS, at, TARGET), []
    for cell in cells:
        with apply_edits(memories, Edits.of(off=[cell], positions=positions)):
            found.append(log_p(memories, IDS, at, TARGET) - clean)
    return torch.tensor(found, dtype=torch.float64)


@pytest.fixture
def small_batches(monkeypatch):
    """A few rows in each, from several layers."""
    monkeypatch.setattr("ffmem.interventions.partial_forward.BATCH_TOKENS", 30)
    monkeypatch.setattr(module, "OVERHEAD", 1000)


def compare_ablations(memories, at, positions):
    cells = [
        Cell(layer, memory)
        for memory in range(0, memories.layout.widths[0], 7)
        for layer in reversed(memories.layout.memory_layers)
    ]
    steps = []
    found = ablate(PartialForward(memories, IDS, at), TARGET, cells, positions, steps.append)
    expected = one_by_one(memories, cells, at, positions)
    assert float(expected.abs().max()) > 1e-3
    assert float((found - expected).abs().max()) <= 1e-4
    assert sum(steps) == len(cells)


def test_a_change_is_that_of_a_whole_pass(memories, small_batches):
    compare_ablations(memories, 3, None)


@pytest.mark.parametrize("name", ["llama", "opt", "bloom", "falcon", "gemma2"])
def test_memories_are_off_where_they_are_told_to_be(name, small_batches):
    compare_ablations(read(name), 6, [1, 6])


def test_a_memory_that_rests_changes_nothing():
    memories = ffmem.load(tiny("opt"), tiny_tokenizer())
    memories.bank(1).keys.bias[4] = -1000
    found = ablate(PartialForward(memories, IDS, 6), TARGET, [Cell(1, 4)])
    assert abs(float(found[0])) < 1e-6


def cost(layers, cuts, n_layers, n_tokens):
    return sum(
        (n_layers - layers[begin] + 1) * ((end - begin) * n_tokens + module.OVERHEAD)
        for begin, end in pairwise(cuts)
    )


def every_way(n, most):
    """All ways to cut n rows into batches of at most so many."""
    if n == 0:
        return [[0]]
    return [[*cuts, n] for begin in range(max(0, n - most), n) for cuts in every_way(begin, most)]


@given(
    st.lists(st.integers(0, 11), max_size=9).map(sorted), st.integers(1, 9), st.integers(1, 2000)
)
def test_rows_are_cut_the_cheapest_way(layers, most, n_tokens):
    cuts = module.cheapest_cuts(layers, 12, n_tokens, most)
    assert cuts in every_way(len(layers), most)
    cheapest = min(cost(layers, way, 12, n_tokens) for way in every_way(len(layers), most))
    assert cost(layers, cuts, 12, n_tokens) == cheapest


# Effects


TEXT = "w5 w9 w2 w17 w30"


def measured(memories, text=TEXT, **options):
    return effect(with_start(memories), text, **options)


def log_p(memories, ids, at, target):
    return float(memories.logits(torch.tensor([ids]))[0, at].double().log_softmax(dim=0)[target])


@pytest.fixture(scope="module")
def llama():
    return read("llama")


def test_a_planted_memory_comes_first_in_all_three():
    memories = planted()
    found = measured(memories, candidates=10, integrated=True)
    first = found.memories[0]
    assert str(first.cell) == "L1N7"
    assert found.target.token == "w11"
    assert found.target.rank == 1
    assert first.change < -1
    assert first.value_top[0] == "w11"
    for name in ("gradient", "direct", "relp", "integrated"):
        assert min(found.memories, key=lambda m: getattr(m, name)).cell == first.cell


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target": "w20", "position": 3},
        {"position": 4, "positions": [0, -2, -1]},  # of which the last does not reach it
    ],
)
def test_every_number_is_that_of_plain_passes(llama, options):
    found = measured(llama, candidates=12, top=12, cells=["L1N3"], **options)
    ids, at, target = read_prompt(with_start(llama), TEXT).ids, found.position, found.target.id
    clean = log_p(llama, ids, at, target)
    assert at == options.get("position", -1) % len(ids)
    assert found.target.log_probability == pytest.approx(clean, abs=1e-5)
    logits = llama.logits(torch.tensor([ids]))[0, at]
    assert found.target.rank == 1 + int((logits > logits[target]).sum())
    assert [c.id for c in found.top] == logits.argsort(descending=True)[:5].tolist()
    coefficients = llama.trace(torch.tensor([ids]))
    for memory in found.memories:
        with apply_edits(llama, Edits.of(off=[memory.cell], positions=found.positions)):
            change = log_p(llama, ids, at, target) - clean
        assert memory.change == pytest.approx(change, abs=1e-4)
        cell = Cell.parse(memory.cell)
        m = coefficients[cell.layer].coefficients[0, at, cell.memory]
        assert memory.coefficient == pytest.approx(float(m), abs=1e-5)
    sizes = [abs(memory.change) for memory in found.memories]
    assert sizes == sorted(sizes, reverse=True)


def test_all_candidates_count_though_only_the_top_is_shown(llama):
    every = measured(llama, candidates=48, top=48, integrated=True, steps=3)
    some = measured(llama, candidates=48, top=2, integrated=True, steps=3)
    assert some.memories == every.memories[:2]
    assert some.candidates == every.candidates == 48
    assert some.correlation == every.correlation
    for name in ("change", "gradient", "direct", "relp", "integrated"):
        total = sum(getattr(memory, name) for memory in every.memories)
        assert some.sum[name] == pytest.approx(total)
    assert every.correlation["gradient"] > 0.8


def test_a_named_memory_is_measured_alone(llama):
    found = measured(llama, candidates=0, cells=["L0N3"])
    assert [str(memory.cell) for memory in found.memories] == ["L0N3"]
    assert found.correlation == {"gradient": None, "direct": None, "relp": None, "integrated": None}


def test_where_direct_is_not_defined_it_is_null_and_said():
    memories = read("opt post-norm")
    found = measured(memories, candidates=5)
    assert all(memory.direct is None for memory in found.memories)
    assert found.correlation["direct"] is None
    assert found.sum["direct"] is None
    (note,) = (one for one in found.notes if "not defined" in one)
    assert note in str(found)


def test_everything_stands_in_its_json_and_its_table():
    found = measured(planted(), candidates=6, top=3)
    content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert set(content) >= {
        *("prompt", "tokens", "position", "target", "top", "ablation", "candidates"),
        *("correlation", "sum", "memories"),
    }
    assert set(content["target"]) == {"token", "id", "probability", "log_probability", "rank"}
    assert set(content["memories"][0]) == {
        *("cell", "change", "gradient", "direct", "relp", "integrated"),
        *("coefficient", "value_top"),
    }
    assert content["memories"][0]["cell"] == "L1N7"
    assert content["memories"][0]["integrated"] is None
    assert "integrated" not in str(found)
    assert "L1N7" in str(found)


def test_the_page_escapes_what_comes_from_prompt_and_model(llama):
    page = replace(measured(llama, candidates=3), tokens=["<script>"] * 6)._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"cells": ["L9N0"]}, UnknownCell, "L9N0"),
        ({"target": "w5 w6"}, ModelError, "not one token"),
        ({"position": 6}, FfmemError, "has 6 tokens"),
        ({"positions": [9]}, FfmemError, "has 6 tokens"),
        ({"steps": 0}, FfmemError, "steps must be 1"),
        ({"top": 0}, FfmemError, "top must be 1"),
        ({"candidates": 0}, FfmemError, "nothing to measure"),
    ],
)
def test_what_cannot_be_asked_is_refused(llama, options, error, says):
    with pytest.raises(error, match=says):
        measured(llama, **options)


# The command


def run_effect(*arguments, code=0):
    result = CliRunner().invoke(cli, ["effect", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


@pytest.fixture
def facts(tmp_path):
    path = tmp_path / "facts.txt"
    path.write_text("The river\nA town\n")
    return path


def test_a_prompt_gives_a_table_or_json(model_folder):
    options = ("--top", 4, "--candidates", 9, "--cell", "L0N3", "--start", "none")
    table = run_effect(model_folder, "The river", *options)
    content = json.loads(run_effect(model_folder, "The river", *options, "--json"))
    assert len(content["memories"]) == 4
    assert content["candidates"] in (9, 10)
    assert all(memory["cell"] in table for memory in content["memories"])


def test_a_list_of_prompts_gives_a_list(model_folder):
    prompts = ["The river", "A town by the sea"]
    options = {"candidates": 4, "top": 2, "start": "none"}
    found = ffmem.effect(model_folder, prompts, **options)
    assert found == [ffmem.effect(model_folder, one, **options) for one in prompts]


def test_a_position_and_places_of_the_ablation_are_passed_on(model_folder):
    options = ("--start", "none", "--candidates", 3, "--position", 0, "--at", 0, "--json")
    content = json.loads(run_effect(model_folder, "The river", *options))
    assert content["position"] == 0
    assert content["positions"] == [0]


def test_an_index_stands_for_its_model(model_folder, tiny_index):
    options = ("--model", model_folder, "--candidates", 3, "--json")
    content = json.loads(run_effect(tiny_index.folder, "The river", *options))
    assert content["ablation"] == "off"


def test_a_file_of_prompts_gives_a_table_or_json(model_folder, facts):
    options = ("--prompts", facts, "--against", facts, "--candidates", 5, "--start", "none")
    assert "2 prompts of" in run_effect(model_folder, *options)
    content = json.loads(run_effect(model_folder, *options, "--integrated", "--steps", 2, "--json"))
    assert content["file"]["prompts"] == 2
    assert all(abs(memory["difference"]) < 1e-9 for memory in content["memories"])


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("a", "--prompts", "facts.txt"),
        ("a", "--against", "facts.txt"),
        ("--prompts", "facts.txt", "--target", "b"),
        ("--prompts", "facts.txt", "--position", "0"),
        ("--prompts", "facts.txt", "--at", "0"),
        ("a", "--steps", "0"),
    ],
)
def test_what_does_not_go_together_is_wrong_usage(model_folder, arguments):
    assert "Error" in run_effect(model_folder, *arguments, code=2)


def test_errors_are_answers(model_folder, tmp_path):
    with pytest.raises(UnknownCell, match="L99N0"):
        run_effect(model_folder, "The river", "--cell", "L99N0")
    with pytest.raises(CorpusError, match="empty"):
        run_effect(model_folder, "")
    with pytest.raises(CorpusError, match="No such file"):
        run_effect(model_folder, "--prompts", tmp_path / "none.txt")


def test_several_cells_stand_between_commas_and_steps_need_integration(model_folder):
    options = ("--candidates", 0, "--cell", "L0N3,L1N4", "--json")
    found = json.loads(run_effect(model_folder, "The river", *options))
    assert {memory["cell"] for memory in found["memories"]} == {"L0N3", "L1N4"}
    run_effect(model_folder, "The river", "--steps", 5, code=2)


def test_a_memory_off_behind_the_position_is_refused(model_folder):
    with pytest.raises(FfmemError, match="cannot have an effect"):
        run_effect(model_folder, "The river", "--at", 2, "--position", 1)
