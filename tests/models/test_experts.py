"""Mixtures of experts against plain loops over tokens, experts and memories."""

import copy
import json
from collections import defaultdict
from functools import partial

import pytest
import torch
from torch.nn.functional import silu
from torch.testing import assert_close
from transformers.activations import ACT2FN

import ffmem
from ffmem.errors import MixtureOfExperts, ModelError, SelfCheckFailed, UnknownCell
from ffmem.models.banks import DenseBank, ExpertBank
from ffmem.models.load import describe, load
from ffmem.models.memories import Memories
from tests.models.test_memories import TOKENS, n_hooks
from tests.tiny import EXPERT, EXPERTS, HIDDEN, N_EXPERTS, read, tiny, tiny_tokenizer

SHARED = {
    "deepseek_v3": 12,
    "deepseek_v4": 12,
    "ernie4_5_moe": 12,
    "ffmem_adaptive moe": 4,
    "glm4_moe": 12,
    "granitemoeshared": 20,
    "hy_v4": 12,
    "llama4_text": 12,
    "nemotron_h in a latent space": 20,
    "nemotron_h with experts": 20,
    "qwen2_moe": 20,
    "qwen4_exp_text": 20,
}
"""Memories of the shared expert."""


@pytest.fixture(params=EXPERTS)
def name(request):
    return request.param


# The plain computation, by each family's own code but for the memories


def record_inputs(model, path, tokens):
    """Return the arguments and outputs of the modules at a path, layer by layer."""
    found = {}
    hooks = []
    for layer, block in enumerate(layers_of(model)):
        module = block
        for part in path.split("."):
            module = getattr(module, part, None)
        if module is not None:
            hooks.append(
                module.register_forward_hook(
                    lambda _, args, kwargs, output, layer=layer: found.update(
                        {layer: (args or tuple(kwargs.values()), output)}
                    ),
                    with_kwargs=True,
                )
            )
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return found


def layers_of(model):
    return model.transformer.blocks if hasattr(model, "transformer") else model.model.layers


def plain_expert(family, module, e, x):
    """Return gate, m and the values of an expert for one token, from the weights as stored."""
    if family == "gpt_oss":
        scores = x @ module.gate_up_proj[e] + module.gate_up_proj_bias[e]
        gate, up = scores[0::2], scores[1::2].clamp(-module.limit, module.limit)
        clamped = gate.clamp(max=module.limit)
        m = (up + 1) * clamped * torch.sigmoid(module.alpha * clamped)
        return gate, m, module.down_proj[e]
    if family == "nemotron_h":
        gate = module.up_proj[e] @ x
        return gate, gate.relu().square(), module.down_proj[e].T
    if family == "ffmem_adaptive":
        gate = module.up_proj[e] @ x + module.up_proj_bias[e]
        return gate, gate.relu(), module.down_proj[e].T
    if family == "dbrx":
        stacks = (weight.view(N_EXPERTS, EXPERT, HIDDEN) for weight in module.mlp.parameters())
        w1, v1, w2 = stacks
        gate = w1[e] @ x
        return gate, silu(gate) * (v1[e] @ x), w2[e]
    if family == "llama4_text":
        scores = x @ module.experts.gate_up_proj[e]
        values = module.experts.down_proj[e]
    elif family == "jetmoe":
        scores = module.input_linear.weight[e] @ x
        values = module.output_linear.weight[e].T
    else:
        scores = module.gate_up_proj[e] @ x
        values = module.down_proj[e].T
    gate, up = scores.chunk(2)
    if family in ("deepseek_v4", "hy_v4"):
        return gate, silu(gate.clamp(max=0.8)) * up.clamp(-0.8, 0.8), values
    return gate, silu(gate) * up, values


