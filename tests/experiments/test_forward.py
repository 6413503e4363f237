"""The pass of Section 5 against plain loops: each prefix run alone, every number by definition."""

import math
import random
from decimal import Decimal, localcontext
from functools import cache

import numpy as np
import pytest
import torch
from torch.nn import functional

import ffmem
from ffmem.experiments import forward, projection
from ffmem.experiments.active_memories import ActiveShares, carrying
from ffmem.experiments.base import ExperimentConfig
from ffmem.experiments.context import ExperimentContext
from ffmem.experiments.metrics import Predictions
from ffmem.experiments.neural_memory import SoftmaxComparison
from ffmem.experiments.zero_agreement import TokenHits
from tests.experiments.planting import FAMILIES, KINDS, LAMBDA, context_of
from tests.tiny import tiny

VARIANTS = [
    *FAMILIES,
    "cohere",  # logits have a scale
    "gemma2",  # and a cap
    "granite",  # y has a multiplier, logits a divisor
    "falcon",
    "opt post-norm",  # o is not r + y
    "olmo2",
    "phi",  # the output embedding has a bias
    *KINDS,
]
METRICS = (ActiveShares, Predictions, SoftmaxComparison, TokenHits)
WITHOUT_VALUES = (ActiveShares, Predictions)


def write_sentences(path, n=12, seed=1):
    words = random.Random(seed)
    lines = [
        " ".join(f"w{words.randint(3, 40)}" for _ in range(words.randint(1, 7))) for _ in range(n)
    ]
    path.write_text("\n".join(lines) + "\n")
    return ffmem.Corpus(str(path), unit="line")


def make_context(folder, name, **options):
    """A context of a tiny model whose sample is every prefix, unless told otherwise."""
    base = context_of(folder / "index", name)
    metrics = METRICS if base.memories.has_values else WITHOUT_VALUES
    return ExperimentContext(
        index=base.index,
        model=base.memories,
        corpus=write_sentences(folder / "valid.txt"),
        config=ExperimentConfig(sample=options.get("sample", "all")),
        metrics=options.get("metrics", metrics),
    )


@pytest.fixture(scope="module", params=VARIANTS)
def context(request, tmp_path_factory):
    return make_context(tmp_path_factory.mktemp("context"), request.param)


@pytest.fixture(scope="module")
def lambda_context(tmp_path_factory):
    """What can be measured where there are no static values."""
    return make_context(tmp_path_factory.mktemp("context"), LAMBDA)


@pytest.fixture(scope="module")
def plain(context):
    return run_alone(context)


def run_alone(context):
    """Every layer's trace of every prefix: each ran alone, read at its last position."""
    start = context.index.manifest.start.id
    found = []
    for example, p in context.prompt_sample.prefixes():
        tokens = torch.tensor([[start, *example.sentence.ids[:p]]])
        found.append(
            [
                type(layer)(*(part if part is None else part[0, -1] for part in layer))
                for layer in context.memories.trace(tokens)
            ]
        )
    return found


def readings(context, layer):
    """The logits of r, y and o, each projected by itself."""
    head = context.memories.head
    return (
        head.logits(layer.residual[None])[0].double(),
        head.folded(layer.ff_output[None])[0].double(),
        head.logits(layer.layer_output[None])[0].double(),
    )


def rank(logits, token):
    own = logits[token].item()
    return sum(other > own for other in logits.tolist())


def test_predictions_are_those_of_prefixes_run_alone(context, plain):
    check_predictions(context, plain)


def test_a_lambda_layer_is_read_as_prefixes_run_alone_say(lambda_context):
    plain = run_alone(lambda_context)
    check_predictions(lambda_context, plain)
    check_activity(lambda_context, plain)
    assert set(lambda_context.measured(ActiveShares).shares) == {"positive"}


