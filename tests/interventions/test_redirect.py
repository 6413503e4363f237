"""Redirected memories: the nearest value that promotes a token, against a general solver."""

import json

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize
from torch.testing import assert_close

import ffmem
from ffmem.errors import FfmemError, ModelError, NoStaticValues
from ffmem.interventions.checkpoint import edit_weights
from ffmem.interventions.edits import EDITS_FILE, Edits, EditsFile
from ffmem.interventions.forward import LoadedModel, apply_edits
from ffmem.interventions.redirect import MARGIN, Readings, nearest_value, solve_redirects
from ffmem.interventions.trace import trace
from tests.indexing.folders import indexed, write_corpus
from tests.interventions.checkpoints import TOKENS, plain_logits, saved, stored, write_edits
from tests.interventions.test_checkpoint import run_edit
from tests.tiny import EXPERTS, TINY, read, tiny, tiny_tokenizer

LINEAR = [name for name in TINY if not name.startswith("ffmem")]
ROUTED = [name for name in EXPERTS if not name.startswith("ffmem")]


def random_readings(seed, vocab=12, width=3):
    rng = np.random.default_rng(seed)
    embedding = torch.from_numpy(rng.normal(size=(vocab, width)))
    return Readings(embedding.float(), torch.eye(width)), rng.normal(size=width)


@pytest.mark.parametrize("seed", range(12))
def test_the_nearest_value_is_that_of_a_general_solver(seed):
    readings, value = random_readings(seed)
    token, lead = seed % 12, 0.3 + seed / 10
    base = np.random.default_rng(seed).normal(size=12) * (seed % 2)
    found = nearest_value(value, readings, token, lead, base)
    rows = readings.rows(np.arange(12))
    normals = rows[token] - np.delete(rows, token, axis=0)
    lead = lead + np.delete(base, token) - base[token]
    possible = linprog(np.zeros(3), -normals, -lead, bounds=(None, None)).status == 0
    assert (found is not None) == possible
    if found is None:
        return
    solved = minimize(
        lambda x: ((x - value) ** 2).sum(),
        value + 1e-3,
        jac=lambda x: 2 * (x - value),
        constraints={"type": "ineq", "fun": lambda x: normals @ x - lead, "jac": lambda _: normals},
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 1000},
    )
    np.testing.assert_allclose(found, solved.x, atol=1e-4)
    assert (normals @ found - lead).min() >= -1e-4


def test_a_value_that_promotes_the_token_already_stays():
    readings, value = random_readings(3)
    logits = readings.logits(value)
    first, second = np.sort(logits)[::-1][:2]
    same = nearest_value(value, readings, int(logits.argmax()), (first - second) / 2)
    assert np.array_equal(same, value)


def test_a_token_between_others_is_promoted_by_no_value():
    embedding = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0], [0.1, 0.1]])
    readings = Readings(embedding, torch.eye(2))
    assert nearest_value(np.ones(2), readings, 3, 1.0) is None
    assert nearest_value(np.ones(2), readings, 2, 1.0) is not None


def possible_token(memories, cell, sign=""):
    """Return a token that some value of a tiny model can promote, and the solved edits."""
    shown = memories.tokenizer.token_texts(memories.vocabulary)
    for token in shown[3:]:
        try:
            edits = Edits.of(redirect={f"{sign}{cell}": token}).resolve(memories.layout)
            return token, solve_redirects(memories, edits)
        except ModelError:  # no value can
            continue
    raise AssertionError("no token can be promoted")


def redirected_cell(memories):
    """Return a memory of the last layer; with experts, of one that a token of TOKENS reaches."""
    layer = memories.layout.memory_layers[-1]
    m = memories.trace(TOKENS)[layer].coefficients.flatten(0, 1).abs().sum(0)
    return memories.layout.cell(layer, int(m.argmax()))


