import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from ffmem.errors import ModelError
from ffmem.models.head import Head, Norm
from ffmem.models.memories import Memories
from tests.tiny import TINY, read, tiny, tiny_tokenizer

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 35, 8, 9]])
LINEAR = [name for name in TINY if not name.startswith("ffmem_adaptive")]
SUMMED = [name for name in LINEAR if name not in ("opt post-norm", "openai-gpt")]  # o = r + y


def stream(memories):
    """Every r and o of every layer, one per row."""
    trace = memories.trace(TOKENS)
    found = [tensor for layer in trace for tensor in (layer.residual, layer.layer_output)]
    return torch.cat([tensor.flatten(0, 1) for tensor in found])


@pytest.mark.parametrize("name", TINY)
def test_the_head_makes_the_models_logits_of_the_last_layers_output(name):
    memories = read(name)
    last = memories.trace(TOKENS)[-1].layer_output.flatten(0, 1)

    assert_close(
        memories.head.logits(last),
        memories.logits(TOKENS).flatten(0, 1),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("name", LINEAR)
def test_folded_logits_are_the_unscaled_ones_without_constant_and_denominator(name):
    """folded(h) = s · σ(h) · (z(h) − c)."""
    memories = read(name)
    head, vectors = memories.head, stream(memories)
    sigma = head.denominator(vectors)[:, None]

    law = head.scale * sigma * (head.unscaled(vectors) - head.constant())
    assert_close(head.folded(vectors), law, rtol=1e-3, atol=1e-3 * law.abs().max().item())


@pytest.mark.parametrize("name", SUMMED)
def test_logits_of_the_feed_forward_output_follow_from_those_of_residual_and_output(name):
    """z_y = σ_o(z_o − c) − σ_r(z_r − c), without projecting y."""
    memories = read(name)
    head, c = memories.head, memories.head.constant()
    for found in memories.trace(TOKENS):
        y, r, o = (
            tensor.flatten(0, 1) for tensor in (found.ff_output, found.residual, found.layer_output)
        )
        expected = head.denominator(o)[:, None] * (head.unscaled(o) - c)
        expected -= head.denominator(r)[:, None] * (head.unscaled(r) - c)
        assert_close(head.folded(y), head.scale * expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", LINEAR)
def test_readings_of_parts_are_linear(name):
    head, vectors = read(name).head, torch.randn(3, 16)

    for reading in (head.folded, head.raw):
        total = reading(vectors[:1]) + 2 * reading(vectors[1:2])
        assert_close(reading(vectors[:1] + 2 * vectors[1:2]), total, rtol=1e-3, atol=1e-3)
        assert not reading(torch.zeros(1, 16)).any()


@pytest.mark.parametrize("name", LINEAR)
def test_raw_is_the_output_embedding_behind_its_projection(name):
    head, vectors = read(name).head, torch.randn(3, 16)
    narrow = vectors if head.project_out is None else head.project_out(vectors)

    assert_close(head.raw(vectors), narrow @ head.embedding.T)
    assert head.embedding.data_ptr() == head.output.weight.data_ptr()


def test_folded_is_what_the_weights_say():
    """Each kind of norm, scale and cap once, written out by hand."""
    vectors = torch.randn(5, 16)
    centered = vectors - vectors.mean(dim=1, keepdim=True)

    gpt2 = read("gpt2").model
    expected = (centered * gpt2.transformer.ln_f.weight) @ gpt2.lm_head.weight.T
    assert_close(read("gpt2").head.folded(vectors), expected, rtol=1e-4, atol=1e-4)

    gemma = read("gemma2").model
    expected = (vectors * (1 + gemma.model.norm.weight)) @ gemma.lm_head.weight.T
    assert_close(read("gemma2").head.folded(vectors), expected, rtol=1e-4, atol=1e-4)

    cohere = read("cohere").model
    expected = 0.25 * (centered * cohere.model.norm.weight) @ cohere.lm_head.weight.T
    assert_close(read("cohere").head.folded(vectors), expected, rtol=1e-4, atol=1e-4)

    granite = read("granite").model
    expected = (vectors * granite.model.norm.weight) @ granite.lm_head.weight.T / 8
    assert_close(read("granite").head.folded(vectors), expected, rtol=1e-4, atol=1e-4)

    opt = read("opt post-norm").model
    expected = vectors @ opt.model.decoder.project_out.weight.T @ opt.lm_head.weight.T
    assert_close(read("opt post-norm").head.folded(vectors), expected, rtol=1e-4, atol=1e-4)


def test_the_constant_holds_the_norms_offset_and_the_heads_bias():
    phi = read("phi").model
    expected = phi.lm_head.weight @ phi.model.final_layernorm.bias + phi.lm_head.bias

    assert_close(read("phi").head.constant(), expected, rtol=1e-4, atol=1e-4)
    assert not read("llama").head.constant().any()


@pytest.mark.parametrize(
    ("name", "gain"),
    [
        ("gpt2", lambda model: model.transformer.ln_f.weight),
        ("llama", lambda model: model.model.norm.weight),
        ("gemma", lambda model: 1 + model.model.norm.weight),
        ("gemma3_text", lambda model: 1 + model.model.norm.weight),
        ("nemotron", lambda model: 1 + model.model.norm.weight),
        ("cohere", lambda model: model.model.norm.weight),
        ("olmo", lambda model: torch.ones(16)),
        ("nanochat", lambda model: torch.ones(16)),
        ("mpt", lambda model: model.transformer.norm_f.weight),
    ],
)
def test_the_gain_that_probing_finds_is_that_of_the_weights(name, gain):
    memories = read(name)

    assert_close(memories.head.norm.gain, gain(memories.model), rtol=1e-5, atol=1e-5)


def test_probing_tells_layer_norm_from_rms_norm():
    norms = {name: read(name).head.norm for name in TINY}

    assert all(norms[name].centered for name in ("gpt2", "cohere", "olmo", "mpt"))
    assert not any(norms[name].centered for name in ("llama", "gemma2", "olmo2", "nanochat"))
    without = [name for name, norm in norms.items() if norm.module is None]
    assert {"opt post-norm", "ffmem_adaptive", "openai-gpt"} <= set(without)
    assert not {"gpt2", "llama"} & set(without)


@given(st.integers(2, 40), st.floats(1e-8, 1e-1), st.booleans(), st.integers(0, 100))
@settings(max_examples=25, deadline=None)
def test_probing_finds_any_norm_of_any_width(width, eps, centered, seed):
    torch.manual_seed(seed)
    module = nn.LayerNorm(width, eps=eps) if centered else nn.RMSNorm(width, eps=eps)
    for weight in module.parameters():
        nn.init.normal_(weight)
    module.requires_grad_(False)
    norm, vectors = Norm(module, width), torch.randn(4, width)

    assert norm.centered is centered
    assert_close(norm.gain, module.weight, rtol=1e-4, atol=1e-4)
    assert_close(norm.offset, module.bias if centered else torch.zeros(width), rtol=1e-4, atol=1e-4)
    part = vectors - vectors.mean(dim=1, keepdim=True) if centered else vectors
    sigma = (part.pow(2).mean(dim=1) + eps).sqrt()
    assert_close(norm.denominator(vectors), sigma, rtol=1e-3, atol=1e-3)


def test_the_soft_cap_bounds_logits_and_keeps_their_order():
    head, vectors = read("gemma2").head, 10 * torch.randn(5, 16)

    assert head.cap == 2.0
    assert head.logits(vectors).abs().max() <= 2.0
    assert head.unscaled(vectors).abs().max() > 2.0
    assert torch.equal(head.logits(vectors).argmax(1), head.unscaled(vectors).argmax(1))


def test_an_adaptive_softmax_reads_log_probabilities_whatever_is_asked():
    head, vectors = read("ffmem_adaptive").head, torch.randn(4, 16)
    expected = head.output.log_probabilities(vectors)

    assert head.adaptive
    assert_close(head.logits(vectors), expected)
    assert_close(head.folded(vectors), expected)
    assert_close(head.raw(vectors), expected)
    assert_close(expected.exp().sum(dim=1), torch.ones(4))


@pytest.mark.parametrize("ask", [lambda h: h.constant(), lambda h: h.unscaled(torch.ones(1, 16))])
def test_what_only_a_linear_head_has_is_refused_by_an_adaptive_softmax(ask):
    with pytest.raises(ModelError, match=r"An adaptive softmax has no .: it is not linear"):
        ask(read("ffmem_adaptive").head)


def test_an_adaptive_softmax_behind_a_final_norm_folds_its_gain():
    TINY["ffmem_adaptive"].final_norm = True
    try:
        memories = Memories(tiny("ffmem_adaptive"), tiny_tokenizer())
    finally:
        TINY["ffmem_adaptive"].final_norm = False
    vectors = torch.randn(4, 16)
    folded = memories.head.norm.fold(vectors)

    assert memories.head.norm.centered
    assert_close(memories.head.folded(vectors), memories.head.output.log_probabilities(folded))


def test_a_bfloat16_head_projects_in_bfloat16_and_answers_in_float32():
    head = Memories(tiny("llama").bfloat16(), tiny_tokenizer()).head
    vectors = torch.randn(3, 16)
    for reading in (head.folded, head.raw, head.logits, head.unscaled):
        assert reading(vectors).dtype == torch.float32
    expected = (vectors * head.norm.gain).bfloat16() @ head.embedding.T
    assert_close(head.folded(vectors), expected.float())


def test_a_head_without_norm_is_the_output_embedding_alone():
    output = nn.Linear(8, 5, bias=False).requires_grad_(False)
    head, vectors = Head(output, Norm(None, 8)), torch.randn(3, 8)

    for reading in (head.logits, head.folded, head.raw, head.unscaled):
        assert_close(reading(vectors), output(vectors))
    assert torch.equal(head.denominator(vectors), torch.ones(3))


@pytest.mark.parametrize("name", TINY)
def test_cluster_logits_combine_to_logits_and_their_shares_to_folded_parts(name):
    memories = read(name)
    head = memories.head
    for found in memories.trace(TOKENS):
        r, o, y = (
            tensor.flatten(0, 1) for tensor in (found.residual, found.layer_output, found.ff_output)
        )
        assert_close(head.combine_clusters(head.cluster_logits(o)), head.logits(o))
        if memories.row.output_norm is not None:
            continue
        shares = [
            head.denominator(o)[:, None] * (of_o - c) - head.denominator(r)[:, None] * (of_r - c)
            for of_o, of_r, c in zip(
                head.cluster_logits(o),
                head.cluster_logits(r),
                head.cluster_constants(),
                strict=True,
            )
        ]
        assert_close(head.combine_part_clusters(shares), head.folded(y), rtol=1e-3, atol=2e-3)
