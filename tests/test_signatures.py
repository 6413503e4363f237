"""Arguments of public functions are checked by the functions' own annotations."""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ffmem
from ffmem.cells import Cell
from ffmem.errors import FfmemError
from ffmem.signatures import CORPUS_OPTIONS, check_arguments, is_kind, kind_name

FUNCTIONS = [name for name in ffmem.__all__ if inspect.isfunction(getattr(ffmem, name))]


class Wrong:
    def __repr__(self):
        return "WRONG"


def check_every_parameter(function):
    """Assert that a function refuses `Wrong` for each parameter that takes no object at all."""
    parameters = inspect.signature(function).parameters.values()
    required = {
        one.name: next(value for value in ("x", ["x"], 1) if is_kind(value, one.annotation))
        for one in parameters
        if one.default is one.empty
    }
    for one in parameters:
        if not is_kind(Wrong(), one.annotation):
            name = f"{function.__name__}: {one.name} is WRONG. It must be "
            with pytest.raises(FfmemError, match=rf"^{name}"):
                function(**required | {one.name: Wrong()})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_names_the_parameter_and_what_it_takes(name):
    check_every_parameter(getattr(ffmem, name))


CASES = [
    (str, ["a", ""], [b"a", 3, None, ["a"]]),
    (int, [3, -1, np.int64(3)], [True, 3.0, "3", np.bool_(True)]),
    (
        float,
        [3, 0.5, np.float32(1), float("nan"), np.array(3.0), torch.tensor(3)],
        [True, "3", 1j, np.array([3.0]), torch.tensor([3.0]), torch.tensor(True)],
    ),
    (bool, [True, False], [0, "no", None]),
    (int | None, [None, 1], ["1", False]),
    (str | Path, ["a", Path("a")], [1, b"a"]),
    (Sequence[int], [[1], (1, 2), range(3), np.arange(3), []], [1, "12", [1.5], {1: 2}]),
    (Sequence[object], ["L0N1", [(0, 1)]], [3, {"L0N1": 2}]),
    (str | Sequence[str], ["a", ["a", "b"]], [3, ["a", 3]]),
    (Iterable[str | tuple[int, int]], [iter("ab"), [(0, 1)], [Cell(0, 1)]], [3, [3]]),
    (Mapping[str, float], [{}, {"a": 1}], [["a"], {"a": "b"}, {1: 2.0}]),
    (dict[str, Any] | str, [{"a": object()}, "a"], [{1: 2}]),
    (Callable[[str], None], [print, lambda: 3], ["print"]),
    ("Index | str | None", ["a", None], [3, Path("a")]),
    ("Path | Index", [Path("a")], ["a", None]),
    (Any, [object(), None], []),
]


@pytest.mark.parametrize(("kind", "taken", "refused"), CASES, ids=[str(case[0]) for case in CASES])
def test_values_are_compared_with_annotations(kind, taken, refused):
    assert [one for one in taken if not is_kind(one, kind)] == []
    assert [one for one in refused if is_kind(one, kind)] == []


def test_annotations_are_shown_without_modules():
    assert kind_name(str | Path | None) == "str | Path | None"
    assert kind_name("Memories | str") == "Memories | str"
    assert kind_name(Sequence[tuple[int, Path]]) == "Sequence[tuple[int, Path]]"


def test_a_checked_function_gets_its_arguments_as_they_were_passed():
    @check_arguments
    def add(one: int, *, two: "int | None" = 2, three=3):
        """Add."""
        return one, two, three

    assert (add(1), add(1, two=None, three="x")) == ((1, 2, 3), (1, None, "x"))
    assert (add.__name__, add.__doc__) == ("add", "Add.")
    with pytest.raises(TypeError, match=r"add\(\) got an unexpected keyword argument 'four'$"):
        add(1, four=4)
    with pytest.raises(TypeError, match=r"add\(\) missing a required argument: 'one'$"):
        add()
    with pytest.raises(FfmemError, match=r"add: one is a list\. It must be int\.$"):
        add(["x" * 100])
    with pytest.raises(FfmemError, match=r"add: one is an OrderedDict\. It must be int\.$"):
        add(OrderedDict({"x" * 100: 1}))


def test_options_of_the_corpus_are_pointed_to_it():
    assert {one.name for one in fields(ffmem.Corpus)} == CORPUS_OPTIONS | {"source"}
    with pytest.raises(
        TypeError, match=r"Pass these options to Corpus\(\), not to index\(\): limit, unit\.$"
    ):
        ffmem.index("mini-wiki", "text.txt", "out", limit=5, unit="line")
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'limits'$"):
        ffmem.index("mini-wiki", "text.txt", "out", limits=5)


def test_a_dtype_of_torch_is_passed_on_by_its_name():
    @check_arguments
    def cast(dtype: str):
        """Cast."""
        return dtype

    assert (cast(torch.bfloat16), cast("float32")) == ("bfloat16", "float32")
    assert ffmem.load("mini-wiki", dtype=torch.bfloat16).dtype == torch.bfloat16