@pytest.mark.parametrize(("number", "name"), list(enumerate(LINEAR + ROUTED)))
def test_the_value_as_show_reads_it_promotes_the_token_by_the_margin(number, name):
    """In the weights; and m · (v′ − v) under the hook predicts the same."""
    memories, sign = read(name), 1 if number % 2 else -1
    cell = redirected_cell(memories)
    token, edits = possible_token(memories, cell, "-" if sign < 0 else "")
    after = ffmem.load(edit_weights(memories, edits).model, tiny_tokenizer())
    before, found = (
        sign * one.head.folded(one.output_directions(cell.layer)[cell.memory][None])[0]
        for one in (memories, after)
    )
    best, other = found.topk(2).values
    assert after.tokenizer.token_texts(64)[int(found.argmax())] == token
    lead = float(MARGIN * before.std(correction=0))
    is_same = torch.allclose(before, found)  # it led by more already
    assert float(best - other) == pytest.approx(lead, rel=1e-3, abs=1e-4) or is_same
    assert float(best - other) > lead * (1 - 1e-3)
    with apply_edits(memories, edits):
        expected = memories.logits(TOKENS)
    assert is_same or not torch.allclose(expected, memories.logits(TOKENS), atol=1e-4)
    assert_close(after.logits(TOKENS), expected, rtol=5e-5, atol=5e-5)


def test_no_other_weight_changes():
    memories = read("llama")
    _, edits = possible_token(memories, "L1N7")
    model = edit_weights(memories, edits).model
    apart = [
        name
        for (name, one), other in zip(
            memories.model.named_parameters(), model.parameters(), strict=True
        )
        if one.data_ptr() != other.data_ptr()
    ]
    assert apart == ["model.layers.1.mlp.down_proj.weight"]
    changed = (model.model.layers[1].mlp.down_proj.weight != memories.values(1).T).any(dim=0)
    assert changed.nonzero().flatten().tolist() == [7]


def test_a_larger_margin_moves_a_value_farther():
    memories = read("gemma2")
    token, _ = possible_token(memories, "L1N7")
    lengths = []
    for margin in (0.1, 1.0, 3.0):
        edits = Edits.of(redirect={"L1N7": token}, margin=margin)
        (edit,) = solve_redirects(memories, edits)
        lengths.append(float((torch.tensor(edit.weights.value) - memories.values(1)[7]).norm()))
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[2]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mixtral", "gpt_oss"])
def test_edits_json_has_the_value_and_makes_the_checkpoint_again(name, tmp_path):
    memories = stored(saved(tiny(name), tmp_path / "model"))
    cell = redirected_cell(memories)
    token, _ = possible_token(memories, cell)
    one = write_edits(memories, tmp_path / "one", redirect={str(cell): token})
    record = json.loads((tmp_path / "one" / EDITS_FILE).read_text())
    (edit,) = record["edits"]
    assert edit["token"] == token
    assert list(edit["weights"]) == ["value"]
    assert (
        "\n" not in (tmp_path / "one" / EDITS_FILE).read_text().split('"value": [')[1].split("]")[0]
    )
    again = write_edits(memories, tmp_path / "two", file=tmp_path / "one")
    assert one.hash_after == again.hash_after != one.hash_before
    assert any("its value moved by" in note for note in one.notes)
    with apply_edits(memories, EditsFile.read(tmp_path / "one").to_edits()):
        expected = memories.logits(TOKENS)
    assert_close(plain_logits(tmp_path / "two"), expected, rtol=5e-5, atol=5e-5)


def test_a_trace_shows_what_the_new_value_promotes():
    memories = read("llama")
    cell = redirected_cell(memories)
    token, _ = possible_token(memories, cell)
    loaded = LoadedModel(memories, None, "none")
    found = trace(loaded, "w5 w9 w2 w17 w30", Edits.of(redirect={str(cell): token}), top=24)
    by_cell = {one.cell: one for one in found.edited_layers[1].memories}
    m = by_cell[str(cell)].coefficient
    shown = by_cell[str(cell)].value_top
    if m > 0:
        assert shown[0] == token
    else:
        assert shown[0] != token
    assert {one.cell: one for one in found.layers[1].memories}[str(cell)].value_top[0] != token
    assert found.edited_output_top != found.output_top
    with apply_edits(memories, Edits(tuple(found.edits))):
        logits = memories.logits(torch.tensor([[5, 9, 2, 17, 30]]))[0, -1]
    chances = logits.softmax(0)
    for one in found.edited_output_top:
        assert one.probability == pytest.approx(float(chances[one.id]), rel=1e-4)


