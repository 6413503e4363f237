"""Traces, effects and edits of mixtures of experts against passes changed by hand."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

import ffmem
from ffmem.cells import Expert
from ffmem.cli import cli
from ffmem.errors import FfmemError, ModelError, StoreError, UnknownCell
from ffmem.indexing.tables import read_columns
from ffmem.interventions.checkpoint import edit_weights
from ffmem.interventions.compare import compare
from ffmem.interventions.edits import Edit, Edits
from ffmem.interventions.effect import ablate
from ffmem.interventions.estimates import direct, gradient, integrated
from ffmem.interventions.forward import LoadedModel, apply_edits
from ffmem.interventions.partial_forward import PartialForward, log_probability
from ffmem.interventions.trace import trace
from ffmem.models.banks import ExpertBank
from ffmem.models.memories import Memories
from tests.indexing.folders import indexed, write_corpus
from tests.interventions.checkpoints import TOKENS as SAVED_TOKENS
from tests.interventions.checkpoints import plain_logits, saved, stored, write_edits
from tests.interventions.pairs import compared, index_of
from tests.interventions.pairs import model as made
from tests.interventions.test_forward import traces_left
from tests.models.test_experts import layers_of, plain_expert
from tests.models.test_memories import TOKENS
from tests.tiny import EXPERT, EXPERTS, N_EXPERTS, read, shaken, tiny, tiny_tokenizer

NAMED = ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "llama4_text", "granitemoe"]
IDS = [0, 5, 9, 2, 17, 30, 8]
AT = 6
SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "intermediate_size", "num_local_experts"),
)
PROMPT = "w5 w9 w7 w17 w30 w8"


@pytest.fixture(params=EXPERTS)
def name(request):
    return request.param


@pytest.fixture(params=NAMED)
def named(request):
    return request.param


def last_layer(memories):
    return memories.layout.memory_layers[-1]


def under(memories, tokens=TOKENS, **edits):
    with apply_edits(memories, Edits.of(**edits).resolve(memories.layout)):
        return memories.logits(tokens)


def dense_cell(memories, layer, number):
    """The name of a memory in the first bank of a layer that every token reaches."""
    return str(memories.layout.cell(layer, memories.banks[layer].dense[0].offset + number))


def routed_at(memories, layer, ids, position):
    """The experts of a layer that run at a position, by number, with their weights."""
    weights = memories.trace(torch.tensor([ids]))[layer].weights[0, position]
    banks = memories.banks[layer]
    return {
        bank.number: float(weights[place])
        for place, bank in enumerate(banks)
        if isinstance(bank, ExpertBank) and weights[place]
    }


# Models changed by hand


def values_of(family, block):
    """The parameters that have the values and biases of a block's experts, expert by expert."""
    if family == "dbrx":
        return block.ffn.experts.mlp.w2.view(N_EXPERTS, EXPERT, -1), None
    if family == "llama4_text":
        return block.feed_forward.experts.down_proj, None
    if family == "jetmoe":
        return block.mlp.output_linear.weight.transpose(1, 2), None
    if family.startswith("granitemoe"):
        return block.block_sparse_moe.experts.down_proj.transpose(1, 2), None
    if family == "nemotron_h":
        return block.mixer.experts.down_proj.transpose(1, 2), None
    if family == "ffmem_adaptive":
        experts = block.memory.experts
        return experts.down_proj.transpose(1, 2), experts.down_proj_bias
    experts = block.mlp.experts
    if family == "gpt_oss":
        return experts.down_proj, experts.down_proj_bias
    return experts.down_proj.transpose(1, 2), None


def changed(name, change):
    """The logits of a model of its family's own code, with weights changed by hand."""
    model = tiny(name)
    with torch.no_grad():
        change(model)
        return model(TOKENS, use_cache=False).logits