def check_predictions(context, plain):
    found = context.measured(Predictions)
    for example, layers in enumerate(plain):
        final = int(readings(context, layers[-1])[2].argmax())
        for layer, trace in enumerate(layers):
            r, y, o = readings(context, trace)
            place = (example, layer)
            assert found.residual_top[place] == r.argmax()
            assert found.ff_top[place] == y.argmax()
            assert found.output_top[place] == o.argmax()
            assert found.ff_residual_rank[place] == rank(y, int(r.argmax()))
            expected = pytest.approx(r.softmax(0)[final].item(), rel=2e-3, abs=1e-7)
            assert found.residual_final_probability[place] == expected
        assert found.final[example] == final


def test_active_memories_are_counted_as_defined(context, plain):
    check_activity(context, plain)


def check_activity(context, plain):
    shares = context.measured(ActiveShares).shares
    assert ("gate" in shares) == context.memories.gated
    n = context.memories.layout.widths[0]
    for example, layers in enumerate(plain):
        for layer, trace in enumerate(layers):
            m = trace.coefficients
            assert shares["positive"][example, layer] == pytest.approx(sum(m > 0).item() / n)
            if context.memories.gated:
                assert shares["gate"][example, layer] == pytest.approx(
                    sum(trace.gate > 0).item() / n
                )
            if not context.memories.has_values:
                continue
            lengths = output_directions(context.memories, layer).norm(dim=1)
            ordered = sorted((m.abs() * lengths).tolist(), reverse=True)
            size = next(k for k in range(n + 1) if sum(ordered[:k]) >= 0.9 * sum(ordered))
            assert shares["effect"][example, layer] == pytest.approx(size / n)


def by_head(memories, scores):
    """The weights of each softmax: one over all memories, or one over each head's slots."""
    persistent = getattr(memories.config, "memory", None) == "persistent"
    heads = memories.config.num_attention_heads if persistent else 1
    return [part.softmax(0) for part in scores.chunk(heads)]


def test_the_softmax_memory_is_equation_2(context, plain):
    found = context.measured(SoftmaxComparison).found
    for example, layers in enumerate(plain):
        for layer, trace in enumerate(layers):
            values = context.memories.values(layer)
            keys, bias = context.memories.keys(layer), context.memories.key_bias(layer)
            heads = by_head(context.memories, keys @ trace.ff_input + bias)
            weights = torch.cat(heads)
            neural = sum(w * v for w, v in zip(weights, values, strict=True))
            plain_ff = trace.value_output - context.memories.bias(layer)
            expected = {
                "cosine": functional.cosine_similarity(plain_ff, neural, dim=0).item(),
                "entropy": -sum(w * math.log(w) for w in weights.tolist() if w > 0) / len(heads),
                "top1_mass": sum(head.max().item() for head in heads) / len(heads),
                "distance": ((plain_ff - neural).norm() / plain_ff.norm()).item(),
            }
            for name, number in expected.items():
                assert found[name][example, layer] == pytest.approx(number, rel=2e-3, abs=2e-4)


@cache
def output_directions(memories, layer):
    return memories.output_directions(layer)


def value_top(context, layer, memory, coefficient):
    """top(m·v): the value times its coefficient, projected by itself."""
    head, value = context.memories.head, output_directions(context.memories, layer)[memory]
    if head.adaptive:
        return int(np.argmax(exact_log_probabilities(head, value, coefficient)))
    return int(head.folded((coefficient * value)[None])[0].argmax())


def exact_log_probabilities(head, value, coefficient):
    """The adaptive softmax of m·v to fifty digits: attention may be 1e-12, where all words tie."""
    with localcontext(prec=50):
        first, *rare = (
            [Decimal(coefficient) * Decimal(z) for z in band[0].tolist()]
            for band in head.project_clusters(head.norm.fold(value[None]))
        )
        total = log_total(first)
        entries = first[len(first) - len(rare) :]
        found = [z - total for z in first[: len(first) - len(rare)]]
        for entry, band in zip(entries, rare, strict=True):
            within = log_total(band)
            found += [entry - total + z - within for z in band]
        return found


def log_total(logits):
    return sum(z.exp() for z in logits).ln()


