import numpy as np
import pytest

from ffmem.interventions.compare import describe_memory, most_changed, most_changed_values
from tests.interventions.pairs import index_of, model

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
