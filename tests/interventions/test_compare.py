"""What changed between two indexes, memory by memory, against plain readings of both."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ffmem.cells import BankRecord
from ffmem.errors import ModelError, StoreError
from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.store import Index
from ffmem.interventions import compare as module
from ffmem.interventions.compare import (
    P,
    check_comparable,
    describe_memory,
    differences,
    layer_changes,
    measure_overlap,
    most_changed,
    most_changed_values,
    value_change,
    value_changes,
)
from ffmem.progress import Progress
from tests.interventions.pairs import index_of, model

# Which indexes can be compared


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return index_of(tmp_path_factory.mktemp("matching") / "index", model())


def with_manifest(index, **fields):
    """Return the same index with another manifest."""
    other = Index(index.folder)
    manifest = index.manifest
    if "layers" in fields:
        fields["banks"] = fields["layers"] * [[BankRecord(size=24)]]
    if "memories" in fields:
        fields["banks"] = manifest.model.layers * [[BankRecord(size=fields.pop("memories"))]]
    model = {name: fields.pop(name) for name in list(fields) if hasattr(manifest.model, name)}
    other.manifest = replace(manifest, model=replace(manifest.model, **model), **fields)
    return other


@pytest.mark.parametrize(
    ("field", "value", "old", "advice"),
    [
        ("family", "mistral", "llama", "architecture"),
        ("layers", 7, "2", "architecture"),
        ("memories", 7, "24", "architecture"),
        ("hidden", 7, "16", "architecture"),
        ("vocabulary", 7, "64", "architecture"),
        ("gated", False, "yes", "architecture"),
        ("t", 7, "3", "settings of the other"),
        ("prefixes", "all", "best", "settings of the other"),
        ("compat", "ff-layers", "none", "settings of the other"),
        ("projection", "raw", "folded", "settings of the other"),
    ],
)
def test_indexes_that_do_not_match_are_refused_with_both_values(
    field, value, old, advice, finished
):
    other = with_manifest(finished, **{field: value})
    value = "no" if value is False else value
    says = f"{field}: {old} in the first, {value} in the second.*{advice}"
    with pytest.raises(StoreError, match=says) as raised:
        check_comparable(finished, other)
    assert str(raised.value).count(" in the first") == 1  # no part of it looks the same
    with pytest.raises(StoreError, match=f"{field}: {value} in the first, {old} in the second"):
        check_comparable(other, finished)


def test_another_corpus_is_refused_by_its_content_not_its_name(finished):
    corpus = finished.manifest.corpus
    renamed = [replace(source, source="moved.txt") for source in corpus.sources]
    check_comparable(finished, with_manifest(finished, corpus=replace(corpus, sources=renamed)))
    other = with_manifest(finished, corpus=replace(corpus, hash="f" * 64))
    says = f"corpus.txt (60 sentences, hash {corpus.hash[:12]}) in the first"
    with pytest.raises(StoreError, match=re.escape(says)) as raised:
        check_comparable(finished, other)
    assert "ffffffffffff) in the second. Index both models over the same corpus" in str(
        raised.value
    )


def test_another_start_token_is_refused(finished):
    none = with_manifest(finished, start=replace(finished.manifest.start, id=None, token=None))
    with pytest.raises(StoreError, match="start token: '<s>' in the first, none in the second"):
        check_comparable(finished, none)


def test_an_index_matches_itself_and_differs_in_nothing(finished):
    check_comparable(finished, finished)
    assert differences(finished.manifest, finished.manifest) == {}


def test_what_may_differ_is_told(finished):
    versions = finished.manifest.versions | {"torch": "0.0"}
    other = with_manifest(finished, dtype="bfloat16", tokenizer="?", versions=versions)
    check_comparable(finished, other)
    assert differences(finished.manifest, other.manifest) == {
        "dtype": ["float32", "bfloat16"],
        "tokenizer": [finished.manifest.tokenizer, "?"],
        "version of torch": [finished.manifest.versions["torch"], "0.0"],
    }


# The overlap of ranked lists


ranked = st.lists(st.integers(0, 12), max_size=8, unique=True)


def plain_rbo(one, other, p=P):
    """Equation 32 of Webber et al., term by term."""
    short, long = sorted((one, other), key=len)
    s, l = len(short), len(long)  # noqa: E741

    def x(d):
        return len(set(short[:d]) & set(long[:d]))

    first = sum(x(d) / d * p**d for d in range(1, l + 1))
    second = sum(x(s) * (d - s) / (s * d) * p**d for d in range(s + 1, l + 1))
    return (1 - p) / p * (first + second) + ((x(l) - x(s)) / l + x(s) / s) * p**l


def plain_rbo_of_equal_lengths(one, other, p=P):
    """Equation 30, for lists evaluated to the same depth k."""
    k = len(one)
    x = [len(set(one[:d]) & set(other[:d])) for d in range(1, k + 1)]
    return x[-1] / k * p**k + (1 - p) / p * sum(x[d - 1] / d * p**d for d in range(1, k + 1))


def matrix(lists, width=8):
    return np.array([[*one, *[NO_PREFIX] * (width - len(one))] for one in lists], np.int64)


def overlap_of(one, other):
    found = measure_overlap(matrix([one]), matrix([other]))
    return found[0][0], found[1][0]


@given(ranked, ranked)
def test_overlaps_are_those_of_the_definitions(one, other):
    jaccard, rbo = overlap_of(one, other)
    if not one and not other:
        assert np.isnan(jaccard)
        assert np.isnan(rbo)
    elif not one or not other:
        assert (jaccard, rbo) == (0, 0)
    else:
        assert jaccard == len({*one} & {*other}) / len({*one} | {*other})
        assert rbo == pytest.approx(plain_rbo(one, other), abs=1e-12)
        assert 0 <= rbo <= 1


@given(st.permutations(range(8)), st.permutations(range(4, 12)))
def test_lists_of_equal_length_have_the_simpler_formulas_overlap(one, other):
    assert overlap_of(one, other)[1] == pytest.approx(plain_rbo_of_equal_lengths(one, other))


@given(st.lists(st.tuples(ranked, ranked), min_size=1, max_size=6), st.integers(1, 200))
def test_rows_do_not_touch_each_other_however_many_are_looked_at_together(pairs, at_once):
    ones, others = (matrix(side) for side in zip(*pairs, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_PAIRS", at_once)
        whole = measure_overlap(ones, others)
    single = [overlap_of(*pair) for pair in pairs]
    np.testing.assert_array_equal(np.stack(whole, axis=1), single)


@given(ranked, ranked)
def test_overlap_is_symmetric_to_the_last_bit(one, other):
    np.testing.assert_array_equal(overlap_of(one, other), overlap_of(other, one))


@given(ranked.filter(bool))
def test_a_list_overlaps_with_itself_entirely(one):
    assert overlap_of(one, one) == (1, 1)


def test_a_list_that_ends_goes_on_as_it_began():
    jaccard, rbo = overlap_of([1, 2, 3], [1, 2, 3, 4, 5, 6])
    assert (jaccard, rbo) == (0.5, 1)


def test_disagreement_at_the_top_weighs_most():
    top, bottom = [2, 1, 3, 4, 5, 6], [1, 2, 3, 4, 6, 5]
    base = [1, 2, 3, 4, 5, 6]
    assert overlap_of(base, top)[1] < overlap_of(base, bottom)[1] < 1


def test_the_worked_example_of_two_lists():
    """By hand: X = 0, 2, 3 at depths 1, 2, 3."""
    expected = 0.1 / 0.9 * (2 / 2 * 0.9**2 + 3 / 3 * 0.9**3) + 1 * 0.9**3
    assert overlap_of([1, 2, 3], [2, 1, 3])[1] == pytest.approx(expected)


# The values of two models


QUIET = Progress(quiet=True)

floats = st.floats(-100, 100, width=32)
values = arrays.arrays(np.float32, (3, 4), elements=floats)


def plain_value_change(first, second):
    """The three definitions, one value at a time."""
    one, other = first.astype(float).tolist(), second.astype(float).tolist()
    norms = math.hypot(*one), math.hypot(*other)
    dot = sum(a * b for a, b in zip(one, other, strict=True))
    cosine = dot / (norms[0] * norms[1]) if all(norms) else math.nan
    ratio = norms[1] / norms[0] if norms[0] else math.nan
    apart = math.dist(one, other) / max(norms) if any(norms) else 0.0
    return cosine, ratio, apart


@given(values, values)
def test_each_number_is_that_of_its_definition(first, second):
    found = np.stack([*value_change(first, second).values()], axis=1)
    expected = [plain_value_change(one, other) for one, other in zip(first, second, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@given(values)
def test_equal_values_have_cosine_1_ratio_1_and_change_0_exactly(first):
    cosine, ratio, change = value_change(first, first.copy()).values()
    there = (first != 0).any(axis=1)
    assert (cosine[there] == 1).all()
    assert (ratio[there] == 1).all()
    assert (change == 0).all()


def test_a_value_switched_off_has_no_direction_and_changed_by_1():
    one, zero = np.ones((1, 3), np.float32), np.zeros((1, 3), np.float32)
    cosine, ratio, change = (column[0] for column in value_change(one, zero).values())
    assert np.isnan(cosine)
    assert (ratio, change) == (0, 1)
    cosine, ratio, change = (column[0] for column in value_change(zero, one).values())
    assert np.isnan(cosine)
    assert np.isnan(ratio)
    assert change == 1


def test_opposite_values_have_cosine_minus_1_and_changed_by_2():
    one = np.ones((1, 3), np.float32)
    cosine, ratio, change = (column[0] for column in value_change(one, -one).values())
    assert (cosine, ratio) == (-1, 1)
    assert change == pytest.approx(2)


def plant(memories):
    memories.values(1).data[5] += torch.arange(16.0)


def test_the_values_of_both_models_are_read_and_nothing_stays(tmp_path):
    first, second = model(), model(edit=plant)
    sides = (
        (index_of(tmp_path / "first", first), first, ""),
        (index_of(tmp_path / "second", second), second, ""),
    )
    (tmp_path / "out").mkdir()
    for layer, found in enumerate(value_changes(*sides, tmp_path / "out", "cpu", QUIET)):
        pair = [memories.values(layer).numpy() for memories in (first, second)]
        for name, expected in value_change(*pair).items():
            np.testing.assert_array_equal(found[name], expected)
    assert (layer, np.flatnonzero(found["value_change"]).tolist()) == (1, [5])
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("wrong", ["first", "second"])
def test_a_model_that_is_not_the_indexs_is_refused(wrong, tmp_path):
    memories, other = model(), model(seed=1)
    index = index_of(tmp_path / "index", memories)
    sides = [(index, other if which == wrong else memories, "") for which in ("first", "second")]
    changes = value_changes(*sides, tmp_path, "cpu", QUIET)
    with pytest.raises(
        StoreError, match=f"{memories.fingerprint()}; the loaded one has {other.fingerprint()}"
    ):
        next(changes)


def test_a_model_that_is_gone_is_told_with_what_to_do(tmp_path):
    memories = model()
    index = index_of(tmp_path / "index", memories)
    sides = (index, memories, "--first-model"), (index, None, "--second-model")
    changes = value_changes(*sides, tmp_path, "cpu", QUIET)
    with pytest.raises(ModelError, match=r"`second_model`\. .* `models=False` compares"):
        next(changes)


def test_a_named_model_that_is_not_there_is_told_as_it_was_given(tmp_path):
    memories = model()
    index = index_of(tmp_path / "index", memories)
    sides = (index, "/no/such.gguf", "--first-model"), (index, memories, "")
    changes = value_changes(*sides, tmp_path, "cpu", QUIET)
    with pytest.raises(ModelError, match=r"^No model '/no/such.gguf'") as raised:
        next(changes)
    assert "--no-models" not in str(raised.value)


# All numbers of a layer


def jaccard(one, other):
    union = {*one} | {*other}
    return len({*one} & {*other}) / len(union) if union else math.nan


def rbo(one, other):
    if not one and not other:
        return math.nan
    return plain_rbo(one, other) if one and other else 0.0


def ratio(one, other):
    return other / one if one > 0 and other > 0 else math.nan


def plain_changes(first, second):
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
        expected = [plain_changes(*pair) for pair in pairs]
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
    for name in change:
        np.testing.assert_array_equal(found[name], change[name])


# The memories that changed most


NAN = np.nan


def columns(change, cosine, moved):
    names = ("change", "value_cosine", "value_change")
    return dict(zip(names, map(np.array, (change, cosine, moved)), strict=True))


def test_memories_rank_by_change_then_by_cosine_then_by_cell():
    numbers = columns(
        change=[0.0, 0.2, 0.9, 0.2, 0.2, 0.9],
        cosine=[0.5, 0.8, 1.0, 0.7, 0.7, 1.0],
        moved=[0.9, 0.1, 0.0, 0.2, 0.2, 0.0],
    )
    assert most_changed(numbers, 9).tolist() == [2, 5, 3, 4, 1, 0]
    assert most_changed(numbers, 2).tolist() == [2, 5]
    assert most_changed_values(numbers, 9).tolist() == [0, 3, 4, 1]
    assert most_changed_values(numbers, 1).tolist() == [0]


def test_what_did_not_change_is_not_listed():
    numbers = columns(change=[0.0, NAN], cosine=[1.0, NAN], moved=[0.0, 0.0])
    assert most_changed(numbers, 9).tolist() == []
    assert most_changed_values(numbers, 9).tolist() == []


def test_without_models_only_triggers_count():
    numbers = columns(change=[0.1, NAN, 0.3], cosine=[NAN] * 3, moved=[NAN] * 3)
    assert most_changed(numbers, 9).tolist() == [2, 0]
    assert most_changed_values(numbers, 9).tolist() == []


def test_a_value_of_zeros_is_further_away_than_any_direction():
    numbers = columns(change=[0.0, NAN, 0.0], cosine=[-1.0, NAN, 1.0], moved=[2.0, 1.0, 0.5])
    assert most_changed(numbers, 9).tolist() == [1, 0, 2]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_row_shows_the_best_trigger_and_the_values_tokens_of_both_sides(name, tmp_path):
    first = index_of(tmp_path / "first", model(name))
    second = index_of(tmp_path / "second", model(name, seed=1))
    row = describe_memory(first, second, {"change": np.full(48, NAN), "rbo": np.arange(48.0)}, 29)
    assert (row["cell"], row["layer"], row["memory"]) == ("L1N5", 1, 5)
    assert row["change"] is None
    assert row["rbo"] == 29
    for side, index in ((row["first"], first), (row["second"], second)):
        memory = index["L1N5"]
        best = memory.triggers[0]
        assert side["trigger"] == {
            "coefficient": best.coefficient,
            "prefix": best.prefix,
            "next_token": best.next_token,
        }
        assert side["tokens"] == [token.token for token in memory.value.top[:10]]
        assert side["active_share"] == memory.stats.active_share
        assert ("negative_trigger" in side) == (name == "llama")
        if name == "llama":
            assert side["negative_trigger"]["prefix"] == memory.negative_triggers[0].prefix
            assert side["negative_tokens"][0] == memory.value.bottom[0].token


def test_a_long_trigger_is_shown_by_its_last_words_and_a_missing_one_as_none(tmp_path):
    words = [f"w{number}" for number in range(3, 33)]
    (tmp_path / "corpus.txt").write_text(" ".join(words) + "\n")

    def silence(memories):
        memories.keys(1).data[0] = 0
        memories.key_bias(1).data[0] = -10

    index = index_of(tmp_path / "index", model("opt", silence), prefixes="all", t=40)
    longest = [memory for memory in index.memories(1) if len(memory.triggers[:1])]
    place = max(longest, key=lambda memory: memory.triggers[0].length)
    row = describe_memory(index, index, {}, 24 + place.cell.memory)
    shown = row["first"]["trigger"]["prefix"]
    assert place.triggers[0].length > 12
    assert shown.startswith("…")
    assert place.triggers[0].prefix.endswith(shown[1:])
    assert len(shown.split()) <= 12
    assert describe_memory(index, index, {}, 24)["second"]["trigger"] is None
