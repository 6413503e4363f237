import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from ffmem.errors import ModelError
from ffmem.networks.config import AdaptiveConfig
from ffmem.networks.model import AdaptiveLM, sinusoids

SIZES, WIDTHS, HIDDEN = [12, 9, 11], [8, 4, 2], 8
VOCABULARY = sum(SIZES)
TOKENS = torch.tensor([[2, 5, 13, 31, 20], [2, 0, 11, 12, 21]])


def config(**other):
    settings = {
        "band_sizes": SIZES,
        "band_widths": WIDTHS,
        "hidden_size": HIDDEN,
        "intermediate_size": 10,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": 0.5,  # large enough that every part matters
    }
    return AdaptiveConfig(**(settings | other))


def tiny(**other):
    torch.manual_seed(0)
    model = AdaptiveLM(config(**other)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
    return model


MODEL = tiny()


@pytest.fixture
def model():
    return MODEL


def cluster_of(word):
    """The cluster of a word, and its place there."""
    for band, size in enumerate(SIZES):
        if word < size:
            return band, word
        word -= size
    raise AssertionError


def test_the_tiny_model_is_tiny(model):
    assert sum(parameter.numel() for parameter in model.parameters()) < 1500


def test_the_paper_s_model_has_as_many_parameters_as_reported():
    with torch.device("meta"):
        model = AdaptiveLM(AdaptiveConfig())
    assert sum(parameter.numel() for parameter in model.parameters()) == 246_933_504
    assert model.config.vocab_size == 267_744


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.floats(0.01, 30))
def test_probabilities_sum_to_one(seed, size):
    hidden = size * torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(seed))
    log_probabilities = MODEL.lm_head.log_probabilities(hidden)
    assert log_probabilities.shape == (3, VOCABULARY)
    assert_close(log_probabilities.exp().sum(dim=1), torch.ones(3))


def test_log_probabilities_are_those_of_the_definition(model):
    hidden = torch.randn(4, HIDDEN)
    bands, classes = model.lm_head.bands, model.lm_head.class_proj.weight
    found = model.lm_head.log_probabilities(hidden)
    for row, h in enumerate(hidden):
        first = [h @ word for word in bands[0].embedding.weight]
        total = torch.stack([*first, *(h @ c for c in classes)]).logsumexp(0)
        for word in range(VOCABULARY):
            band, place = cluster_of(word)
            if band == 0:
                expected = first[place] - total
            else:
                narrow = h @ bands[band].projection.weight
                within = torch.stack([narrow @ word for word in bands[band].embedding.weight])
                expected = h @ classes[band - 1] - total + within[place] - within.logsumexp(0)
            assert_close(found[row, word], expected)


def test_the_way_out_of_frequent_words_does_not_use_their_projection(model):
    changed = copy.deepcopy(model)
    changed.lm_head.bands[0].projection.weight.mul_(3)
    hidden = torch.randn(4, HIDDEN)
    same = model.lm_head.log_probabilities(hidden)
    assert torch.equal(changed.lm_head.log_probabilities(hidden), same)
    assert not torch.allclose(changed(TOKENS).logits, model(TOKENS).logits)  # the way in does

    differences = same[:, 1 : SIZES[0]] - same[:, :1]
    words = model.lm_head.bands[0].embedding.weight
    assert_close(differences, hidden @ (words[1:] - words[0]).T)


def test_the_ranking_depends_on_the_coefficient_across_clusters_but_not_within(model):
    values = torch.randn(200, HIDDEN)
    small, large = (model.lm_head.log_probabilities(c * values) for c in (0.3, 30))
    assert (small.argmax(1) != large.argmax(1)).any()
    for small_band, large_band in zip(small.split(SIZES, 1), large.split(SIZES, 1), strict=True):
        assert torch.equal(small_band.argmax(1), large_band.argmax(1))


def test_cluster_logits_add_up(model):
    residual, output = torch.randn(2, 3, HIDDEN)
    parts = (model.lm_head.cluster_logits(part) for part in (residual, output))
    summed = [first + second for first, second in zip(*parts, strict=True)]
    expected = model.lm_head.log_probabilities(residual + output)
    assert_close(model.lm_head.normalize(summed), expected)


def test_a_token_is_embedded_by_its_cluster(model):
    found = model.model.embed_tokens(TOKENS)
    for row, line in enumerate(TOKENS.tolist()):
        for column, word in enumerate(line):
            band, place = cluster_of(word)
            part = model.model.embed_tokens.bands[band]
            expected = part.projection.weight @ part.embedding.weight[place]
            assert_close(found[row, column], expected)


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_a_token_outside_the_vocabulary_is_refused(model, token):
    with pytest.raises(IndexError, match="outside the vocabulary of 32 words"):
        model(torch.tensor([[2, token]]))


