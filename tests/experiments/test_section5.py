"""Rows of Section 5's figures, against plain loops over what the pass measured."""

import statistics

import numpy as np
import pytest

from ffmem.experiments import stop_words as section_5_1
from ffmem.experiments.active_memories import ActiveShares
from ffmem.experiments.base import find
from ffmem.experiments.metrics import Predictions
from ffmem.experiments.neural_memory import SoftmaxComparison
from ffmem.experiments.zero_agreement import TokenHits
from tests.experiments.planting import FAMILIES, KINDS
from tests.experiments.test_forward import make_context

active_memories, neural_memory, prediction_cases = (
    find(name).run for name in ("active-memories", "neural-memory", "prediction-cases")
)
residual_prediction, residual_probability = (
    find(name).run for name in ("residual-prediction", "residual-probability")
)
stop_words, zero_agreement = find("stop-words").run, find("zero-agreement").run


@pytest.fixture(scope="module", params=[*FAMILIES, *KINDS])
def context(request, tmp_path_factory):
    return make_context(tmp_path_factory.mktemp("context"), request.param)


def layers(context):
    return range(context.memories.n_layers)


def test_residual_prediction_counts_examples(context):
    found = context.measured(Predictions)
    for layer, row in enumerate(residual_prediction(context).rows):
        n = len(found.final)
        residual = found.residual_top[:, layer].tolist()
        outputs = found.output_top[:, layer:].tolist()
        final = found.output_top[:, -1].tolist()
        already = [r == w for r, w in zip(residual, final, strict=True)]
        now = [later[0] == w for later, w in zip(outputs, final, strict=True)]
        for_good = [set(later) == {w} for later, w in zip(outputs, final, strict=True)]
        assert row["layer"] == layer
        assert row["n"] == n
        assert row["residual_share"] == sum(already) / n
        assert row["output_share"] == sum(now) / n
        assert row["decided_share"] == sum(for_good) / n
        assert row["low"] <= row["residual_share"] <= row["high"]
    assert row["output_share"] == row["decided_share"] == 1


def test_decided_shares_never_fall_and_never_exceed_the_outputs(context):
    rows = residual_prediction(context).rows
    decided = [row["decided_share"] for row in rows]
    assert decided == sorted(decided)
    assert all(row["decided_share"] <= row["output_share"] for row in rows)


def test_residual_probability_is_the_spread_over_examples(context):
    found = context.measured(Predictions).residual_final_probability
    for layer, row in enumerate(residual_probability(context).rows):
        column = found[:, layer].tolist()
        assert row["mean"] == pytest.approx(sum(column) / len(column))
        assert row["median"] == pytest.approx(statistics.median(column))
        assert 0 <= row["q1"] <= row["median"] <= row["q3"] <= 1


def test_every_example_is_one_case(context):
    found = context.measured(Predictions)
    for layer, row in enumerate(prediction_cases(context).rows):
        cases = {"residual": 0, "agreement": 0, "ffn": 0, "composition": 0, "broken": 0}
        ranks = {True: [], False: []}
        for example in range(row["n"]):
            r = found.residual_top[example, layer]
            y = found.ff_top[example, layer]
            o = found.output_top[example, layer]
            if o == r:
                cases["agreement" if o == y else "residual"] += 1
            else:
                cases["ffn" if o == y else "composition"] += 1
                cases["broken"] += r == y
            ranks[bool(o == r)].append(found.ff_residual_rank[example, layer])
        for name in ("residual", "agreement", "ffn", "composition"):
            assert row[name] == cases[name] / row["n"]
        assert row["broken_agreement"] == cases["broken"] / row["n"]
        shares = (row[name] for name in ("residual", "agreement", "ffn", "composition"))
        assert sum(shares) == pytest.approx(1)
        for kept, name in ((True, "kept_rank_median"), (False, "veto_rank_median")):
            expected = statistics.median(ranks[kept]) if ranks[kept] else None
            assert row[name] == expected


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_two_that_agree_are_never_overruled_by_their_sum_under_a_plain_head(tmp_path, name):
    # It may happen under an adaptive softmax, and under a LayerNorm with its constant.
    rows = prediction_cases(make_context(tmp_path, name)).rows
    assert all(row["broken_agreement"] == 0 for row in rows)
    assert any(row["agreement"] > 0 for row in rows)


