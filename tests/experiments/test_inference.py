"""The pass of Section 5 against plain loops: each prefix run alone, every number by definition."""

import math
import random
from decimal import Decimal, localcontext
from functools import cache, partial

import numpy as np
import pytest
import torch
from torch.nn import functional

import ffmem
from ffmem.errors import FfmemError, NoStaticValues
from ffmem.experiments import inference
from ffmem.experiments.activity import carrying
from ffmem.experiments.predictions import DETAILS
from ffmem.experiments.study import Study
from tests.experiments.planting import FAMILIES, KINDS, LAMBDA, study_of
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
WITHOUT_VALUES = ("activity", "predictions", "details")


def write_sentences(path, n=12, seed=1):
    words = random.Random(seed)
    lines = [
        " ".join(f"w{words.randint(3, 40)}" for _ in range(words.randint(1, 7))) for _ in range(n)
    ]
    path.write_text("\n".join(lines) + "\n")
    return ffmem.Corpus(str(path), unit="line")


def studied(folder, name, **options):
    """A study of a tiny model whose sample is every prefix, unless told otherwise."""
    base = study_of(folder / "index", name)
    settings = {"corpus": write_sentences(folder / "valid.txt"), "sample": None} | options
    return Study(index=base.index, memories=base.memories, **settings)


@pytest.fixture(scope="module", params=VARIANTS)
def study(request, tmp_path_factory):
    return studied(tmp_path_factory.mktemp("study"), request.param)


@pytest.fixture(scope="module")
def lambda_study(tmp_path_factory):
    """What can be measured where there are no static values."""
    return studied(tmp_path_factory.mktemp("study"), LAMBDA, parts=WITHOUT_VALUES)


@pytest.fixture(scope="module")
def plain(study):
    return run_alone(study)


def run_alone(study):
    """Every layer's trace of every prefix: each ran alone, read at its last position."""
    start = study.index.manifest.start.id
    found = []
    for example, p in study.drawn.prefixes():
        tokens = torch.tensor([[start, *example.sentence.ids[:p]]])
        found.append(
            [
                type(layer)(*(part if part is None else part[0, -1] for part in layer))
                for layer in study.memories.trace(tokens)
            ]
        )
    return found


def readings(study, layer):
    """The logits of r, y and o, each projected by itself."""
    head = study.memories.head
    return (
        head.logits(layer.residual[None])[0].double(),
        head.folded(layer.ff_output[None])[0].double(),
        head.logits(layer.layer_output[None])[0].double(),
    )


def rank(logits, token):
    own = logits[token].item()
    return sum(other > own for other in logits.tolist())


def test_predictions_are_those_of_prefixes_run_alone(study, plain):
    check_predictions(study, plain)


def test_a_lambda_layer_is_read_as_prefixes_run_alone_say(lambda_study):
    plain = run_alone(lambda_study)
    check_predictions(lambda_study, plain)
    check_activity(lambda_study, plain)
    assert set(lambda_study.inference.activity.shares) == {"positive"}


@pytest.mark.parametrize("part", ["votes", "softmax"])
def test_what_reads_values_is_refused_where_there_are_none(tmp_path, part):
    with pytest.raises(NoStaticValues, match="static keys"):
        _ = studied(tmp_path, LAMBDA, parts=("predictions", part)).inference


def check_predictions(study, plain):
    found = study.inference.predictions
    for example, layers in enumerate(plain):
        final = int(readings(study, layers[-1])[2].argmax())
        for layer, trace in enumerate(layers):
            r, y, o = readings(study, trace)
            place = (example, layer)
            assert found.residual_top[place] == r.argmax()
            assert found.ff_top[place] == y.argmax()
            assert found.output_top[place] == o.argmax()
            assert found.residual_final_rank[place] == rank(r, final)
            assert found.ff_final_rank[place] == rank(y, final)
            assert found.ff_residual_rank[place] == rank(y, int(r.argmax()))
            for probability, logits, token in (
                (found.residual_final_probability, r, final),
                (found.residual_top_probability, r, r.argmax()),
                (found.ff_top_probability, y, y.argmax()),
                (found.ff_final_probability, y, final),
                (found.ff_residual_probability, y, r.argmax()),
                (found.output_top_probability, o, o.argmax()),
            ):
                expected = logits.softmax(0)[token].item()
                assert probability[place] == pytest.approx(expected, rel=2e-3, abs=1e-7)
        assert found.final[example] == final


def test_active_memories_are_counted_as_defined(study, plain):
    check_activity(study, plain)


