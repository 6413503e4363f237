"""Checks of the arguments that Python callers pass, by the annotations of the function.

    @check_arguments
    def search(folder: str | Path | Index, query: str, …): …

    search(index, 3)      FfmemError: search: query is 3. It must be str.

An annotation in quotes names classes that may not be imported yet, so a value is compared with it
by the names of its classes. Numbers may be those of numpy, or tensors and arrays without
dimensions; dtypes may be those of torch, and are passed on by name.
"""

import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin

from ffmem.errors import FfmemError

CORPUS_OPTIONS = {"unit", "column", "detokenize", "limit", "content_only"}
"""Options of `Corpus`, which people pass to the functions that read one."""

P = ParamSpec("P")
R = TypeVar("R")


def check_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that raises unless its arguments are what its annotations say."""
    signature = inspect.signature(function)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            advice = _corpus_advice(function.__name__, signature, kwargs)
            raise TypeError(f"{function.__qualname__}() {error}{advice}") from None
        for name, value in bound.arguments.items():
            kind = signature.parameters[name].annotation
            if name == "dtype" and _is_torch_dtype(value):
                value = bound.arguments[name] = str(value).removeprefix("torch.")
            if not is_kind(value, kind):
                shown = repr(value) if len(repr(value)) <= 80 else _with_article(value)
                raise FfmemError(
                    f"{function.__qualname__}: {name} is {shown}. It must be {kind_name(kind)}."
                )
        return function(*bound.args, **bound.kwargs)

    return checked


def _corpus_advice(name: str, signature: inspect.Signature, kwargs: Mapping[str, Any]) -> str:
    """Return advice about keyword arguments that belong to the corpus."""
    given = kwargs.keys() - signature.parameters.keys()
    if not given or not given <= CORPUS_OPTIONS or "corpus" not in signature.parameters:
        return ""
    return f". Pass these options to Corpus(), not to {name}(): {', '.join(sorted(given))}."


def _is_torch_dtype(value: object) -> bool:
    """Return whether a value is torch.float32 or the like; torch need not be installed."""
    return (type(value).__module__, type(value).__name__) == ("torch", "dtype")


def _with_article(value: object) -> str:
    """Return the class of a value, as `a list` or `an Index`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def to_number(value: Any) -> Any:
    """Return a tensor or array without dimensions as the number in it, and all else as it is."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return value


def is_kind(value: Any, kind: Any) -> bool:
    """Return whether a value is what an annotation says, with all that a list or dict holds."""
    origin, inside = get_origin(kind), get_args(kind)
    if kind in (Any, object, inspect.Parameter.empty):
        return True
    if isinstance(kind, str):
        named = kind.replace("None", "NoneType").split(" | ")
        return any(one.__name__ in named for one in type(value).__mro__)
    if origin in (Union, UnionType):
        return any(is_kind(value, one) for one in inside)
    if kind in (int, float):
        number, value = (Integral, value) if kind is int else (Real, to_number(value))
        return isinstance(value, number) and not isinstance(value, bool)
    if kind is Path:
        return isinstance(value, os.PathLike)
    if origin in (None, tuple, Callable):
        return isinstance(value, origin or kind)
    if issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(
            is_kind(key, inside[0]) and is_kind(one, inside[1]) for key, one in value.items()
        )
    if isinstance(value, str):  # a list of letters is hardly what is meant
        return inside[0] in (Any, object)
    if isinstance(value, Mapping | bytes) or not isinstance(value, Iterable):
        return False
    return not isinstance(value, Collection) or all(is_kind(one, inside[0]) for one in value)


def kind_name(kind: Any) -> str:
    """Return an annotation as Python writes it, without modules."""
    return re.sub(r"\b(\w+\.)+", "", inspect.formatannotation(kind)).replace("'", "")
