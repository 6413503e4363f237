"""Memories of every kind of our own model: what is off by weights, by hooks and exactly; what is
said of values that come from the input."""

import json

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoTokenizer

import ffmem
from ffmem.cells import Cell
from ffmem.errors import ModelError
from ffmem.interventions.checkpoint import edit_weights
from ffmem.interventions.edits import Edits, EditsFile
from ffmem.interventions.effect import effect, effect_of_facts
from ffmem.interventions.forward import apply_edits, record_values
from ffmem.interventions.results import INPUT_VALUES
from ffmem.interventions.trace import trace
from ffmem.models.memories import Memories
from ffmem.models.tokenizer import WordTokenizer
from tests.conftest import OURS
from tests.interventions.checkpoints import saved, stored, write_edits
from tests.interventions.planted import with_start
from tests.interventions.test_forward import traces_left
from tests.test_cli import run
from tests.tiny import VOCABULARY, read, tiny, tiny_tokenizer

TEXT, IDS = "w5 w9 w12 w17 w30", [0, 5, 9, 12, 17, 30]
LAMBDA = OURS["lambda"]
SLOTS = [OURS[kind] for kind in ("softmax", "persistent", "lambda")]
UNBIASED = [OURS[kind] for kind in ("swiglu", "softmax", "persistent", "lambda")]
KINDS = list(OURS.values())


def log_p(memories, target, ids=IDS):
    return float(memories.logits(torch.tensor([ids]))[0, -1].double().log_softmax(0)[target])


def off_by_weights(memories, cell):
    return Memories(edit_weights(memories, Edits.of(off=[cell])).model, memories.tokenizer)


def at_end(memories, layer, ids=IDS):
    """m and what it multiplies, at the last of these tokens, from a whole trace."""
    found = memories.trace(torch.tensor([ids]))[layer]
    if memories.has_values:
        return found.coefficients[0, -1], memories.values(layer)
    return found.coefficients[0, -1], memories.values_at(layer, found.ff_input[0], len(ids) - 1)


@pytest.mark.parametrize("name", KINDS)
def test_an_exact_ablation_is_that_by_hooks_and_that_by_weights(name):
    memories = read(name)
    options = {"target": "w11", "candidates": 6, "integrated": True}
    found = effect(with_start(memories), TEXT, **options)
    clean = log_p(memories, found.target.id)
    assert abs(found.memories[0].change) > 1e-3
    for memory in found.memories:
        with apply_edits(memories, Edits.of(off=[memory.cell])):
            by_hooks = log_p(memories, found.target.id) - clean
        by_weights = log_p(off_by_weights(memories, memory.cell), found.target.id) - clean
        assert memory.change == pytest.approx(by_hooks, abs=1e-4)
        assert by_weights == pytest.approx(by_hooks, abs=1e-4)


@pytest.mark.parametrize("kind", ["softmax", "persistent"])
def test_the_rest_of_a_softmax_is_not_made_larger(kind):
    memories = read(OURS[kind])
    tokens = torch.tensor([IDS])
    before = memories.trace(tokens)[0].coefficients
    weights = off_by_weights(memories, "L0N3").trace(tokens)[0].coefficients
    with apply_edits(memories, Edits.of(off=["L0N3"])):
        hooks = memories.trace(tokens)[0].coefficients
    assert (before[..., 3] > 0).all()
    assert torch.equal(weights, before)  # it is its value that is gone
    others = [memory for memory in range(memories.layout.widths[0]) if memory != 3]
    assert torch.equal(hooks[..., others], before[..., others])


@pytest.mark.parametrize("name", SLOTS)
def test_one_row_is_rewritten_and_nothing_else(name):
    memories = read(name)
    model = edit_weights(memories, Edits.of(scale={"L1N5": 0.3})).model
    part = "values" if memories.has_values else "keys"
    moved = {
        key: (tensor != memories.model.state_dict()[key]).any(dim=1).nonzero().flatten().tolist()
        for key, tensor in model.state_dict().items()
        if not torch.equal(tensor, memories.model.state_dict()[key])
    }
    assert moved == {f"model.layers.1.memory.{part}.weight": [5]}
    after = Memories(model, memories.tokenizer)
    assert_close(*(at_end(one, 0) for one in (after, memories)))
    part_of_y = [m[5] * v[5] for m, v in (at_end(one, 1) for one in (memories, after))]
    assert_close(part_of_y[1], 0.3 * part_of_y[0])