def test_a_memory_that_is_edited_is_a_value_that_is_edited_by_hand(name):
    memories, family = read(name), EXPERTS[name].model_type
    layer = last_layer(memories)

    def by_hand(model):
        values, _ = values_of(family, layers_of(model)[layer])
        values[3][3] = 0
        values[1][2] *= -2.5

    found = under(memories, off=[f"L{layer}E3N3"], scale={f"L{layer}E1N2": -2.5})
    expected = changed(name, by_hand)
    assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (found - memories.logits(TOKENS)).abs().max() > 1e-3


def test_an_expert_that_is_off_outputs_nothing_and_others_keep_their_weights(name):
    memories, family = read(name), EXPERTS[name].model_type
    layer = last_layer(memories)
    tokens = torch.tensor([IDS])
    before = memories.trace(tokens)[layer]
    (one, *_) = routed_at(memories, layer, IDS, AT)
    both = (one, (one + 2) % N_EXPERTS)

    def by_hand(model):
        values, bias = values_of(family, layers_of(model)[layer])
        for expert in both:
            values[expert] = 0
            if bias is not None:
                bias[expert] = 0

    off = [f"L{layer}E{both[0]}", f"l{layer}e0{both[1]}"]
    assert_close(under(memories, off=off), changed(name, by_hand), rtol=1e-4, atol=1e-5)
    with apply_edits(memories, Edits.of(off=off)):
        after = memories.trace(tokens)[layer]
    for number, bank in enumerate(memories.banks[layer]):
        is_off = isinstance(bank, ExpertBank) and bank.number in both
        expected = torch.zeros_like(before.weights) if is_off else before.weights
        assert_close(after.weights[..., number], expected[..., number])
        if is_off:
            assert not after.coefficients[..., bank.memories].any()
    assert traces_left(memories.model)[0] == 0
    assert not memories.banks[layer].experts.weighings


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3", "llama4_text", "granitemoeshared"])
def test_a_shared_expert_that_is_off_outputs_nothing(name):
    memories = read(name)
    layer = last_layer(memories)
    path = {
        "qwen2_moe": "mlp.shared_expert.down_proj",
        "deepseek_v3": "mlp.shared_experts.down_proj",
        "llama4_text": "feed_forward.shared_expert.down_proj",
        "granitemoeshared": "shared_mlp.output_linear",
    }[name]

    def by_hand(model):
        layers_of(model)[layer].get_submodule(path).weight.zero_()

    found = under(memories, off=[f"L{layer}S"])
    assert_close(found, changed(name, by_hand), rtol=1e-4, atol=1e-5)
    assert (found - memories.logits(TOKENS)).abs().max() > 1e-3


def test_the_bias_of_a_shared_expert_is_off_too():
    model = tiny("qwen2_moe")
    values = model.model.layers[1].mlp.shared_expert.down_proj
    values.bias = torch.nn.Parameter(torch.randn(16))
    memories = Memories(model, tiny_tokenizer())
    with apply_edits(memories, Edits.of(off=["L1S"])):
        assert not memories.trace(TOKENS)[1].coefficients[..., :20].any()
        found = memories.logits(TOKENS)
    with torch.no_grad():
        written = edit_weights(memories, Edits.of(off=["L1S"])).model(TOKENS).logits
        values.weight.zero_()
        values.bias.zero_()
        assert_close(found, model(TOKENS).logits)
    assert_close(written, found)


def test_edits_at_positions_act_there_alone(named):
    """What an expert does at position 4 cannot reach earlier ones, and position 4 is as if off."""
    memories = read(named)
    layer, tokens = last_layer(memories), torch.tensor([IDS])
    (expert, *_) = routed_at(memories, layer, IDS, 4)
    for how in ("off", "forbid", "force"):
        edits = Edits.of(**{how: [f"L{layer}E{expert}"]}, positions=[4])
        with apply_edits(memories, edits):
            some = memories.trace(tokens)[layer]
        with apply_edits(memories, Edits(edits.edits)):
            everywhere = memories.trace(tokens)[layer]
        plain = memories.trace(tokens)[layer]
        for position in range(len(IDS)):
            expected = everywhere if position == 4 else plain
            assert_close(some.weights[:, position], expected.weights[:, position])
            assert_close(some.layer_output[:, position], expected.layer_output[:, position])
        if how != "force":
            assert not torch.equal(some.weights[:, 4], plain.weights[:, 4])


