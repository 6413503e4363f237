import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffmem.indexing.results import LayerResult, LayerStats, Triggers
from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.topk import MAX_PREFIXES, TopK, pack_keys

MEMORIES = 3

coefficients = st.sampled_from([0.0, 0.5, 1.0, 2.0])  # few, so that ties abound


@st.composite
def corpora(draw):
    """Coefficients and gates of a few prefixes, and to which of four parts each belongs."""
    n = draw(st.integers(1, 14))
    size = n * MEMORIES
    numbers = draw(st.lists(coefficients, min_size=size, max_size=size))
    parts = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    gates = draw(st.lists(st.sampled_from([-1, 1]), min_size=size, max_size=size))
    shape = (n, MEMORIES)
    return (
        np.array(numbers, np.float32).reshape(shape),
        np.array(parts),
        np.array(gates, np.int8).reshape(shape),
    )


def brute_force(coefficients, gates, sign, t):
    """What the docstring says, written as plainly as possible: (coefficient, prefix, gate)."""
    lists = []
    for memory in range(MEMORIES):
        rows = [
            (float(c) * sign, prefix, int(gates[prefix, memory]))
            for prefix, c in enumerate(coefficients[:, memory])
            if c > 0
        ]
        lists.append(sorted(rows, key=lambda row: (-abs(row[0]), row[1]))[:t])
    return lists


def listed(triggers):
    """The filled slots of triggers, in the form of `brute_force`."""
    return [
        [
            (float(c), int(p), int(g))
            for c, p, g in zip(*(column[memory] for column in triggers), strict=True)
            if p != NO_PREFIX
        ]
        for memory in range(MEMORIES)
    ]


def add(topk, coefficients, gates, prefixes):
    for prefix in prefixes:
        row = torch.from_numpy(coefficients[prefix])
        threshold = topk.threshold(torch.device("cpu"))
        (memory,) = ((row >= threshold) & (row > 0)).nonzero(as_tuple=True)
        memory = memory.numpy()
        is_open = gates[prefix, memory] > 0
        prefixes = np.full(len(memory), prefix)
        topk.add(memory, pack_keys(coefficients[prefix, memory], prefixes, is_open))


def add_block(topk, coefficients, gates, prefixes):
    """Add what `add` adds, the first memory on its own and the others together."""
    rows = coefficients[prefixes]
    keys = pack_keys(rows, np.asarray(prefixes)[:, None], gates[prefixes] > 0) * (rows > 0)
    for memories in (slice(0, 1), slice(1, MEMORIES)):
        topk.add_block(memories, keys[:, memories])


def of_part(coefficients, gates, prefixes, sign, t):
    topk = TopK(MEMORIES, t, sign)
    add(topk, coefficients, gates, prefixes)
    topk.commit()
    return topk.triggers(gated=True)


@given(corpora(), st.integers(1, 5), st.sampled_from([1, -1]), st.randoms())
def test_merging_the_parts_in_any_order_gives_the_triggers_of_the_whole(corpus, t, sign, random):
    coefficients, parts, gates = corpus
    merged = LayerResult.empty(MEMORIES, t, gated=False).positive
    order = list(range(4))
    random.shuffle(order)
    for part in order:
        prefixes = np.flatnonzero(parts == part).tolist()
        random.shuffle(prefixes)  # batches do not come in the order of prefixes
        merged = merged.merge(of_part(coefficients, gates, prefixes, sign, t))
    assert listed(merged) == brute_force(coefficients, gates, sign, t)


@given(corpora(), st.integers(1, 5), st.randoms())
def test_one_list_fed_chunk_by_chunk_gives_the_triggers_of_the_whole(corpus, t, random):
    coefficients, parts, gates = corpus
    topk = TopK(MEMORIES, t, 1)
    order = list(range(4))
    random.shuffle(order)
    for part in order:
        add_some = random.choice([add, add_block])
        add_some(topk, coefficients, gates, np.flatnonzero(parts == part))
        if random.random() < 0.5:
            topk.commit()
    topk.commit()
    assert listed(topk.triggers(gated=True)) == brute_force(coefficients, gates, 1, t)


