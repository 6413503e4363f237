import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ffmem.indexing.chunks import batches, cut_chunks

lengths = st.lists(st.integers(1, 30), min_size=1, max_size=80)


@given(lengths, st.integers(1, 100), st.integers(1, 79))
def test_chunks_cover_the_corpus_in_order_and_close_at_their_size(n_tokens, size, split):
    parts = [np.array(n_tokens[:split], int), np.array(n_tokens[split:], int)]
    chunks = list(cut_chunks(parts, size))
    sentence = prefix = 0
    for number, chunk in enumerate(chunks):
        mine = n_tokens[sentence : sentence + chunk.n_sentences]
        assert chunk == (number, sentence, len(mine), prefix, sum(mine))
        assert sum(mine[:-1]) < size
        assert sum(mine) >= size or chunk is chunks[-1]
        sentence, prefix = sentence + len(mine), prefix + sum(mine) + len(mine)
    assert sentence == len(n_tokens)


@given(lengths, st.integers(1, 100), st.sampled_from([None, 7]))
def test_batches_hold_every_sentence_once_by_length_and_within_their_size(n_tokens, size, start):
    sentences = [(1000 * i, [i + 1] * n) for i, n in enumerate(n_tokens)]
    extra = 0 if start is None else 1
    seen = []
    for batch in batches(sentences, start, size):
        assert batch.lengths == sorted(batch.lengths)
        assert batch.tokens.shape == (len(batch.lengths), batch.lengths[-1] + extra)
        assert batch.tokens.numel() <= size or len(batch.lengths) == 1
        for row, length, offset in zip(batch.tokens, batch.lengths, batch.offsets, strict=True):
            if start is not None:
                assert row[0] == start
            assert row[extra : extra + length].tolist() == [offset // 1000 + 1] * length
            seen.append((length, offset))
    assert seen == sorted((n, 1000 * i) for i, n in enumerate(n_tokens))