# Routes


def scores_and_weights(family, block, x):
    """Return a router's scores of all experts, and how it makes weights of those chosen."""
    if family == "deepseek_v3":
        gate = block.mlp.gate
        scores = torch.sigmoid(x @ gate.weight.T)
        choice = scores + gate.e_score_correction_bias

        def weigh(chosen):
            return 1.7 * scores[chosen] / (scores[chosen].sum() + 1e-20)
    elif family == "llama4_text":
        choice = x @ block.feed_forward.router.weight.T

        def weigh(chosen):
            return torch.sigmoid(choice[chosen])
    elif family in ("gpt_oss", "granitemoe"):
        if family == "gpt_oss":
            choice = x @ block.mlp.router.weight.T + block.mlp.router.bias
        else:
            choice = x @ block.block_sparse_moe.router.weight.T

        def weigh(chosen):
            return choice[chosen].softmax(0)
    else:
        choice = (x @ block.mlp.gate.weight.T).softmax(0)

        def weigh(chosen):
            found = choice[chosen]
            return found / found.sum() if family == "mixtral" else found

    return choice, weigh


@pytest.mark.parametrize("how", ["forbid", "force"])
@pytest.mark.parametrize("expert", range(N_EXPERTS))
def test_the_router_chooses_as_by_hand(named, how, expert):
    """Sorted scores in plain loops; weights from the scores of the chosen; then the output."""
    memories, family = read(named), EXPERTS[named].model_type
    layer, tokens = last_layer(memories), torch.tensor([IDS])
    banks, block = memories.banks[layer], memories.blocks[layer]
    with apply_edits(memories, Edits.of(**{how: [f"L{layer}E{expert}"]})):
        found = memories.trace(tokens)[layer]
        edited = memories.logits(tokens)
    n_chosen = int((found.weights[0, 0, -N_EXPERTS:] != 0).sum())
    for position in range(len(IDS)):
        x = found.ff_input[0, position]
        with torch.no_grad():
            scores, weigh = scores_and_weights(family, block, x)
        order = [e for e in scores.argsort(descending=True).tolist() if e != expert]
        chosen = order[:n_chosen] if how == "forbid" else [expert, *order[: n_chosen - 1]]
        expected = torch.zeros(N_EXPERTS)
        expected[chosen] = weigh(chosen).detach()
        weights = found.weights[0, position, -N_EXPERTS:]
        assert_close(weights, expected)
        output = torch.zeros_like(x)
        for bank in banks:
            own = found.coefficients[0, position, bank.memories]
            output += own @ bank.value_rows().detach()
            if isinstance(bank, ExpertBank):
                scaled = x * weights[bank.number] if family == "llama4_text" else x
                path = {"llama4_text": "feed_forward", "granitemoe": "block_sparse_moe.experts"}
                module = block.get_submodule(path.get(family, "mlp.experts"))
                _, m, _ = plain_expert(family, module, bank.number, scaled)
                w = 1.0 if family == "llama4_text" else weights[bank.number]
                is_chosen = bank.number in chosen
                assert_close(own, w * m.detach() if is_chosen else torch.zeros_like(own))
                output += weights[bank.number] * bank.value_bias().detach()
        assert_close(found.value_output[0, position], output, rtol=1e-4, atol=1e-5)
    routed = {e for p in range(len(IDS)) for e in routed_at(memories, layer, IDS, p)}
    everywhere = all(expert in routed_at(memories, layer, IDS, p) for p in range(len(IDS)))
    unchanged = expert not in routed if how == "forbid" else everywhere
    assert torch.equal(edited, memories.logits(tokens)) == unchanged