@pytest.mark.parametrize("name", UNBIASED)
def test_a_fixed_coefficient_is_refused_where_there_is_no_bias(name):
    with pytest.raises(ModelError, match=r"Cannot write L0N1 = 2: .*off and scale can be written"):
        edit_weights(read(name), Edits.of(set={"L0N1": 2.0}))
    assert edit_weights(read(name), Edits.of(set={"L0N1": 0.0})).flag is None


@pytest.mark.parametrize("name", KINDS)
def test_an_edited_folder_traces_as_under_the_edit(name, tmp_path):
    memories = stored(saved(tiny(name), tmp_path / "model"))
    asked = {"off": ["L0N3"], "scale": {"L1N0": -2.0}}
    write_edits(memories, tmp_path / "out", **asked)
    options = {"generate": 4, "top": 5, "grid": True}
    under = trace(with_start(memories), TEXT, Edits.of(**asked), **options)
    alone = trace(with_start(stored(tmp_path / "out")), TEXT, **options)
    assert under.edited_generated == alone.generated
    for one, other in zip(under.edited.layers, alone.layers, strict=True):
        assert one.case == other.case
        for first, second in zip(one.output_top, other.output_top, strict=True):
            assert first.id == second.id
            assert first.probability == pytest.approx(second.probability, rel=1e-3)
    grids = [
        [place.output.id for row in grid for place in row]
        for grid in (under.edited_grid, alone.grid)
    ]
    assert grids[0] == grids[1]
    assert EditsFile.read(tmp_path / "out").to_edits() == Edits.of(**asked)


def test_an_off_key_is_told_when_it_is_off_already(tmp_path):
    write_edits(stored(saved(tiny(LAMBDA), tmp_path / "model")), tmp_path / "one", off=["L0N1"])
    found = write_edits(stored(tmp_path / "one"), tmp_path / "two", scale={"L0N1": 3.0})
    assert "The key of L0N1 was all zeros: L0N1 × 3 has no effect." in found.notes
    assert found.notes[-1] == "The weights do not change."


def test_values_of_a_lambda_layer_come_from_the_prompt_and_its_results_say_so():
    memories = read(LAMBDA)
    for found in (
        trace(with_start(memories), TEXT),
        effect(with_start(memories), TEXT, candidates=5),
    ):
        content = json.loads(json.dumps(found.to_dict()))
        assert content["values"] == "input"
        assert INPUT_VALUES in content["notes"]
        assert INPUT_VALUES in str(found)
        assert INPUT_VALUES in found._repr_html_()
    other = read(OURS["persistent"])
    for found in (trace(with_start(other), TEXT), effect(with_start(other), TEXT, candidates=5)):
        assert found.to_dict()["values"] == "static"
        assert found.to_dict()["notes"] == []


