"""Token removal, against every changed trigger run alone, and keys whose answer is known."""

import json
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffmem.experiments.base import find
from ffmem.experiments.token_removal import (
    CHANGES,
    DRAWN,
    draw_trials,
    other_tokens,
    run_trials,
    sequences_of,
    unknown_token,
)
from ffmem.indexing.triggers import NONE, corpus_tokens
from tests.experiments.planting import (
    FAMILIES,
    KINDS,
    LAMBDA,
    PlainTriggers,
    context_of,
    traced,
    with_dead_memory,
    without_attention,
)
from tests.indexing.folders import write_corpus
from tests.tiny import tiny

token_removal = find("token-removal").run

UNK = 2


def drawn(context):
    """Return the trials of every layer."""
    unk = unknown_token(context)
    return [draw_trials(context, layer, unk) for layer in range(context.index.n_layers)]


def changed(ids, how, place, other):
    """Return a trigger without the token at a place, or with another one there."""
    return [*ids[:place], *([] if how == "removed" else [other]), *ids[place + 1 :]]


def plain_row(context, trials, token, how):
    """Return the relative changes of coefficients and pre-activations, each run by itself."""
    memories, layer = context.memories, trials.layer
    key, bias = memories.keys(layer), memories.key_bias(layer)
    changes, raw, interior = [], [], []

    @cache
    def run(*tokens):
        return traced(context, tokens)[layer]

    for memory, prefix, position, others in zip(*trials[1:5], strict=True):
        ids = corpus_tokens(context.index).prefix(int(prefix)).tolist()
        number = ["first", "last", "random"].index(token)
        place = [0, len(ids) - 1, int(position)][number]
        both = [run(*ids), run(*changed(ids, how, place, int(others[number])))]
        c, after = (float(trace.coefficients[0, -1, memory]) for trace in both)
        changes.append((after - c) / c)
        a, after = (float(t.ff_input[0, -1] @ key[memory] + bias[memory]) for t in both)
        raw.append((after - a) / a)
        interior.append(0 < place < len(ids) - 1)
    return np.array(changes), np.array(raw), np.array(interior, bool)


def check(row, changes, raw, gated):
    assert row["n"] == len(changes)
    if not len(changes):
        assert row["mean"] is None
        return
    near = {"rel": 1e-3, "abs": 1e-4}
    assert row["mean"] == pytest.approx(changes.mean(), **near)
    quartiles = np.quantile(changes, [0.25, 0.5, 0.75])
    assert [row["q1"], row["median"], row["q3"]] == pytest.approx(quartiles, **near)
    expected = (None, None) if gated else pytest.approx((raw.mean(), np.median(raw)), **near)
    assert (row["raw_mean"], row["raw_median"]) == expected


@pytest.mark.parametrize("name", [*FAMILIES, *KINDS, LAMBDA])
def test_changes_are_those_of_triggers_run_alone(name, tmp_path):
    context = context_of(tmp_path / "index", name, per_layer=3, triggers=2)
    result = token_removal(context)
    rows = {(row["layer"], row["token"], row["how"]): row for row in result.rows}
    interior = {(row["layer"], row["how"]): row for row in result.also["interior"]}
    assert len(rows) == len(result.rows) == context.index.n_layers * 6
    for trials in drawn(context):
        for how, token in CHANGES:
            changes, raw, inside = plain_row(context, trials, token, how)
            gated = context.memories.gated
            check(rows[trials.layer, token, how], changes, raw, gated)
            if token == "random":
                check(interior[trials.layer, how], changes[inside], raw[inside], gated)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_chosen_triggers_are_the_first_of_the_stronger_sign(name, tmp_path):
    context = context_of(tmp_path / "index", name, per_layer=100, triggers=3)
    plain, offsets = PlainTriggers(context), corpus_tokens(context.index)
    for trials in drawn(context):
        for memory in range(context.index.layout.widths[0]):
            signs = (1, -1) if context.memories.gated else (1,)
            lists = [plain.of(trials.layer, memory, sign)[:3] for sign in signs]
            best = max(lists, key=lambda triggers: abs(triggers[0][0]) if triggers else 0)
            expected = [ids[:p] for _, ids, p in best if p >= 2]
            prefixes = trials.prefix[trials.memory == memory].tolist()
            assert [offsets.prefix(prefix).tolist() for prefix in prefixes] == expected


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_key_that_reads_only_the_last_token_is_changed_by_no_other(name, tmp_path):
    context = context_of(tmp_path / "index", without_attention(name), per_layer=8)
    result = token_removal(context)
    assert {row["n"] > 0 for row in result.rows} == {True}
    for row in result.rows:
        spread = [row["q1"], row["median"], row["q3"], row["mean"]]
        if row["token"] == "first":
            assert spread == pytest.approx([0] * 4, abs=1e-5)
        if row["token"] == "last":
            assert row["median"] < -0.05
        if not context.memories.gated and row["token"] == "first":
            assert row["raw_mean"] == pytest.approx(0, abs=1e-5)
    for row in result.also["interior"]:
        assert row["mean"] == pytest.approx(0, abs=1e-5)


def test_all_changes_of_a_trigger_are_read_from_six_sequences_at_most(tmp_path):
    context = context_of(tmp_path / "index", "gpt2")
    last = 1 + CHANGES.index(("removed", "last"))
    for trials in drawn(context):
        found = sequences_of(context, trials)
        assert len(found) <= 6 * len(trials.prefix)
        where = {(r.trial, r.column): (ids, r.length) for ids, rs in found.items() for r in rs}
        for trial in range(len(trials.prefix)):
            ids, length = where[trial, 0]
            assert where[trial, last] == (ids, length - 1)