def test_routes_of_every_family_can_be_forbidden_and_forced(name):
    memories = read(name)
    layer, tokens = last_layer(memories), torch.tensor([IDS])
    before = memories.trace(tokens)[layer].weights[..., -N_EXPERTS:]
    with apply_edits(memories, Edits.of(forbid=[f"L{layer}E2"], force=[f"L{layer}E4"])):
        weights = memories.trace(tokens)[layer].weights[..., -N_EXPERTS:]
    assert not weights[..., 2].any()
    assert weights[..., 4].all()
    if not memories.banks[layer].experts.n_identities:  # which have no weights of their own
        assert torch.equal((weights != 0).sum(-1), (before != 0).sum(-1))
    assert traces_left(memories.model)[0] == 0
    assert torch.equal(memories.trace(tokens)[layer].weights[..., -N_EXPERTS:], before)


def test_an_expert_that_is_never_chosen_can_be_forbidden_without_effect():
    memories = read("mixtral")
    (never, *_) = set(range(N_EXPERTS)) - set(routed_at(memories, 1, IDS[:1], 0))
    tokens = torch.tensor([IDS[:1]])
    found = under(memories, tokens, forbid=[f"L1E{never}"])
    assert torch.equal(found, memories.logits(tokens))


def test_a_router_that_does_not_choose_by_top_k_is_refused():
    settings = EXPERTS["mixtral"].to_dict()
    settings = {key: settings[key] for key in SIZES} | {"num_experts_per_tok": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("phimoe", **settings))
    memories = Memories(shaken(model), tiny_tokenizer())
    for how in ("forbid", "force"):
        with pytest.raises(ModelError, match=r"layer 1 does not choose its experts by top-k"):
            under(memories, **{how: ["L1E2"]})
    (expert, *_) = routed_at(memories, 1, IDS, AT)
    tokens = torch.tensor([IDS])
    off = under(memories, tokens, off=[f"L1E{expert}"])
    assert not torch.equal(off, memories.logits(tokens))
    assert traces_left(model)[0] == 0


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"off": ["L1E5"]}, "no expert L1E5: layer 1 has banks E0 to E4 with memories 0 to 11"),
        ({"off": ["L7E0"]}, "no expert L7E0: the model has layers 0 to 1"),
        ({"off": ["L1S"]}, "no expert L1S"),
        ({"off": ["L1E4N12"]}, "no memory L1E4N12"),
        ({"forbid": ["L1N3"]}, "Cannot forbid L1N3. Use an expert, like L5E12"),
        ({"force": ["L1S"]}, "Cannot force L1S: every token reaches a shared expert"),
        ({"set": {"L1E2": 2}}, "'L1E2' is not the name of a memory"),
        ({"forbid": ["L1E2"], "force": ["L1E2"]}, "L1E2 is edited twice"),
        ({"forbid": ["L1E2"], "off": ["L1E2"]}, "L1E2 is edited twice"),
        ({"off": ["L1E2", "L1E2N3"]}, "same edit"),
        (
            {"off": ["L1E2"], "scale": {"L1E2N3": 2}},
            "L1E2N3 × 2 has no effect, because of L1E2 off",
        ),
        ({"forbid": [f"L1E{e}" for e in range(5)]}, "All 5 experts of layer 1 are forbidden"),
        ({"forbid": ["L1E0", "L1E1", "L1E2", "L1E3"]}, r"chooses 2 of 5 .* only 1 expert\."),
        ({"force": ["L1E0", "L1E1", "L1E2"]}, "chooses 2 experts for each token, so 3 cannot"),
    ],
)
def test_edits_of_experts_that_cannot_be_are_refused(edits, message):
    if message == "same edit":
        message = "L1E2N3 off has no effect, because of L1E2 off"
    with pytest.raises(FfmemError, match=message):
        under(read("mixtral"), **edits)
    assert traces_left(read("mixtral").model)[0] == 0


@pytest.mark.parametrize("how", ["off", "forbid", "force"])
def test_a_dense_model_has_no_experts(how):
    with pytest.raises(UnknownCell, match=r"no expert L1E0: layer 1 has memories 0 to 23"):
        ffmem.trace(read("llama"), PROMPT, start="none", **{how: ["L1E0"]})


# Effects


