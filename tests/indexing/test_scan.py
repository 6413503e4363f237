"""The pass against the plainest computation of what it promises, in every family."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from ffmem.errors import ForwardError
from ffmem.indexing import results
from ffmem.indexing.chunks import batches, cut_chunks, prefix_range
from ffmem.indexing.scan import Scan
from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.tables import UNIT
from ffmem.models.memories import Memories
from tests.tiny import TINY, ragged, tiny, tiny_tokenizer

T, CHUNK_TOKENS, BATCH_TOKENS, START = 4, 60, 48, 0
MODES = {"best": ("best", False), "all": ("all", False), "ff-layers": ("best", True)}
SOURCE_HASH = "5" * 64


def corpus():
    """Short sentences of a small vocabulary, some of them equal, so that ties abound."""
    random = np.random.default_rng(1)
    sentences = [random.integers(3, 12, random.integers(1, 9)).tolist() for _ in range(24)]
    return sentences + sentences[:6]


def offsets_of(sentences):
    return np.cumsum([0] + [len(ids) + 1 for ids in sentences])[:-1].tolist()


def chunks_of(sentences):
    lengths = np.array([len(ids) for ids in sentences])
    offsets = offsets_of(sentences)
    for chunk in cut_chunks([lengths], CHUNK_TOKENS):
        numbers = range(chunk.first_sentence, chunk.first_sentence + chunk.n_sentences)
        rows = [(offsets[number], sentences[number]) for number in numbers]
        yield chunk, list(batches(rows, START, BATCH_TOKENS))


def drawn(sentences, empty_prefix):
    return results.draw_sample(
        SOURCE_HASH, [np.array([len(ids) for ids in sentences])], empty_prefix
    )


def scanned(memories, sentences, prefixes, empty_prefix):
    """Return the scan of a corpus, and every layer's coefficients on the sample."""
    scan = Scan(memories, T, prefixes == "all", prefix_range(True, empty_prefix))
    sampled = drawn(sentences, empty_prefix).prefixes
    parts = []
    for chunk, batched in chunks_of(sentences):
        past = chunk.first_prefix + chunk.n_tokens + chunk.n_sentences
        inside = sampled[(sampled >= chunk.first_prefix) & (sampled < past)]
        parts.append(scan.read(chunk, batched, inside))
        scan.commit()
    return scan, [np.concatenate(layer, axis=1) for layer in zip(*parts, strict=True)]


def every_coefficient(memories, sentences, empty_prefix):
    """{prefix: (sentence, m of each layer, gate or None)}, from whole traces of the batches."""
    found = {}
    offsets = offsets_of(sentences)
    for _, batched in chunks_of(sentences):
        for batch in batched:
            with memories.skip_padding(batch.is_token):
                trace = memories.trace(batch.tokens)
            m = [layer.coefficients.numpy() for layer in trace]
            gate = [layer.gate.numpy() for layer in trace] if memories.gated else None
            for row, (length, offset) in enumerate(zip(batch.lengths, batch.offsets, strict=True)):
                for p in range(0, length) if empty_prefix else range(1, length + 1):
                    # The start token stands at position 0, so prefix p ends at position p.
                    signs = None if gate is None else [layer[row, p] > 0 for layer in gate]
                    here = [layer[row, p] for layer in m]
                    found[offset + p] = (offsets.index(offset), here, signs)
    return found


def expected_list(every, layer, memory, sign, prefixes):
    """The t strongest (coefficient, prefix, gate) of one sign, written as the definition says."""
    rows = []
    for prefix, (sentence, m, gate) in every.items():
        if sign * m[layer][memory] > 0:
            is_open = 0 if gate is None else (1 if gate[layer][memory] else -1)
            rows.append((float(m[layer][memory]), prefix, is_open, sentence))
    rows.sort(key=lambda row: (-abs(row[0]), row[1]))
    if prefixes == "best":
        seen, best = set(), []
        for row in rows:
            if row[3] not in seen:
                seen.add(row[3])
                best.append(row)
        rows = best
    return [row[:3] for row in rows[:T]]


def actual_list(triggers, memory):
    columns = (column[memory].tolist() for column in triggers)
    return [row for row in zip(*columns, strict=True) if row[1] != NO_PREFIX]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*TINY, "ragged"])
def test_the_pass_equals_brute_force_over_all_prefixes(name, mode):
    prefixes, empty_prefix = MODES[mode]
    model = ragged() if name == "ragged" else tiny(name)
    memories = Memories(model, tiny_tokenizer())
    sentences = corpus()
    scan, sampled = scanned(memories, sentences, prefixes, empty_prefix)
    every = every_coefficient(memories, sentences, empty_prefix)
    assert scan.n_prefixes == len(every)
    for layer in range(memories.n_layers):
        found = scan.result(layer)
        lists = [found.positive, found.negative] if memories.gated else [found.positive]
        for memory in range(memories.layout.widths[layer]):
            for sign, triggers in zip((1, -1), lists, strict=False):
                expected = expected_list(every, layer, memory, sign, prefixes)
                assert actual_list(triggers, memory) == expected
        check_stats(found.stats, every, layer, memories.gated)
        for column, prefix in enumerate(drawn(sentences, empty_prefix).prefixes.tolist()):
            np.testing.assert_array_equal(sampled[layer][:, column], every[prefix][1][layer])


