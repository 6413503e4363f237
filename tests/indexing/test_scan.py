"""The pass against the plainest computation of what it promises, in every family."""

import numpy as np
import pytest
import torch

from ffmem.errors import ModelError
from ffmem.indexing import sample
from ffmem.indexing.found import Found
from ffmem.indexing.leases import batches, cut
from ffmem.indexing.scan import Scan, reach
from ffmem.indexing.statistics import UNIT
from ffmem.indexing.triggers import VACANT
from ffmem.models.memories import Memories
from tests.tiny import TINY, tiny, tiny_tokenizer

T, LEASE_TOKENS, BATCH_TOKENS, START = 4, 60, 48, 0
MODES = {"best": ("best", False), "all": ("all", False), "ff-layers": ("best", True)}
SOURCE_HASH = "5" * 64


def corpus():
    """Short sentences of a small vocabulary, some of them equal, so that ties abound."""
    random = np.random.default_rng(1)
    sentences = [random.integers(3, 12, random.integers(1, 9)).tolist() for _ in range(24)]
    return sentences + sentences[:6]


def offsets_of(sentences):
    return np.cumsum([0] + [len(ids) + 1 for ids in sentences])[:-1].tolist()


def leases_of(sentences):
    lengths = np.array([len(ids) for ids in sentences])
    offsets = offsets_of(sentences)
    for lease in cut([lengths], LEASE_TOKENS):
        numbers = range(lease.first_sentence, lease.first_sentence + lease.n_sentences)
        rows = [(offsets[number], sentences[number]) for number in numbers]
        yield lease, list(batches(rows, START, BATCH_TOKENS))


def scanned(memories, sentences, prefixes, empty_prefix):
    found = Found.nothing(memories.n_layers, memories.n_memories, T, memories.gated)
    scan = Scan(memories, T, prefixes, reach(has_start=True, empty_prefix=empty_prefix))
    lengths = np.array([len(ids) for ids in sentences])
    sampled = sample.draw(SOURCE_HASH, [lengths], empty_prefix)
    for lease, batched in leases_of(sentences):
        floors = [triggers.weakest() for triggers in found.lists()]
        *tokens, part = scan.lease(lease, batched, floors, sampled)
        assert sum(tokens) == lease.n_tokens
        found = found.merge(part)
    return found


def every_coefficient(memories, sentences, empty_prefix):
    """{prefix: (sentence, m (layer, memory), gate or None)}, from whole traces of the batches."""
    found = {}
    offsets = offsets_of(sentences)
    for _, batched in leases_of(sentences):
        for batch in batched:
            trace = memories.trace(batch.tokens)
            m = torch.stack([layer.coefficients for layer in trace]).numpy()
            gate = None
            if memories.gated:
                gate = torch.stack([layer.gate for layer in trace]).numpy()
            for row, (length, offset) in enumerate(zip(batch.lengths, batch.offsets, strict=True)):
                for p in range(0, length) if empty_prefix else range(1, length + 1):
                    # The start token stands at position 0, so prefix p ends at position p.
                    signs = None if gate is None else gate[:, row, p] > 0
                    found[offset + p] = (offsets.index(offset), m[:, row, p], signs)
    return found


def expected_list(every, layer, memory, sign, prefixes):
    """The t strongest (coefficient, prefix, gate) of one sign, written as the definition says."""
    rows = []
    for prefix, (sentence, m, gate) in every.items():
        if sign * m[layer, memory] > 0:
            is_open = 0 if gate is None else (1 if gate[layer, memory] else -1)
            rows.append((float(m[layer, memory]), prefix, is_open, sentence))
    rows.sort(key=lambda row: (-abs(row[0]), row[1]))
    if prefixes == "best":
        seen, best = set(), []
        for row in rows:
            if row[3] not in seen:
                seen.add(row[3])
                best.append(row)
        rows = best
    return [row[:3] for row in rows[:T]]


def actual_list(triggers, layer, memory):
    columns = (column[memory].tolist() for column in triggers.layer(layer))
    return [row for row in zip(*columns, strict=True) if row[1] != VACANT]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TINY)
def test_the_pass_equals_brute_force_over_all_prefixes(name, mode):
    prefixes, empty_prefix = MODES[mode]
    memories = Memories(tiny(name), tiny_tokenizer())
    sentences = corpus()
    found = scanned(memories, sentences, prefixes, empty_prefix)
    every = every_coefficient(memories, sentences, empty_prefix)
    for layer in range(memories.n_layers):
        for memory in range(memories.n_memories):
            for sign, triggers in zip((1, -1), found.lists(), strict=False):
                expected = expected_list(every, layer, memory, sign, prefixes)
                assert actual_list(triggers, layer, memory) == expected
    check_statistics(found.statistics, every, memories.gated)
    check_sample(found.sample, every)


def check_statistics(statistics, every, gated):
    m = np.stack([entry[1] for entry in every.values()])  # (prefix, layer, memory)
    is_active = np.stack([entry[2] for entry in every.values()]) if gated else m > 0
    assert statistics.n_prefixes == len(every)
    np.testing.assert_array_equal(statistics.active, is_active.sum(0))
    np.testing.assert_array_equal(statistics.maximum, m.max(0))
    np.testing.assert_array_equal(statistics.minimum, m.min(0))
    np.testing.assert_allclose(
        statistics.sums * UNIT, m.sum(0, dtype=np.float64), atol=1e-5 * len(every)
    )


def check_sample(taken, every):
    assert len(taken.prefixes) == min(sample.SIZE, len(every))
    for column, prefix in enumerate(taken.prefixes.tolist()):
        np.testing.assert_array_equal(taken.coefficients[..., column], every[prefix][1])


def test_ties_abound_in_the_corpus_of_these_tests():
    memories = Memories(tiny("llama"), tiny_tokenizer())
    every = every_coefficient(memories, corpus(), empty_prefix=False)
    values = [float(entry[1][0, 0]) for entry in every.values()]
    assert len(set(values)) < len(values)


def test_without_a_start_token_the_first_position_is_the_first_prefix():
    assert reach(has_start=False, empty_prefix=False) == (0, 1)
    assert reach(has_start=True, empty_prefix=False) == (1, 1)
    assert reach(has_start=True, empty_prefix=True) == (0, 0)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_bfloat16_coefficients_are_ranked_as_they_are(name):
    memories = Memories(tiny(name).to(torch.bfloat16), tiny_tokenizer())
    found = scanned(memories, corpus(), "best", False)
    rounded = torch.from_numpy(found.positive.coefficients)
    assert (rounded == rounded.to(torch.bfloat16)).all()
    assert rounded.any()


def test_a_coefficient_that_is_not_finite_is_refused_with_its_place():
    memories = Memories(tiny("gpt2"), tiny_tokenizer())
    with torch.no_grad():  # too large for float32 on the way, on one token only
        memories.model.get_input_embeddings().weight[5] = 3e38
    with pytest.raises(ModelError, match=r"not finite somewhere in sentences 0 to \d+\. The model"):
        scanned(memories, [[3, 4], [5, 5], [3, 3]], "best", False)
