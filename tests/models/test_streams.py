"""Models with several residual streams, shared feed-forward parts, or repeated layers."""

import pytest
import torch
from torch.nn.functional import gelu, relu, silu
from torch.testing import assert_close

from ffmem.errors import ModelError
from ffmem.interventions.checkpoint import edit_weights
from ffmem.interventions.edits import Edits
from ffmem.interventions.effect import ablate
from ffmem.interventions.forward import apply_edits
from ffmem.interventions.partial_forward import PartialForward
from ffmem.models.families import RERUN
from ffmem.models.load import describe
from ffmem.models.memories import Memories, fingerprint
from tests.models.test_memories import TOKENS
from tests.tiny import UNUSUAL, VOCABULARY, read, tiny, tiny_tokenizer

HYPER = ["deepseek_v4", "hy_v4", "qwen4_exp_text"]


@pytest.fixture(params=[*HYPER, *UNUSUAL])
def name(request):
    return request.param


def calls_of(modules, run):
    """Return the inputs and outputs of modules while something runs."""
    found = []
    hooks = [
        module.register_forward_hook(lambda _, args, output: found.append((args[0], output)))
        for module in modules
    ]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return found


def test_logits_are_those_of_the_models_own_code(name):
    own = tiny(name)
    with torch.no_grad():
        expected = own(TOKENS).logits
    memories = read(name)
    assert_close(memories.logits(TOKENS), expected, rtol=1e-4, atol=1e-5)
    last = memories.trace(TOKENS)[-1].layer_output.flatten(0, 1)
    assert_close(memories.head.logits(last), expected.flatten(0, 1), rtol=1e-4, atol=1e-4)


def test_r_and_y_add_up_and_layers_follow_each_other(name):
    memories = read(name)
    traces = memories.trace(TOKENS)
    assert len(traces) == memories.n_layers
    for layer, trace in enumerate(traces):
        assert trace.residual.shape == (*TOKENS.shape, memories.hidden)
        assert_close(trace.residual + trace.ff_output, trace.layer_output)
        if layer and name != "hrm_text":  # where norms and sums lie between stacks
            assert_close(trace.block_input, traces[layer - 1].layer_output)


@pytest.mark.parametrize("name", ["deepseek_v4", "hy_v4"])
def test_r_is_what_the_head_reads_of_the_streams_before_y_is_written(name):
    """S' = Cᵀ · S + p ⊗ FF(x), by the layer's own hyper-connection; hy_v4 has no C."""
    memories = read(name)
    for block, trace in zip(memories.blocks, memories.trace(TOKENS), strict=True):
        ((streams, (post, *mixed)),) = calls_of([block.ffn_hc], lambda: memories.forward(TOKENS))
        if len(mixed) == 2:
            streams = torch.einsum("bpjk,bpjd->bpkd", mixed[0], streams)
        added = post[..., None] * trace.value_output[..., None, :]
        head = memories.model.model.hc_head
        with torch.no_grad():
            assert_close(trace.residual, head(streams), rtol=1e-4, atol=1e-5)
            assert_close(trace.layer_output, head(streams + added), rtol=1e-4, atol=1e-5)


def test_r_of_qwen_4_is_what_its_mixer_reads_before_y_is_injected():
    memories = read("qwen4_exp_text")
    for block, trace in zip(memories.blocks, memories.trace(TOKENS), strict=True):
        modules = [block.mlp_hyper_connection]
        ((streams, (_, _, weights)),) = calls_of(modules, lambda: memories.forward(TOKENS))
        added = (trace.value_output[..., None, :] * weights[..., None]).flatten(-2)
        mixer = memories.model.model.hyper_connection_mixer
        with torch.no_grad():
            assert_close(trace.residual, mixer(streams), rtol=1e-4, atol=1e-5)
            assert_close(trace.layer_output, mixer(streams + added), rtol=1e-4, atol=1e-5)


def test_r_of_gemma_3n_is_corrected_without_the_feed_forward_part():
    memories = read("gemma3n_text")
    block, trunk = memories.blocks[-1], memories.model.model
    (before, _), *_ = calls_of([block.pre_feedforward_layernorm], lambda: memories.forward(TOKENS))
    predictions = []
    own = block.altup.correct
    try:
        block.altup.correct = lambda *args: predictions.append(args[0]) or own(*args)
        memories.forward(TOKENS)
    finally:
        del block.altup.correct
    with torch.no_grad():
        streams = block.altup.correct(predictions[0], before)
        gate = block.per_layer_input_gate(block.altup(streams[0]))
        embedded = trunk.embed_tokens(TOKENS)
        inputs = trunk.project_per_layer_inputs(embedded, trunk.get_per_layer_inputs(TOKENS))
        gated = block.act_fn(gate) * inputs[:, :, -1]
        streams[1:] += block.post_per_layer_input_norm(block.per_layer_projection(gated))
        size = streams[0].pow(2).mean(-1, keepdim=True).sqrt()
        parts = [streams[0]]
        for projection, stream in zip(trunk.altup_unembed_projections, streams[1:], strict=True):
            part = projection(stream)
            parts.append(part * size / part.pow(2).mean(-1, keepdim=True).sqrt())
        expected = sum(parts) / len(parts)
    assert_close(memories.trace(TOKENS)[-1].residual, expected, rtol=1e-4, atol=1e-5)


