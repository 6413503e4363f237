"""Shapes are checked at every definition, also in functions within functions."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Annotated

import jaxtyping
import pytest
import torch
from jaxtyping import Float, Int, TypeCheckError, install_import_hook
from torch import Tensor

from tests import checking

SOURCE = '''
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


class Pair(tuple):
    """A type that annotations name in quotes."""


def scaled(by):
    def inner(x: Float[Tensor, "a b"]) -> Float[Tensor, "a b"]:
        return by(x)

    return inner


def of_kind(kind):
    def inner(x: kind) -> kind:
        return x

    return inner


def tagged(kind, tag):
    def inner(x: kind) -> str:
        return tag

    return inner


def holding(thing):
    def inner(x: Float[Tensor, ""]) -> bool:
        return thing is not None

    return inner


def quoted():
    def inner(x: "Pair | Float[Tensor, ' a']") -> int:
        return len(x)

    return inner


def with_default(number):
    def inner(x: "int | Float[Tensor, ' a']" = number) -> int:
        return x

    return inner


def without_shapes(x: int) -> str:
    return x


@dataclass
class Named:
    name: str


class Shapes:
    @property
    def row(self) -> Float[Tensor, " a"]:
        return 1

    @staticmethod
    def length(x: Float[Tensor, " a"]) -> int:
        return len(x)


@dataclass
class Row:
    numbers: Float[Tensor, " a"]


def countdown(n):
    def inner(left: "int | Float[Tensor, ' a']") -> list:
        return [(n, left), *(countdown(n + 1)(left - 1) if left else [])]

    return inner
'''


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A module that came in through jaxtyping's import hook, as all of ffmem does here."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "planted_closures.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        with install_import_hook("planted_closures", "beartype.beartype"):
            import planted_closures
        yield planted_closures


def test_the_import_hook_finds_the_decorator_that_prepares_once():
    assert jaxtyping.jaxtyped is checking.jaxtyped


def test_every_definition_is_checked_and_calls_its_own_function(planted):
    square, row = torch.ones(2, 2), torch.ones(2)
    for factor in (2, 3):
        inner = planted.scaled(lambda x, factor=factor: factor * x)
        assert torch.equal(inner(square), factor * square)
        with pytest.raises(TypeCheckError, match=r"parameters of planted_closures\.scaled"):
            inner(row)
    first, second = (planted.scaled(lambda x, n=n: n * x) for n in (5, 7))
    assert [float(f(square)[0, 0]) for f in (second, first, second)] == [7, 5, 7]


def test_every_result_is_checked_against_the_shapes_of_its_arguments(planted):
    for wrong in (lambda x: x.T, lambda x: x[0], lambda x: x.long()):
        with pytest.raises(TypeCheckError, match=r"return value of planted_closures\.scaled"):
            planted.scaled(wrong)(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("kind", "other", "thing"),
    [
        (Float[Tensor, "a b"], Float[Tensor, "a a"], torch.ones(2, 3)),
        (Float[Tensor, " a"], Int[Tensor, " a"], torch.ones(2)),
        (list[Float[Tensor, " a"]], list[Int[Tensor, " a"]], [torch.ones(2)]),
        (Float[Tensor, " a"] | None, Int[Tensor, " a"] | None, torch.ones(2)),
        (Annotated[Float[Tensor, " a"], []], Annotated[Int[Tensor, " a"], []], torch.ones(2)),
    ],
    ids=["shapes", "numbers", "parts", "unions", "no hash"],
)
def test_annotations_that_differ_from_one_definition_to_the_next_are_told_apart(
    planted, kind, other, thing
):
    for _ in range(2):
        assert planted.of_kind(kind)(thing) is thing
        with pytest.raises(TypeCheckError):
            planted.of_kind(other)(thing)


def test_methods_properties_and_dataclasses_are_checked(planted):
    assert planted.Shapes.length(torch.ones(2)) == 2
    for wrong in (
        lambda: planted.Shapes().row,
        lambda: planted.Shapes.length(torch.ones(2, 2)),
        lambda: planted.Row(torch.ones(2, 2)),
    ):
        with pytest.raises(TypeCheckError):
            wrong()


def test_functions_without_shapes_are_left_to_mypy(planted):
    assert planted.without_shapes("a") == "a"
    assert planted.Named(1).name == 1
    assert not hasattr(planted.without_shapes, "__wrapped__")


@pytest.mark.parametrize(
    "hint",
    ['Float[Tensor, "a b"] | None', "dict[str, Int64[ndarray, ' a']]", "UInt8[Tensor, '']"],
)
def test_shapes_in_quotes_are_found(hint):
    assert checking.has_shape(hint)
    assert not checking.has_shape(hint.split("[Tensor")[0].replace("Int64[ndarray, ' a']", "Point"))


def test_annotations_in_quotes_are_those_of_the_module(planted):
    assert planted.quoted()(planted.Pair((1, 2))) == 2
    with pytest.raises(TypeCheckError):
        planted.quoted()((1, 2))


def test_defaults_are_those_of_each_definition(planted):
    assert [planted.with_default(number)() for number in (1, 2)] == [1, 2]
    with pytest.raises(TypeCheckError):
        planted.with_default(1)("a")


def test_one_that_calls_another_of_the_same_place_comes_back_to_itself(planted):
    assert planted.countdown(0)(3) == [(0, 3), (1, 2), (2, 1), (3, 0)]


def test_an_exception_leaves_nothing_behind(planted):
    def fail(x):
        raise ZeroDivisionError

    twice = planted.scaled(lambda x: 2 * x)
    for wrong, error in ((torch.ones(2, 2), ZeroDivisionError), (1, TypeCheckError)):
        with pytest.raises(error):
            planted.scaled(fail)(wrong)
        assert float(twice(torch.ones(1, 1))) == 2
    assert checking._now.function is None


def kind_that(meets):
    """Return a type of everything, which does something while "now" is checked."""

    class Meeting(type):
        def __instancecheck__(cls, found):
            if found == "now":
                meets()
            return True

    return Meeting("Kind", (), {}) | Float[Tensor, " a"]


def test_another_that_runs_during_a_check_changes_nothing(planted):
    seen = []
    row = Float[Tensor, " a"]
    kind = kind_that(lambda: seen.append(planted.tagged(row, "inner")(torch.ones(2))))
    assert planted.tagged(kind, "outer")("now") == "outer"
    assert set(seen) == {"inner"}


def test_threads_do_not_mix_their_functions(planted):
    both, found = threading.Barrier(2, timeout=60), {}
    kind = kind_that(both.wait)

    def work(tag):
        found[tag] = planted.tagged(kind, tag)("now")

    threads = [threading.Thread(target=work, args=(tag,)) for tag in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == {"one": "one", "two": "two"}


def test_what_a_function_holds_is_let_go_with_it(planted):
    held = {1, 2}
    gone = weakref.ref(held)
    assert planted.holding(held)(torch.tensor(1.0))
    del held
    gc.collect()
    assert gone() is None


def test_a_place_is_prepared_once():
    prepared = []

    def typechecker(function):
        prepared.append(function.__name__)
        return function

    def define():
        def inner(x: Callable[[Float[Tensor, "a b"]], int] | None) -> Float[Tensor, " a"] | None:
            return x

        return checking.jaxtyped(typechecker=typechecker)(inner)

    assert [define()(n) for n in range(5)] == [0, 1, 2, 3, 4]
    assert prepared == ["inner", "inner"]  # its arguments, and its result
