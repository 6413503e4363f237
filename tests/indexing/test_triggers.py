import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffmem.indexing.running import Running
from ffmem.indexing.triggers import VACANT, Triggers

LAYERS, MEMORIES = 2, 3

coefficients = st.sampled_from([0.0, 0.5, 1.0, 2.0])  # few, so that ties abound


@st.composite
def corpora(draw):
    """Coefficients of a few prefixes, and to which of up to four parts each prefix belongs."""
    n = draw(st.integers(1, 14))
    size = LAYERS * n * MEMORIES
    numbers = draw(st.lists(coefficients, min_size=size, max_size=size))
    parts = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    gates = draw(st.lists(st.sampled_from([-1, 1]), min_size=size, max_size=size))
    shape = (LAYERS, n, MEMORIES)
    return (
        np.array(numbers, np.float32).reshape(shape),
        np.array(parts),
        np.array(gates, np.int8).reshape(shape),
    )


def brute_force(coefficients, gates, sign, t):
    """What the docstring says, written as plainly as possible: (coefficient, prefix, gate)."""
    lists = {}
    for layer in range(LAYERS):
        for memory in range(MEMORIES):
            rows = [
                (float(c) * sign, prefix, int(gates[layer, prefix, memory]))
                for prefix, c in enumerate(coefficients[layer, :, memory])
                if c > 0
            ]
            lists[layer, memory] = sorted(rows, key=lambda row: (-abs(row[0]), row[1]))[:t]
    return lists


def listed(triggers):
    """The filled slots of triggers, in the form of `brute_force`."""
    return {
        (layer, memory): [
            (float(c), int(p), int(g))
            for c, p, g in zip(*(rows[memory] for rows in triggers.layer(layer)), strict=True)
            if p != VACANT
        ]
        for layer in range(LAYERS)
        for memory in range(MEMORIES)
    }


def ran(coefficients, gates, prefixes, sign, t, floor=None):
    """The triggers of some prefixes of a corpus, through the running list of a lease."""
    if floor is None:
        floor = np.zeros((LAYERS, MEMORIES), np.float32)
    running = Running(floor, t, sign)
    for prefix in prefixes:
        for layer in range(LAYERS):
            row = torch.from_numpy(coefficients[layer, prefix])
            threshold = running.threshold(layer, torch.device("cpu"))
            (memory,) = ((row >= threshold) & (row > 0)).nonzero(as_tuple=True)
            memory = memory.numpy()
            running.add(
                layer,
                memory,
                coefficients[layer, prefix, memory],
                np.full(len(memory), prefix),
                (gates[layer, prefix, memory] > 0).astype(np.int64),
            )
    return running.triggers(first_prefix=0, gated=True)


@given(corpora(), st.integers(1, 5), st.sampled_from([1, -1]), st.randoms())
def test_merging_the_parts_in_any_order_gives_the_triggers_of_the_whole(corpus, t, sign, random):
    coefficients, parts, gates = corpus
    merged = Triggers.empty(LAYERS, MEMORIES, t)
    order = list(range(4))
    random.shuffle(order)
    for part in order:
        prefixes = np.flatnonzero(parts == part).tolist()
        random.shuffle(prefixes)  # batches do not come in the order of prefixes
        merged = merged.merge(ran(coefficients, gates, prefixes, sign, t))
    assert listed(merged) == brute_force(coefficients, gates, sign, t)


@given(corpora(), st.integers(1, 5), st.randoms())
def test_a_floor_from_committed_parts_shuts_out_nothing_that_counts(corpus, t, random):
    coefficients, parts, gates = corpus
    merged = Triggers.empty(LAYERS, MEMORIES, t)
    order = list(range(4))
    random.shuffle(order)
    for part in order:
        prefixes = np.flatnonzero(parts == part).tolist()
        merged = merged.merge(ran(coefficients, gates, prefixes, 1, t, merged.weakest()))
    assert listed(merged) == brute_force(coefficients, gates, 1, t)


@given(corpora(), st.integers(1, 4))
def test_merging_is_associative_and_commutative(corpus, t):
    coefficients, parts, gates = corpus
    a, b, c = (
        ran(coefficients, gates, np.flatnonzero(parts % 3 == part), 1, t) for part in range(3)
    )
    for left, right in ((a.merge(b).merge(c), a.merge(b.merge(c))), (a.merge(b), b.merge(a))):
        for field in Triggers._fields:
            np.testing.assert_array_equal(getattr(left, field), getattr(right, field))


def test_a_busy_memory_keeps_its_strongest_whatever_the_number_of_candidates():
    floor = np.zeros((1, 2), np.float32)
    running = Running(floor, 3, 1)
    strengths = np.random.default_rng(0).permutation(1000).astype(np.float32) + 1
    running.add(0, np.zeros(1000, np.int64), strengths, np.arange(1000), np.zeros(1000, np.int64))
    triggers = running.triggers(first_prefix=7, gated=False)
    assert triggers.coefficients[0, 0].tolist() == [1000, 999, 998]
    assert triggers.prefixes[0, 0].tolist() == [7 + p for p in np.argsort(-strengths)[:3]]
    assert triggers.prefixes[0, 1].tolist() == [VACANT] * 3
    assert not triggers.gates.any()


def test_the_smallest_positive_number_triggers():
    smallest = np.nextafter(np.float32(0), np.float32(1))
    running = Running(np.zeros((1, 1), np.float32), 2, 1)
    one = np.zeros(1, np.int64)
    running.add(0, one, np.array([smallest]), one, one)
    assert running.triggers(0, gated=False).coefficients[0, 0].tolist() == [smallest, 0]


def test_shifting_moves_prefixes_and_leaves_vacant_slots():
    triggers = Triggers.empty(1, 1, 2)
    triggers.prefixes[0, 0, 0] = 5
    assert triggers.shifted(100).prefixes[0, 0].tolist() == [105, VACANT]
