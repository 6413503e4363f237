"""The most probable values, against the index's own records and plain definitions."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffmem.experiments import predictive_values as predictive
from ffmem.experiments.agreement import agrees
from ffmem.experiments.base import find
from ffmem.experiments.max_probability import auc, bins
from ffmem.experiments.predictive_values import precision
from ffmem.experiments.rows import upper_layers
from tests.experiments.planting import (
    FAMILIES,
    KINDS,
    context_of,
    llama_with_unit_embeddings,
    plain_logits,
    plain_top,
    plant_value,
    with_dead_memory,
)
from tests.tiny import tiny

max_probability, predictive_values = find("max-probability").run, find("predictive-values").run


@pytest.fixture(scope="module", params=[*FAMILIES, *KINDS])
def context(request, tmp_path_factory):
    return context_of(tmp_path_factory.mktemp(request.param) / "index", request.param)


def plain_precision(context, layer, memory, sign):
    """Return (agreeing, triggers with a next token), from the records of one memory."""
    record = context.index[layer, memory]
    top = context.index.token(plain_top(plain_logits(context.memories, layer, memory, sign)))
    triggers = record.triggers if sign > 0 else record.negative_triggers
    following = [t.next_token for t in triggers if t.next_token is not None]
    return sum(token == top for token in following), len(following)


def test_the_most_probable_values_come_first_with_their_precision(context, monkeypatch):
    monkeypatch.setattr(predictive, "MOST", 30)
    result = predictive_values(context)
    everything = sorted(
        (-float(values.probability[memory]), layer, memory)
        for layer, values in enumerate(context.values)
        for memory in range(context.index.layout.widths[0])
    )
    assert [(-r["probability"], r["layer"], r["memory"]) for r in result.rows] == everything[:30]
    precisions = []
    for row in result.rows:
        sign = int(context.top_triggers[row["layer"]].sign[row["memory"]]) or 1
        agreeing, n = plain_precision(context, row["layer"], row["memory"], sign)
        assert (row["agreeing"], row["n_triggers"], row["sign"]) == (agreeing, n, sign)
        assert row["precision"] == (agreeing / n if n else None)
        assert row["cell"] == f"L{row['layer']}N{row['memory']}"
        assert row["token"] == context.index.token(row["token_id"])
        precisions += [agreeing / n] if n else []
    also = result.also
    assert also["n"] == 30
    assert also["mean_precision"] == pytest.approx(np.mean(precisions))
    assert also["with_agreeing_trigger"] == sum(row["agreeing"] > 0 for row in result.rows)
    layers = [row["layer"] for row in result.rows]
    assert also["layer_histogram"] == [layers.count(i) for i in range(context.index.n_layers)]
    assert also["upper_share"] == np.mean([layer >= also["upper_from"] for layer in layers])


def test_a_small_model_gives_all_its_values(context):
    result = predictive_values(context)
    assert result.also["n"] == len(result.rows) == min(100, len(context.index))
    upper = context.index.n_layers - result.also["upper_from"]
    assert result.also["random_control"]["n"] == min(
        result.also["n"], upper * context.index.layout.widths[0]
    )


def test_the_control_of_a_whole_layer_is_that_layer(context):
    """All upper values are drawn where there are less than 100: their statistics are known."""
    result = predictive_values(context)
    found = [
        plain_precision(context, layer, memory, int(context.values[layer].sign[memory]))
        for layer in range(result.also["upper_from"], context.index.n_layers)
        for memory in range(context.index.layout.widths[0])
    ]
    assert len(found) <= 100
    control = result.also["random_control"]
    assert control["with_agreeing_trigger"] == sum(agreeing > 0 for agreeing, _ in found)
    assert control["mean_precision"] == pytest.approx(np.mean([a / n for a, n in found if n]))


def test_agreement_by_probability_counts_every_memory_with_a_top_trigger(context):
    result = max_probability(context)
    n = sum(int(top.exists.sum()) for top in context.top_triggers)
    agreeing = sum(
        int(agrees(top, values).sum())
        for top, values in zip(context.top_triggers, context.values, strict=True)
    )
    assert len(result.rows) == 8
    assert sum(row["n"] for row in result.rows) == n
    found = sum(row["rate"] * row["n"] for row in result.rows if row["n"])
    assert found == pytest.approx(agreeing)
    widths = [row["high"] - row["low"] for row in result.rows]
    assert widths == pytest.approx([widths[0]] * 8)
    for row in result.rows:
        assert row["rate"] is None or row["low_rate"] <= row["rate"] <= row["high_rate"]


numbers = st.lists(
    st.tuples(st.sampled_from([0.125, 0.25, 0.3, 0.5, 0.75, 1.0]), st.booleans()),
    min_size=1,
    max_size=20,
)


@given(numbers)
def test_a_bin_holds_what_lies_between_its_edges(pairs):
    probability = np.array([p for p, _ in pairs], np.float32)
    agreeing = np.array([a for _, a in pairs])
    rows = bins(probability, agreeing)
    assert (rows[0]["low"], rows[-1]["high"]) == (probability.min(), probability.max())
    assert len(rows) == (8 if probability.min() < probability.max() else 1)
    for row in rows:
        last = row is rows[-1]
        inside = [
            a
            for p, a in zip(probability.tolist(), agreeing.tolist(), strict=True)
            if row["low"] <= p and (p < row["high"] or (last and p == row["high"]))
        ]
        assert row["n"] == len(inside)
        assert row["rate"] == (sum(inside) / len(inside) if inside else None)


@given(numbers)
def test_the_auc_is_the_share_of_pairs_in_the_right_order(pairs):
    probability = np.array([p for p, _ in pairs], np.float32)
    agreeing = np.array([a for _, a in pairs])
    yes, no = probability[agreeing], probability[~agreeing]
    if not len(yes) or not len(no):
        assert auc(probability, agreeing) is None
        return
    wins = [(a > b) + (a == b) / 2 for a in yes for b in no]
    assert auc(probability, agreeing) == pytest.approx(np.mean(wins))


def test_equal_probabilities_go_to_the_lower_cell(tmp_path):
    model = tiny("llama")
    with torch.no_grad():
        for block in model.model.layers:
            block.mlp.down_proj.weight.zero_()
    context = context_of(tmp_path / "index", model)
    cells = [(row["layer"], row["memory"]) for row in predictive_values(context).rows]
    assert cells == sorted(cells)
    assert len(cells) == len(context.index)


def test_the_upper_layers_are_the_papers_in_proportion():
    assert [upper_layers(n, 11)[0] for n in (16, 30, 12, 3, 2, 1)] == [10, 19, 8, 2, 1, 0]


def test_a_planted_value_has_full_precision_and_raises_the_auc(tmp_path):
    """Sure values that agree with all their triggers stand first, and agreement follows."""
    corpus = tmp_path / "corpus.txt"  # behind every word but the first stands w50
    corpus.write_text("".join(f"w{n} w50 w50 w50 w50\n" for n in range(3, 40)))
    model = llama_with_unit_embeddings()
    before = context_of(tmp_path / "before", model, corpus)
    head = before.top_triggers[-1]
    planted = np.flatnonzero(head.exists)[:5].tolist()
    for memory in planted:
        plant_value(model, memory, 50, 40 * int(head.sign[memory]))
    context = context_of(tmp_path / "after", model, corpus)
    rows = predictive_values(context).rows[:5]
    assert sorted(row["memory"] for row in rows) == planted
    assert {row["token"] for row in rows} == {"w50"}
    assert {row["precision"] for row in rows} == {1.0}
    assert max_probability(context).rows[-1]["rate"] == 1.0
    assert max_probability(context).also["auc"] > 0.5


def test_a_dead_memory_may_be_probable_but_has_no_precision(tmp_path):
    context = context_of(tmp_path / "index", with_dead_memory("opt", 1, 7))
    (row,) = [r for r in predictive_values(context).rows if (r["layer"], r["memory"]) == (1, 7)]
    assert (row["precision"], row["n_triggers"], row["agreeing"]) == (None, 0, 0)


def test_a_corpus_without_next_tokens_gives_values_without_precision(tmp_path):
    corpus = tmp_path / "words.txt"
    corpus.write_text("\n".join(f"w{n}" for n in range(3, 20)) + "\n")
    context = context_of(tmp_path / "index", "llama", corpus)
    result = predictive_values(context)
    assert {row["precision"] for row in result.rows} == {None}
    assert result.also["mean_precision"] is None
    assert result.also["random_control"]["mean_precision"] is None
    assert max_probability(context).rows == []
    assert max_probability(context).also["auc"] is None
    json.dumps(result.to_dict(), allow_nan=False)


def test_the_same_seed_draws_the_same_control_and_another_another(tmp_path, monkeypatch):
    monkeypatch.setattr(predictive, "MOST", 10)
    drawn = {}
    for seed in (0, 1):
        context = context_of(tmp_path / f"{seed}", "llama", seed=seed)
        asked = []

        def record(index, cells, sign, top, asked=asked):
            asked.append(cells.tolist())
            return precision(index, cells, sign, top)

        monkeypatch.setattr(predictive, "precision", record)
        texts = {json.dumps(predictive_values(context).to_dict()) for _ in range(2)}
        assert len(texts) == 1
        first, second = asked[1], asked[3]
        assert first == second
        assert len(set(first)) == 10
        assert min(first) >= upper_layers(2, 11)[0] * context.index.layout.widths[0]
        drawn[seed] = first
    assert drawn[0] != drawn[1]
