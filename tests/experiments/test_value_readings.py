"""What values predict, against plain loops over all logits and against the authors' own code."""

import csv
import gzip
import html
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import ffmem
from ffmem.experiments import values
from ffmem.experiments.context import ExperimentContext
from ffmem.experiments.values import read_values
from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.triggers import NO_SIGN, NONE, corpus_tokens, trigger_table
from ffmem.models.memories import Memories
from tests.experiments.planting import (
    FAMILIES,
    KINDS,
    context_of,
    plain_logits,
    plain_rank,
    plain_top,
    with_dead_memory,
)
from tests.tiny import MEMORIES, VOCABULARY, tiny, tiny_tokenizer

ORACLE = Path(__file__).parent.parent / "oracle"
RAW_HYPHENS = 9
"""The sentence that the authors' code splits in two ways, so that its targets are shifted."""


@pytest.mark.parametrize("name", [*FAMILIES, *KINDS])
def test_a_value_is_read_as_a_plain_look_at_all_its_logits_says(name, tmp_path):
    context = context_of(tmp_path / "index", name)
    memories = context.memories
    for layer in range(memories.n_layers):
        found, head = context.values[layer], context.top_triggers[layer]
        for memory in range(memories.layout.widths[0]):
            sign = int(head.sign[memory]) or 1
            logits = plain_logits(memories, layer, memory, sign)
            top = plain_top(logits)
            assert found.sign[memory] == sign
            assert found.top[memory] == top
            p = torch.tensor(logits).double().softmax(0)[top]
            assert found.probability[memory] == pytest.approx(float(p), rel=1e-5)
            token = int(head.next_token[memory])
            rank = NONE if token == NONE else plain_rank(logits, token)
            assert found.next_rank[memory] == rank


def with_ties():
    """A model with thirteen tokens of equal and long rows in the output embedding."""
    model = tiny("llama")
    with torch.no_grad():
        rows = model.get_output_embeddings().weight
        rows[7] *= 10
        rows[40:52] = rows[7]
    return Memories(model, tiny_tokenizer())


def read_ranks(memories, layer, sign, tokens):
    """The readings of a layer, and how each value ranks several tokens."""
    found = [read_values(memories, layer, sign, np.asarray(column)) for column in tokens.T]
    return found[0], np.stack([one.next_rank for one in found], axis=1)


def every_token():
    return np.tile(np.arange(VOCABULARY), (MEMORIES, 1))


def test_equal_logits_have_one_rank_and_the_lowest_id_is_the_top():
    memories = with_ties()
    sign = np.resize([1, -1], MEMORIES).astype(np.int8)
    found, ranks = read_ranks(memories, 1, sign, every_token())
    tied = [7, *range(40, 52)]
    assert (ranks[:, tied] == ranks[:, [7]]).all()
    assert 7 in found.top
    assert not np.isin(found.top, range(40, 52)).any()
    for memory in range(MEMORIES):
        logits = plain_logits(memories, 1, memory, int(sign[memory]))
        assert ranks[memory].tolist() == [plain_rank(logits, w) for w in range(VOCABULARY)]
        assert found.top[memory] == plain_top(logits)


@pytest.mark.parametrize("budget", [1, 4 * VOCABULARY * 5, 4 * VOCABULARY * 23])
def test_how_many_values_are_projected_at_a_time_changes_nothing(budget, monkeypatch):
    memories = with_ties()
    sign = np.resize([1, -1, 1], MEMORIES).astype(np.int8)
    at_once, whole_ranks = read_ranks(memories, 0, sign, every_token())
    monkeypatch.setattr(values, "PROJECTED_BYTES", budget)
    in_parts, ranks = read_ranks(memories, 0, sign, every_token())
    np.testing.assert_array_equal(in_parts.top, at_once.top)
    np.testing.assert_array_equal(ranks, whole_ranks)
    np.testing.assert_allclose(in_parts.probability, at_once.probability, rtol=1e-5)