@given(corpora(), st.integers(1, 5))
def test_a_chunk_that_is_rolled_back_was_never_there(corpus, t):
    coefficients, parts, gates = corpus
    topk = TopK(MEMORIES, t, 1)
    for part in range(4):
        add_some = add_block if part < 2 else add
        add_some(topk, coefficients, gates, np.flatnonzero(parts == part))
        if part % 2:
            topk.rollback()
        else:
            topk.commit()
    kept = np.where((parts % 2 == 0)[:, None], coefficients, 0)
    assert listed(topk.triggers(gated=True)) == brute_force(kept, gates, 1, t)


@given(corpora(), st.integers(1, 4))
def test_merging_is_associative_and_commutative(corpus, t):
    coefficients, parts, gates = corpus
    a, b, c = (
        of_part(coefficients, gates, np.flatnonzero(parts % 3 == part), 1, t) for part in range(3)
    )
    for left, right in ((a.merge(b).merge(c), a.merge(b.merge(c))), (a.merge(b), b.merge(a))):
        for mine, theirs in zip(left, right, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@given(corpora(), st.integers(1, 5))
def test_a_block_raises_the_threshold_as_its_candidates_one_by_one(corpus, t):
    coefficients, _, gates = corpus
    one_by_one, block = TopK(MEMORIES, t, 1), TopK(MEMORIES, t, 1)
    add(one_by_one, coefficients, gates, range(len(gates)))
    one_by_one.commit()
    add_block(block, coefficients, gates, range(len(gates)))
    expected = one_by_one.threshold(torch.device("cpu"))
    assert block.threshold(torch.device("cpu")).tolist() == expected.tolist()


def test_a_busy_memory_keeps_its_strongest_whatever_the_number_of_candidates():
    topk = TopK(2, 3, 1)
    strengths = np.random.default_rng(0).permutation(1000).astype(np.float32) + 1
    none_open = np.zeros(1000, np.int64)
    topk.add(np.zeros(1000, np.int64), pack_keys(strengths, np.arange(1000), none_open))
    topk.commit()
    triggers = topk.triggers(gated=False)
    assert triggers.coefficients[0].tolist() == [1000, 999, 998]
    assert triggers.prefixes[0].tolist() == np.argsort(-strengths)[:3].tolist()
    assert triggers.prefixes[1].tolist() == [NO_PREFIX] * 3
    assert not triggers.gates.any()


def test_the_smallest_coefficient_and_the_last_prefix_fit_into_a_key():
    smallest, largest = np.nextafter(np.float32(0), np.float32(1)), np.finfo(np.float32).max
    topk = TopK(1, 3, 1)
    one = np.zeros(2, np.int64)
    prefixes = np.array([MAX_PREFIXES - 1, 0])
    topk.add(one, pack_keys(np.array([smallest, largest]), prefixes, np.array([1, 0])))
    topk.commit()
    triggers = topk.triggers(gated=True)
    assert triggers.coefficients[0].tolist() == [largest, smallest, 0]
    assert triggers.prefixes[0].tolist() == [0, MAX_PREFIXES - 1, NO_PREFIX]
    assert triggers.gates[0].tolist() == [-1, 1, 0]


def test_shifting_moves_prefixes_and_leaves_empty_slots():
    triggers = Triggers(
        np.ones((1, 2), np.float32), np.array([[5, NO_PREFIX]]), np.zeros((1, 2), np.int8)
    )
    assert triggers.shift(100).prefixes[0].tolist() == [105, NO_PREFIX]


stats = st.builds(
    lambda active, sums, high, low: LayerStats(
        np.array([active]), np.array([sums]), np.float32([high]), np.float32([low])
    ),
    st.integers(0, 9),
    st.integers(-(10**12), 10**12),
    st.floats(-5, 5, width=32),
    st.floats(-5, 5, width=32),
)


@given(stats, stats, stats)
def test_merging_statistics_is_exact_in_any_order(a, b, c):
    assert a.merge(b).merge(c) == a.merge(b.merge(c)) == c.merge(b).merge(a)
    assert a.merge(LayerStats.empty(1)) == a


def test_the_mean_is_the_sum_over_the_prefixes():
    found = LayerStats(np.array([3]), np.array([5 << 20]), np.float32([2]), np.float32([0]))
    assert found.mean(4).tolist() == [1.25]