def test_from_any_layer_up_is_a_whole_pass_and_ablations_are_exact(name):
    """Each memory off by hand: a whole pass through the family's code with its value 0."""
    memories, family = read(name), EXPERTS[name].model_type
    forward, target = PartialForward(memories, IDS, AT), 7
    clean = log_probability(memories.head, forward.output, target)
    generator = np.random.default_rng(0)
    cells = []
    for layer in memories.layout.memory_layers:
        if memories.banks[layer].routed:
            (expert, *_) = routed_at(memories, layer, IDS, AT)
            cells += [f"L{layer}E{expert}N{m}" for m in generator.choice(4, 3, replace=False)]
            if memories.banks[layer].dense:
                cells.append(dense_cell(memories, layer, 2))
    resolved = [memories.layout.resolve(cell) for cell in cells]
    found = ablate(forward, target, resolved)
    for cell, change in zip(resolved, found, strict=True):
        model = tiny(name)
        bank = memories.banks[cell.layer].at(cell.memory)
        with torch.no_grad():
            if isinstance(bank, ExpertBank):
                values, _ = values_of(family, layers_of(model)[cell.layer])
                values[bank.number][cell.memory - cell.offset] = 0
            else:
                path = next(n for n, one in memories.model.named_modules() if one is bank.values)
                model.get_submodule(path).weight[:, cell.memory - cell.offset] = 0
            logits = model(torch.tensor([IDS]), use_cache=False).logits[0, AT].double()
        expected = logits.log_softmax(0)[target] - clean[0]
        assert_close(change, expected.cpu(), rtol=0, atol=1e-4)
    assert found.abs().max() > 1e-4


def test_estimates_are_slopes_of_exact_changes(named):
    """−m · ∂log p/∂m by finite differences, memory by memory, in every bank that runs."""
    memories = read(named)
    forward, target = PartialForward(memories, IDS, AT), 7
    estimates = gradient(forward, target)
    straight = direct(forward, target)
    assert straight is not None
    layout = memories.layout
    for layer in layout.memory_layers:
        for bank in memories.banks[layer]:
            memory = bank.offset + 3
            number = layout.number(layout.cell(layer, memory))
            if not forward.layers[layer].coefficients[0, memory]:
                assert straight[number] == 0
            step = 1e-2
            logs = []
            for factor in (1 - step, 1 + step):

                def scaled(rows, memory=memory, factor=factor):
                    if memory not in rows.memories:
                        return rows.coefficients
                    found = rows.coefficients.clone()
                    found[:, memory - rows.memories.start] *= factor
                    return found

                with torch.no_grad():
                    output = forward.run(layer, 1, {layer: scaled})
                logs.append(float(log_probability(memories.head, output, target)))
            slope = -(logs[1] - logs[0]) / (2 * step)
            assert float(estimates[number]) == pytest.approx(slope, rel=0.05, abs=2e-4)


def test_in_the_last_layer_direct_and_exact_agree_to_first_order(named):
    memories = read(named)
    forward, target = PartialForward(memories, IDS, AT), 7
    whole, straight = gradient(forward, target, [AT]), direct(forward, target, [AT])
    layer = last_layer(memories)
    own = slice(memories.layout.starts[layer], memories.layout.starts[layer + 1])
    with torch.no_grad():
        assert straight[own].abs().max() > 1e-4
    # Beside the straight way there is only the final norm's σ.
    assert torch.corrcoef(torch.stack([whole[own], straight[own]]))[0, 1] > 0.8


def test_integrated_gradients_of_a_layer_sum_to_the_layer_off(named):
    memories = read(named)
    forward, target = PartialForward(memories, IDS, AT), 7
    layer = last_layer(memories)
    own = slice(memories.layout.starts[layer], memories.layout.starts[layer + 1])
    found = integrated(forward, target, 64)[own].sum()
    with torch.no_grad():
        off = forward.run(layer, 1, {layer: lambda rows: torch.zeros_like(rows.coefficients)})
    expected = log_probability(memories.head, off, target) - log_probability(
        memories.head, forward.output, target
    )
    assert float(found) == pytest.approx(float(expected), rel=0.05, abs=2e-3)