@pytest.mark.parametrize("position", [1, 3, -1])
def test_what_a_lambda_layer_multiplies_is_read_at_the_position(position):
    memories = read(LAMBDA)
    found = trace(with_start(memories), TEXT, position=position, top=memories.layout.widths[0])
    ids = IDS[: found.position + 1]
    shown = memories.tokenizer.token_texts(memories.vocabulary)
    for layer in found.layers:
        m, v = at_end(memories, layer.layer, ids)
        for memory in layer.memories:
            i = Cell.parse(memory.cell).memory
            assert memory.contribution == pytest.approx(float((m[i] * v[i]).norm()), rel=1e-4)
            if i % (memories.layout.widths[0] // 2) >= len(ids):  # no token is so far in front
                assert (memory.coefficient, memory.contribution, memory.value_top) == (0, 0, [])
            else:
                best = memories.head.folded(m[i] * v[i][None]).argmax()
                assert memory.value_top[0] == shown[int(best)]


def test_values_move_with_an_edit_below_them():
    memories = read(LAMBDA)
    found = trace(
        with_start(memories), TEXT, Edits.of(scale={"L0N0": 9.0}), top=memories.layout.widths[0]
    )
    with apply_edits(memories, Edits.of(scale={"L0N0": 9.0})):
        m, v = at_end(memories, 1)
    for memory in found.edited.layers[1].memories:
        length = float((m * v.T).norm(dim=0)[Cell.parse(memory.cell).memory])
        assert memory.contribution == pytest.approx(length, rel=1e-4, abs=1e-6)
    assert found.edited.layers[1].memories != found.plain.layers[1].memories


def test_nothing_is_kept_where_values_are_static():
    memories = read("llama")
    with record_values(memories) as values:
        assert traces_left(memories.model)[0] == 0
    (found,) = values(0)
    assert torch.equal(found, memories.output_directions(0))


@pytest.mark.parametrize("name", KINDS)
def test_facts_are_read_by_the_mean_of_what_memories_add(name, tmp_path):
    memories = read(name)
    facts = ["w5 w9 w12", "w4 w30", "w8 w8 w21 w7"]
    (tmp_path / "facts.txt").write_text("".join(f"{fact}\n" for fact in facts))
    found = effect_of_facts(with_start(memories), tmp_path / "facts.txt", top=8, candidates=8)
    content = found.to_dict()
    assert content["values"] == ("static" if memories.has_values else "input")
    assert (INPUT_VALUES in str(found)) == (not memories.has_values)
    shown = memories.tokenizer.token_texts(memories.vocabulary)
    for row in found.memories:
        parts = []
        for fact in facts:
            cell = Cell.parse(row.cell)
            m, v = at_end(memories, cell.layer, [0, *(int(w[1:]) for w in fact.split())])
            parts.append(m[cell.memory] * v[cell.memory])
        mean = torch.stack(parts).mean(dim=0)
        if mean.any():
            assert row.value_top[0] == shown[int(memories.head.folded(mean[None]).argmax())]
        else:
            assert not memories.has_values or row.coefficient == 0


@pytest.mark.parametrize("name", KINDS)
def test_the_commands_take_every_kind(name, tmp_path):
    folder = saved(tiny(name), tmp_path / "model")
    edits = ("--off", "L0N1", "--set", "L0N2=1.5", "--scale", "L1N3=2")
    more = ("--position", "2", "--generate", "3", "--start", "none", "--json")
    code, out, error = run("trace", folder, TEXT, *edits, *more)
    assert code == 0, error
    assert json.loads(out)["edited_layers"]
    code, out, error = run("effect", folder, TEXT, "--candidates", "4", "--start", "none")
    assert code == 0, error
    assert ("no static values" in out) == (name == LAMBDA)
    code, out, error = run(
        *("edit", folder, "--off", "L0N1", "--scale", "L1N3=2", "--no-report"),
        *("--out", tmp_path / "out"),
    )
    assert code == 0, error


def test_a_word_level_model_is_saved_with_its_dictionary(tmp_path, monkeypatch):
    words = [f"w{i}" for i in range(4, VOCABULARY)]
    tokenizer = WordTokenizer(words)
    (tmp_path / "dict.txt").write_text("".join(f"{word} 7\n" for word in words))
    monkeypatch.chdir(tmp_path)  # nobody said that this one is the model's
    found = write_edits(ffmem.load(tiny(LAMBDA), tokenizer), tmp_path / "one", off=["L0N1"])
    assert any("dict.txt lists 0" in note for note in found.notes)
    memories = ffmem.load(tmp_path / "one")
    assert memories.tokenizer.fingerprint == tokenizer.fingerprint
    plain = AutoTokenizer.from_pretrained(tmp_path / "one")
    assert plain("w9 nothing w63")["input_ids"] == [2, 9, 3, 63]
    counted = "".join(f"{word} {100 - i}\n" for i, word in enumerate(words))
    (tmp_path / "one" / "dict.txt").write_text(counted)
    found = write_edits(stored(tmp_path / "one"), tmp_path / "two", off=["L0N2"])
    assert not any("dict.txt" in note for note in found.notes)
    assert (tmp_path / "two" / "dict.txt").read_text() == counted


def test_keys_shared_between_lambda_layers_are_refused():
    model = tiny(LAMBDA)
    model.model.layers[1].memory.keys.weight = model.model.layers[0].memory.keys.weight
    with pytest.raises(ModelError, match="The keys of layer 1 are shared"):
        edit_weights(ffmem.load(model, tiny_tokenizer()), Edits.of(off=[Cell(1, 1)]))