def test_a_memory_without_a_head_is_read_as_it_is(tmp_path):
    context = context_of(tmp_path / "index", with_dead_memory("llama", 1, 7))
    head, found = context.top_triggers[1], context.values[1]
    assert head.sign[7] == NO_SIGN
    assert found.sign[7] == 1
    assert found.next_rank[7] == NONE
    assert found.top[7] == plain_top(plain_logits(context.memories, 1, 7, 1))


def test_a_model_in_bfloat16_is_read_in_its_own_precision(tmp_path):
    context = context_of(tmp_path / "index", tiny("llama").to(torch.bfloat16))
    found = context.values[0]
    for memory in range(MEMORIES):
        sign = int(found.sign[memory])
        assert found.top[memory] == plain_top(plain_logits(context.memories, 0, memory, sign))


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """The authors' kind of model, indexed over what their code read: index, memories, words."""
    folder = tmp_path_factory.mktemp("oracle")
    rows = json.loads((ORACLE / "expected_tokens.json").read_text())
    words = [row["moses_encode"] for row in rows]
    corpus = folder / "moses.txt"
    corpus.write_text("".join(" ".join(line) + "\n" for line in words))
    memories = ffmem.load(ORACLE / "model.pt")
    corpus = ffmem.Corpus(str(corpus), unit="line")
    index = ffmem.index(memories, corpus, folder / "index", t=5, compat="ff-layers")
    return index, memories, words


def published():
    """Return the rows of the authors' script, repaired, by (layer, memory)."""
    with gzip.open(ORACLE / "kva_repaired.tsv.gz", "rt", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t")
        return {(int(row["layer"]), int(row["W2_dim"])): row for row in rows}


def test_the_authors_code_gives_the_same_top_tokens_and_probabilities(oracle):
    index, memories, _ = oracle
    rows = published()
    assert len(rows) == len(index)
    for layer, found in enumerate(ExperimentContext(index=index, model=memories).values):
        for memory in range(index.layout.widths[0]):
            row = rows[layer, memory]
            assert found.top[memory] == int(row["embedding_index"])
            assert found.probability[memory] == pytest.approx(float(row["max_prob"]), rel=1e-4)


def published_target(memories, words, length):
    """The last token of the prefix as the authors' script writes it; `<s>` if there is none."""
    if length == 0:
        return 0
    word = html.unescape(words[length - 1])
    return memories.tokenizer.encode(["<unk>" if word in {"unk", "pad"} else word])[0].ids[0]


def test_the_authors_code_gives_the_same_ranks_of_last_tokens(oracle):
    index, memories, words = oracle
    rows, n_equal, n_compared = published(), 0, 0
    for layer in range(index.n_layers):
        triggers = trigger_table(index, layer, 1)
        filled = triggers.prefixes != NO_PREFIX
        sentence = np.full(filled.shape, NONE)
        sentence[filled] = corpus_tokens(index).at(triggers.prefixes[filled]).sentence
        targets = np.full(filled.shape, NONE)
        for slot in np.argwhere(filled):
            line, length = words[sentence[tuple(slot)]], int(triggers.lengths[tuple(slot)])
            targets[tuple(slot)] = published_target(memories, line, length)
        _, ranks = read_ranks(memories, layer, np.ones(index.layout.widths[0], np.int8), targets)
        for memory in range(index.layout.widths[0]):
            # The script groups triggers by token, and adds rows that are none.
            theirs = Counter(re.findall(r"\((\d+)\)", rows[layer, memory]["target_rankings"]))
            for slot in np.flatnonzero(filled[memory]):
                if sentence[memory, slot] != RAW_HYPHENS:
                    rank = str(ranks[memory, slot])
                    n_compared += 1
                    n_equal += theirs[rank] > 0
                    theirs[rank] -= 1
    assert n_compared == 2214
    assert n_equal >= n_compared - 3  # near-ties of logits
