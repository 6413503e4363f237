"""Experiments on mixtures of experts against plain loops over prefixes that ran alone."""

import json
import math
from statistics import fmean, median

import numpy as np
import pytest
import torch
from torch.nn import functional

from ffmem.experiments import token_removal
from ffmem.experiments.active_memories import EXPERIMENT as ACTIVE_MEMORIES
from ffmem.experiments.active_memories import ActiveShares
from ffmem.experiments.base import NAMES, check_claims, find
from ffmem.experiments.context import run_experiments
from ffmem.experiments.neural_memory import EXPERIMENT as NEURAL_MEMORY
from ffmem.experiments.neural_memory import SoftmaxComparison
from ffmem.experiments.report import Report
from ffmem.experiments.zero_agreement import TokenHits
from ffmem.text import format_share
from tests.experiments.planting import context_of
from tests.experiments.test_forward import make_context, readings, run_alone, value_top

NAMED = [
    "deepseek_v3",  # a dense layer, then a shared expert and routed ones, which are scaled
    "gpt_oss",  # values have biases, which the router's weights multiply
    "nemotron_h with experts",  # not gated, and layers without memories
]


@pytest.fixture(scope="module", params=NAMED)
def context(request, tmp_path_factory):
    return make_context(tmp_path_factory.mktemp("context"), request.param)


@pytest.fixture(scope="module")
def plain(context):
    return run_alone(context)


def expert_layers(context):
    return [layer for layer, n in enumerate(context.memories.layout.n_experts) if n]


def reached_banks(context, layer, trace):
    """(w, bank) of every bank that a prefix reaches."""
    pairs = zip(trace.weights.tolist(), context.memories.banks[layer], strict=True)
    return [(w, bank) for w, bank in pairs if w != 0]


def test_activity_is_counted_over_all_memories_and_over_those_reached(context, plain):
    rows, _ = ACTIVE_MEMORIES.measure(context)
    definitions = ["positive", *["gate"] * context.memories.gated, "effect"]
    assert len(rows) == 2 * len(definitions) * len(context.memories.layout.memory_layers)
    fewer = 0
    for layer in expert_layers(context):
        shares = {(name, of): [] for name in definitions for of in ("all", "reached")}
        lengths = context.memories.output_directions(layer).norm(dim=1)
        for layers in plain:
            trace = layers[layer]
            m = trace.coefficients
            carried = sorted((m.abs() * lengths).tolist(), reverse=True)
            active = {
                "positive": sum(one > 0 for one in m.tolist()),
                "effect": next(
                    k for k in range(len(m) + 1) if sum(carried[:k]) >= 0.9 * sum(carried)
                ),
            }
            if context.memories.gated:
                active["gate"] = sum(one > 0 for one in trace.gate.tolist())
            reached = sum(bank.size for _, bank in reached_banks(context, layer, trace))
            fewer += reached < len(m)
            for name, n in active.items():
                shares[name, "all"].append(n / len(m))
                shares[name, "reached"].append(n / reached)
        for (name, of), expected in shares.items():
            (row,) = (
                one
                for one in rows
                if (one["layer"], one["definition"], one["of"]) == (layer, name, of)
            )
            assert row["mean"] == pytest.approx(fmean(expected), rel=1e-5)
            assert row["median"] == pytest.approx(median(expected), rel=1e-5)
            assert row["n"] == len(plain)
    assert fewer == len(plain) * len(expert_layers(context))


def test_all_memories_of_a_dense_layer_are_reached(context):
    activity = context.measured(ActiveShares)
    for layer, n_experts in enumerate(context.memories.layout.n_experts):
        assert (activity.reached[:, layer] == 1).all() == (not n_experts)


def test_the_softmax_memory_has_a_softmax_in_each_bank_that_a_prefix_reaches(context, plain):
    found = context.measured(SoftmaxComparison).found
    for example, layers in enumerate(plain):
        for layer in expert_layers(context):
            trace = layers[layer]
            feed_forward = trace.coefficients @ context.memories.values(layer)
            neural, entropies, largest = torch.zeros_like(feed_forward), [], []
            for w, bank in reached_banks(context, layer, trace):
                weights = (bank.key_rows() @ trace.ff_input + bank.key_bias()).softmax(0)
                for weight, value in zip(weights, bank.value_rows(), strict=True):
                    neural = neural + w * weight * value
                entropies.append(-sum(p * math.log(p) for p in weights.tolist() if p > 0))
                largest.append(weights.max().item())
            expected = {
                "cosine": functional.cosine_similarity(feed_forward, neural, dim=0).item(),
                "distance": ((feed_forward - neural).norm() / feed_forward.norm()).item(),
                "entropy": fmean(entropies),
                "effective": fmean(map(math.exp, entropies)),
                "top1_mass": fmean(largest),
            }
            for name, number in expected.items():
                assert found[name][example, layer] == pytest.approx(number, rel=2e-3, abs=2e-4)


