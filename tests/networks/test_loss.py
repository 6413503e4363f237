"""The loss of the adaptive softmax is that of its log-probabilities, and starts where it should."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from ffmem.networks.config import KINDS, AdaptiveConfig
from ffmem.networks.model import AdaptiveLM
from tests.tiny import EXPERTS, TINY, tiny

OURS = [name for name in TINY | EXPERTS if name.startswith("ffmem_adaptive")]
HIDDEN = 8


def softmax_of(sizes, seed=0):
    torch.manual_seed(seed)
    widths = [HIDDEN, 4, 2][: len(sizes)]
    model = AdaptiveLM(
        AdaptiveConfig(
            band_sizes=sizes,
            band_widths=widths,
            hidden_size=HIDDEN,
            intermediate_size=4,
            num_hidden_layers=1,
            num_attention_heads=2,
            initializer_range=0.5,
        )
    )
    return model.lm_head


def by_definition(softmax, hidden, words):
    """−mean log p, row by row, of the words that count."""
    rows = softmax.log_probabilities(hidden)
    found = [
        -row[word].float() for row, word in zip(rows, words.tolist(), strict=True) if word >= 0
    ]
    return sum(found) / len(found)


@settings(max_examples=50)
@given(st.data(), st.lists(st.integers(1, 9), min_size=1, max_size=3), st.booleans())
def test_the_loss_is_the_mean_of_minus_log_p_of_the_words_that_count(data, sizes, narrow):
    softmax = softmax_of(sizes)
    words = st.sampled_from([-100, -1, *range(sum(sizes))])
    words = data.draw(st.lists(words, min_size=1, max_size=9).filter(lambda some: max(some) >= 0))
    words, hidden = torch.tensor(words), torch.randn(len(words), HIDDEN)
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow), torch.no_grad():
        found, expected = softmax.loss(hidden, words), by_definition(softmax, hidden, words)
    assert found.dtype == torch.float32
    assert_close(found, expected, rtol=1e-2 if narrow else 1e-5, atol=1e-2 if narrow else 1e-5)


def test_a_cluster_without_words_changes_nothing_but_its_class():
    """Words of the head alone: tails have no gradient, the classes that they were not have one."""
    softmax = softmax_of([6, 5, 4])
    softmax.loss(torch.randn(4, HIDDEN), torch.tensor([0, 5, -100, 3])).backward()
    assert softmax.bands[1].embedding.weight.grad is None
    assert softmax.bands[2].projection.weight.grad is None
    assert (softmax.class_proj.weight.grad != 0).all()


def test_gradients_of_the_loss_are_those_of_its_definition():
    softmax = softmax_of([6, 5, 4]).double()
    weights = [weight for name, weight in softmax.named_parameters() if "bands.0.proj" not in name]
    hidden = torch.randn(7, HIDDEN, dtype=torch.float64, requires_grad=True)
    words = torch.tensor([0, 7, -100, 14, 11, 5, 6])

    def gradients(loss):
        return torch.autograd.grad(loss, [hidden, *weights])

    rows = softmax.log_probabilities(hidden)[words >= 0]
    expected = -rows.gather(1, words[words >= 0, None]).mean()
    for one, other in zip(gradients(softmax.loss(hidden, words)), gradients(expected), strict=True):
        assert_close(one, other)


def test_one_cluster_is_a_plain_softmax():
    softmax = softmax_of([9])
    hidden = torch.randn(3, HIDDEN)
    logits = hidden @ softmax.bands[0].embedding.weight.T
    assert_close(softmax.log_probabilities(hidden), logits.log_softmax(-1))
    assert softmax.class_proj.weight.shape == (0, HIDDEN)


@pytest.mark.parametrize("name", OURS)
def test_labels_are_targets_shifted_by_one(name):
    model = tiny(name)
    tokens = torch.randint(64, (2, 7), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[0, 4:] = -100
    with torch.no_grad():
        output = model(tokens, labels=labels)
        expected = model.loss(tokens[:, :-1], labels[:, 1:])
    assert_close(output.loss, expected)
    rows = [(b, p) for b in range(2) for p in range(6) if labels[b, p + 1] >= 0]
    plain = [-output.logits[b, p, labels[b, p + 1]] for b, p in rows]
    assert_close(output.loss, sum(plain) / len(plain))


@pytest.mark.parametrize("bands", [[500], [100, 150, 250]])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_knows_nothing_before_it_is_trained(kind, bands):
    """Its loss is about that of zeros: ln(vocabulary), with one cluster."""
    torch.manual_seed(0)
    config = AdaptiveConfig(
        memory=kind,
        band_sizes=bands,
        band_widths=[64, 16, 4][: len(bands)],
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    model = AdaptiveLM(config)
    tokens = torch.randint(500, (4, 65))
    with torch.no_grad():
        found = model.loss(tokens[:, :-1], tokens[:, 1:])
        zeros = model.lm_head.loss(torch.zeros(256, 64), tokens[:, 1:].flatten())
    if len(bands) == 1:
        assert_close(zeros, torch.tensor(math.log(500)))
    assert zeros - 0.2 < found < zeros + 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_weights_start_as_large_as_their_place_asks(kind):
    """Also where a layer has as many memories as the stream is wide, and keys look like values."""
    torch.manual_seed(0)
    config = AdaptiveConfig(
        memory=kind,
        band_sizes=[100, 400],
        band_widths=[64, 16],
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        distances=16,
        key_width=16,
    )
    model = AdaptiveLM(config)
    memory = model.model.layers[1].memory
    into_stream = math.sqrt(2 / (128 + 64)) / 2
    xavier = math.sqrt(2 / (128 + 64))
    deviations = {
        "relu": {"keys.weight": xavier, "values.weight": into_stream},
        "softmax": {"keys.weight": xavier, "values.weight": 1 / math.sqrt(128)},
        "persistent": {"keys.weight": 1 / math.sqrt(16), "values.weight": 1 / math.sqrt(128)},
        "lambda": {
            "keys.weight": 1.0,
            "keys.query.weight": 1 / 32,
            "values.out.weight": math.sqrt(2 / 128) / 2,
        },
        "moe": {
            "experts.up_proj": xavier,
            "experts.down_proj": into_stream,
            "router.weight": 0.1 / math.sqrt(64),
        },
    }
    for place, deviation in deviations.get(kind, deviations["relu"]).items():
        found = memory.get_parameter(place).detach().std()
        assert_close(float(found), deviation, rtol=0.1, atol=0)
    frequent, others = model.model.embed_tokens.bands
    vectors = [8 * band(torch.arange(100)).detach() for band in (frequent, others)]
    assert_close(float(vectors[0].std()), 1.0, rtol=0.1, atol=0)
    assert_close(float(vectors[1].std()), 0.25, rtol=0.1, atol=0)
    assert not any(bias.any() for name, bias in model.named_parameters() if "bias" in name)