def test_positions_are_sines_then_cosines_counted_from_two():
    found = sinusoids(torch.arange(6)[None], HIDDEN)[0]
    for place in range(6):
        frequencies = [10_000 ** (-j / 3) for j in range(4)]
        sines = [math.sin((place + 2) * f) for f in frequencies]
        cosines = [math.cos((place + 2) * f) for f in frequencies]
        assert_close(found[place], torch.tensor(sines + cosines))


@pytest.mark.parametrize(
    ("activation", "scaled", "final_norm"), [("relu", True, False), ("gelu", False, True)]
)
def test_the_trunk_is_the_one_of_the_definition(activation, scaled, final_norm):
    model = tiny(memory=activation, scale_embedding=scaled, final_norm=final_norm)
    trunk, f = model.model, getattr(torch.nn.functional, activation)
    hidden = trunk.embed_tokens(TOKENS) * (math.sqrt(HIDDEN) if scaled else 1)
    hidden = hidden + sinusoids(torch.arange(5)[None], HIDDEN)
    for layer in trunk.layers:
        x = layer.self_attn_layer_norm(hidden)
        heads = layer.self_attn
        read = torch.zeros_like(x)
        for part in (slice(0, 4), slice(4, 8)):
            q, k, v = (p(x)[..., part] for p in (heads.q_proj, heads.k_proj, heads.v_proj))
            scores = q @ k.mT / math.sqrt(4)
            future = torch.ones(5, 5, dtype=torch.bool).triu(1)
            read[..., part] = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        hidden = hidden + heads.out_proj(read)
        memory = layer.memory
        hidden = hidden + memory.values(f(memory.keys(layer.final_layer_norm(hidden))))
    if final_norm:
        hidden = trunk.layer_norm(hidden)
    assert_close(trunk(TOKENS).last_hidden_state, hidden)
    assert_close(model(TOKENS).logits, model.lm_head(hidden))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 5), st.integers(0, VOCABULARY - 1))
def test_what_stands_behind_a_prefix_does_not_change_it(length, padding):
    padded = TOKENS.clone()
    padded[:, length:] = padding
    alone = MODEL(TOKENS[:, :length]).logits
    assert_close(MODEL(padded).logits[:, :length], alone, atol=1e-5, rtol=1e-5)


def test_an_attention_mask_of_ones_hides_nothing(model):
    ones = torch.ones_like(TOKENS)
    assert torch.equal(model(TOKENS, attention_mask=ones).logits, model(TOKENS).logits)


def test_only_the_last_log_probabilities_are_made_when_told(model):
    assert_close(model(TOKENS, logits_to_keep=2).logits, model(TOKENS).logits[:, -2:])


def test_generating_appends_the_most_probable_word(model):
    prompt = TOKENS[:1]
    with torch.no_grad():
        generated = model.generate(prompt, max_new_tokens=3, do_sample=False)
    for length in range(5, generated.shape[1]):
        assert generated[0, length] == model(generated[:, :length]).logits[0, -1].argmax()


def test_the_trunk_is_the_base_model(model):
    assert model.base_model is model.model


def test_input_and_softmax_share_their_weights(model):
    names = dict(model.named_parameters())
    assert [name for name in names if name.startswith("lm_head")] == ["lm_head.class_proj.weight"]
    assert model.lm_head.bands is model.model.embed_tokens.bands


@pytest.mark.parametrize("final_norm", [False, True])
def test_saving_and_loading_gives_the_same_model(tmp_path, final_norm):
    model = tiny(final_norm=final_norm)
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).to_diff_dict() == model.config.to_diff_dict()
    for loaded in (
        AdaptiveLM.from_pretrained(tmp_path),
        AutoModelForCausalLM.from_pretrained(tmp_path),
    ):
        assert type(loaded) is AdaptiveLM
        assert loaded.lm_head.bands[1].embedding is loaded.model.embed_tokens.bands[1].embedding
        assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


def test_the_model_runs_in_bfloat16():
    logits = tiny().to(torch.bfloat16)(TOKENS).logits
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()


def test_the_vocabulary_is_as_large_as_its_clusters_together():
    assert config(vocab_size=5).vocab_size == VOCABULARY


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"memory": "swish"}, r"memory 'swish'\. Known kinds: relu, gelu, swiglu, softmax, per"),
        ({"hidden_act": "linear"}, r"memory = 'relu' and hidden_act = 'linear'.* Correct one"),
        ({"memory": "softmax", "hidden_act": "gelu"}, "softmax memories use 'softmax'"),
        ({"num_attention_heads": 3}, "hidden_size 8 is not divisible by num_attention_heads 3"),
        ({"band_widths": [8, 4]}, r"band_widths \[8, 4\] do not fit hidden_size 8"),
        ({"band_widths": [4, 4, 2]}, "the first must equal hidden_size"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(setting, message):
    with pytest.raises(ModelError, match=message):
        config(**setting)
