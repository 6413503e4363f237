"""Facts written into idle memories: against weights that are changed by hand."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import ffmem
from ffmem.cli import cli
from ffmem.errors import FfmemError, NoStaticValues
from ffmem.interventions import write as writing
from ffmem.interventions.checkpoint import edit_weights
from ffmem.interventions.edits import EDITS_FILE, Edit, Edits, EditsFile, MemoryWeights
from ffmem.interventions.forward import LoadedModel, apply_edits
from ffmem.interventions.idle import IDLE, activities
from ffmem.interventions.partial_forward import PartialForward, log_probabilities
from ffmem.interventions.redirect import Readings, nearest_value
from ffmem.interventions.side_effects import measure_drift as drift
from ffmem.interventions.side_effects import same_endings
from ffmem.interventions.trace import trace
from ffmem.interventions.write import (
    WRITE_FILE,
    Goal,
    make_key,
    second_moments,
    value_direction,
)
from tests.conftest import OURS
from tests.indexing.folders import indexed, write_corpus
from tests.interventions.checkpoints import TOKENS, saved, stored
from tests.tiny import EXPERTS, TINY, ragged, read, tiny, tiny_tokenizer

write = partial(writing.write, corpus=None)

PROMPT = "w5 w9 w7 w17 w30"
IDS = [0, 5, 9, 7, 17, 30]
WRITTEN = [
    *("llama", "llama with biases", "gpt2", "gptj", "phi3", "gemma2", "olmo2", "falcon"),
    *("granite", "opt post-norm", "ffmem_adaptive", "mixtral", "gpt_oss", "dbrx", "llama4_text"),
    *("qwen2_moe", "nemotron_h in a latent space"),
]
"""Gated, ungated with bias, parallel, fused keys, post-norm, multipliers, adaptive, experts."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c.txt", n=120)


def sample(corpus, limit=40):
    return ffmem.Corpus(str(corpus), unit="line", limit=limit)


def logits_of(model, ids=IDS):
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0, -1]


def some_token(memories, n=3):
    """Return a token that the model ranks low after the prompt, and some value can promote."""
    order = logits_of(memories.model).argsort(descending=True).tolist()
    cell = reached(memories)
    bank = memories.banks[cell.layer].at(cell.memory)
    for id in (one for one in order[n:] if one > 2):
        origin = np.zeros(bank.stored_values().shape[1])
        if (
            not memories.head.linear
            or nearest_value(origin, Readings.of(memories, bank), id, 1.0) is not None
        ):
            return memories.tokenizer.token_texts(memories.vocabulary)[id], id
    raise AssertionError("no token can be promoted")


def reached(memories):
    """Return a memory of the last layer that the prompt reaches."""
    layer = memories.layout.memory_layers[-1]
    m = memories.trace(torch.tensor([IDS]))[layer].coefficients[0, -1].abs()
    return memories.layout.cell(layer, int(m.argmax()))


@pytest.mark.parametrize("name", [*TINY, *EXPERTS])
def test_new_keys_and_values_reach_the_weights_they_name(name):
    """The bank of the edited model has them, and no other memory of the layer changed."""
    memories = read(name)
    if memories.row.softmax_groups is not None or not memories.has_values:
        return
    cell = reached(memories)
    bank = memories.banks[cell.layer].at(cell.memory)
    own = cell.memory - bank.offset
    rng = np.random.default_rng(0)
    value = tuple(rng.normal(size=bank.stored_values().shape[1]).round(3).tolist())
    stored_keys = bank.experts.keys(bank.number) if hasattr(bank, "experts") else bank.key_rows()
    key, up = (tuple(rng.normal(size=stored_keys.shape[1]).round(3).tolist()) for _ in range(2))
    weights = MemoryWeights(value=value, key=key, up=up if bank.gated else None)
    edit = Edit(str(cell), "write", 1.0, 0.0, token="w5", weights=weights)
    model = edit_weights(memories, Edits((edit,)), is_stored=True).model
    after = ffmem.load(model, tiny_tokenizer())
    other = after.banks[cell.layer].at(cell.memory)
    assert_close(other.stored_values()[own], torch.tensor(value))
    rest = [number for number in range(bank.size) if number != own]
    for rows in ("key_rows", "stored_values", *(["up_rows"] if bank.gated else [])):
        before, now = getattr(bank, rows)(), getattr(other, rows)()
        assert torch.equal(before[rest], now[rest])
        assert not torch.equal(before[own], now[own])
    if getattr(bank, "to_latent", None) is None:
        assert_close(other.key_rows()[own], torch.tensor(key))
        if bank.gated:
            assert_close(other.up_rows()[own], torch.tensor(up))
    assert torch.equal(other.key_bias()[rest], bank.key_bias()[rest])


