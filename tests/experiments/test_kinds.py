"""Every experiment on memories of every kind: laws of each, and what cannot be measured is told."""

import json
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import ffmem
from ffmem.cli import main
from ffmem.errors import NoStaticValues
from ffmem.experiments.base import NAMES, find, find_all
from ffmem.experiments.neural_memory import SoftmaxComparison
from ffmem.progress import Progress
from tests.annotation.kept_patterns import first_three, keep
from tests.experiments.planting import KINDS, LAMBDA
from tests.experiments.test_forward import make_context, run_alone
from tests.experiments.test_report import linked_well
from tests.experiments.test_run import FIELDS
from tests.indexing.folders import indexed, memories, write_corpus
from tests.tiny import TINY

FROM_VALUES = [one.name for one in find_all() if one.needs_values]
MEASURABLE = [name for name in NAMES if name not in FROM_VALUES]


@pytest.fixture(scope="module", params=[*KINDS[2:], LAMBDA])
def reported(request, tmp_path_factory):
    """A whole report: the name of the model, its index, and the report's folder."""
    folder = tmp_path_factory.mktemp("kind")
    model = memories(request.param)
    index = indexed(folder / "index", write_corpus(folder / "train.txt"), model, t=5)
    keep(index, "automatic", first_three)
    valid = write_corpus(folder / "valid.txt", n=12, seed=3)
    options = {"model": model, "per_layer": 3, "triggers": 3}
    ffmem.report(index, folder / "out", str(valid), **options)
    return request.param, index, folder / "out"


def kind_of(name):
    return TINY[name].memory


def test_a_report_measures_every_experiment_that_a_kind_allows(reported):
    name, _, folder = reported
    expected = MEASURABLE if name == LAMBDA else NAMES
    assert {path.stem for path in folder.glob("*.json")} == set(expected)
    for experiment in expected:
        content = json.loads((folder / f"{experiment}.json").read_text())
        assert content["settings"]["kind"] == kind_of(name)
        assert content["settings"]["projection"] == "folded"  # y, even where there is no v
        # A layer that adds little composes nothing on a few prefixes.
        assert content["rows"] or experiment == "last-layer-composition"
        for row in content["rows"]:
            assert set(FIELDS[experiment].split()) <= set(row)
        assert content.get("note") == find(experiment).notes.get(kind_of(name))
        assert (folder / f"{experiment}.svg").read_text().startswith("<svg")


def test_the_page_says_what_is_left_out_and_why_and_what_the_kind_changes(reported):
    name, _, folder = reported
    page = linked_well(folder)
    text = (folder / "report.md").read_text()
    for experiment in find_all():
        assert experiment.notes.get(kind_of(name), "") in page.text
    assert page.elements.count("svg") == len(MEASURABLE if name == LAMBDA else NAMES)
    assert "Not measured" not in page.text
    for said in (page.text, text.replace("\\", "")):
        is_said = (
            "Memories of a lambda layer have no static values, but these experiments need them"
            in said
        )
        assert is_said == (name == LAMBDA)
        named = [f"{find(one).title} ({one})" in said for one in FROM_VALUES]
        assert all(named) if name == LAMBDA else not any(named)
        assert ("This memory has no static value" in said) == (name == LAMBDA)


def test_the_figure_of_active_memories_says_that_a_softmax_is_always_above_0(reported):
    name, _, folder = reported
    rows = json.loads((folder / "active-memories.json").read_text())["rows"]
    figure = (folder / "active-memories.svg").read_text()
    of_softmax = kind_of(name) in ("softmax", "persistent")
    assert ("true for every softmax weight" in figure) == of_softmax
    shares = {row["median"] for row in rows if row["definition"] == "positive"}
    assert (shares == {1.0}) == of_softmax
    assert any(row["definition"] == "effect" for row in rows) == (name != LAMBDA)
    claimed = [line for line in (folder / "report.md").read_text().splitlines() if " **" in line]
    of_activity = [line for line in claimed if "(#active-memories)" in line]
    why = "above 0" if of_softmax else "a sign, not activity"
    cannot = [why in line and "**cannot be compared**" in line for line in of_activity]
    assert len(cannot) == 2
    assert all(cannot) == (of_softmax or name == LAMBDA)


@pytest.fixture(scope="module")
def lambda_index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lambda")
    return indexed(folder / "index", write_corpus(folder / "train.txt", n=20), memories(LAMBDA))


@pytest.mark.parametrize("name", FROM_VALUES)
def test_what_reads_values_is_refused_before_a_lambda_model_is_loaded(lambda_index, tmp_path, name):
    with pytest.raises(NoStaticValues, match=rf"{name} needs static values.*token-removal"):
        ffmem.experiment(name, lambda_index, tmp_path, corpus="nowhere.txt", model="nowhere")
    assert list(tmp_path.iterdir()) == []


def test_the_command_refuses_in_one_line(lambda_index, tmp_path, monkeypatch):
    arguments = ["experiment", "agreement", str(lambda_index.folder), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["ffmem", *arguments])
    with pytest.raises(SystemExit, match=r"\AError: agreement needs static values.*\Z"):
        main()


def test_a_report_says_on_the_way_what_it_leaves_out(lambda_index, tmp_path, capsys):
    valid = write_corpus(tmp_path / "valid.txt", n=5)
    options = {"model": memories(LAMBDA), "per_layer": 2, "triggers": 2, "progress": Progress()}
    ffmem.report(lambda_index, tmp_path / "out", str(valid), **options)
    told = capsys.readouterr().err
    assert f"have no static values): {', '.join(FROM_VALUES)}." in told
    linked_well(tmp_path / "out")


def test_a_softmax_memory_is_the_neural_memory(tmp_path):
    found = make_context(tmp_path, "ffmem_adaptive softmax").measured(SoftmaxComparison).found
    np.testing.assert_allclose(found["cosine"], 1, atol=1e-5)
    np.testing.assert_allclose(found["distance"], 0, atol=1e-5)


def persistent(heads):
    """A persistent model with another number of heads."""
    config = TINY["ffmem_adaptive persistent"]
    changed = config.to_dict() | {"num_attention_heads": heads}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config.__class__.from_dict(changed))
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.3 * torch.randn_like(parameter)
    return model.eval()


def test_one_head_of_slots_is_the_neural_memory_times_the_attention_that_slots_get(tmp_path):
    found = make_context(tmp_path, persistent(1)).measured(SoftmaxComparison).found
    mass = found["slot_mass"]
    assert ((mass > 0) & (mass < 1)).all()
    np.testing.assert_allclose(found["cosine"], 1, atol=1e-5)
    np.testing.assert_allclose(found["distance"], (1 - mass) / mass, rtol=1e-3)


def test_slot_mass_is_what_the_slots_of_a_head_get_on_average(tmp_path):
    context = make_context(tmp_path, persistent(4))
    found = context.measured(SoftmaxComparison).found["slot_mass"]
    for example, layers in enumerate(run_alone(context)):
        for layer, trace in enumerate(layers):
            assert found[example, layer] == pytest.approx(trace.coefficients.sum().item() / 4)
