"""Against a plain reading of both indexes, one memory at a time."""

import math

import numpy as np
import pytest

from ffmem.interventions.compare import layer_changes, value_change
from tests.interventions.pairs import index_of, model
from tests.interventions.test_overlap import plain_rbo


def jaccard(one, other):
    union = {*one} | {*other}
    return len({*one} & {*other}) / len(union) if union else math.nan


def rbo(one, other):
    if not one and not other:
        return math.nan
    return plain_rbo(one, other) if one and other else 0.0


def ratio(one, other):
    return other / one if one > 0 and other > 0 else math.nan


def plain(first, second):
    """What changed in a memory, from what `show` tells of it on both sides."""

    def prefixes(triggers):
        return [(trigger.sentence, trigger.length) for trigger in triggers]

    def ids(tokens):
        return [token.id for token in tokens[:10]]

    lists = [(prefixes(first.triggers), prefixes(second.triggers))]
    found = {"jaccard": jaccard(*lists[0]), "rbo": rbo(*lists[0])}
    if first.gated:
        lists.append((prefixes(first.negative_triggers), prefixes(second.negative_triggers)))
        found |= {"negative_jaccard": jaccard(*lists[1]), "negative_rbo": rbo(*lists[1])}
    changes = [1 - rbo(*pair) for pair in lists if any(pair)]
    found["change"] = sum(changes) / len(changes) if changes else math.nan
    found["value_tokens"] = jaccard(ids(first.value.top), ids(second.value.top))
    if first.gated:
        ends = ids(first.value.bottom), ids(second.value.bottom)
        found["negative_value_tokens"] = jaccard(*ends)
    found["active_change"] = second.stats.active_share - first.stats.active_share
    found["max_ratio"] = ratio(first.stats.max, second.stats.max)
    if first.gated:
        found["min_ratio"] = ratio(-first.stats.min, -second.stats.min)
    return found


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"t": 3}),
        ("gpt2", {"t": 40, "prefixes": "all"}),
        ("opt", {"t": 70}),  # more than there are sentences: lists end early, some are empty
        ("ffmem_adaptive", {"t": 5, "compat": "ff-layers"}),
    ],
)
def test_every_number_is_that_of_a_plain_reading(name, options, tmp_path):
    first = index_of(tmp_path / "first", model(name, silence), **options)
    second = index_of(tmp_path / "second", model(name, silence, seed=1), **options)
    for layer in range(2):
        found = layer_changes(first, second, layer, None)
        pairs = zip(first.memories(layer), second.memories(layer), strict=True)
        expected = [plain(*pair) for pair in pairs]
        for column in ("value_cosine", "value_norm_ratio", "value_change"):
            assert np.isnan(found.pop(column)).all()
        assert found.keys() == expected[0].keys()
        for column in found:
            wanted = [memory[column] for memory in expected]
            np.testing.assert_allclose(found[column], wanted, atol=1e-9, err_msg=column)


def silence(memories):
    """Let memory 0 of the last layer never be active in either model."""
    memories.keys(1).data[0] = 0
    if memories.row.up is None:
        memories.key_bias(1).data[0] = -10


def test_lists_that_are_empty_on_both_sides_have_no_overlap_and_on_one_side_none(tmp_path):
    first = index_of(tmp_path / "first", model("opt", silence))
    second = index_of(tmp_path / "second", model("opt"))
    both = layer_changes(first, first, 1, None)
    one = layer_changes(first, second, 1, None)
    for name in ("jaccard", "rbo", "change", "max_ratio"):
        assert np.isnan(both[name][0]), name
    assert (one["jaccard"][0], one["rbo"][0], one["change"][0]) == (0, 0, 1)
    assert np.isnan(one["max_ratio"][0])


def test_the_change_of_values_is_taken_over(tmp_path):
    index = index_of(tmp_path / "index", model())
    values = np.random.default_rng(0).normal(size=(2, 24, 16)).astype(np.float32)
    change = value_change(*values)
    found = layer_changes(index, index, 0, change)
    for name in ("cosine", "norm_ratio", "change"):
        np.testing.assert_array_equal(found[f"value_{name}"], getattr(change, name))