def routes(family, model):
    """Return, by layer: the module with experts, its inputs, and (token, expert, weight)."""
    path = {
        "dbrx": "ffn.experts",
        "ffmem_adaptive": "memory.experts",
        "granitemoe": "block_sparse_moe.experts",
        "granitemoeshared": "block_sparse_moe.experts",
        "jetmoe": "mlp",
        "llama4_text": "feed_forward",
        "nemotron_h": "mixer.experts",
    }.get(family, "mlp.experts")
    found = {}
    routers = {}
    if family in ("jetmoe", "llama4_text"):
        routers = record_inputs(model, f"{path}.router", TOKENS)
    for layer, (args, _) in record_inputs(model, path, TOKENS).items():
        module = layers_of(model)[layer].get_submodule(path)
        x = args[0].reshape(-1, args[0].shape[-1])
        chosen = []
        if family == "llama4_text":
            if layer not in routers:
                continue
            scores = routers[layer][1][0]
            chosen = [(t, e, float(scores[t, e])) for t, e in scores.nonzero().tolist()]
        elif family == "jetmoe":
            _, tokens, weights, counts, _ = routers[layer][1]
            experts = [e for e, count in enumerate(counts) for _ in range(count)]
            chosen = list(zip(tokens.tolist(), experts, weights.tolist(), strict=True))
        else:
            for token, (experts, weights) in enumerate(zip(args[1], args[2], strict=True)):
                chosen += [
                    (token, int(e), float(w))
                    for e, w in zip(experts, weights, strict=True)
                    if e < N_EXPERTS  # others give their input back
                ]
        found[layer] = (module, x, chosen)
    return found


def test_coefficients_of_experts_are_the_router_weight_times_m_token_by_token(name):
    family = EXPERTS[name].model_type
    memories = read(name)
    trace = memories.trace(TOKENS)
    plain = routes(family, tiny(name))
    assert [layer for layer, banks in enumerate(memories.banks) if banks.routed] == list(plain)
    for layer, (module, x, chosen) in plain.items():
        width = memories.layout.widths[layer]
        expected = torch.zeros(len(x), width)
        gates = torch.zeros(len(x), width)
        weights = torch.zeros(len(x), N_EXPERTS)
        output = torch.zeros(len(x), x.shape[1])
        first = width - N_EXPERTS * memories.banks[layer].routed[0].size
        with torch.no_grad():
            for token, expert, weight in chosen:
                scaled = x[token] * weight if family == "llama4_text" else x[token]
                gate, m, values = plain_expert(family, module, expert, scaled)
                bank = slice(first + expert * len(m), first + (expert + 1) * len(m))
                coefficient = m if family == "llama4_text" else weight * m
                expected[token, bank] = coefficient
                gates[token, bank] = gate
                weights[token, expert] = weight
                output[token] += coefficient @ values
                if family == "gpt_oss":
                    output[token] += weight * module.down_proj_bias[expert]
        found = trace[layer]
        assert_close(found.coefficients.flatten(0, 1)[:, first:], expected[:, first:])
        assert_close(found.weights.flatten(0, 1)[:, -N_EXPERTS:], weights)
        if memories.gated:
            assert_close(found.gate.flatten(0, 1)[:, first:], gates[:, first:])
        else:
            assert found.gate is None
        if memories.layout.layers[layer][0].kind == "expert":  # no shared expert beside them
            constant = memories.bias(layer)
            expected_output = (output + constant).view(*TOKENS.shape, -1)
            assert_close(found.value_output, expected_output, rtol=1e-4, atol=1e-5)


def test_the_coefficients_of_a_shared_expert_are_scaled_by_its_gate():
    memories = read("qwen2_moe")
    for layer, block in enumerate(memories.blocks):
        found = memories.trace(TOKENS)[layer]
        x, mlp = found.ff_input, block.mlp
        shared = mlp.shared_expert
        m = silu(x @ shared.gate_proj.weight.T) * (x @ shared.up_proj.weight.T)
        weight = torch.sigmoid(x @ mlp.shared_expert_gate.weight.T)
        assert_close(found.coefficients[..., :20], weight * m)
        assert_close(found.weights[..., :1], weight)
        assert 0.01 < float(weight.min()) < float(weight.max()) < 0.99


def test_shared_experts_are_banks_of_their_own(name):
    memories = read(name)
    for banks, records in zip(memories.banks, memories.layout.layers, strict=True):
        kinds = {record.kind: (record.size, record.count) for record in records}
        if not banks.routed:
            assert set(kinds) <= {"dense"}
        elif name in SHARED:
            assert kinds["shared"] == (SHARED[name], 1)
            assert list(kinds) == ["shared", "expert"]
        elif name == "longcat_flash":
            assert list(kinds) == ["dense", "expert"]
        else:
            assert list(kinds) == ["expert"]
        if banks.routed:
            assert kinds["expert"][1] == N_EXPERTS
    cell = memories.layout.resolve("L1E3N2")
    bank = memories.banks[1].routed[3]
    assert (cell.memory, str(cell)) == (bank.offset + 2, "L1E3N2")