def test_zero_agreement_has_four_variants_of_every_layer(context):
    hits = context.measured(TokenHits)
    rows = zero_agreement(context).rows
    assert len(rows) == 4 * context.memories.n_layers
    for row in rows:
        counts = hits.agreeing[row["target"], row["memories"]][:, row["layer"]].tolist()
        assert row["share"] == sum(count == 0 for count in counts) / len(counts)
        assert row["agreeing"] == pytest.approx(sum(counts) / len(counts))
        assert 0 <= row["chance"] <= 1
        assert 0 <= row["carried"] <= 1
        assert row["low"] <= row["share"] <= row["high"]


def test_all_memories_of_a_gated_model_hit_at_least_as_often_as_active_ones(context):
    if context.memories.gated:
        agreeing = context.measured(TokenHits).agreeing
        for target in "yo":
            assert (agreeing[target, "all"] >= agreeing[target, "active"]).all()


def test_stop_words_are_counted_case_by_case(context, monkeypatch):
    stop = np.array(
        [
            token in {"w3", "w4", "w5", "w6", "w7", "w8", "w9", "w10", "w11", "w12"}
            for token in context.memories.tokenizer.token_texts(context.memories.vocabulary)
        ]
    )
    monkeypatch.setattr(section_5_1, "are_stop_words", lambda tokens: stop)
    result = stop_words(context)
    found, hits = context.measured(Predictions), context.measured(TokenHits)
    prefixes = list(context.prompt_sample.prefixes())
    cases = {"agreeing": [], "all": []}
    for number, (example, p) in enumerate(prefixes):
        ids = example.sentence.ids
        for layer in layers(context):
            case = (found.ff_top[number, layer], p, ids[p] if p < len(ids) else None)
            cases["all"].append(case)
            if hits.agreeing["y", "all"][number, layer]:
                cases["agreeing"].append(case)
    assert [row["group"] for row in result.rows] == ["agreeing", "all"]
    for row in result.rows:
        some = cases[row["group"]]
        assert row["n"] == len(some)
        if not some:
            assert row["stop_word_share"] is None
            continue
        assert row["stop_word_share"] == sum(stop[top] for top, _, _ in some) / len(some)
        assert row["short_prefix_share"] == sum(p < 5 for _, p, _ in some) / len(some)
        following = [token for _, _, token in some if token is not None]
        assert row["next_n"] == len(following)
        assert row["next_stop_word_share"] == sum(stop[t] for t in following) / len(following)
    assert len(result.also["variants"]) == 8


def test_stop_words_are_english_ones_without_case_or_space():
    found = section_5_1.are_stop_words([" The", "of", "ship", " ", "THE "])
    assert found.tolist() == [True, True, False, False, True]


def test_active_memories_have_a_row_for_each_definition(context):
    rows = active_memories(context).rows
    names = ["positive", "gate", "effect"] if context.memories.gated else ["positive", "effect"]
    assert [(row["layer"], row["definition"]) for row in rows] == [
        (layer, name) for layer in layers(context) for name in names
    ]
    for row in rows:
        column = context.measured(ActiveShares).shares[row["definition"]][:, row["layer"]].tolist()
        assert row["mean"] == pytest.approx(sum(column) / len(column))
        assert row["median"] == pytest.approx(statistics.median(column))


def test_neural_memory_averages_over_examples(context):
    result = neural_memory(context)
    heads = getattr(context.memories.config, "softmax_groups", 0) or 1
    n_memories = context.memories.layout.widths[0] / heads
    assert result.also["max_entropy"] == pytest.approx(np.log(n_memories))
    for row in result.rows:
        for name in ("cosine", "entropy", "top1_mass", "distance", "effective"):
            column = context.measured(SoftmaxComparison).found[name][:, row["layer"]].tolist()
            assert row[name] == pytest.approx(sum(column) / len(column), rel=1e-5)
        assert 0 <= row["entropy"] <= result.also["max_entropy"] + 1e-5
        assert 1 / n_memories <= row["top1_mass"] <= 1


def test_a_dead_layer_has_no_distance_and_is_left_out(context):
    softmax = context.measured(SoftmaxComparison)
    kept = softmax.found["distance"][:, 0].copy()
    try:
        softmax.found["distance"][:3, 0] = np.inf
        assert softmax.row(0)["n"] == len(kept) - 3
    finally:
        softmax.found["distance"][:, 0] = kept