def tokens_of(context, layer, trace):
    """Return (memory, its token) of all memories, and of the active ones."""
    m = trace.coefficients.tolist()
    everybody, active = [], []
    for memory, coefficient in enumerate(m):
        if context.memories.gated:
            everybody.append((memory, value_top(context, layer, memory, coefficient)))
            is_active = trace.gate[memory] > 0
        else:
            everybody.append((memory, value_top(context, layer, memory, 1.0)))
            is_active = coefficient > 0
        if is_active:
            active.append((memory, value_top(context, layer, memory, coefficient)))
    return {"all": everybody, "active": active}


def test_hits_are_counted_as_defined(context, plain):
    hits = context.measured(TokenHits)
    frequency = context.frequencies.tolist()
    bins = [math.floor(math.log2(count + 1)) for count in frequency]
    for prefix, layers in list(enumerate(plain))[::4]:
        for layer, trace in enumerate(layers):
            _, y, o = readings(context, trace)
            lengths = output_directions(context.memories, layer).norm(dim=1)
            weights = (trace.coefficients.abs() * lengths).double()
            for memories, tokens in tokens_of(context, layer, trace).items():
                for target, wanted in {"y": int(y.argmax()), "o": int(o.argmax())}.items():
                    variant, place = (target, memories), (prefix, layer)
                    agree = [memory for memory, token in tokens if token == wanted]
                    assert hits.agreeing[variant][place] == len(agree)
                    carried = (weights[agree].sum() / weights.sum()).item()
                    assert hits.carried[variant][place] == pytest.approx(carried, abs=1e-5)
                    as_frequent = [t for t in range(len(bins)) if bins[t] == bins[wanted]]
                    missed = [t for t in as_frequent if t not in {token for _, token in tokens}]
                    chance = len(missed) / len(as_frequent)
                    assert hits.chance[variant][place] == pytest.approx(chance)


@pytest.mark.parametrize("name", ["llama", "gpt2", "ffmem_adaptive"])
def test_batches_and_chunks_change_nothing(tmp_path, monkeypatch, name):
    whole = tables(make_context(tmp_path, name))
    monkeypatch.setattr(forward, "MAX_TRACE_BYTES", 1)  # the smallest batches
    monkeypatch.setattr(projection, "LOGIT_BYTES", 1)
    pieces = tables(make_context(tmp_path, name))
    for column in Predictions._fields:
        np.testing.assert_allclose(whole[column], pieces[column], rtol=1e-4, atol=1e-7)
    for column in whole:
        if column.startswith("agreeing"):
            assert (whole[column] == pieces[column]).all()


def tables(context):
    """Every table that the pass fills in, by name."""
    hits = context.measured(TokenHits)
    return {
        **context.measured(Predictions)._asdict(),
        **context.measured(ActiveShares).shares,
        **context.measured(SoftmaxComparison).found,
        **{
            f"{name} {variant}": table
            for name in ("agreeing", "carried", "chance")
            for variant, table in getattr(hits, name).items()
        },
    }


@pytest.mark.parametrize("name", ["llama", "gpt2", "ffmem_adaptive"])
def test_batches_that_are_read_together_keep_their_places(tmp_path, monkeypatch, name):
    one_batch = tables(make_context(tmp_path, name))
    # a batch for every length, all in one group
    monkeypatch.setattr(forward, "MIN_BATCH_TOKENS", 1)
    by_length = make_context(tmp_path, name)
    start = by_length.index.manifest.start.id
    (group,) = forward.groups(by_length.prompt_sample, start, by_length.memories)
    assert len(group) > 2
    for column, found in tables(by_length).items():
        np.testing.assert_allclose(one_batch[column], found, rtol=1e-3, atol=1e-6)