def test_every_layer_outputs_the_sum_of_its_memories(name):
    """Σ c·v + Σ w·b = the output of the feed-forward part, memory by memory, and r + y = o."""
    memories = read(name)
    for layer, found in enumerate(memories.trace(TOKENS)):
        if not memories.banks[layer]:
            continue
        total = memories.bias_at(layer, found).clone()
        values = memories.values(layer)
        assert len(values) == memories.layout.widths[layer]
        for memory, value in enumerate(values):
            total += found.coefficients[..., memory, None] * value
        assert_close(total, found.value_output, rtol=1e-4, atol=1e-5)
        assert_close(found.residual + found.ff_output, found.layer_output)
        assert_close(
            torch.cat(list(memories.direction_parts(layer))), memories.output_directions(layer)
        )


def test_keys_and_biases_give_the_gate_in_every_bank(name):
    memories = read(name)
    for layer, found in enumerate(memories.trace(TOKENS)):
        for number, bank in enumerate(memories.banks[layer]):
            if name == "longcat_flash" and isinstance(bank, DenseBank):
                continue  # it has an input of its own
            x = found.ff_input
            if EXPERTS[name].model_type == "llama4_text" and isinstance(bank, ExpertBank):
                x = x * found.weights[..., number, None]
            scores = x @ bank.key_rows().T + bank.key_bias()
            routed = slice(None)
            if isinstance(bank, ExpertBank):
                routed = found.weights[..., number] != 0
            if memories.gated:
                assert_close(found.gate[..., bank.memories][routed], scores[routed])
            else:
                m = ACT2FN[memories.activation](scores)
                if found.weights is not None:
                    m = m * found.weights[..., number, None]
                assert_close(found.coefficients[..., bank.memories][routed], m[routed])


def test_the_logits_are_those_of_the_models_own_code(name):
    own = tiny(name)
    with torch.no_grad():
        expected = own(TOKENS).logits
    memories = Memories(own, tiny_tokenizer())

    assert_close(memories.logits(TOKENS), expected, rtol=1e-4, atol=1e-5)


def test_reading_gives_each_expert_the_tokens_that_are_routed_to_it(name):
    memories = read(name)
    seen = defaultdict(list)
    with memories.read_coefficients(
        lambda bank, m, gate, routing: seen[bank].append((m.clone(), gate, routing))
    ):
        memories.forward(TOKENS)
    trace = memories.trace(TOKENS)
    for layer, banks in enumerate(memories.banks):
        for number, bank in enumerate(banks):
            expected = trace[layer].coefficients[..., bank.memories]
            if isinstance(bank, DenseBank):
                ((m, _, routing),) = seen[bank]
                assert_close(m, expected)
                assert (routing is None) == (name not in ("qwen2_moe", "qwen4_exp_text"))
                continue
            weights = trace[layer].weights[..., number]
            if bank not in seen:
                assert not weights.any()
                continue
            ((m, gate, routing),) = seen[bank]
            places = weights.nonzero()
            assert torch.equal(torch.stack([routing.sentences, routing.positions], 1), places)
            assert_close(m, expected[tuple(places.T)])
            assert_close(routing.weights, weights[tuple(places.T)])
            assert (gate is not None) == memories.gated


def test_nothing_stays_behind_after_reading(name):
    memories = read(name)
    with pytest.raises(ZeroDivisionError), memories.read_coefficients(lambda *_: 1 / 0):
        memories.forward(TOKENS)
    assert n_hooks(memories.model) == 0
    assert all(not banks.experts.readers for banks in memories.banks if banks.routed)


def test_a_trace_at_some_places_is_the_whole_trace_there(name):
    memories = read(name)
    at = torch.tensor([[1, 5], [0, 2], [1, 0], [1, 5]])
    for whole, some in zip(memories.trace(TOKENS), memories.trace(TOKENS, at), strict=True):
        for everywhere, few in zip(whole, some, strict=True):
            assert (everywhere is None) == (few is None)
            if few is not None:
                assert torch.equal(few, everywhere[at[:, 0], at[:, 1]])


