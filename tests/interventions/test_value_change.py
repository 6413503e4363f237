import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ffmem.errors import ModelError, StoreError
from ffmem.interventions.compare import _read_values, _Side, value_change
from ffmem.progress import Progress
from tests.interventions.pairs import index_of, model

QUIET = Progress(quiet=True)

numbers = st.floats(-100, 100, width=32)
values = arrays.arrays(np.float32, (3, 4), elements=numbers)


def plain(first, second):
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
    found = np.stack(value_change(first, second), axis=1)
    expected = [plain(one, other) for one, other in zip(first, second, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@given(values)
def test_equal_values_have_cosine_1_ratio_1_and_change_0_exactly(first):
    cosine, ratio, change = value_change(first, first.copy())
    there = (first != 0).any(axis=1)
    assert (cosine[there] == 1).all()
    assert (ratio[there] == 1).all()
    assert (change == 0).all()


def test_a_value_switched_off_has_no_direction_and_changed_by_1():
    one, zero = np.ones((1, 3), np.float32), np.zeros((1, 3), np.float32)
    cosine, ratio, change = (column[0] for column in value_change(one, zero))
    assert np.isnan(cosine)
    assert (ratio, change) == (0, 1)
    cosine, ratio, change = (column[0] for column in value_change(zero, one))
    assert np.isnan(cosine)
    assert np.isnan(ratio)
    assert change == 1


def test_opposite_values_have_cosine_minus_1_and_changed_by_2():
    one = np.ones((1, 3), np.float32)
    cosine, ratio, change = (column[0] for column in value_change(one, -one))
    assert (cosine, ratio) == (-1, 1)
    assert change == pytest.approx(2)


def plant(memories):
    memories.values(1).data[5] += torch.arange(16.0)


def test_the_values_of_both_models_are_read_and_nothing_stays(tmp_path):
    first, second = model(), model(edit=plant)
    sides = (
        _Side(index_of(tmp_path / "first", first), first, ""),
        _Side(index_of(tmp_path / "second", second), second, ""),
    )
    (tmp_path / "out").mkdir()
    with _read_values(*sides, tmp_path / "out", "cpu", QUIET) as values:
        for layer in range(2):
            for found, memories in zip(values(layer), (first, second), strict=True):
                np.testing.assert_array_equal(found, memories.values(layer).numpy())
        assert np.flatnonzero(value_change(*values(1)).change).tolist() == [5]
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("wrong", ["first", "second"])
def test_a_model_that_is_not_the_indexs_is_refused(wrong, tmp_path):
    memories, other = model(), model(seed=1)
    index = index_of(tmp_path / "index", memories)
    sides = [
        _Side(index, other if which == wrong else memories, "") for which in ("first", "second")
    ]
    changes = _read_values(*sides, tmp_path, "cpu", QUIET)
    with pytest.raises(
        StoreError, match=f"{memories.fingerprint()}; the loaded one has {other.fingerprint()}"
    ):
        changes.__enter__()


def test_a_model_that_is_gone_is_told_with_what_to_do(tmp_path):
    memories = model()
    index = index_of(tmp_path / "index", memories)
    sides = _Side(index, memories, "--first-model"), _Side(index, None, "--second-model")
    changes = _read_values(*sides, tmp_path, "cpu", QUIET)
    with pytest.raises(ModelError, match=r"--second-model\. --no-models .* compares"):
        changes.__enter__()


def test_a_named_model_that_is_not_there_is_told_as_it_was_given(tmp_path):
    memories = model()
    index = index_of(tmp_path / "index", memories)
    sides = _Side(index, "/no/such.gguf", "--first-model"), _Side(index, memories, "")
    changes = _read_values(*sides, tmp_path, "cpu", QUIET)
    with pytest.raises(ModelError, match=r"^No model '/no/such.gguf'") as raised:
        changes.__enter__()
    assert "--no-models" not in str(raised.value)
