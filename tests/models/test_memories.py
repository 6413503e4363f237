import hashlib
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, NemotronHConfig
from transformers.activations import ACT2FN

from ffmem.errors import ModelError, NoStaticValues, SelfCheckFailed
from ffmem.models.families import FAMILIES, FUSED
from ffmem.models.head import Norm
from ffmem.models.memories import Memories, fingerprint
from tests.tiny import HEADS, LAYERS, TINY, ragged, read, tiny, tiny_tokenizer

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 35, 8, 9]])
GATED = [name for name, config in TINY.items() if FAMILIES[config.model_type].for_config(config).up]
OURS = [name for name in TINY if name.startswith("ffmem_adaptive")]


@pytest.fixture(params=TINY)
def memories(request):
    return read(request.param)


def n_hooks(model):
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )


def test_a_layer_outputs_its_values_weighted_by_their_coefficients(memories):
    """The paper's equation, y = ∑ᵢ mᵢ vᵢ + b, summed memory by memory."""
    outputs = {}
    hooks = [
        memories.bank(layer).values.register_forward_hook(
            lambda _, args, output, layer=layer: outputs.update({layer: output.clone()})
        )
        for layer in memories.layout.memory_layers
    ]
    trace = memories.trace(TOKENS)
    for hook in hooks:
        hook.remove()

    assert len(trace) == memories.n_layers >= LAYERS
    for layer in memories.layout.memory_layers:
        found = trace[layer]
        total = memories.bias(layer).expand(*TOKENS.shape, -1).clone()
        for row, place in np.ndindex(*TOKENS.shape):
            values = memories.values_at(layer, found.ff_input[row], place)
            assert values.shape == (memories.layout.widths[layer], memories.hidden)
            if memories.has_values:
                assert torch.equal(values, memories.values(layer))
            for memory in range(memories.layout.widths[layer]):
                total[row, place] += found.coefficients[row, place, memory] * values[memory]
        assert_close(total, outputs[layer].reshape(total.shape), rtol=1e-4, atol=1e-4)
        assert_close(total, found.value_output, rtol=1e-4, atol=1e-4)


def test_coefficients_are_what_the_keys_make_of_the_input(memories):
    """m = f(x · Kᵀ + b), and in gated models the gate alone goes through f.

    Persistent slots share a softmax with the tokens, head by head; static keys of a lambda layer
    have a coefficient where there is a token.
    """
    kind = getattr(memories.config, "memory", None)
    trace = memories.trace(TOKENS)
    for layer in memories.layout.memory_layers:
        found = trace[layer]
        x = found.ff_input
        gate = x @ memories.keys(layer).T + memories.key_bias(layer)
        if kind == "persistent":
            heads = found.coefficients.unflatten(-1, (HEADS, -1))
            expected = gate.unflatten(-1, (HEADS, -1)).softmax(-1) * heads.sum(-1, keepdim=True)
            expected = expected.flatten(-2)
        elif kind == "lambda":
            distance = torch.arange(memories.layout.widths[0]) % memories.config.distances
            expected = gate * (distance <= torch.arange(TOKENS.shape[1])[:, None])
        elif kind == "softmax":
            expected = gate.softmax(-1)
        else:
            expected = ACT2FN[memories.activation](gate)
        if memories.gated:
            assert_close(found.gate, gate, rtol=1e-4, atol=1e-4)
            expected = expected * (x @ memories.up_keys(layer).T + memories.up_bias(layer))
        else:
            assert found.gate is None
        assert_close(found.coefficients, expected, rtol=1e-4, atol=1e-4)


def test_residual_and_output_of_the_feed_forward_layer_sum_to_the_layers_output(memories):
    """o = r + y; where the block norms its output, o is that norm of r + y."""
    trace = memories.trace(TOKENS)
    for layer, found in enumerate(trace):
        output = found.residual + found.ff_output
        if memories.row.output_norm is not None:
            output = memories.blocks[layer].get_submodule(memories.row.output_norm)(output)
        assert_close(output, found.layer_output, rtol=1e-4, atol=1e-4)
    for found, following in pairwise(trace):
        assert torch.equal(found.layer_output, following.block_input)