def test_two_readers_of_one_model_and_a_copy_do_not_disturb_each_other():
    model = tiny("mixtral")
    one, two = Memories(model, tiny_tokenizer()), Memories(model, tiny_tokenizer())
    copied = copy.deepcopy(model)
    copied.model.layers[0].mlp.experts.down_proj.data.zero_()
    three = Memories(copied, tiny_tokenizer())

    expected = one.trace(TOKENS)[1].coefficients
    assert torch.equal(two.trace(TOKENS)[1].coefficients, expected)
    assert not three.trace(TOKENS)[0].value_output.any()
    assert not torch.equal(three.trace(TOKENS)[1].coefficients, expected)


def test_memories_that_are_switched_off_act_as_values_of_zeros(name):
    """Of every bank of a layer the memory 3 at once."""
    memories, other = read(name), Memories(tiny(name), tiny_tokenizer())
    layer = memories.layout.memory_layers[-1]
    with torch.no_grad():
        for bank in other.banks[layer]:
            weights = bank.experts.values(bank.number) if bank.kind == "expert" else None
            (bank.value_rows() if weights is None else weights)[3] = 0.0

    def off(bank, coefficients, tokens):
        assert coefficients.shape == (len(tokens), bank.size)
        changed = coefficients.clone()
        changed[:, 3] = 0
        return changed

    before = memories.logits(TOKENS)
    with memories.banks[layer].editing(off):
        edited = memories.logits(TOKENS)
        found = memories.trace(TOKENS)[layer].coefficients
    assert not any(found[..., bank.offset + 3].any() for bank in memories.banks[layer])
    assert_close(edited, other.logits(TOKENS), rtol=1e-4, atol=1e-5)
    assert (edited - before).abs().max() > 1e-3
    assert torch.equal(memories.logits(TOKENS), before)


def test_an_edit_changes_what_multiplies_the_value(name):
    """y changes by Σ δ · v where a bank runs, if δ is added to its coefficients."""
    memories = read(name)
    layer = memories.layout.memory_layers[-1]
    before = memories.trace(TOKENS)[layer]
    reached = defaultdict(list)

    def add(bank, coefficients, tokens):
        reached[bank].extend(tokens.tolist())
        return coefficients + 0.25

    with memories.banks[layer].editing(add):
        after = memories.trace(TOKENS)[layer]
    expected = before.value_output.flatten(0, 1).clone()
    for bank, tokens in reached.items():
        expected[tokens] += 0.25 * bank.value_rows().sum(0)
    assert_close(after.value_output.flatten(0, 1), expected, rtol=1e-4, atol=1e-4)


def test_experts_that_give_their_input_back_are_a_part_of_the_residual():
    memories = read("longcat_flash")
    plain = record_inputs(tiny("longcat_flash"), "mlp.experts", TOKENS)
    norms = record_inputs(tiny("longcat_flash"), "post_attention_layernorm.1", TOKENS)
    for layer, ((x, experts, weights), _) in plain.items():
        back = ((experts >= N_EXPERTS) * weights).sum(1, keepdim=True) * x
        assert back.any()
        expected = norms[layer][0][0] + back.view(*TOKENS.shape, -1)
        assert_close(memories.trace(TOKENS)[layer].residual, expected)


def test_experts_are_described():
    facts = describe(read("deepseek_v3"))
    assert facts["experts"] == {
        "layers": 1,
        "routed": "5 × 12 memories",
        "shared": "1 × 12 memories",
    }
    assert describe(read("mixtral"))["experts"] == {"layers": 2, "routed": "5 × 12 memories"}
    assert "experts" not in describe(read("llama"))


# What cannot be read


def test_a_router_that_chooses_an_expert_without_weights_is_refused():
    model = tiny("mixtral")
    experts = model.model.layers[1].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        setattr(experts, name, torch.nn.Parameter(getattr(experts, name)[:2].detach().clone()))

    with pytest.raises(
        ModelError, match=r"router chose expert 4, but the layer has weights of 2 exp"
    ):
        Memories(model, tiny_tokenizer())


def test_a_router_that_is_not_a_number_is_refused():
    model = tiny("mixtral")
    router = model.model.layers[1].mlp.gate
    router.register_forward_hook(
        lambda _, args, output: (output[0], output[1] * torch.nan, output[2])
    )

    with pytest.raises(SelfCheckFailed, match="not finite"):
        Memories(model, tiny_tokenizer())