def check_activity(study, plain):
    shares = study.inference.activity.shares
    assert ("gate" in shares) == study.memories.gated
    n = study.memories.n_memories
    for example, layers in enumerate(plain):
        for layer, trace in enumerate(layers):
            m = trace.coefficients
            assert shares["positive"][example, layer] == pytest.approx(sum(m > 0).item() / n)
            if study.memories.gated:
                assert shares["gate"][example, layer] == pytest.approx(
                    sum(trace.gate > 0).item() / n
                )
            if not study.memories.has_values:
                continue
            lengths = readable_values(study.memories, layer).norm(dim=1)
            ordered = sorted((m.abs() * lengths).tolist(), reverse=True)
            size = next(k for k in range(n + 1) if sum(ordered[:k]) >= 0.9 * sum(ordered))
            assert shares["effect"][example, layer] == pytest.approx(size / n)


def by_head(memories, scores):
    """The weights of each softmax: one over all memories, or one over each head's slots."""
    persistent = getattr(memories.config, "memory", None) == "persistent"
    heads = memories.config.num_attention_heads if persistent else 1
    return [part.softmax(0) for part in scores.chunk(heads)]


def test_the_softmax_memory_is_equation_2(study, plain):
    found = study.inference.softmax.found
    for example, layers in enumerate(plain):
        for layer, trace in enumerate(layers):
            values = study.memories.values(layer)
            keys, bias = study.memories.keys(layer), study.memories.key_bias(layer)
            heads = by_head(study.memories, keys @ trace.ff_input + bias)
            weights = torch.cat(heads)
            neural = sum(w * v for w, v in zip(weights, values, strict=True))
            plain_ff = trace.value_output - study.memories.bias(layer)
            expected = {
                "cosine": functional.cosine_similarity(plain_ff, neural, dim=0).item(),
                "entropy": -sum(w * math.log(w) for w in weights.tolist() if w > 0) / len(heads),
                "top1_mass": sum(head.max().item() for head in heads) / len(heads),
                "distance": ((plain_ff - neural).norm() / plain_ff.norm()).item(),
            }
            for name, number in expected.items():
                assert found[name][example, layer] == pytest.approx(number, rel=2e-3, abs=2e-4)


@cache
def readable_values(memories, layer):
    return memories.readable_values(layer)


def vote(study, layer, memory, coefficient):
    """top(m·v): the value times its coefficient, projected by itself."""
    head, value = study.memories.head, readable_values(study.memories, layer)[memory]
    if head.adaptive:
        return int(np.argmax(exact_log_probabilities(head, value, coefficient)))
    return int(head.folded((coefficient * value)[None])[0].argmax())