def test_only_opt_post_norm_and_the_first_gpt_norm_the_sum():
    normed = {name for name in TINY if read(name).row.output_norm is not None}

    assert normed == {"opt post-norm", "openai-gpt"}


@pytest.mark.parametrize("name", [name for name in TINY if name != "ffmem_adaptive lambda"])
def test_output_directions_sum_to_what_reaches_the_residual_stream(name):
    """y = ∑ᵢ mᵢ vᵢ + b of readable values, over the post-norm's σ where there is one."""
    memories = read(name)
    for layer, found in enumerate(memories.trace(TOKENS)):
        values = memories.output_directions(layer)
        bias = memories.bias(layer) * memories.output_scale(layer)
        expected = found.ff_output
        if memories.row.post_norm is not None:
            norm = Norm(
                memories.blocks[layer].get_submodule(memories.row.post_norm), memories.hidden
            )
            bias = norm.fold(bias[None])[0]
            sigma = norm.denominator(found.value_output.flatten(0, 1))
            expected = expected * sigma.view(*TOKENS.shape, 1)
        assert_close(found.coefficients @ values + bias, expected, rtol=1e-4, atol=1e-4)


def test_only_lambda_layers_have_no_static_values_and_they_say_so():
    assert [name for name in OURS if not read(name).has_values] == ["ffmem_adaptive lambda"]
    memories = read("ffmem_adaptive lambda")
    for ask in (memories.values, memories.output_directions):
        with pytest.raises(NoStaticValues, match="Lambda layers"):
            ask(1)
    assert memories.keys(1).shape == (memories.layout.widths[0], memories.hidden)


def test_a_multiplier_and_a_post_norm_are_in_the_output_directions():
    granite, gemma, llama = read("granite"), read("gemma2"), read("llama")

    assert_close(granite.output_directions(1), granite.values(1) * 0.22)
    gain = 1 + gemma.blocks[1].post_feedforward_layernorm.weight
    assert_close(gemma.output_directions(1), gemma.values(1) * gain)
    assert llama.output_directions(1).data_ptr() == llama.values(1).data_ptr()


def test_reading_gives_the_coefficients_of_the_trace_in_layer_order(memories):
    seen = []
    with memories.read_coefficients(lambda *reading: seen.append(reading)):
        memories.forward(TOKENS)

    trace = memories.trace(TOKENS)
    assert [bank.layer for bank, *_ in seen] == memories.layout.memory_layers
    for bank, coefficients, gate, routing in seen:
        assert routing is None
        found = trace[bank.layer]
        assert torch.equal(coefficients, found.coefficients)
        if memories.gated:
            assert torch.equal(gate, found.gate)
        else:
            assert gate is None


def test_reading_copies_nothing(memories):
    inputs, seen = [], []
    hooks = [
        bank.values.register_forward_pre_hook(lambda _, args: inputs.append(args[0].data_ptr()))
        for banks in memories.banks
        for bank in banks
    ]
    with memories.read_coefficients(lambda bank, m, gate, routing: seen.append(m.data_ptr())):
        memories.forward(TOKENS)
    for hook in hooks:
        hook.remove()

    assert seen == inputs


def test_every_forward_pass_is_read_while_reading_is_open_and_none_afterwards():
    memories, seen = read("llama"), []
    with memories.read_coefficients(lambda bank, m, gate, routing: seen.append(m.shape[0])):
        memories.forward(TOKENS)
        memories.forward(TOKENS[:1])
        memories.logits(TOKENS[:1])
    memories.forward(TOKENS)

    assert seen == [2, 2, 1, 1, 1, 1]


def test_hooks_are_gone_after_reading(memories):
    before = n_hooks(memories.model)
    with memories.read_coefficients(lambda *_: None):
        assert n_hooks(memories.model) > before
        memories.forward(TOKENS)

    assert n_hooks(memories.model) == before == 0