def test_quantized_experts_are_refused_with_advice():
    model = tiny("mixtral")
    experts = model.model.layers[0].mlp.experts
    blocks = torch.zeros(N_EXPERTS, HIDDEN, EXPERT, dtype=torch.uint8)
    experts.down_proj_blocks = torch.nn.Parameter(blocks, requires_grad=False)
    del experts.down_proj

    with pytest.raises(MixtureOfExperts, match=r"'mixtral' model .*dequantized"):
        Memories(model, tiny_tokenizer())


def test_experts_of_a_small_dtype_are_refused_with_advice():
    model = tiny("mixtral")
    experts = model.model.layers[0].mlp.experts
    weight = experts.down_proj.detach().to(torch.float8_e4m3fn)
    experts.down_proj = torch.nn.Parameter(weight, requires_grad=False)

    with pytest.raises(MixtureOfExperts, match=r"down_proj is torch.float8.*dequantized"):
        Memories(model, tiny_tokenizer())


def test_experts_that_other_code_runs_are_refused():
    model = tiny("mixtral")
    experts = model.model.layers[1].mlp.experts
    experts.forward = lambda x, *_: x  # as a kernel that replaces the module's forward

    with pytest.raises(MixtureOfExperts, match="layer 1 computes them with other code"):
        Memories(model, tiny_tokenizer())


@pytest.mark.parametrize("name", ["mixtral", "jetmoe"])
def test_a_checkpoint_whose_config_lies_about_its_experts_is_refused(name, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    tiny_tokenizer().tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_local_experts"] = N_EXPERTS + 2
    (tmp_path / "config.json").write_text(json.dumps(config))

    stored = rf"has shape \({N_EXPERTS}, .*config requires \({N_EXPERTS + 2}, .*config.json"
    with pytest.raises(ModelError, match=stored):
        load(str(tmp_path))


def test_a_router_stored_as_nan_is_refused_by_name():
    model = tiny("mixtral")
    model.model.layers[1].mlp.gate.weight.data[2, 3] = torch.nan
    with pytest.raises(SelfCheckFailed, match=r"NaN or infinite \(in layer 1, .*mlp.gate.weight"):
        Memories(model, tiny_tokenizer())


@pytest.mark.parametrize("cell", ["L1E5N3", "L1E2N12", "L1SN0", "L2E0N0"])
def test_an_expert_or_memory_that_does_not_exist_is_an_error(cell):
    memories = read("mixtral")
    for ask in (memories.layout.resolve, partial(ffmem.neighbours, memories)):
        with pytest.raises(UnknownCell, match=f"no memory {cell}: .*(E0 to E4|layers 0 to 1)"):
            ask(cell)


def test_a_model_whose_config_lies_about_its_experts_is_read_by_its_weights():
    model = tiny("mixtral")
    model.config.num_local_experts = 77
    assert Memories(model, tiny_tokenizer()).layout.layers[0][0].count == N_EXPERTS


def test_bfloat16_experts_are_read():
    memories = Memories(tiny("qwen2_moe").bfloat16(), tiny_tokenizer())
    assert memories.dtype == torch.bfloat16
    assert memories.trace(TOKENS)[0].coefficients.dtype == torch.bfloat16


def test_a_token_that_skips_its_expert_is_not_routed():
    """Some routers give a token that skips the weight 0, and an expert that does not count."""
    memories = Memories(tiny("mixtral"), tiny_tokenizer())
    router = memories.blocks[1].mlp.gate

    def skip(_, args, output):
        logits, weights, experts = output
        weights, experts = weights.clone(), experts.clone()
        weights[3], experts[3] = 0, 0
        return logits, weights, experts

    handle = router.register_forward_hook(skip)
    seen = []
    with memories.read_coefficients(
        lambda bank, m, gate, routing: seen.extend(routing.tokens.tolist()) if bank.layer else None
    ):
        memories.forward(TOKENS)
    handle.remove()
    assert 3 not in seen
    assert len(seen) == 2 * (TOKENS.numel() - 1)


def test_every_expert_model_is_small_enough_that_some_expert_gets_no_token():
    """The empty bank is a case that the tests of the index have to meet."""
    memories = read("mixtral")
    weights = memories.trace(TOKENS[:1, :2])[0].weights.flatten(0, 1)
    assert (weights.sum(0) == 0).any()
