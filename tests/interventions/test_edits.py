"""Which edits there are, which are refused, and edits.json."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffmem.cells import BankRecord, Layout
from ffmem.errors import FfmemError, StoreError, UnknownCell
from ffmem.interventions.edits import Edit, Edits, EditsFile, resolve_position


def test_every_edit_is_a_factor_and_a_constant():
    edits = Edits.of(off=["L0N1"], set={"L0N2": 3}, scale={"1.0": 0.5})
    assert list(edits) == [
        Edit("L0N1", "off", 0.0, 0.0),
        Edit("L0N2", "set", 0.0, 3.0),
        Edit("L1N0", "scale", 0.5, 0.0),
    ]
    assert str(edits) == "L0N1 off, L0N2 = 3, L1N0 × 0.5"


def test_one_name_alone_is_a_list_of_one():
    assert Edits.of(off="L0N1") == Edits.of(off=["L0N1"])


def test_the_same_edit_twice_is_one():
    assert len(Edits.of(off=["L0N1", "0.1"])) == 1


@pytest.mark.parametrize(
    "both", [{"off": ["L0N1"], "set": {"0.1": 2}}, {"scale": {"L0N1": 2, "0:1": 3}}]
)
def test_two_different_edits_of_one_memory_are_refused(both):
    with pytest.raises(FfmemError, match="L0N1 is edited twice"):
        Edits.of(**both)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), "3", True, None, 1j])
def test_only_finite_numbers_are_taken(number):
    with pytest.raises(FfmemError, match="finite number"):
        Edits.of(set={"L0N1": number})


def test_a_mean_needs_an_index():
    with pytest.raises(FfmemError, match="stored in an index"):
        Edits.of(mean=["L0N1"])


def test_a_list_with_numbers_is_refused():
    with pytest.raises(FfmemError, match="without numbers"):
        Edits.of(off={"L0N1": 2})


def test_a_memory_that_the_model_lacks_is_refused():
    edits = Edits.of(off=["L2N0"])
    assert edits.resolve(Layout.dense([1, 1, 1])) == edits
    with pytest.raises(UnknownCell, match="L2N0"):
        edits.resolve(Layout.dense([10, 10]))


def test_a_memory_of_a_bank_gets_its_place_and_two_names_of_it_are_one():
    layout = Layout([[BankRecord(size=3), BankRecord(size=2, kind="expert", count=4)]])
    edits = Edits.of(off=["L0E2N1", (0, 8)], positions=[0]).resolve(layout)
    assert [edit.cell for edit in edits] == ["L0E2N1"]
    assert edits.by_layer(layout) == {0: [(8, Edit("L0E2N1", "off", 0.0, 0.0))]}
    assert edits.positions == (0,)


@given(st.integers(1, 50), st.data())
def test_positions_count_from_both_ends(n, data):
    position = data.draw(st.integers(-n, n - 1))
    assert resolve_position(position, n) == range(n)[position]


@pytest.mark.parametrize("position", [3, -4])
def test_a_position_outside_the_prompt_is_refused(position):
    with pytest.raises(FfmemError, match="has 3 tokens"):
        Edits.of(off=["L0N0"], positions=[position]).resolve(Layout.dense([1]), 3)


def test_positions_are_resolved_once_and_in_order():
    edits = Edits.of(off=["L0N0"], positions=[-1, 0, 2])
    assert edits.resolve(Layout.dense([1]), 3).positions == (0, 2)


def test_numbers_of_numpy_are_numbers():
    assert Edits.of(set={"L0N0": np.float32(2)}) == Edits.of(set={"L0N0": 2})


@pytest.mark.parametrize("positions", [[], [0.5], "0"])
def test_edits_that_act_nowhere_are_refused(positions):
    with pytest.raises(FfmemError, match="Positions"):
        Edits.of(off=["L0N0"], positions=positions)


@pytest.mark.parametrize("wrong", [{"off": 5}, {"set": ["L0N1=2"]}, {"scale": "L0N1"}])
def test_lists_and_numbers_are_told_apart(wrong):
    with pytest.raises(FfmemError, match="takes"):
        Edits.of(**wrong)


EDITS = Edits.of(off=["L0N1"], set={"L1N2": 0.1}, scale={"L0N3": -2})


def test_edits_json_reads_back_as_it_was_written(tmp_path):
    written = EditsFile(edits=list(EDITS), model="model", hash_before="before", hash_after="after")
    (tmp_path / "edits.json").write_text(written.to_json())
    for path in (tmp_path, tmp_path / "edits.json"):
        assert EditsFile.read(path) == written
        assert EditsFile.read(path).to_edits() == EDITS


def test_a_file_written_by_hand_needs_only_edits(tmp_path):
    edit = {"cell": "0.1", "how": "off", "factor": 0, "constant": 0}
    (tmp_path / "mine.json").write_text(json.dumps({"edits": [edit]}))
    assert EditsFile.read(tmp_path / "mine.json").to_edits() == Edits.of(off=["L0N1"])


EDIT = {"cell": "L0N1", "how": "off", "factor": 0.0, "constant": 0.0}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "Expecting property name"),
        ("[" * 100_000, "Cannot read the edits"),
        ("[]", "not an object"),
        ("{}", "edits is missing"),
        ({"edits": []}, "no edits"),
        ({"edits": [EDIT], "more": 1}, "more is unknown"),
        ({"edits": [EDIT], "format": "ffmem-edits-9"}, "'ffmem-edits-9'"),
        ({"edits": [EDIT | {"cell": "L0"}]}, "not the name of a memory"),
        ({"edits": [EDIT | {"how": "burn"}]}, "burn L0N1 .* not an edit"),
        ({"edits": [EDIT | {"constant": float("inf")}]}, "not an edit"),
        ({"edits": [EDIT | {"factor": "2"}]}, "factor is '2'"),
        ({"edits": [EDIT, EDIT | {"how": "scale", "factor": 2.0}]}, "edited twice"),
    ],
)
def test_a_broken_file_is_refused_with_its_fault(content, says, tmp_path):
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "edits.json").write_text(text)
    with pytest.raises(StoreError, match=says):
        EditsFile.read(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(StoreError, match=r"No file .*edits\.json"):
        EditsFile.read(tmp_path)


def test_numbers_may_be_tensors_and_arrays_without_dimensions():
    numbers = {"L0N1": torch.tensor(3.0), "L0N2": np.array(2), "L0N3": np.float32(1.5)}
    assert [edit.constant for edit in Edits.of(set=numbers)] == [3.0, 2.0, 1.5]
    with pytest.raises(FfmemError, match="Use a finite number"):
        Edits.of(set={"L0N1": torch.ones(2)})