def test_at_one_position_only_that_position_and_what_follows_changes():
    memories = read("llama")
    _, edits = possible_token(memories, "L0N3")
    plain = memories.logits(TOKENS)
    with apply_edits(memories, Edits(edits.edits, (2,))):
        changed = memories.logits(TOKENS)
    moved = (changed - plain).abs().amax(dim=(0, 2)) > 1e-6
    assert moved.tolist() == [False, False, True, True, True]


def test_the_sign_is_that_of_the_largest_coefficient_in_the_index(tmp_path):
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    index = indexed(tmp_path / "index", write_corpus(tmp_path / "c.txt"), memories)
    signs = {}
    for number in range(24):
        (edit,) = Edits.of(redirect={f"L0N{number}": "w5"}, index=index)
        stats = index[f"L0N{number}"].stats
        signs[edit.sign] = signs.get(edit.sign, 0) + 1
        assert edit.sign == (-1 if -stats.min > stats.max else 1)
    assert set(signs) == {1, -1}
    (given,) = Edits.of(redirect={"+L0N1": "w5"}, index=index)
    (other,) = Edits.of(redirect={"−L0N1": "w5"}, index=index)
    assert (given.sign, other.sign) == (1, -1)


@pytest.mark.parametrize(
    ("redirect", "message"),
    [
        ({"L0N1": "w5 w6"}, "not one token"),
        ({"L0N99": "w5"}, "There is no memory L0N99"),
        ({"L0N1": ""}, "Pass one token as text"),
        (["L0N1"], "takes memories with tokens"),
    ],
)
def test_mistakes_are_told(redirect, message):
    memories = read("llama")
    with pytest.raises(FfmemError, match=message):
        solve_redirects(memories, Edits.of(redirect=redirect))


def test_what_has_no_value_or_no_logits_that_add_up_is_refused():
    with pytest.raises(NoStaticValues, match="L0N1 cannot be redirected"):
        solve_redirects(read("ffmem_adaptive lambda"), Edits.of(redirect={"L0N1": "w5"}))
    with pytest.raises(ModelError, match="head is not linear"):
        solve_redirects(read("ffmem_adaptive"), Edits.of(redirect={"L0N1": "w5"}))
    zero = tiny("llama")
    zero.model.layers[0].mlp.down_proj.weight.data[:, 1] = 0
    with pytest.raises(ModelError, match="promotes nothing"):
        solve_redirects(ffmem.load(zero, tiny_tokenizer()), Edits.of(redirect={"L0N1": "w5"}))
    with pytest.raises(FfmemError, match="Pass redirect too"):
        Edits.of(off=["L0N1"], margin=1.0)
    with pytest.raises(FfmemError, match="above 0"):
        Edits.of(redirect={"L0N1": "w5"}, margin=-1.0)


def test_the_command(tmp_path):
    folder = saved(tiny("llama"), tmp_path / "model")
    token, _ = possible_token(stored(folder), "L0N1")
    out = ("--no-report", "--out", tmp_path / "out")
    code, text, err = run_edit(folder, "--redirect", f"-L0N1={token}", "--margin", 1, *out)
    assert code == 0
    assert f"with −L0N1 → '{token}'" in text
    assert "its value moved by" in err
    for wrong, message in (
        (("--redirect", "L0N1"), "pass a memory and a token"),
        (("--redirect", "L0N1=w5", "--redirect", "L0N1=w6"), "two tokens"),
    ):
        code, _, err = run_edit(folder, *wrong, "--no-report", "--out", tmp_path / "other")
        assert code == 2
        assert message in err