def test_hooks_are_gone_after_an_exception_in_the_reader():
    memories = read("llama")

    def fail(bank, coefficients, gate, routing):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), memories.read_coefficients(fail):
        memories.forward(TOKENS)
    assert n_hooks(memories.model) == 0


def test_hooks_are_gone_after_a_trace_that_failed():
    memories = read("llama")

    with pytest.raises(IndexError):
        memories.trace(torch.tensor([[10_000]]))
    assert n_hooks(memories.model) == 0


def test_padding_on_the_right_does_not_change_real_positions(memories):
    short = TOKENS[:, :4]
    padded = torch.cat([short, torch.full((2, 3), 7)], dim=1)

    for alone, found in zip(memories.trace(short), memories.trace(padded), strict=True):
        assert_close(found.coefficients[:, :4], alone.coefficients, rtol=1e-4, atol=1e-4)
        assert_close(found.layer_output[:, :4], alone.layer_output, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", GATED)
def test_the_gates_sign_is_that_of_the_activation_and_not_of_the_other_factor(name):
    """Where the gate is far below zero f is almost zero, whatever the other factor is."""
    found = read(name).trace(TOKENS)[0]
    strong = found.gate < found.gate.abs().max() * -0.8
    if strong.any():
        largest = found.coefficients.abs().max()
        assert found.coefficients[strong].abs().max() < 0.5 * largest
    memories = Memories(tiny(name), tiny_tokenizer())
    memories.blocks[0].get_submodule(memories.row.keys).weight.data[0] *= -1
    assert_close(memories.trace(TOKENS)[0].gate[..., 0], -found.gate[..., 0] + bias_twice(memories))


def bias_twice(memories):
    return 2 * memories.key_bias(0)[0]


def test_fused_keys_are_the_gates_first():
    memories = read("phi3")
    fused = memories.blocks[0].mlp.gate_up_proj.weight

    assert memories.row.up == FUSED
    assert torch.equal(memories.keys(0), fused[:24])
    assert torch.equal(memories.up_keys(0), fused[24:])


def test_up_keys_of_a_model_without_a_gate_are_refused():
    with pytest.raises(ModelError, match="'gpt2' model is not gated"):
        read("gpt2").up_keys(0)


def test_gpt2_keeps_values_and_llama_their_transpose():
    gpt2, llama = read("gpt2"), read("llama")

    assert torch.equal(gpt2.values(1), gpt2.blocks[1].mlp.c_proj.weight)
    assert torch.equal(llama.values(1), llama.blocks[1].mlp.down_proj.weight.T)
    assert torch.equal(gpt2.keys(1), gpt2.blocks[1].mlp.c_fc.weight.T)
    assert not llama.bias(1).any()


def test_the_trunk_computes_no_logits():
    memories, seen = read("llama"), []
    hook = memories.head.output.register_forward_hook(lambda *_: seen.append(1))
    memories.forward(TOKENS)
    hook.remove()

    assert seen == []


def test_logits_are_the_models_own(memories):
    with torch.no_grad():
        expected = memories.model(TOKENS).logits

    assert_close(memories.logits(TOKENS), expected)


def test_the_fingerprint_is_of_every_weight_and_of_tied_ones_once():
    model = tiny("gpt2")
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        assert name != "lm_head.weight"
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        digest.update(weight.detach().numpy().tobytes())

    memories = Memories(model, tiny_tokenizer())
    assert memories.fingerprint() == fingerprint(model) == digest.hexdigest()


@given(st.integers(0, 10_000))
@settings(max_examples=10, deadline=None)
def test_any_changed_weight_changes_the_fingerprint(place):
    model = tiny("gpt2")
    before = fingerprint(model)
    weights = list(model.parameters())
    weight = weights[place % len(weights)].data
    weight.view(-1)[place % weight.numel()] += 1

    assert fingerprint(model) != before


def test_the_fingerprint_of_the_weights_as_loaded_outlives_a_cast():
    loaded = fingerprint(tiny("llama"))
    memories = Memories(tiny("llama").bfloat16(), tiny_tokenizer(), fingerprint=loaded)

    assert memories.fingerprint() == loaded != fingerprint(memories.model)


def test_a_config_that_names_experts_is_read_if_the_model_has_none():
    memories = read("nemotron_h")
    assert memories.config.n_routed_experts == 8
    assert memories.layout.widths == [24, 24, 0, 0, 24]


def test_a_model_without_an_output_embedding_is_refused():
    with pytest.raises(ModelError, match="LlamaModel has no output embedding"):
        Memories(tiny("llama").model, tiny_tokenizer())


def test_a_layer_that_computes_past_its_value_map_is_refused():
    model = tiny("bloom")
    mlp = model.transformer.h[1].mlp
    mlp.pretraining_tp, mlp.slow_but_exact = 2, True

    with pytest.raises(SelfCheckFailed, match="Layer 1 of this 'bloom' model"):
        Memories(model, tiny_tokenizer())


def test_the_model_is_only_read():
    memories = read("llama")

    assert not memories.model.training
    assert not any(weight.requires_grad for weight in memories.model.parameters())
    assert memories.device == torch.device("cpu")
    assert memories.dtype == torch.float32
    assert (memories.family, memories.source, memories.revision) == ("llama", "in memory", None)


@pytest.mark.parametrize("name", ["gpt2", "llama", "falcon", "opt", "bloom", *OURS])
def test_a_trace_at_some_places_is_the_whole_trace_there(name):
    memories = read(name)
    at = torch.tensor([[1, 5], [0, 2], [1, 0]])
    for whole, some in zip(memories.trace(TOKENS), memories.trace(TOKENS, at), strict=True):
        for all_places, few in zip(whole, some, strict=True):
            if all_places is None:
                assert few is None
            else:
                assert torch.equal(few, all_places[at[:, 0], at[:, 1]])


def test_a_pass_over_the_first_layers_runs_no_others(memories):
    seen = []
    with memories.read_coefficients(
        lambda bank, coefficients, gate, routing: seen.append(bank.layer)
    ):
        memories.forward(TOKENS, layers=1)
        assert seen == [0]
        memories.forward(TOKENS, layers=memories.n_layers)
        memories.forward(TOKENS)
    assert seen == [0, *memories.layout.memory_layers, *memories.layout.memory_layers]
    assert n_hooks(memories.model) == 0
    short, whole = memories.trace(TOKENS, layers=1), memories.trace(TOKENS)
    assert len(short) == 1
    assert torch.equal(short[0].layer_output, whole[0].layer_output)


def test_a_layer_without_a_feed_forward_part_adds_nothing():
    memories = read("nemotron_h")
    for layer in (2, 3):
        found = memories.trace(TOKENS)[layer]
        assert found.coefficients.shape == (*TOKENS.shape, 0)
        assert torch.equal(found.residual, found.layer_output)
        assert not found.ff_output.any()
        assert not torch.equal(found.block_input, found.layer_output)  # it does something else
        assert memories.values(layer).shape == memories.keys(layer).shape == (0, memories.hidden)
        assert not memories.bias(layer).any()
        with pytest.raises(ModelError, match=f"Layer {layer} of this 'nemotron_h' model has no"):
            memories.bank(layer)


def test_a_model_in_which_no_layer_has_a_feed_forward_part_is_refused():
    config = TINY["nemotron_h"].to_dict() | {"layers_block_type": ["full_attention"]}
    model = AutoModelForCausalLM.from_config(NemotronHConfig.from_dict(config))

    with pytest.raises(ModelError, match="No layer of this 'nemotron_h' model has a feed-forward"):
        Memories(model, tiny_tokenizer())


def test_a_layer_without_memories_has_no_keys_and_no_key_biases():
    memories = Memories(ragged(), tiny_tokenizer())
    assert memories.layout.widths[0] == 0
    assert memories.keys(0).shape == (0, memories.hidden)
    assert memories.key_bias(0).shape == (0,)
