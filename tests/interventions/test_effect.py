"""The effect of memories on one prompt: planted, against plain passes, and what is refused."""

import json
from dataclasses import replace

import pytest
import torch

import ffmem
from ffmem.errors import FfmemError, ModelError, UnknownCell
from ffmem.interventions.edits import Edits
from ffmem.interventions.effect import effect
from ffmem.interventions.forward import apply_edits
from ffmem.interventions.prompts import read_prompt
from tests.interventions.planted import planted, with_start
from tests.tiny import tiny, tiny_tokenizer

TEXT = "w5 w9 w2 w17 w30"


def measured(memories, text=TEXT, **options):
    return effect(with_start(memories), text, **options)


def log_p(memories, ids, at, target):
    return float(memories.logits(torch.tensor([ids]))[0, at].double().log_softmax(dim=0)[target])


@pytest.fixture(scope="module")
def llama():
    return ffmem.load(tiny("llama"), tiny_tokenizer())


def test_a_planted_memory_comes_first_in_all_three():
    memories = planted()
    found = measured(memories, candidates=10, integrated=True)
    first = found.memories[0]
    assert str(first.cell) == "L1N7"
    assert found.target.token == "w11"
    assert found.target.rank == 1
    assert first.change < -1
    assert first.value_top[0] == "w11"
    for name in ("gradient", "direct", "integrated"):
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
        m = coefficients[memory.cell.layer].coefficients[0, at, memory.cell.memory]
        assert memory.coefficient == pytest.approx(float(m), abs=1e-5)
    sizes = [abs(memory.change) for memory in found.memories]
    assert sizes == sorted(sizes, reverse=True)


def test_all_candidates_count_though_only_the_top_is_shown(llama):
    every = measured(llama, candidates=48, top=48, integrated=True, steps=3)
    some = measured(llama, candidates=48, top=2, integrated=True, steps=3)
    assert some.memories == every.memories[:2]
    assert some.candidates == every.candidates == 48
    assert some.correlation == every.correlation
    for name in ("change", "gradient", "direct", "integrated"):
        total = sum(getattr(memory, name) for memory in every.memories)
        assert some.sums[name] == pytest.approx(total)
    assert every.correlation["gradient"] > 0.8


def test_a_named_memory_is_measured_alone(llama):
    found = measured(llama, candidates=0, cells=["L0N3"])
    assert [str(memory.cell) for memory in found.memories] == ["L0N3"]
    assert found.correlation == {"gradient": None, "direct": None, "integrated": None}


def test_where_direct_is_not_defined_it_is_null_and_said():
    memories = ffmem.load(tiny("opt post-norm"), tiny_tokenizer())
    found = measured(memories, candidates=5)
    assert all(memory.direct is None for memory in found.memories)
    assert found.correlation["direct"] is None
    assert found.sums["direct"] is None
    assert "not defined" in found.notes[0]
    assert found.notes[0] in str(found)


def test_everything_stands_in_its_json_and_its_table():
    found = measured(planted(), candidates=6, top=3)
    content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert set(content) >= {
        *("prompt", "tokens", "position", "target", "top", "ablation", "candidates"),
        *("correlation", "sum", "memories"),
    }
    assert set(content["target"]) == {"token", "id", "probability", "log_probability", "rank"}
    assert set(content["memories"][0]) == {
        *("cell", "change", "gradient", "direct", "integrated", "coefficient", "value_top"),
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
