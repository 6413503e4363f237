"""Agreement and ranks, against the definition on sentences run one by one, and planted truth."""

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ffmem
from ffmem.experiments.agreement import agrees, permutation
from ffmem.experiments.base import find
from ffmem.experiments.context import ExperimentContext
from ffmem.indexing.triggers import corpus_tokens, last_tokens, trigger_table
from tests.experiments.planting import (
    FAMILIES,
    KINDS,
    PlainTriggers,
    context_of,
    llama_with_unit_embeddings,
    plain_logits,
    plain_rank,
    plain_top,
    plant_value,
    with_dead_memory,
)

agreement, next_token_rank = find("agreement").run, find("next-token-rank").run

ORACLE = Path(__file__).parent.parent / "oracle"


def mean(numbers):
    return sum(numbers) / len(numbers) if numbers else None


def near(number):
    return None if number is None else pytest.approx(number, abs=1e-12)


def plain_rows(context):
    """Return what agreement and rank say of each layer, as plainly as the definitions."""
    memories, triggers = context.memories, PlainTriggers(context)
    band = memories.config.band_sizes[0] if context.memories.family == "ffmem_adaptive" else None
    rows = []
    for layer in range(memories.n_layers):
        seen = []
        for memory in range(memories.layout.widths[0]):
            head = triggers.head(layer, memory, memories.gated)
            if head is not None:
                sign, _, ids, p = head
                logits = plain_logits(memories, layer, memory, sign)
                rank = plain_rank(logits, ids[p])
                seen.append((sign, plain_top(logits), ids[p - 1], ids[p], rank))
        pairs = [top == following for _, top, _, _, _ in seen for _, _, _, following, _ in seen]
        signed = {s: [top == w for sign, top, _, w, _ in seen if sign == s] for s in (1, -1)}
        gated = memories.gated
        rows.append(
            {
                "rate": mean([top == w for _, top, _, w, _ in seen]),
                "n": len(seen),
                "permutation": mean(pairs),
                "last_token_rate": mean([top == last for _, top, last, _, _ in seen]),
                "rate_at_10": mean([rank < 10 for *_, rank in seen]),
                "positive_rate": mean(signed[1]) if gated else None,
                "negative_rate": mean(signed[-1]) if gated else None,
                "positive_n": len(signed[1]) if gated else None,
                "negative_n": len(signed[-1]) if gated else None,
                "head_band_share": band and mean([w < band for _, _, _, w, _ in seen]),
                "ranks": [rank for *_, rank in seen],
                "ranks in the band": [rank for _, _, _, w, rank in seen if band and w < band],
            }
        )
    return rows


@pytest.mark.parametrize("name", [*FAMILIES, *KINDS])
def test_rates_and_ranks_are_those_of_the_definition(name, tmp_path):
    context = context_of(tmp_path / "index", name)
    agreed, ranked = agreement(context).rows, next_token_rank(context).rows
    adaptive = name.startswith("ffmem_adaptive")
    for layer, plain in enumerate(plain_rows(context)):
        ranks, in_band = plain.pop("ranks"), plain.pop("ranks in the band")
        for field, number in plain.items():
            assert agreed[layer][field] == near(number), (layer, field)
        row = ranked[layer]
        assert agreed[layer]["layer"] == row["layer"] == layer
        assert (row["n"], row["mean"]) == (len(ranks), near(mean(ranks)))
        assert [row["q1"], row["median"], row["q3"]] == np.quantile(
            ranks, [0.25, 0.5, 0.75]
        ).tolist()
        assert row["head_band_median"] == (np.median(in_band) if adaptive else None)
        low, high = agreed[layer]["low"], agreed[layer]["high"]
        assert low <= agreed[layer]["rate"] <= high


