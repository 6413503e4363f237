"""Segments: what was found comes back, and nothing else passes for it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ffmem.cluster.shared import SharedFolder
from ffmem.errors import StoreError
from ffmem.indexing.found import Found
from ffmem.indexing.sample import Sample
from ffmem.indexing.segments import Segments
from ffmem.indexing.statistics import Statistics
from ffmem.indexing.tree import Node
from ffmem.indexing.triggers import VACANT, Triggers

LAYERS, MEMORIES, T = 3, 5, 4


def some(seed, first=0, gated=True):
    """What might have been found in prefixes `first` … `first` + 99."""
    chance = np.random.default_rng(seed)
    shape = (LAYERS, MEMORIES)

    def listed(sign):
        triggers = Triggers.empty(*shape, T)
        for layer, memory in np.ndindex(shape):
            n = chance.integers(0, T + 1)
            strengths = np.sort(chance.random(n).astype(np.float32))[::-1]
            triggers.coefficients[layer, memory, :n] = sign * strengths
            triggers.prefixes[layer, memory, :n] = first + chance.permutation(100)[:n]
            triggers.gates[layer, memory, :n] = chance.choice([-1, 1], n) if gated else 0
        return triggers

    k = int(chance.integers(0, 4))
    sample = Sample(
        chance.integers(0, 2**64, k, np.uint64),
        np.sort(first + chance.permutation(100)[:k]),
        chance.standard_normal((*shape, k)).astype(np.float32),
    )
    statistics = Statistics(
        100,
        chance.integers(0, 100, shape),
        chance.integers(-(2**40), 2**40, shape),
        chance.random(shape).astype(np.float32),
        -chance.random(shape).astype(np.float32),
    )
    return Found(listed(1), listed(-1) if gated else None, statistics, sample)


def arrays(found):
    """Every array of what was found, in order."""
    lists = [column for one in found.lists() for column in one]
    return [*lists, *map(np.asarray, found.statistics), *found.sample]


def same(one, other):
    pairs = zip(arrays(one), arrays(other), strict=True)
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


def segments(folder, run="run", gated=True):
    return Segments(SharedFolder.at(folder), run, T, gated)


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), gated=st.booleans())
def test_what_was_found_comes_back_layer_by_layer(tmp_path_factory, seed, gated):
    kept = segments(tmp_path_factory.mktemp("kept"), gated=gated)
    found = some(seed, gated=gated)
    kept.commit(Node(0, 7), found.layers())
    back = list(kept.layers(Node(0, 7)))
    assert len(back) == LAYERS
    assert all(same(one, other) for one, other in zip(back, found.layers(), strict=True))
    assert kept.nodes() == [Node(0, 7)]


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_merged_segments_are_the_merge_of_what_they_hold(tmp_path_factory, seed):
    kept = segments(tmp_path_factory.mktemp("kept"))
    parts = [some(seed + n, first=1000 * n) for n in range(3)]
    for number, part in enumerate(parts):
        kept.commit(Node(0, number), part.layers())
    kept.commit(Node(1, 0), kept.merged([Node(0, n) for n in range(3)]))
    whole = parts[0].merge(parts[1]).merge(parts[2])
    merged = kept.layers(Node(1, 0))
    assert all(same(one, other) for one, other in zip(merged, whole.layers(), strict=True))


def test_the_floor_of_a_segment_is_the_weakest_of_each_full_list(tmp_path):
    kept, found = segments(tmp_path), some(3)
    kept.commit(Node(0, 0), found.layers())
    for floor, triggers in zip(kept.floors(Node(0, 0)), found.lists(), strict=True):
        for layer, memory in np.ndindex(LAYERS, MEMORIES):
            full = triggers.prefixes[layer, memory, -1] != VACANT
            last = abs(triggers.coefficients[layer, memory, -1]) if full else 0
            assert floor[layer, memory] == last


@pytest.mark.parametrize("where", [0.1, 0.5, 0.9, 0.999])
def test_a_byte_that_has_changed_is_noticed_or_changes_nothing(tmp_path, where):
    kept, found = segments(tmp_path), some(1)
    kept.commit(Node(0, 0), found.layers())
    path = tmp_path / kept.name(Node(0, 0))
    content = bytearray(path.read_bytes())
    content[int(len(content) * where)] ^= 0x55
    path.write_bytes(content)
    try:
        back = list(kept.layers(Node(0, 0)))
    except StoreError:
        return
    assert all(same(one, other) for one, other in zip(back, found.layers(), strict=True))


@pytest.mark.parametrize("left", [0, 20, -9])
def test_half_a_segment_is_damaged(tmp_path, left):
    kept = segments(tmp_path)
    kept.commit(Node(0, 0), some(1).layers())
    path = tmp_path / kept.name(Node(0, 0))
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(StoreError, match=r"is damaged .* only its lease is repeated"):
        list(kept.layers(Node(0, 0)))


def test_a_changed_number_does_not_pass(tmp_path):
    kept, found = segments(tmp_path), some(1)
    kept.commit(Node(0, 0), found.layers())
    path = tmp_path / kept.name(Node(0, 0))
    number = found.statistics.sums[1, 2].tobytes()
    assert path.read_bytes().count(number) == 1
    path.write_bytes(path.read_bytes().replace(number, bytes(8)))
    with pytest.raises(StoreError, match="do not match their hash"):
        list(kept.layers(Node(0, 0)))


def test_a_segment_of_another_run_or_place_is_refused(tmp_path):
    kept = segments(tmp_path)
    kept.commit(Node(1, 0), some(1).layers())
    with pytest.raises(StoreError, match="belongs to another run"):
        list(segments(tmp_path, run="other").layers(Node(1, 0)))
    (tmp_path / kept.name(Node(1, 0))).rename(tmp_path / kept.name(Node(1, 1)))
    with pytest.raises(StoreError, match="belongs to another run or place"):
        list(kept.layers(Node(1, 1)))


def test_a_file_that_is_none_of_ours_is_damaged(tmp_path):
    (tmp_path / "segment-0-000000.arrow").write_text("hello")
    with pytest.raises(StoreError, match="is damaged"):
        list(segments(tmp_path).layers(Node(0, 0)))