def test_entropy_is_at_most_that_of_the_largest_bank(context):
    rows, also = NEURAL_MEMORY.measure(context)
    sizes = [bank.size for banks in context.memories.banks for bank in banks]
    assert also["max_entropy"] == pytest.approx(math.log(max(sizes)))
    assert all(row["entropy"] < also["max_entropy"] for row in rows)


def test_memories_that_are_not_reached_count_with_their_value_and_are_not_active(context, plain):
    hits = context.measured(TokenHits)
    for example, layers in enumerate(plain[::4]):
        for layer in expert_layers(context):
            trace = layers[layer]
            _, y, _ = readings(context, trace)
            gate = trace.coefficients if trace.gate is None else trace.gate
            all_of, active = 0, 0
            for memory, (m, open_) in enumerate(
                zip(trace.coefficients.tolist(), gate.tolist(), strict=True)
            ):
                sign = -1.0 if m < 0 and context.memories.gated else 1.0
                agrees = value_top(context, layer, memory, sign) == int(y.argmax())
                all_of += agrees
                active += agrees and open_ > 0
            assert hits.agreeing["y", "all"][example * 4, layer] == all_of
            assert hits.agreeing["y", "active"][example * 4, layer] == active


@pytest.mark.parametrize("name", NAMED)
def test_a_changed_trigger_that_leaves_its_expert_has_no_coefficient(name, tmp_path):
    context = context_of(tmp_path / "index", name, per_layer=15, triggers=3)
    rows, _ = token_removal.measure(context)
    left = 0
    for layer in context.memories.layout.memory_layers:
        trials = token_removal.draw_trials(context, layer, token_removal.unknown_token(context))
        corpus = token_removal.corpus_tokens(context.index)
        start = context.index.manifest.start.id
        unrouted = []
        for memory, prefix in zip(trials.memory.tolist(), trials.prefix.tolist(), strict=True):
            ids = corpus.prefix(prefix).tolist()[:-1]
            trace = context.memories.trace(torch.tensor([[start, *ids]]))[layer]
            if trace.weights is not None:
                bank = next(
                    number
                    for number, one in enumerate(context.memories.banks[layer])
                    if one.offset <= memory < one.offset + one.size
                )
                unrouted.append(trace.weights[0, -1, bank].item() == 0)
                if unrouted[-1]:
                    assert trace.coefficients[0, -1, memory] == 0
        (row,) = (
            one
            for one in rows
            if (one["layer"], one["token"], one["how"]) == (layer, "last", "removed")
        )
        if unrouted:
            assert row["unrouted"] == pytest.approx(fmean(unrouted))
            left += sum(unrouted)
        else:
            assert "unrouted" not in row
    assert left


@pytest.fixture(scope="module")
def results(context, tmp_path_factory):
    out = tmp_path_factory.mktemp("results")
    names = [name for name in NAMES if name != "patterns"]
    return run_experiments(context, [find(name) for name in names], out), out


def test_every_experiment_says_that_there_are_experts(context, results):
    layout = context.memories.layout
    for result in results[0]:
        assert result.settings["experts"] == layout.n_experts
        assert result.also.get("note") == find(result.experiment).notes.get("experts")
        content = json.loads((results[1] / f"{result.experiment}.json").read_text())
        assert content["rows"] == json.loads(json.dumps(result.rows))
    text = "\n".join(Report(results[0], context.index).definitions)
    assert "mixture of experts" in text
    assert "w·m" in text


def test_the_share_of_active_memories_is_judged_over_the_layer(context, results):
    result = next(one for one in results[0] if one.experiment == "active-memories")
    definition = "gate" if context.memories.gated else "positive"
    medians = [
        row["median"]
        for row in result.rows
        if (row["definition"], row["of"]) == (definition, "all")
    ]
    shown = find("active-memories").claims[0].check(result)
    inside = [0.1 <= one <= 0.5 for one in medians]
    assert (shown.holds, shown.partly) == (all(inside), 2 * sum(inside) >= len(inside))
    ends = f"medians from {format_share(min(medians))} to {format_share(max(medians))}"
    assert shown.shown.startswith(ends)
    assert "of the memories that the router reaches" in shown.shown
    assert "Of the memories that the router reaches" in find("active-memories").summary(result)
    assert check_claims([result])


def test_experts_change_nothing_in_the_rows_of_a_dense_model(tmp_path):
    context = make_context(tmp_path, "llama")
    rows, _ = ACTIVE_MEMORIES.measure(context)
    assert all("of" not in row for row in rows)
    assert "experts" not in context.settings()
    assert (context.measured(ActiveShares).reached == 1).all()
    assert np.isfinite([row["mean"] for row in rows]).all()
