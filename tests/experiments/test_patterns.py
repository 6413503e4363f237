"""Figure 2 against plain counting over the patterns that an index keeps."""

import json

import pytest

from ffmem.cells import Cell
from ffmem.errors import StoreError
from ffmem.experiments.base import ExperimentConfig, check_claims, find
from ffmem.experiments.context import ExperimentContext
from ffmem.patterns.labels import LABELS
from ffmem.patterns.store import ExaminedList, NoPatterns, Pattern, PatternWriter
from tests.annotation.kept_patterns import copied, first_three, keep, listed, signs


def patterns(index, seed=0):
    """Measure Figure 2 without a model."""
    config = ExperimentConfig(seed=seed)
    return find("patterns").run(ExperimentContext(index=index, model=no_model, config=config))


def no_model():
    raise AssertionError("No model is needed.")


FIELDS = "layer source shallow both semantic uncovered patterns_per_key n keys with_pattern"


@pytest.fixture
def own(index, tmp_path):
    return copied(index, tmp_path / "index")


def counted(index, layer, seen):
    """Return the labels of all triggers of a layer's main lists, and patterns per list."""
    found, per_list = [], []
    for memory in range(index.layout.widths[0]):
        sign = int(signs(index)[layer][memory])
        if not sign:
            continue
        cell = Cell(layer, memory)
        n = len(listed(index, cell, sign))
        own = seen(cell, sign, n)
        per_list.append(len(own))
        for rank in range(1, n + 1):
            kinds = {kind for kind, ranks in own if rank in ranks}
            found.append("both" if len(kinds) > 1 else kinds.pop() if kinds else "uncovered")
    return found, per_list


def test_the_shares_are_what_counting_gives(own):
    keep(own, "automatic", first_three)
    result = patterns(own)
    assert [row["layer"] for row in result.rows] == list(range(own.n_layers))
    for row in result.rows:
        found, per_list = counted(own, row["layer"], first_three)
        assert set(FIELDS.split()) <= set(row)
        assert row["source"] == "automatic"
        assert row["n"] == len(found)
        assert row["keys"] == len(per_list)
        assert row["patterns_per_key"] == pytest.approx(sum(per_list) / len(per_list))
        assert row["with_pattern"] == pytest.approx(sum(map(bool, per_list)) / len(per_list))
        for name in LABELS:
            assert row[name] == pytest.approx(found.count(name) / len(found))
        assert sum(row[name] for name in LABELS) == pytest.approx(1)
        assert row["low"] <= row["covered"] <= row["high"]


def test_every_source_has_all_its_layers_people_first(own):
    keep(own, "automatic", lambda cell, sign, n: [], {"shuffled": 0.01})
    keep(own, "human", first_three, {"control": {"false_pattern_rate": 0.1}})
    result = patterns(own)
    layers = range(own.n_layers)
    assert [(row["source"], row["layer"]) for row in result.rows] == [
        (source, layer) for source in ("human", "automatic") for layer in layers
    ]
    automatic = [row for row in result.rows if row["source"] == "automatic"]
    assert {row["uncovered"] for row in automatic} == {1.0}
    assert {row["with_pattern"] for row in automatic} == {0.0}
    assert result.also["sources"]["automatic"] == {"shuffled": 0.01}
    assert result.also["sources"]["human"]["control"]["false_pattern_rate"] == 0.1
    assert "not" in result.also["protocol"]


def test_layers_in_which_nobody_looked_have_a_row_without_numbers(own):
    sign = int(signs(own)[0][3])
    cell, n = Cell(0, 3), len(listed(own, (0, 3), sign))
    writing = PatternWriter(own, "human")
    seen = Pattern(cell, sign, 1, "semantic", "a topic", "person", "", (1, 2, 3))
    writing.layer(0, [ExaminedList(cell, sign, n)], [seen])
    writing.commit({})
    first, *others = patterns(own).rows
    assert first["semantic"] == pytest.approx(3 / n)
    assert first["keys"] == 1
    assert first["low"] is first["high"] is None  # of one key nobody knows how others differ
    for row in others:
        assert row["n"] == row["keys"] == 0
        assert row["shallow"] is row["uncovered"] is row["patterns_per_key"] is None
    json.dumps(patterns(own).to_dict(), allow_nan=False)
    assert find("patterns").summary(patterns(own))
    assert find("patterns").chart(patterns(own))
    assert check_claims([patterns(own)])


def test_without_patterns_the_command_to_find_them_is_named(own):
    with pytest.raises(
        NoPatterns, match=r"no patterns yet\. Find them with `ffmem patterns detect"
    ):
        patterns(own)


def test_patterns_of_another_state_of_the_index_are_not_read(own):
    keep(own, "automatic", first_three)
    path = own.folder / "patterns/automatic/manifest.json"
    path.write_text(path.read_text().replace('"index": "', '"index": "0'))
    with pytest.raises(StoreError, match="has changed since its patterns"):
        patterns(own)


def test_no_model_is_needed_and_the_same_patterns_give_the_same_bytes(own, tmp_path):
    keep(own, "automatic", first_three)
    result = patterns(own)
    assert result == patterns(own)
    assert result.quoted
    one, two = (result.write(tmp_path / name).read_bytes() for name in ("a", "b"))
    assert one == two
    assert patterns(own, seed=1).rows[0]["covered"] == result.rows[0]["covered"]
