"""Types of models that differ from the usual in every way; docs/coverage.py tries all types."""

import pytest
import torch
from torch.nn import functional

from docs.coverage import expert_error, tiny_model, tiny_tokenizer
from ffmem.errors import ModelError
from ffmem.models.load import describe, load
from ffmem.models.modules import get_module

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])


def linear(module, x):
    """Return what a linear map makes of x, in plain sums."""
    product = (x[..., None, :] * module.weight).sum(-1)
    return product if module.bias is None else product + module.bias


def gated(f, gate, up, x):
    return f(linear(gate, x)) * linear(up, x)


def tanh_gelu(x):
    return functional.gelu(x, approximate="tanh")


def xielu(act, x):
    positive, negative = functional.softplus(act.alpha_p), functional.softplus(act.alpha_n)
    negative, beta = act.beta + negative, act.beta
    below = (torch.expm1(torch.min(x, act.eps)) - x) * negative + beta * x
    return torch.where(x > 0, positive * x * x + beta * x, below)


def rms_norm(module, x):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + module.variance_epsilon) * module.weight


def fused(f, module, size, x):
    scores = linear(module, x)
    return f(scores[..., :size]) * scores[..., size:]


def mlp(f):
    return "mlp.gate_proj", lambda b, x: gated(f, b.mlp.gate_proj, b.mlp.up_proj, x)


COEFFICIENTS = {
    "apertus": ("mlp.up_proj", lambda b, x: xielu(b.mlp.act_fn, linear(b.mlp.up_proj, x))),
    "bart": ("fc1", lambda b, x: functional.gelu(linear(b.fc1, x))),
    "bitnet": (
        "mlp.gate_proj",
        lambda b, x: rms_norm(
            b.mlp.ffn_sub_norm,
            gated(lambda s: s.relu() ** 2, b.mlp.gate_proj, b.mlp.up_proj, x),
        ),
    ),
    "ctrl": ("ffn.0", lambda b, x: linear(b.ffn[0], x).relu()),
    "doge": mlp(functional.silu),
    "falcon_h1": (
        "feed_forward.gate_proj",
        lambda b, x: (
            functional.silu(
                linear(b.feed_forward.gate_proj, x) * b.feed_forward.config.mlp_multipliers[0]
            )
            * linear(b.feed_forward.up_proj, x)
        ),
    ),
    "gemma4_text": mlp(tanh_gelu),
    "git": (
        "intermediate.dense",
        lambda b, x: functional.gelu(linear(b.intermediate.dense, x)),
    ),
    "hyperclovax": mlp(functional.silu),
    "lfm2": (
        "feed_forward.w1",
        lambda b, x: gated(functional.silu, b.feed_forward.w1, b.feed_forward.w3, x),
    ),
    "minicpm3": mlp(functional.silu),
    "mllama": mlp(functional.silu),
    "modernbert-decoder": (
        "mlp.Wi",
        lambda b, x: fused(functional.gelu, b.mlp.Wi, b.mlp.Wo.in_features, x),
    ),
    "olmo_hybrid": mlp(functional.silu),
    "phi4_multimodal": (
        "mlp.gate_up_proj",
        lambda b, x: fused(functional.silu, b.mlp.gate_up_proj, b.mlp.down_proj.in_features, x),
    ),
    "recurrent_gemma": (
        "mlp_block.gate_proj",
        lambda b, x: gated(tanh_gelu, b.mlp_block.gate_proj, b.mlp_block.up_proj, x),
    ),
}
"""By type: a map that gets x, and m from x, written by hand after the code of the model."""

WITH_EXPERTS = ["axk2", "beam", "deepseek_v4", "jamba", "qwen3_5_moe_text"]

REFUSED = {
    "bert": "is an encoder",
    "blt": "it turns bytes into patches",
    "mamba": "it is a state-space model",
    "musicgen": "it predicts several audio codes",
    "prophetnet": "it runs one stream per future token",
    "rwkv": "gates the sum of values",
}


@pytest.fixture(scope="module", params=[*COEFFICIENTS, *WITH_EXPERTS])
def memories(request):
    return load(tiny_model(request.param), tiny_tokenizer())


def kind_of(memories):
    return memories.family.removesuffix("_text_model")


def test_nothing_in_a_model_is_zero_or_one_by_default(memories):
    for name, weight in memories.model.named_parameters():
        assert weight.numel() == 1 or weight.std() > 0, name
        assert not (weight == 1).all(), name
        assert not (weight == 0).all(), name