def test_the_bar_ends_where_the_run_ends(tmp_path):
    context = context_of(tmp_path / "index", "llama", per_layer=3)
    for trials in drawn(context):
        done = []
        run_trials(context, trials, done.append)
        assert sum(done) == trials.work


def test_every_run_stops_at_its_layer(tmp_path):
    context = context_of(tmp_path / "index", "llama", per_layer=3)
    ran = []
    context.memories.blocks[1].register_forward_hook(lambda *_: ran.append(1))
    run_trials(context, drawn(context)[0], lambda n: None)
    assert not ran


def test_short_triggers_are_counted_and_left_out(tmp_path):
    corpus = tmp_path / "words.txt"
    corpus.write_text("\n".join(f"w{n}" for n in range(3, 20)) + "\n")
    context = context_of(tmp_path / "index", "llama", corpus, per_layer=4, triggers=3)
    result = token_removal(context)
    assert result.also["excluded"] == [12, 12]
    assert {row["n"] for row in result.rows} == {0}
    assert {row["median"] for row in result.rows} == {None}
    result.write(tmp_path / "out")


def test_vacant_slots_are_not_counted_as_short_triggers(tmp_path):
    corpus = tmp_path / "words.txt"
    corpus.write_text("w5\n")
    context = context_of(tmp_path / "index", "llama", corpus, per_layer=4, triggers=3)
    assert token_removal(context).also["excluded"] == [4, 4]


def test_a_model_without_a_start_token_and_the_authors_prefixes_can_be_measured(tmp_path):
    for number, options in enumerate([{"start": "none"}, {"compat": "ff-layers"}]):
        context = context_of(tmp_path / f"{number}", "llama", per_layer=3, **options)
        trials = drawn(context)[1]
        lengths = corpus_tokens(context.index).at(trials.prefix).length
        assert (lengths >= 2).all()
        assert token_removal(context).rows[-1]["n"] == len(trials.prefix) > 0


def test_a_model_in_bfloat16_can_be_measured(tmp_path):
    context = context_of(tmp_path / "index", tiny("opt").to(torch.bfloat16), per_layer=3)
    assert all(row["n"] and row["raw_mean"] is not None for row in token_removal(context).rows)


def test_dead_memories_are_never_chosen(tmp_path):
    context = context_of(tmp_path / "index", with_dead_memory("llama", 1, 7), per_layer=100)
    chosen = set(drawn(context)[1].memory.tolist())
    assert 7 not in chosen
    assert len(chosen) > 10
    few = context_of(tmp_path / "few", with_dead_memory("opt", 1, *range(22)), per_layer=2)
    assert set(drawn(few)[1].memory.tolist()) == {22, 23}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_draws(tmp_path):
    corpus, texts = write_corpus(tmp_path / "c.txt"), []
    for seed in (0, 0, 1):
        context = context_of(tmp_path / "index", "llama", corpus, seed=seed, per_layer=4)
        texts.append(json.dumps(token_removal(context).to_dict() | {"settings": None}))
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    first, second = drawn(context)
    assert {*first.memory.tolist()} != {*second.memory.tolist()}


def test_the_random_token_may_be_any(tmp_path):
    context = context_of(
        tmp_path / "index", "llama", write_corpus(tmp_path / "c.txt", 200), per_layer=24, t=20
    )
    trials = drawn(context)[0]
    lengths = corpus_tokens(context.index).at(trials.prefix).length
    for length in range(2, 7):
        positions = trials.position[lengths == length]
        assert set(positions.tolist()) == set(range(length))


def test_the_unknown_token_replaces_any_other_but_not_itself(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"w{n} what w{n + 1} who\n" for n in range(3, 40)))
    context = context_of(tmp_path / "index", "llama", corpus, per_layer=100, triggers=5)
    trials = draw_trials(context, 0, UNK)
    for prefix, position, others in zip(*trials[2:5], strict=True):
        ids = corpus_tokens(context.index).prefix(int(prefix)).tolist()
        for token, other in zip((ids[0], ids[-1], ids[position]), others, strict=True):
            assert other == (NONE if token == UNK else UNK)
    assert NONE in trials.replacements
    found = run_trials(context, trials, lambda n: None)
    missing = np.isnan(found.coefficients[:, 4:])
    assert (missing == (trials.replacements == NONE)).all()
    assert not np.isnan(found.coefficients[:, :4]).any()


def test_a_token_that_also_marks_the_end_of_texts_replaces_nothing(monkeypatch, tmp_path):
    context = context_of(tmp_path / "index", "llama", per_layer=2)
    tokenizer = context.memories.tokenizer
    monkeypatch.setattr(tokenizer, "unk", tokenizer.eos)
    assert token_removal(context).also["replacement"] == DRAWN
    monkeypatch.setattr(tokenizer, "unk", UNK)
    assert token_removal(context).also["replacement"] == "<unk>"


counts = st.lists(st.integers(0, 3), min_size=2, max_size=6).filter(any)


@given(counts, st.integers(0, 5), st.integers(0, 9))
def test_a_drawn_token_is_another_one_of_the_corpus(frequencies, token, seed):
    frequencies = np.array(frequencies)
    token %= len(frequencies)
    tokens = np.full((40, 3), token)
    found = other_tokens(tokens, frequencies, np.random.default_rng(seed))
    others = [i for i, n in enumerate(frequencies) if n and i != token]
    assert set(found.ravel().tolist()) <= set(others or [NONE])


def test_tokens_are_drawn_as_often_as_they_stand_in_the_corpus():
    frequencies = np.array([6, 3, 0, 1, 2])
    found = other_tokens(np.full((4000, 3), 1), frequencies, np.random.default_rng(0))
    shares = np.bincount(found.ravel(), minlength=5) / found.size
    assert shares == pytest.approx([6 / 9, 0, 0, 1 / 9, 2 / 9], abs=0.02)