def test_baselines_are_those_of_the_vocabulary_and_the_corpus(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("w5 w9 w9\nw9 w6\nw7 w8 w9\n")
    result = agreement(context_of(tmp_path / "index", "gpt2", corpus))
    assert result.also["unigram_token"] == "w9"
    for row in result.rows:
        assert row["uniform"] == 1 / 64
        assert row["unigram"] == 4 / 8


def test_a_planted_value_is_found(tmp_path):
    """The rate of the last layer rises by the values that were made to agree, and by no others."""
    model = llama_with_unit_embeddings()
    before = context_of(tmp_path / "before", model)
    head = before.top_triggers[-1]
    rate = agreement(before).rows[-1]["rate"]
    disagreeing = np.flatnonzero(head.exists & ~agrees(head, before.values[-1]))
    planted = disagreeing[::2]
    assert len({int(head.sign[memory]) for memory in planted}) == 2
    model = llama_with_unit_embeddings()
    for memory in planted.tolist():
        plant_value(model, memory, int(head.next_token[memory]), int(head.sign[memory]))

    after = context_of(tmp_path / "after", model)

    row = agreement(after).rows[-1]
    assert row["rate"] == near(rate + len(planted) / row["n"])
    assert (after.values[-1].next_rank[planted] == 0).all()
    assert agreement(after).rows[:-1] == agreement(before).rows[:-1]


def test_a_value_planted_for_the_last_token_is_found_by_the_published_target_alone(tmp_path):
    model = llama_with_unit_embeddings()
    before = context_of(tmp_path / "before", model)
    head = before.top_triggers[-1]
    last = last_tokens(before.index, head.prefix)
    different = np.flatnonzero(head.exists & (last != head.next_token))
    for memory in different.tolist():
        plant_value(model, memory, int(last[memory]), int(head.sign[memory]))
    row = agreement(context_of(tmp_path / "after", model)).rows[-1]
    assert len(different) > 10
    assert row["last_token_rate"] >= len(different) / row["n"]
    assert row["rate"] <= 1 - len(different) / row["n"]


def test_the_planted_memories_of_the_authors_model_agree_as_they_were_planted(tmp_path):
    sentences = json.loads((ORACLE / "expected_tokens.json").read_text())
    corpus = tmp_path / "moses.txt"
    corpus.write_text("".join(" ".join(row["moses_encode"]) + "\n" for row in sentences))
    memories = ffmem.load(ORACLE / "model.pt")
    corpus = ffmem.Corpus(str(corpus), unit="line")
    index = ffmem.index(memories, corpus, tmp_path / "index", t=5, compat="ff-layers")
    context = ExperimentContext(index=index, model=memories)
    at_head, at_trigger = Counter(), Counter()
    for plant in json.loads((ORACLE / "planted.json").read_text()):
        layer, memory, kind = plant["layer"], plant["dim"], plant["kind"]
        value, triggers = context.values[layer], trigger_table(index, layer, 1)
        sentence = corpus_tokens(index).at(triggers.prefixes[memory]).sentence
        here = (sentence == plant["sentence"]) & (triggers.lengths[memory] == plant["position"])
        (slot,) = np.flatnonzero(here)
        assert slot <= 1
        side = triggers.next if kind == "next" else triggers.last
        assert value.top[memory] == plant["token_id"] == side[memory, slot]
        at_trigger[kind] += 1
        top = context.top_triggers[layer]
        token = top.next_token if kind == "next" else last_tokens(index, top.prefix)
        at_head[kind] += int(value.top[memory] == token[memory])
    assert at_trigger == {"next": 32, "current": 32}
    # Another prefix fires two of the keys even more; both were planted for the next token.
    assert at_head == {"next": 30, "current": 32}
    for row in agreement(context).rows:
        assert row["rate"] >= 6 / row["n"]
        assert row["last_token_rate"] >= 8 / row["n"]


def test_a_corpus_without_next_tokens_gives_no_rate(tmp_path):
    corpus = tmp_path / "words.txt"
    corpus.write_text("\n".join(f"w{n}" for n in range(3, 20)) + "\n")
    context = context_of(tmp_path / "index", "llama", corpus)
    for row in agreement(context).rows:
        assert row["n"] == 0
        assert row["no_next"] + row["no_trigger"] == context.index.layout.widths[0]
        for field in ("rate", "low", "high", "permutation", "last_token_rate", "positive_rate"):
            assert row[field] is None
    for row in next_token_rank(context).rows:
        assert row["n"] == 0
        assert row["median"] is None
    agreement(context).write(tmp_path / "out")  # which refuses NaN
    next_token_rank(context).write(tmp_path / "out")


def test_every_memory_is_counted_once(tmp_path):
    context = context_of(tmp_path / "index", with_dead_memory("opt", 0, 3))
    rows = agreement(context).rows
    assert rows[0]["no_trigger"] >= 1
    for row in rows:
        assert row["n"] + row["no_next"] + row["no_trigger"] == context.index.layout.widths[0]


def test_the_same_index_gives_the_same_bytes(tmp_path):
    corpus = None
    for number in "ab":
        context = context_of(tmp_path / "index", "llama", corpus)
        corpus = tmp_path / "index.txt"
        for experiment in (agreement, next_token_rank):
            experiment(context).write(tmp_path / number)
    for name in ("agreement.json", "next-token-rank.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


tokens = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5)


@given(tokens)
def test_the_permutation_rate_is_the_mean_over_all_permutations(pairs):
    tops, nexts = (np.array(column) for column in zip(*pairs, strict=True))
    rates = [
        (tops == nexts[list(order)]).mean() for order in itertools.permutations(range(len(tops)))
    ]
    expected = permutation(tops, nexts)
    assert expected == pytest.approx(np.mean(rates), abs=1e-12)
    assert expected <= min(np.bincount(tops).max(), np.bincount(nexts).max()) / len(tops) + 1e-12