@pytest.mark.parametrize("name", WRITTEN)
def test_a_written_model_predicts_the_token_and_edits_json_makes_it_again(name, corpus, tmp_path):
    memories = stored(saved(tiny(name), tmp_path / "model"))
    token, id = some_token(memories, 1)  # a post-norm limits what a memory of a tiny model can do
    loaded = LoadedModel(memories, None, "id:0")
    cell = reached(memories)
    found = write(
        *(loaded, PROMPT, token, tmp_path / "out"),
        cell=str(cell),
        force=True,
        margin=0.05,
        corpus=sample(corpus),
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    logs = logits_of(model).log_softmax(0)
    first, second = logs.topk(2)[0]
    assert int(logs.argmax()) == id
    assert float(first - second) == pytest.approx(0.05, abs=0.01)
    assert found.written.holds
    assert found.written.probability_after == pytest.approx(float(logs.exp()[id]), rel=1e-3)
    assert found.written.probability_before == pytest.approx(found.target.probability, rel=1e-3)
    assert model.config.to_dict().keys() == memories.model.config.to_dict().keys()
    after = ffmem.load(tmp_path / "out")
    m = after.trace(torch.tensor([IDS]))[cell.layer].coefficients[0, -1, cell.memory]
    assert found.coefficient == pytest.approx(float(m), rel=1e-3)
    traced = trace(LoadedModel(after, None, "id:0"), PROMPT, top=100).layers[cell.layer].memories
    (own,) = (one for one in traced if one.cell == str(cell))
    r = memories.trace(torch.tensor([IDS]))[cell.layer].residual[0, -1].norm()
    assert found.strength == pytest.approx(own.contribution / float(r), rel=1e-3)
    assert own.coefficient == pytest.approx(found.coefficient, rel=1e-3)
    ffmem.edit(memories, tmp_path / "again", edits=tmp_path / "out", corpus=None)
    weights = [tmp_path / one / "model.safetensors" for one in ("out", "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert found.hash_after == after.fingerprint() != found.hash_before
    record = json.loads((tmp_path / "out" / WRITE_FILE).read_text())
    assert record == {key: one for key, one in found.to_dict().items() if key != "folder"}
    assert found.side_effects.tokens > 0
    assert found.change.kl > 0


def by_hand(memories, layer, number, key, value, bias=None):
    """Return a copy of a llama's or gpt2's weights with one memory written by hand."""
    model = AutoModelForCausalLM.from_config(memories.model.config).eval()
    model.load_state_dict(memories.model.state_dict())
    with torch.no_grad():
        if memories.family == "gpt2":
            block = model.transformer.h[layer].mlp
            block.c_fc.weight[:, number], block.c_proj.weight[number] = key, value
            block.c_fc.bias[number] = bias
        else:
            block = model.model.layers[layer].mlp
            block.gate_proj.weight[number] = key[0]
            block.up_proj.weight[number] = key[1]
            block.down_proj.weight[:, number] = value
    return model


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_key_and_value_are_those_of_the_definition(name, corpus, tmp_path):
    memories = stored(saved(tiny(name), tmp_path / "model"))
    token, id = some_token(memories)
    index = indexed(tmp_path / "index", corpus, ffmem.load(tmp_path / "model"))
    loaded = LoadedModel(memories, index)
    found = write(loaded, PROMPT, token, tmp_path / "out", layer=1, cell="L1N5", force=True)
    # C by hand: the input of the keys at every token of the index's sentences
    rows = []
    for row in index.sentences.rows(0, index.sentences.n_sentences):
        if len(row.ids) > 1:
            rows.append(memories.trace(torch.tensor([[0, *row.ids]]))[1].ff_input[0])
    x = torch.cat(rows).double()
    moment = x.T @ x / len(x)
    at = memories.trace(torch.tensor([IDS]))[1].ff_input[0, -1].double()
    identity = torch.eye(16, dtype=torch.float64)
    k = torch.linalg.inv(moment + 0.05 * moment.trace() / 16 * identity) @ at
    k /= k @ at
    run = PartialForward(memories, IDS, 5)
    v = value_direction(memories, run, memories.banks[1].dense[0], Goal(id, 1.0, None))
    weights = EditsFile.read(tmp_path / "out").to_edits().edits[0].weights
    alpha = float(np.linalg.norm(weights.value))
    assert_close(torch.tensor(weights.value), (alpha * v).float(), rtol=1e-4, atol=1e-5)
    if name == "gpt2":
        model = by_hand(memories, 1, 5, (12 * k).float(), (alpha * v).float(), bias=-6.0)
    else:
        model = by_hand(memories, 1, 5, ((6 * k).float(), k.float()), (alpha * v).float())
    with torch.no_grad():
        expected = model(TOKENS, use_cache=False).logits
        saved_model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert_close(saved_model(TOKENS, use_cache=False).logits, expected, rtol=1e-3, atol=1e-3)
    # A smaller strength is not enough
    less = (
        by_hand(memories, 1, 5, (12 * k).float(), (0.99 * alpha * v).float(), -6.0)
        if (name == "gpt2")
        else by_hand(memories, 1, 5, ((6 * k).float(), k.float()), (0.99 * alpha * v).float())
    )
    leads = []
    for one in (less, model):
        logs = logits_of(one).log_softmax(0)
        own = float(logs[id])
        logs[id] = -torch.inf
        leads.append(own - float(logs.max()))
    assert leads[0] < 1.0 <= leads[1] + 1e-3
    assert found.written.holds


@pytest.mark.parametrize("name", ["gemma2", "granite", "gpt2", "mixtral"])
def test_the_value_is_the_shortest_that_promotes_the_token_and_makes_up_for_the_others(name):
    memories = read(name)
    _, id = some_token(memories)
    run = PartialForward(memories, IDS, 5)
    cell = reached(memories)
    bank = memories.banks[cell.layer].at(cell.memory)
    direction = value_direction(memories, run, bank, Goal(id, 0.7, None)).float()
    to_stream, head = memories.to_directions(cell.layer), memories.head
    sigma = head.denominator(run.output)

    def spare(value):
        """Return by how much a value does more than it must, with the final norm's σ held."""
        z = head.scale * head.unscaled(run.output)[0]
        own = head.folded(to_stream(bank.from_stored(value[None])))[0] / sigma
        needed = 0.7 + (z - z[id]).clamp_min(0)
        left = own[id] - own - needed
        left[id] = torch.inf
        return float(left.min())

    low, high = 0.0, 1e4
    assert spare(high * direction) > 0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if spare(middle * direction) >= 0 else (middle, high)
    rng = torch.Generator().manual_seed(0)
    for _ in range(200):  # no other vector of this length does as much
        other = direction + 0.1 * torch.randn(direction.shape, generator=rng)
        assert spare(high * other / other.norm()) <= 1e-3


def test_with_a_head_that_is_not_linear_no_direction_raises_the_token_faster():
    memories = read("ffmem_adaptive")
    run, bank = PartialForward(memories, IDS, 5), memories.banks[1].dense[0]
    best = value_direction(memories, run, bank, Goal(7, 1.0, None)).float()
    sigma = memories.head.denominator(run.output)

    def rise(value):
        ends = [run.output + step * value for step in (1e-2, -1e-2)]
        both = [log_probabilities(memories.head, end, sigma)[0, 7] for end in ends]
        return float(both[0] - both[1])

    rng = torch.Generator().manual_seed(0)
    for _ in range(20):
        other = torch.randn(best.shape, generator=rng)
        assert abs(rise(other / other.norm())) <= rise(best) * 1.01


def test_the_key_answers_least_to_the_text_it_is_made_from(corpus):
    memories = read("llama")
    sentences = [[5, 9, 7], [8, 8, 20, 4], [30, 11], [17, 12, 13, 14, 15]]
    bank = memories.banks[1].dense[0]
    moment = second_moments(memories, [bank], sentences, 0)[bank]
    rows = [memories.trace(torch.tensor([[0, *ids]]))[1].ff_input[0] for ids in sentences]
    x = torch.cat(rows).double()
    assert_close(moment, x.T @ x / len(x), rtol=1e-5, atol=1e-6)
    at = memories.trace(torch.tensor([IDS]))[1].ff_input[0, -1].double()
    key = make_key(at, moment)
    assert float(key @ at) == pytest.approx(1)
    for _ in range(20):
        other = key + 0.1 * torch.randn(16, dtype=torch.float64)
        other /= other @ at
        ridge = 0.05 * moment.diagonal().mean()
        costs = [float(k @ moment @ k + ridge * k @ k) for k in (key, other)]
        assert costs[0] <= costs[1]


@pytest.mark.parametrize("name", ["llama4_text", "mixtral", "nemotron_h in a latent space"])
def test_the_input_of_an_expert_is_what_the_expert_gets(name):
    memories = read(name)
    run, layer = PartialForward(memories, IDS, 5), memories.layout.memory_layers[-1]
    weights = run.layers[layer].weights[0]
    banks = memories.banks[layer].banks
    bank = max(
        (one for one in banks if one.kind == "expert"), key=lambda one: weights[banks.index(one)]
    )
    seen = {}
    with bank.experts.reading(lambda rows: seen.setdefault(rows.expert, rows)):
        memories.forward(torch.tensor([IDS]))
    rows = seen[bank.number]
    assert int(rows.tokens[-1]) == 5
    found = writing._prompt_input(memories, run, bank)
    assert_close(found.float(), rows.inputs[-1], rtol=1e-4, atol=1e-5)


def test_a_negative_coefficient_gets_a_value_of_the_other_sign(corpus, monkeypatch, tmp_path):
    monkeypatch.setattr(writing, "SCORE", -0.5)  # GELU is negative there
    memories = stored(saved(tiny("gpt2"), tmp_path / "model"))
    token, _ = some_token(memories)
    found = write(
        *(LoadedModel(memories, None, "id:0"), PROMPT, token, tmp_path / "out"),
        cell="L1N5",
        force=True,
        margin=0.05,
        corpus=sample(corpus),
    )
    assert found.coefficient < 0
    assert found.written.holds
    assert found.value_top[0] == token


# Idle memories


@pytest.fixture(scope="module")
def idle(tmp_path_factory, corpus):
    """A llama in which L1N3 hardly speaks, L1N4 not at all, and its index."""
    folder = tmp_path_factory.mktemp("idle")
    model = tiny("llama")
    model.model.layers[1].mlp.down_proj.weight.data[:, 3] *= 1e-3
    model.model.layers[1].mlp.down_proj.weight.data[:, 4] = 0
    for number in (3, 4):
        model.model.layers[1].mlp.gate_proj.weight.data[number] *= 1e-3
    saved(model, folder / "model")
    return indexed(folder / "index", corpus, ffmem.load(folder / "model"))


def test_contributions_are_means_over_the_sample(idle):
    memories = ffmem.load(idle.manifest.model.source)
    bank = memories.banks[1].dense[0]
    found = activities(idle, memories, bank)
    norms = memories.output_directions(1).norm(dim=1)
    expected = [float(np.abs(idle.sample(ffmem.Cell(1, n))).mean() * norms[n]) for n in range(24)]
    np.testing.assert_allclose([one.contribution for one in found], expected, rtol=1e-5)
    shares = [idle[f"L1N{n}"].stats.active_share for n in range(24)]
    np.testing.assert_allclose([one.active_share for one in found], shares)
    for one in found:
        assert one.relative == pytest.approx(one.contribution / np.median(expected))
        assert one.is_idle == (one.relative <= IDLE and one.active_share <= np.median(shares))


def test_the_idlest_memory_of_the_layer_is_overwritten(idle, corpus, tmp_path):
    memories = stored(idle.manifest.model.source)
    token, _ = some_token(memories)
    found = write(
        *(LoadedModel(memories, idle), PROMPT, token, tmp_path / "out"),
        layer=1,
        corpus=sample(corpus),
        controls=1,
    )
    bank = memories.banks[1].dense[0]
    idlest = [
        (one.contribution, n)
        for n, one in enumerate(activities(idle, memories, bank))
        if one.is_idle
    ]
    assert found.cell == f"L1N{min(idlest)[1]}"
    assert found.activity.is_idle
    assert [one.cell for one in found.control] != [found.cell]
    assert all(one.cell != found.cell for one in found.control)
    text = str(found)
    assert f"written into {found.cell}" in text
    assert "On corpus text: KL" in text
    assert "| perplexity |" in text
    page = found._repr_html_()
    assert page.startswith("<p>")
    assert "<table>" in page
    assert found.neighbours
    assert all(one.prompt.split()[-1] == "w30" for one in found.neighbours)


def test_layers_are_tried_and_the_one_that_changes_least_is_kept(idle, tmp_path):
    memories = stored(idle.manifest.model.source)
    token, _ = some_token(memories)
    loaded = LoadedModel(memories, idle)
    try:
        found = write(loaded, PROMPT, token, tmp_path / "out", margin=0.1, controls=0)
    except FfmemError as error:
        pytest.fail(str(error))
    solved = [one for one in found.trials if one.kl is not None]
    assert found.cell == min(solved, key=lambda one: one.kl).cell
    assert {one.layer for one in found.trials} <= {0, 1}


def test_a_memory_that_works_is_kept_unless_forced(idle, corpus, tmp_path):
    memories = stored(idle.manifest.model.source)
    token, _ = some_token(memories)
    busy = max(
        enumerate(activities(idle, memories, memories.banks[1].dense[0])),
        key=lambda one: one[1].contribution,
    )[0]
    loaded = LoadedModel(memories, idle)
    with pytest.raises(FfmemError, match=f"L1N{busy} is not idle: active on.*`force=True`"):
        write(loaded, PROMPT, token, tmp_path / "out", cell=f"L1N{busy}")
    assert not (tmp_path / "out").exists()
    found = write(
        loaded, PROMPT, token, tmp_path / "out", cell=f"L1N{busy}", force=True, controls=0
    )
    assert any("was not idle" in note for note in found.notes)


# Prompts and text


def test_neighbours_end_as_the_prompt_does_those_alike_longest_first():
    memories = read("llama")
    sentences = [[4, 30, 6], [17, 30], [7, 17, 30, 8], [5, 9, 7, 17, 30, 3], [20, 21], [17, 30]]
    found = same_endings(memories, sentences, IDS, 0)
    assert [ids for _, ids in found] == [[0, 7, 17, 30], [0, 17, 30], [0, 4, 30]]
    assert found[0][0] == "w7 w17 w30"


def test_drift_is_the_mean_divergence_over_positions_with_a_next_token():
    memories = read("llama")
    edits = Edits.of(off=["L1N3"])
    other = ffmem.load(edit_weights(memories, edits).model, tiny_tokenizer())
    sentences = [[5, 9, 7, 17], [30, 8, 4], [9]]
    kl, differ = drift(memories, other, sentences, 0)
    terms, changed = [], []
    for ids in sentences[:2]:
        with apply_edits(memories, edits):
            after = memories.logits(torch.tensor([[0, *ids]]))[0, 1:-1].log_softmax(-1)
        before = memories.logits(torch.tensor([[0, *ids]]))[0, 1:-1].log_softmax(-1)
        terms += (before.exp() * (before - after)).sum(-1).tolist()
        changed += (before.argmax(-1) != after.argmax(-1)).tolist()
    assert kl == pytest.approx(np.mean(terms), rel=1e-3)
    assert differ == pytest.approx(np.mean(changed))


def test_paraphrases_and_neighbours_come_from_files(idle, tmp_path):
    memories = stored(idle.manifest.model.source)
    token, id = some_token(memories)
    (tmp_path / "same.txt").write_text("w5 w9 w7 w17 w30\nw9 w7 w17 w30\n")
    (tmp_path / "other.txt").write_text("w8 w30\n")
    found = write(
        *(LoadedModel(memories, idle), PROMPT, token, tmp_path / "out"),
        layer=1,
        probability=0.2,
        paraphrases=tmp_path / "same.txt",
        neighbours=tmp_path / "other.txt",
        controls=0,
    )
    assert [one.prompt for one in found.neighbours] == ["w8 w30"]
    assert found.paraphrases[0] == found.written
    assert found.written.probability_after == pytest.approx(0.2, abs=0.01)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for one, ids in ((found.paraphrases[1], [0, 9, 7, 17, 30]), (found.neighbours[0], [0, 8, 30])):
        chances = logits_of(after, ids).softmax(0)
        assert one.probability_after == pytest.approx(float(chances[id]), rel=1e-3)
        assert one.after == memories.tokenizer.token_texts(64)[int(chances.argmax())]


# Mistakes


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"token": "w5 w6"}, "not one token"),
        ({"prompt": "w5 " * 80}, "the model reads 64"),
        ({"prompt": ""}, "The prompt is empty"),
        ({"cell": "L1N99"}, "There is no memory L1N99"),
        ({"cell": "L1N3", "layer": 0}, "not in layer 0"),
        ({"layer": 7}, "There is no layer 7"),
        ({"margin": -1.0}, "above 0"),
        ({"probability": 1.5}, "between 0 and 1"),
        ({"controls": -1}, "0 or more"),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(asked, message, idle, tmp_path):
    memories = stored(idle.manifest.model.source)
    given = {"prompt": PROMPT, "token": "w9"} | asked
    with pytest.raises(FfmemError, match=message):
        write(
            *(LoadedModel(memories, idle), given.pop("prompt"), given.pop("token")),
            tmp_path / "out",
            **given,
        )
    assert list(tmp_path.iterdir()) == []


def test_what_is_true_already_is_not_written(idle, tmp_path):
    memories = stored(idle.manifest.model.source)
    top = memories.tokenizer.token_texts(64)[int(logits_of(memories.model).argmax())]
    with pytest.raises(FfmemError, match="already"):
        write(LoadedModel(memories, idle), PROMPT, top, tmp_path / "out", margin=1e-6)


def test_without_an_index_the_memory_must_be_given_and_forced(tmp_path):
    loaded = LoadedModel(read("llama"), None, "id:0")
    with pytest.raises(FfmemError, match=r"build one with `ffmem index`.*`cell` and `force=True`"):
        write(loaded, PROMPT, "w9", tmp_path / "out")
    with pytest.raises(FfmemError, match="Only an index knows whether L1N3 is idle"):
        write(loaded, PROMPT, "w9", tmp_path / "out", cell="L1N3")
    with pytest.raises(FfmemError, match="Pass a corpus or an index"):
        write(loaded, PROMPT, "w9", tmp_path / "out", cell="L1N3", force=True)


@pytest.mark.parametrize(
    ("name", "error"), [("lambda", "Lambda layers"), ("softmax", "softmax weights")]
)
def test_models_that_have_no_place_for_a_fact_are_refused(name, error, corpus, tmp_path):
    loaded = LoadedModel(read(OURS[name]), None, "id:0")
    with pytest.raises(FfmemError, match=error) as raised:
        write(
            *(loaded, PROMPT, "w9", tmp_path / "out"),
            cell="L1N3",
            force=True,
            corpus=sample(corpus),
        )
    assert isinstance(raised.value, NoStaticValues) == (name == "lambda")


def test_a_layer_without_memories_and_an_expert_out_of_reach_are_refused(corpus, tmp_path):
    widths = ffmem.load(ragged(), tiny_tokenizer())
    index = indexed(tmp_path / "index", corpus, widths)
    with pytest.raises(FfmemError, match=r"Layer 3 has no memories\. Layers with some: 1, 2, 4"):
        write(LoadedModel(widths, index), PROMPT, "w9", tmp_path / "out", layer=3)
    memories = read("mixtral")
    weights = memories.trace(torch.tensor([IDS]))[1].weights[0, -1]
    idle = int((weights == 0).nonzero()[0])
    with pytest.raises(FfmemError, match=f"does not reach expert L1E{idle}"):
        write(
            *(LoadedModel(memories, None, "id:0"), PROMPT, "w9", tmp_path / "out"),
            cell=f"L1E{idle}N3",
            force=True,
            corpus=sample(corpus),
        )


def test_a_written_memory_cannot_be_traced_by_hooks():
    weights = MemoryWeights(value=(0.0,) * 16)
    edits = Edits((Edit("L0N1", "write", 1.0, 0.0, token="w5", weights=weights),))
    with pytest.raises(FfmemError, match="trace the new model"), apply_edits(read("llama"), edits):
        pass


def test_weights_of_another_width_are_refused(tmp_path):
    weights = {"value": [0.0, 1.0], "key": [1.0] * 16, "up": [1.0] * 16}
    edit = {"cell": "L0N1", "how": "write", "factor": 1, "constant": 0, "token": "w5"}
    (tmp_path / EDITS_FILE).write_text(json.dumps({"edits": [edit | {"weights": weights}]}))
    with pytest.raises(FfmemError, match="the new value has 2 numbers, but the model stores 16"):
        edit_weights(read("llama"), EditsFile.read(tmp_path / EDITS_FILE).to_edits())
    weights["value"] = [float("nan")] * 16
    (tmp_path / EDITS_FILE).write_text(json.dumps({"edits": [edit | {"weights": weights}]}))
    with pytest.raises(FfmemError, match="not finite"):
        EditsFile.read(tmp_path / EDITS_FILE)


def test_the_command(idle, corpus, tmp_path):
    memories = stored(idle.manifest.model.source)
    token, _ = some_token(memories)
    arguments = [*("write", str(idle.folder), PROMPT, token, "--layer", "1", "--controls", "1")]
    arguments += ["--corpus", str(corpus), "--unit", "line", "--limit", "20"]
    done = CliRunner().invoke(cli, [*arguments, "--out", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["written"]["holds"]
    assert found["target"]["token"] == token
    assert found["side_effects"]["sentences"] <= 20
    again = CliRunner().invoke(cli, [*arguments, "--out", str(tmp_path / "out")])
    assert isinstance(again.exception, FfmemError)
    assert "not empty" in str(again.exception)