def check_stats(stats, every, layer, gated):
    m = np.stack([entry[1][layer] for entry in every.values()])  # (prefix, memory)
    is_active = np.stack([entry[2][layer] for entry in every.values()]) if gated else m > 0
    np.testing.assert_array_equal(stats.active, is_active.sum(0))
    if gated:
        np.testing.assert_array_equal(stats.positive, (m > 0).sum(0))
        np.testing.assert_array_equal(stats.open_positive, (is_active & (m > 0)).sum(0))
    else:
        assert stats.positive is stats.open_positive is None
    np.testing.assert_array_equal(stats.maximum, m.max(0))
    np.testing.assert_array_equal(stats.minimum, m.min(0))
    np.testing.assert_allclose(
        stats.sums * UNIT, m.sum(0, dtype=np.float64), atol=1e-5 * len(every)
    )


def test_ties_abound_in_the_corpus_of_these_tests():
    memories = Memories(tiny("llama"), tiny_tokenizer())
    every = every_coefficient(memories, corpus(), empty_prefix=False)
    values = [float(entry[1][0][0]) for entry in every.values()]
    assert len(set(values)) < len(values)


def test_without_a_start_token_the_first_position_is_the_first_prefix():
    assert prefix_range(has_start=False, empty_prefix=False) == (0, 1)
    assert prefix_range(has_start=True, empty_prefix=False) == (1, 1)
    assert prefix_range(has_start=True, empty_prefix=True) == (0, 0)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_bfloat16_coefficients_are_ranked_as_they_are(name):
    memories = Memories(tiny(name).to(torch.bfloat16), tiny_tokenizer())
    scan, _ = scanned(memories, corpus(), "best", False)
    rounded = torch.from_numpy(scan.result(0).positive.coefficients)
    assert (rounded == rounded.to(torch.bfloat16)).all()
    assert rounded.any()


class TwoBanks(Memories):
    """A model whose layers are read as two banks each, of unequal sizes."""

    @contextmanager
    def read_coefficients(self, read):
        def read_parts(bank, coefficients, gate, routing):
            for first, last in ((0, 7), (7, bank.size)):
                part = slice(first, last)
                read(
                    replace(bank, offset=first, size=last - first),
                    coefficients[..., part],
                    None if gate is None else gate[..., part],
                    routing,
                )

        with super().read_coefficients(read_parts):
            yield


@pytest.mark.parametrize("prefixes", ["best", "all"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_two_banks_of_a_layer_give_what_one_bank_of_all_its_memories_gives(name, prefixes):
    one, sample = scanned(Memories(tiny(name), tiny_tokenizer()), corpus(), prefixes, False)
    two, other = scanned(TwoBanks(tiny(name), tiny_tokenizer()), corpus(), prefixes, False)
    for layer, (mine, theirs) in enumerate(zip(sample, other, strict=True)):
        np.testing.assert_array_equal(mine, theirs)
        mine, theirs = one.result(layer), two.result(layer)
        np.testing.assert_allclose(mine.stats.sums * UNIT, theirs.stats.sums * UNIT, atol=1e-4)
        mine, theirs = (
            [*result.positive, *(result.negative or ()), *result.stats._replace(sums=0)]
            for result in (mine, theirs)
        )
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


def overflowing():
    """A model that overflows on one token."""
    memories = Memories(tiny("gpt2"), tiny_tokenizer())
    with torch.no_grad():
        memories.model.get_input_embeddings().weight[5] = 3e38
    return memories


def test_a_coefficient_that_is_not_finite_is_refused_with_its_place():
    with pytest.raises(ForwardError, match=r"not finite somewhere in chunk 0 \(sentences 0 to 2\)"):
        scanned(overflowing(), [[3, 4], [5, 5], [3, 3]], "best", False)


def test_a_chunk_that_fails_leaves_the_scan_as_it_was():
    memories = overflowing()
    good = [[3, 4, 6], [7, 3], [3, 3, 9, 4]]
    alone, _ = scanned(memories, good, "best", False)
    scan, _ = scanned(memories, good, "best", False)
    (chunk, batched), *_ = chunks_of([[3, 8], [5, 5], [7, 7, 7]])
    with pytest.raises(ForwardError):
        scan.read(chunk, batched, np.zeros(0, np.int64))
    assert scan.n_prefixes == alone.n_prefixes
    for layer in range(memories.n_layers):
        for mine, theirs in zip(
            (*scan.result(layer).positive, *scan.result(layer).stats),
            (*alone.result(layer).positive, *alone.result(layer).stats),
            strict=True,
        ):
            np.testing.assert_array_equal(mine, theirs)
    scan.read(chunk, [batch for batch in batched if 5 not in batch.tokens], np.zeros(0, np.int64))