def test_effect_lists_memories_of_experts_by_name(named):
    memories = read(named)
    found = ffmem.effect(
        memories, PROMPT, candidates=10, top=10, cells=["L1E3N2"], integrated=True, start="none"
    )
    assert any("E" in row.cell for row in found.memories)
    for row in found.memories:
        assert None not in (row.gradient, row.direct, row.integrated)
    ids = [5, 9, 7, 17, 30, 8]
    clean = memories.logits(torch.tensor([ids]))[0, -1].double().log_softmax(0)
    for row in found.memories[:3]:
        off = under(memories, torch.tensor([ids]), off=[row.cell])[0, -1].double().log_softmax(0)
        expected = float((off - clean)[found.target.id])
        assert row.change == pytest.approx(expected, abs=1e-4)


# Traces


def test_a_trace_names_the_experts_their_weights_and_their_memories(named):
    memories, family = read(named), EXPERTS[named].model_type
    found = trace(LoadedModel(memories, None, "none"), PROMPT, top=500)
    few = trace(LoadedModel(memories, None, "none"), PROMPT, top=3)
    ids = [5, 9, 7, 17, 30, 8]
    layers = memories.trace(torch.tensor([ids]))
    for layer, (shown, one) in enumerate(zip(found.layers, layers, strict=True)):
        if one.weights is None:
            assert shown.experts is None
            assert all(row.weight is None and row.m is None for row in shown.memories)
            continue
        weights = one.weights[0, -1]
        expected = {
            f"L{layer}S" if bank.kind == "shared" else f"L{layer}E{bank.number}": float(w)
            for bank, w in zip(memories.banks[layer], weights, strict=True)
            if w
        }
        assert {row.expert: row.weight for row in shown.experts} == pytest.approx(expected)
        assert [row.weight for row in shown.experts] == sorted(expected.values(), reverse=True)
        lengths = memories.output_directions(layer).norm(dim=1)
        sizes = (one.coefficients[0, -1].abs() * lengths).tolist()
        largest = sorted(range(len(sizes)), key=lambda number: (-sizes[number], number))
        assert [row.cell for row in shown.memories] == [
            str(memories.layout.cell(layer, number)) for number in largest
        ]
        assert [row.contribution for row in shown.memories] == pytest.approx(
            [sizes[number] for number in largest], rel=1e-5
        )
        assert few.layers[layer].memories == shown.memories[:3]
        for row in shown.memories:
            cell = memories.layout.resolve(row.cell)
            assert row.cell == str(cell)
            name = str(Expert(layer, cell.bank))
            assert row.weight == pytest.approx(expected.get(name, 0.0))
            product = row.m if family == "llama4_text" and "E" in name else row.weight * row.m
            assert product == pytest.approx(row.coefficient, abs=1e-7)
            if row.contribution:
                assert name in expected
    text = str(found)
    assert "experts" in text
    assert f"{found.layers[-1].experts[0].expert} 0." in text or "S 1" in text
    assert " = " in text
    best = found.layers[-1].memories[0]
    assert found.to_dict()["layers"][-1]["memories"][0]["weight"] == best.weight


def test_a_dense_trace_shows_no_experts():
    found = trace(LoadedModel(read("llama"), None, "none"), PROMPT)
    assert "experts" not in str(found)
    assert all(layer.experts is None for layer in found.layers)


def test_a_trace_under_edited_routes_shows_both_runs(named):
    memories = read(named)
    layer = last_layer(memories)
    (expert, *_) = routed_at(memories, layer, [5, 9, 7, 17, 30, 8], 5)
    cell = f"L{layer}E{expert}"
    found = ffmem.trace(memories, PROMPT, forbid=[cell], start="none", generate=3, grid=True)
    assert found.edits == [Edit(cell, "forbid", 0.0, 0.0)]
    assert cell in [one.expert for one in found.layers[layer].experts]
    assert cell not in [one.expert for one in found.edited_layers[layer].experts]
    assert f"edited    {cell} forbidden" in str(found)
    tokens = torch.tensor([[5, 9, 7, 17, 30, 8]])
    expected = under(memories, tokens, forbid=[cell])[0, -1].softmax(0)
    top = found.edited_output_top[0]
    assert top.probability == pytest.approx(float(expected.max()), abs=1e-5)