def test_coefficients_are_what_the_code_of_the_model_says(memories):
    if kind_of(memories) in WITH_EXPERTS:
        assert expert_error(memories) < 1e-5
        return
    path, formula = COEFFICIENTS[kind_of(memories)]
    inputs = {}

    def keep(layer):
        return lambda _, args: inputs.__setitem__(layer, args[0])

    handles = [
        get_module(memories.blocks[layer], path).register_forward_pre_hook(keep(layer))
        for layer in memories.layout.memory_layers
    ]
    traces = memories.trace(TOKENS)
    for handle in handles:
        handle.remove()

    assert list(inputs) == memories.layout.memory_layers
    for layer, x in inputs.items():
        expected = formula(memories.blocks[layer], x)
        torch.testing.assert_close(traces[layer].coefficients, expected, rtol=1e-4, atol=1e-5)


def test_r_is_what_a_layer_gives_without_its_memories(memories):
    """So y is all that they add, whatever scales or norms lie between."""
    traces = memories.trace(TOKENS)
    for layer in memories.layout.memory_layers:
        row, block = memories.rows[layer], memories.blocks[layer]
        if row.added is not None:
            continue  # a later part of the layer reads r + y
        output = output_without(memories, layer)
        expected = traces[layer].residual
        if row.output_norm is not None:
            expected = get_module(block, row.output_norm)(expected)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


def output_without(memories, layer):
    """Return what a layer gives if its feed-forward part gives zeros."""
    outputs = []

    def silence(_, args, output):
        if isinstance(output, torch.Tensor):
            return torch.zeros_like(output)
        return (torch.zeros_like(output[0]), *output[1:])

    def keep(_, args, output):
        stream = output if isinstance(output, torch.Tensor) else output[0]
        outputs.append(memories.streams.collapse(stream))

    handles = [
        memories.blocks[layer].register_forward_hook(keep),
        *(module.register_forward_hook(silence) for module in memories.banks[layer].outputs),
    ]
    memories.forward(TOKENS)
    for handle in handles:
        handle.remove()
    return outputs[0]


def test_r_and_y_add_up_to_o_in_every_layer(memories):
    traces = memories.trace(TOKENS)
    assert len(traces) == memories.n_layers
    for layer, trace in enumerate(traces):
        total = trace.residual + trace.ff_output
        if memories.rows[layer].output_norm is not None:
            total = get_module(memories.blocks[layer], memories.rows[layer].output_norm)(total)
        torch.testing.assert_close(total, trace.layer_output, rtol=1e-4, atol=1e-4)
        if layer:
            torch.testing.assert_close(trace.block_input, traces[layer - 1].layer_output)


def test_y_is_the_sum_of_coefficients_times_output_directions(memories):
    for layer, trace in enumerate(memories.trace(TOKENS)):
        if memories.rows[layer].post_norm is not None or memories.layout.has_experts:
            continue  # up to a factor for each token
        directions = memories.output_directions(layer)
        bias = memories.bias(layer) * memories.output_scale(layer)
        found = trace.coefficients @ directions + bias
        torch.testing.assert_close(found, trace.ff_output, rtol=1e-4, atol=1e-4)


def test_y_of_gemma_4_is_normed_and_scaled_and_its_per_layer_input_belongs_to_r():
    memories = load(tiny_model("gemma4_text"), tiny_tokenizer())
    for block, trace in zip(memories.blocks, memories.trace(TOKENS), strict=True):
        y = block.post_feedforward_layernorm(trace.value_output) * block.layer_scalar
        torch.testing.assert_close(trace.ff_output, y)


def test_the_head_gives_the_logits_of_the_model(memories):
    with torch.no_grad():
        logits = memories.model(TOKENS, use_cache=False).logits
    output = memories.trace(TOKENS)[-1].layer_output
    torch.testing.assert_close(
        memories.head.logits(output.flatten(0, 1)), logits.flatten(0, 1), rtol=1e-4, atol=1e-4
    )


def test_a_model_is_described(memories):
    found = describe(memories)
    assert found["layers"] == memories.n_layers
    assert found["block"]
    assert found["head"]["kind"] in ("linear", "a small network, then linear")


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_refused_with_a_sentence_that_says_why(kind):
    with pytest.raises(ModelError, match=REFUSED[kind]) as refused:
        load(tiny_model(kind), tiny_tokenizer())
    assert ". " not in str(refused.value)