def test_the_effect_is_carried_by_the_smallest_set_that_reaches_nine_tenths():
    carried = np.array([[9, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [8, 1, 0.5, 0.5]], np.float32)
    assert carrying(carried).tolist() == [0.25, 1, 0, 0.5]


def test_one_pass_measures_what_is_asked_for_and_announced(tmp_path, monkeypatch):
    passes = []
    evaluate = forward.evaluate_sample
    monkeypatch.setattr(
        "ffmem.experiments.forward.evaluate_sample",
        lambda context, kinds: passes.append(set(kinds)) or evaluate(context, kinds),
    )
    context = make_context(tmp_path, "llama", metrics=(ActiveShares, Predictions))
    activity = context.measured(ActiveShares)
    context.measured(Predictions)
    assert context.measured(ActiveShares) is activity
    assert passes == [{ActiveShares, Predictions}]
    context.measured(SoftmaxComparison)
    assert passes[1:] == [{SoftmaxComparison}]


def test_a_batch_of_one_length_needs_no_padding(tmp_path, monkeypatch):
    context = make_context(tmp_path, "llama")
    monkeypatch.setattr(forward, "MIN_BATCH_TOKENS", 1)
    for some in forward.prefix_batches(
        context.prompt_sample, context.index.manifest.start.id, context.memories
    ):
        ends = [
            max(place for at, place in some.at.tolist() if at == row)
            for row in set(some.at[:, 0].tolist())
        ]
        assert {end + 1 for end in ends} == {some.tokens.shape[1]}


def test_a_prefix_does_not_depend_on_what_was_drawn_beside_it(tmp_path):
    every = make_context(tmp_path, "llama")
    some = make_context(tmp_path, "llama", sample=7)
    places = [(example.number, p) for example, p in every.prompt_sample.prefixes()]
    chosen = [places.index((example.number, p)) for example, p in some.prompt_sample.prefixes()]
    assert len(chosen) == 7
    for one, other in zip(every.measured(Predictions), some.measured(Predictions), strict=True):
        np.testing.assert_allclose(one[chosen], other, rtol=1e-4, atol=1e-7)


def dictated(token):
    """A llama whose last layer says one token, and one memory alone makes it say so."""
    model = tiny("llama")
    last = model.model.layers[-1].mlp
    with torch.no_grad():
        rows = model.get_output_embeddings().weight
        rows /= rows.norm(dim=1, keepdim=True)
        wanted = rows[token] / model.model.norm.weight
        last.down_proj.weight.zero_()
        last.down_proj.weight[:, 5] = 1000 * wanted
        # The gate is open and both keys agree on every prefix: m > 0.
        last.gate_proj.weight[5] = last.up_proj.weight[5]
    return model


def test_a_layer_that_one_memory_dictates_is_seen_as_such(tmp_path):
    context = make_context(tmp_path, dictated(17))
    predictions, hits = context.measured(Predictions), context.measured(TokenHits)
    m = np.array(
        [
            [layer.coefficients[0, -1, 5].item() for layer in context.memories.trace(tokens)][-1]
            for tokens in (
                torch.tensor([[context.index.manifest.start.id, *example.sentence.ids[:p]]])
                for example, p in context.prompt_sample.prefixes()
            )
        ]
    )
    ruled = m > 0.01
    assert ruled.sum() > 10
    assert (predictions.ff_top[ruled, -1] == 17).all()
    assert (predictions.final[ruled] == 17).all()
    assert (hits.agreeing["y", "all"][ruled, -1] >= 1).all()
    assert (
        context.measured(ActiveShares).shares["effect"][ruled, -1].max()
        <= 1 / context.memories.layout.widths[0] + 1e-6
    )
    assert (hits.carried["y", "all"][ruled, -1] > 0.99).all()
    cases = predictions.cases()
    assert (cases["ffn"] | cases["agreement"])[ruled, -1].all()


@pytest.mark.parametrize("held", [1, 5000, 1 << 29])
def test_no_batch_holds_more_prefixes_than_there_is_room_for(tmp_path, monkeypatch, held):
    context = make_context(tmp_path, "llama")
    monkeypatch.setattr(forward, "MAX_TRACE_BYTES", held)
    most = max(1, held // forward.trace_bytes(context.memories))
    found = list(
        forward.prefix_batches(context.prompt_sample, 0, context.memories, batch_tokens=64)
    )
    numbers = np.concatenate([some.prefixes for some in found])
    assert sorted(numbers.tolist()) == list(range(len(context.prompt_sample.lengths)))
    for some in found:
        assert len(some.prefixes) <= most or len(some.tokens) == 1
        assert len(some.tokens) == len(some.at[:, 0].unique())