def exact_log_probabilities(head, value, coefficient):
    """The adaptive softmax of m·v to fifty digits: attention may be 1e-12, where all words tie."""
    with localcontext(prec=50):
        first, *rare = (
            [Decimal(coefficient) * Decimal(z) for z in band[0].tolist()]
            for band in head.band_logits(head.norm.fold(value[None]))
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


def ballots(study, layer, trace):
    """Who votes for what, under both definitions of who votes."""
    m = trace.coefficients.tolist()
    everybody, active = [], []
    for memory, coefficient in enumerate(m):
        if study.memories.gated:
            everybody.append((memory, vote(study, layer, memory, coefficient)))
            is_active = trace.gate[memory] > 0
        else:
            everybody.append((memory, vote(study, layer, memory, 1.0)))
            is_active = coefficient > 0
        if is_active:
            active.append((memory, vote(study, layer, memory, coefficient)))
    return everybody, active


def test_votes_are_counted_as_defined(study, plain):
    votes = study.inference.votes
    frequency = study.frequencies.tolist()
    bins = [math.floor(math.log2(count + 1)) for count in frequency]
    for example, layers in enumerate(plain[::4]):
        for layer, trace in enumerate(layers):
            _, y, o = readings(study, trace)
            lengths = readable_values(study.memories, layer).norm(dim=1)
            weights = (trace.coefficients.abs() * lengths).double()
            both = ballots(study, layer, trace)
            for target, token in enumerate((int(y.argmax()), int(o.argmax()))):
                for voters, cast in enumerate(both):
                    place = (example * 4, layer, target, voters)
                    agree = [memory for memory, voted in cast if voted == token]
                    assert votes.agreeing[place] == len(agree)
                    carried = (weights[agree].sum() / weights.sum()).item()
                    assert votes.carried[place] == pytest.approx(carried, abs=1e-5)
                    as_frequent = [t for t in range(len(bins)) if bins[t] == bins[token]]
                    given = {voted for _, voted in cast}
                    missed = [t for t in as_frequent if t not in given]
                    chance = len(missed) / len(as_frequent)
                    assert votes.chance[place] == pytest.approx(chance)


@pytest.mark.parametrize("name", ["llama", "gpt2", "ffmem_adaptive"])
def test_batches_and_chunks_change_nothing(tmp_path, monkeypatch, name):
    whole = studied(tmp_path, name).inference
    monkeypatch.setattr(inference, "HELD", 1)  # the smallest batches
    projector = inference.Projector
    monkeypatch.setattr(inference, "Projector", partial(projector, budget=1))
    pieces = studied(tmp_path, name).inference
    for one, other in zip(whole.predictions, pieces.predictions, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7)
    assert (whole.votes.agreeing == pieces.votes.agreeing).all()


@pytest.mark.parametrize("name", ["llama", "gpt2", "ffmem_adaptive"])
def test_batches_that_are_read_together_keep_their_places(tmp_path, monkeypatch, name):
    one_batch = studied(tmp_path, name).inference.tables()
    monkeypatch.setattr(inference, "FULL", 1)  # a batch for every length, all in one group
    by_length = studied(tmp_path, name)
    start = by_length.index.manifest.start.id
    (group,) = inference.groups(by_length.drawn, start, by_length.memories)
    assert len(group) > 2
    for column, found in by_length.inference.tables().items():
        np.testing.assert_allclose(one_batch[column], found, rtol=1e-3, atol=1e-6)


def test_the_effect_is_carried_by_the_smallest_set_that_reaches_nine_tenths():
    carried = np.array([[9, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [8, 1, 0.5, 0.5]], np.float32)
    assert carrying(carried).tolist() == [0.25, 1, 0, 0.5]


def test_only_what_is_asked_for_is_measured(tmp_path):
    study = studied(tmp_path, "llama", parts=("activity",))
    assert study.inference.activity is not None
    assert study.inference.predictions is study.inference.votes is study.inference.softmax is None
    with pytest.raises(FfmemError, match="did not measure softmax"):
        inference.measured(study.inference.softmax, "softmax")


@pytest.mark.parametrize("name", ["llama", "gpt2", "ffmem_adaptive"])
def test_details_that_nobody_asked_for_are_none_and_all_else_is_the_same(tmp_path, name):
    full = studied(tmp_path, name).inference.predictions
    lean = studied(tmp_path, name, parts=("predictions",)).inference.predictions
    for column, of_full, of_lean in zip(full._fields, full, lean, strict=True):
        if column in DETAILS:
            missing = np.isnan(of_lean) if "probability" in column else of_lean == -1
            assert missing.all()
            assert np.isfinite(of_full).all()
            assert (of_full >= 0).all()
        else:
            assert (of_lean == of_full).all()


def test_a_batch_of_one_length_needs_no_padding(tmp_path, monkeypatch):
    study = studied(tmp_path, "llama")
    monkeypatch.setattr(inference, "FULL", 1)
    for some in inference.places(study.drawn, study.index.manifest.start.id, study.memories):
        ends = [
            max(place for at, place in some.at.tolist() if at == row)
            for row in set(some.at[:, 0].tolist())
        ]
        assert {end + 1 for end in ends} == {some.tokens.shape[1]}


def test_a_prefix_does_not_depend_on_what_was_drawn_beside_it(tmp_path):
    every = studied(tmp_path, "llama")
    some = studied(tmp_path, "llama", sample=7)
    places = [(example.number, p) for example, p in every.drawn.prefixes()]
    chosen = [places.index((example.number, p)) for example, p in some.drawn.prefixes()]
    assert len(chosen) == 7
    for one, other in zip(every.inference.predictions, some.inference.predictions, strict=True):
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
    study = studied(tmp_path, dictated(17))
    found = study.inference
    m = np.array(
        [
            [layer.coefficients[0, -1, 5].item() for layer in study.memories.trace(tokens)][-1]
            for tokens in (
                torch.tensor([[study.index.manifest.start.id, *example.sentence.ids[:p]]])
                for example, p in study.drawn.prefixes()
            )
        ]
    )
    ruled = m > 0.01
    assert ruled.sum() > 10
    assert (found.predictions.ff_top[ruled, -1] == 17).all()
    assert (found.predictions.final[ruled] == 17).all()
    assert (found.votes.agreeing[ruled, -1, 0, 0] >= 1).all()
    assert found.activity.shares["effect"][ruled, -1].max() <= 1 / study.memories.n_memories + 1e-6
    assert (found.votes.carried[ruled, -1, 0, 0] > 0.99).all()
    cases = found.predictions.cases()
    assert (cases["ffn"] | cases["agreement"])[ruled, -1].all()


@pytest.mark.parametrize("held", [1, 5000, 1 << 29])
def test_no_batch_holds_more_prefixes_than_there_is_room_for(tmp_path, monkeypatch, held):
    study = studied(tmp_path, "llama")
    monkeypatch.setattr(inference, "HELD", held)
    most = max(1, held // inference.held_by(study.memories))
    found = list(inference.places(study.drawn, 0, study.memories, batch_tokens=64))
    numbers = np.concatenate([some.examples for some in found])
    assert sorted(numbers.tolist()) == list(range(len(study.drawn.lengths)))
    for some in found:
        assert len(some.examples) <= most or len(some.tokens) == 1
        assert len(some.tokens) == len(some.at[:, 0].unique())