def test_coefficients_of_gemma_3n_are_zero_below_the_cutoff_of_their_token():
    memories = read("gemma3n_text")
    for layer, trace in enumerate(memories.trace(TOKENS)):
        scores = trace.ff_input @ memories.keys(layer).T
        share = memories.config.activation_sparsity_pattern[layer]
        if share:
            quantile = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(share))
            deviation = scores.std(-1, keepdim=True, unbiased=False)
            scores = relu(scores - scores.mean(-1, keepdim=True) - quantile * deviation)
            assert 0 < (scores > 0).float().mean() < 1.5 * (1 - share)
        up = trace.ff_input @ memories.up_keys(layer).T
        assert_close(trace.gate, scores)
        assert_close(trace.coefficients, gelu(scores, approximate="tanh") * up)


@pytest.mark.parametrize("name", ["zamba", "zamba2"])
def test_layers_of_zamba_share_values_and_not_their_outputs(name):
    memories = read(name)
    one, two = memories.layout.memory_layers
    assert memories.values(one).data_ptr() == memories.values(two).data_ptr()
    assert torch.equal(memories.keys(one), memories.keys(two)) == (name == "zamba")
    for layer in (one, two):
        trace, block = memories.trace(TOKENS)[layer], memories.blocks[layer]
        keys, up = memories.keys(layer), memories.up_keys(layer)
        gate = trace.ff_input @ keys.T
        act = silu if memories.activation == "silu" else gelu
        assert_close(trace.gate, gate)
        assert_close(trace.coefficients, act(gate) * (trace.ff_input @ up.T))
        assert_close(
            memories.output_directions(layer), memories.values(layer) @ block.linear.weight.T
        )
    with pytest.raises(ModelError, match=r"The values of layer 1 are shared"):
        edit_weights(memories, Edits.of(off=["L1N3"]))


def test_every_run_of_a_repeated_layer_is_a_layer():
    model = tiny("hrm_text")
    names, before = list(model.state_dict()), fingerprint(model)
    own = calls_of(
        [
            one.mlp.down_proj
            for stack in ("L_module", "H_module")
            for one in getattr(model.model, stack).layers
        ],
        lambda: model(TOKENS),
    )
    memories = Memories(model, tiny_tokenizer())
    Memories(model, tiny_tokenizer())  # again: nothing is unrolled twice
    assert memories.n_layers == model.config.num_hidden_layers == len(own) == 12
    assert (list(model.state_dict()), fingerprint(model)) == (names, before)
    for trace, (m, _) in zip(memories.trace(TOKENS), own, strict=True):
        assert_close(trace.coefficients, m)
    low, high = model.model.L_module.layers[1], model.model.H_module.layers[1]
    for layer, shared in ((1, low), (3, low), (5, high), (7, low), (11, high)):
        assert memories.banks[layer].dense[0].values.weight is shared.mlp.down_proj.weight
    with pytest.raises(ModelError, match="run several times with the same weights"):
        edit_weights(memories, Edits.of(off=["L1N3"]))


def test_effects_are_those_of_whole_passes(name):
    memories = read(name)
    ids = TOKENS[0].tolist()
    forward = PartialForward(memories, ids, len(ids) - 1)
    layers = memories.layout.memory_layers
    cells = [
        memories.layout.cell(layer, int(forward.layers[layer].coefficients[0].abs().argmax()))
        for layer in (layers[0], layers[len(layers) // 2])
    ]
    clean = memories.logits(TOKENS[:1])[0, -1].double().log_softmax(0)
    found = ablate(forward, 7, cells)
    for cell, change in zip(cells, found, strict=True):
        with apply_edits(memories, Edits.of(off=[str(cell)])):
            logits = memories.logits(TOKENS[:1])
        expected = (logits[0, -1].double().log_softmax(0) - clean)[7]
        assert_close(change, expected, rtol=0, atol=1e-4)
    assert found.abs().max() > 1e-5
    assert forward.skips_blocks == (name not in ("gemma3n_text", "hrm_text"))


def test_a_block_is_described(name):
    memories = read(name)
    block = describe(memories)["block"]
    assert ("y = o − r" in block) == (memories.row.residual == RERUN)
    assert ("several streams" in block) == (memories.row.streams is not None)


def test_an_edit_at_some_positions_acts_there_alone():
    """Where streams come first, positions are the third axis."""
    memories = read("gemma3n_text")
    edits = Edits.of(set={"L0N3": 5.0}, positions=[4])
    with apply_edits(memories, edits.resolve(memories.layout, TOKENS.shape[1])):
        found = memories.trace(TOKENS)[0].coefficients[..., 3]
    expected = memories.trace(TOKENS)[0].coefficients[..., 3].clone()
    expected[:, 4] = 5.0
    assert_close(found, expected)
    assert memories.vocabulary == VOCABULARY