def test_the_command_takes_experts(tmp_path):
    folder = saved(tiny("mixtral"), tmp_path / "model")
    run = CliRunner().invoke
    asked = ["trace", str(folder), PROMPT, "--start", "none", "--forbid", "L1E0,L1E1", "--json"]
    found = json.loads(run(cli, [*asked, "--force", "L1E3", "--off", "L0E2"]).stdout)
    assert [(edit["cell"], edit["how"]) for edit in found["edits"]] == [
        ("L0E2", "off"),
        ("L1E0", "forbid"),
        ("L1E1", "forbid"),
        ("L1E3", "force"),
    ]
    ran = [one["expert"] for one in found["edited_layers"][1]["experts"]]
    assert "L1E3" in ran
    assert not {"L1E0", "L1E1"} & {*ran}
    wrong = run(cli, ["trace", str(folder), PROMPT, "--forbid", "L1N3"])
    assert str(wrong.exception) == "Cannot forbid L1N3. Use an expert, like L5E12."


# Weights


def test_edits_in_weights_are_edits_in_hooks(name, tmp_path):
    memories = read(name)
    layer = last_layer(memories)
    edits = {
        "off": [f"L{layer}E1N3", f"L{layer}E0", f"L{layer}E3"],
        "scale": {f"L{layer}E2N3": -2.5, f"L{layer}E4N0": 3},
    }
    if memories.banks[layer].dense:
        edits["off"].append(dense_cell(memories, layer, 3))
    before = memories.logits(TOKENS)
    expected = under(memories, **edits)
    edited = edit_weights(memories, Edits.of(**edits)).model
    with torch.no_grad():
        assert_close(edited(TOKENS, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
    assert (expected - before).abs().max() > 1e-3
    assert torch.equal(memories.logits(TOKENS), before)


def test_a_shared_expert_can_be_off_in_weights():
    memories = read("qwen2_moe")
    edited = edit_weights(memories, Edits.of(off=["L0S", "L1S"])).model
    with torch.no_grad():
        found = edited(TOKENS, use_cache=False).logits
    assert_close(found, under(memories, off=["L0S", "L1S"]), rtol=1e-4, atol=1e-5)


def test_an_edited_mixture_is_saved_as_plain_transformers_reads_it(named, tmp_path):
    memories = stored(saved(tiny(named), tmp_path / "base"))
    layer = last_layer(memories)
    edits = {"off": [f"L{layer}E1N3", f"L{layer}E0"], "scale": {f"L{layer}E2N3": -2.5}}
    written = write_edits(memories, tmp_path / "out", **edits)
    expected = under(memories, SAVED_TOKENS, **edits)
    assert_close(plain_logits(tmp_path / "out"), expected, rtol=1e-4, atol=1e-5)
    assert "ffmem" not in (tmp_path / "out" / "config.json").read_text()
    again = write_edits(memories, tmp_path / "again", file=tmp_path / "out")
    assert again.hash_after == written.hash_after
    assert [edit.cell for edit in written.edits if edit.how == "off"] == [
        f"L{layer}E1N3",
        f"L{layer}E0",
    ]


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4_text"])
def test_a_fixed_coefficient_of_an_expert_cannot_be_written(name):
    memories = read(name)
    layer = last_layer(memories)
    with pytest.raises(ModelError, match=r"Cannot write L.E2N3 = 1\.5: .* multiplied by its weigh"):
        edit_weights(memories, Edits.of(set={f"L{layer}E2N3": 1.5}))
    edits = Edits.of(set={f"L{layer}E2N3": 0})
    with torch.no_grad():
        found = edit_weights(memories, edits).model(TOKENS, use_cache=False).logits
    assert_close(found, under(memories, off=[f"L{layer}E2N3"]), rtol=1e-4, atol=1e-5)


def test_a_gated_shared_expert_holds_no_fixed_coefficient():
    with pytest.raises(ModelError, match=r"L1SN3 = 1\.5: .* multiplied by its weight"):
        edit_weights(read("qwen2_moe"), Edits.of(set={"L1SN3": 1.5}))


@pytest.mark.parametrize("how", ["forbid", "force"])
def test_routes_cannot_be_written(how):
    with pytest.raises(ModelError, match=r"Cannot write L1E2 for.*router weights cannot"):
        edit_weights(read("mixtral"), Edits.of(**{how: ["L1E2"]}))


def test_a_coefficient_that_is_set_is_what_multiplies_the_value_where_the_expert_runs(named):
    memories = read(named)
    layer, tokens = last_layer(memories), torch.tensor([IDS])
    before = memories.trace(tokens)[layer]
    (expert, *_) = routed_at(memories, layer, IDS, AT)
    cell = memories.layout.resolve(f"L{layer}E{expert}N3")
    with apply_edits(memories, Edits.of(set={str(cell): 1.5})):
        after = memories.trace(tokens)[layer]
    bank = memories.banks[layer].at(cell.memory)
    runs = before.weights[0, :, memories.banks[layer].banks.index(bank)] != 0
    assert runs.any()
    expected = torch.where(runs, 1.5, 0.0)
    assert_close(after.coefficients[0, :, cell.memory], expected)
    moved = (expected - before.coefficients[0, :, cell.memory])[:, None] * bank.value_rows()[3]
    assert_close(after.value_output[0] - before.value_output[0], moved, rtol=1e-3, atol=1e-4)


# With an index


def test_the_mean_of_a_memory_in_an_expert_is_that_where_the_expert_runs(tmp_path):
    memories = read("mixtral")
    write_corpus(tmp_path / "corpus.txt")
    index = indexed(tmp_path / "index", tmp_path / "corpus.txt", memories)
    start = index.manifest.start.id
    before = [] if start is None else [start]
    for name in ("L1E0N3", "L1E2N5"):
        cell = memories.layout.resolve(name)
        own = []
        for ids in read_columns(index.folder / "sentences.parquet", ["ids"])["ids"]:
            found = memories.trace(torch.tensor([[*before, *ids]]))[1]
            runs = found.weights[0, :, int(cell.bank[1:])] != 0
            runs[: len(before)] = False
            own += found.coefficients[0, runs, cell.memory].tolist()
        (edit,) = Edits.of(mean=[name], index=index)
        assert edit.constant == pytest.approx(np.mean(own), rel=1e-4)
        assert len(own) < index.manifest.corpus.prefixes


def test_two_indexes_of_mixtures_are_compared_bank_by_bank(tmp_path):
    def turn(memories):
        with torch.no_grad():
            memories.banks[1].routed[2].experts.values(2)[4] *= -1

    first, second = made("qwen2_moe"), made("qwen2_moe", turn)
    found = compared(tmp_path, first, second)
    cell = first.layout.resolve("L1E2N4")
    number = first.layout.number(cell)
    cosines = found.numbers["value_cosine"]
    assert len(cosines) == len(first.layout)
    assert cosines[number] == -1
    assert np.delete(cosines, number) == pytest.approx(1)
    assert found.changed_values[0]["cell"] == "L1E2N4"


def test_mixtures_with_other_experts_are_not_compared(tmp_path):
    """Their layers have 60 memories each, but memory 11 of one expert is memory 1 of another."""
    settings = EXPERTS["mixtral"].to_dict() | {"num_local_experts": 6, "intermediate_size": 10}
    torch.manual_seed(0)
    other = AutoModelForCausalLM.from_config(EXPERTS["mixtral"].__class__.from_dict(settings))
    second = Memories(shaken(other), tiny_tokenizer())
    assert second.layout.widths == read("mixtral").layout.widths
    indexes = [
        index_of(tmp_path / "one", made("mixtral")),
        index_of(tmp_path / "two", second),
    ]
    with pytest.raises(StoreError, match=r"banks: 5 experts of 12 in the first, 6 experts of 10"):
        compare(*indexes, tmp_path, models=False)
