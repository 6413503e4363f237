import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ffmem.indexing import results
from ffmem.indexing.results import SAMPLE_SIZE, Sample, merge_samples

HASHES = ("0123456789abcdef" * 4, "fedcba9876543210" * 4)
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def taken(source_hash, n_tokens, base):
    """A part's sample, and its coefficients in each of two layers: the prefix's own number."""
    hashes, places = results.draw_sample(source_hash, [np.array(n_tokens)], False)
    coefficients = np.broadcast_to((places + base).astype(np.float32), (3, len(places)))
    return Sample(hashes, places + base), coefficients


def every_prefix(source_hash, n_tokens, empty_prefix):
    """(hash, place) of all prefixes of a source, one by one."""
    place, found = 0, []
    for n in n_tokens:
        for p in range(n + 1):
            if (p < n) if empty_prefix else (p > 0):
                found.append((int(results.hash_places(source_hash, np.array([place]))[0]), place))
            place += 1
    return found


@given(lengths, st.booleans())
def test_the_sample_is_the_prefixes_of_smallest_hash(n_tokens, empty_prefix):
    hashes, places = results.draw_sample(HASHES[0], [np.array(n_tokens)], empty_prefix)
    expected = sorted(every_prefix(HASHES[0], n_tokens, empty_prefix))[:SAMPLE_SIZE]
    assert sorted(zip(hashes.tolist(), places.tolist(), strict=True)) == expected
    assert (np.diff(places) > 0).all()


@given(lengths, lengths)
def test_samples_of_parts_merge_to_the_sample_of_the_whole(first, second):
    base = sum(first) + len(first)
    (a, of_a), (b, of_b) = taken(HASHES[0], first, 0), taken(HASHES[1], second, base)
    merged, layers = merge_samples([a, b], [[of_a, of_b], [of_a, of_b]])
    expected = every_prefix(HASHES[0], first, False)
    expected += [(h, p + base) for h, p in every_prefix(HASHES[1], second, False)]
    kept = sorted(prefix for _, prefix in sorted(expected)[:SAMPLE_SIZE])
    assert merged.prefixes.tolist() == kept
    assert [layer[2].tolist() for layer in layers] == [kept, kept]


def test_the_source_decides_the_sample():
    n_tokens = [30] * 100
    one, two = (
        set(results.draw_sample(h, [np.array(n_tokens)], False)[1].tolist()) for h in HASHES
    )
    assert len(one) == len(two) == SAMPLE_SIZE
    assert one != two
