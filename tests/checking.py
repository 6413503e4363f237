"""Shapes in signatures are checked at every call, at a price that a large suite can pay.

jaxtyping's import hook decorates every function, and its check binds the arguments of each call:
more than half of the time of tests with tiny models. So only functions whose annotations have
shapes are checked; mypy checks all other types.

A function within another is decorated at every call of the other, and to prepare its check takes
longer than most passes of a tiny model. All functions of one place in the source with the same
annotations have the same check:

    checked(f) = check(place, annotations) ∘ f
"""

import re
import threading
from functools import partial, wraps
from inspect import signature
from types import FunctionType
from typing import get_args, get_origin

import jaxtyping

_prepare = jaxtyping.jaxtyped
_checks = {}
_now = threading.local()
_QUOTED_SHAPE = re.compile(r"\b(Float|Int|UInt|Bool|Shaped|Num|Real)\d*\[")


def has_shape(hint):
    """Return whether an annotation, which may be in quotes, has a shape somewhere."""
    if isinstance(hint, str):
        return _QUOTED_SHAPE.search(hint) is not None
    if isinstance(hint, list):
        return any(map(has_shape, hint))
    is_shape = isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)
    return is_shape or any(map(has_shape, get_args(hint)))


def _names_shapes(thing):
    """Return whether a function, method, property or class has annotations with shapes."""
    if isinstance(thing, property):
        return any(map(_names_shapes, (thing.fget, thing.fset)))
    thing = getattr(thing, "__func__", thing)
    return any(map(has_shape, getattr(thing, "__annotations__", {}).values()))


def _is_within_another(thing):
    """Defaults may differ from one definition to the next: such a function has its own check."""
    return (
        isinstance(thing, FunctionType)
        and "<locals>" in thing.__qualname__
        and thing.__defaults__ is None
        and thing.__kwdefaults__ is None
    )


def _known(hint):
    """Return what tells annotations apart: of a shape, jaxtyping makes a new class every time."""
    if isinstance(hint, list):
        return tuple(map(_known, hint))
    if parts := get_args(hint):
        return get_origin(hint), *map(_known, parts)
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return hint.__name__, hint.array_type
    return hint


def _check(function, typechecker):
    """Return a function that checks arguments and result, and calls the function of now."""
    now = _now

    def called(*args, **kwargs):
        return now.function(*args, **kwargs)

    # With the globals of its place, where jaxtyping looks up annotations in quotes.
    called = FunctionType(
        called.__code__, function.__globals__, function.__name__, None, called.__closure__
    )
    called = wraps(function)(called)
    called.__signature__ = signature(function)
    del called.__wrapped__  # or the first function would live for ever, with all that it holds
    return _prepare(called, typechecker=typechecker)


def jaxtyped(function=None, *, typechecker):
    """Return the function with its check, as jaxtyping's decorator of this name does."""
    if function is None:
        return partial(jaxtyped, typechecker=typechecker)
    if not _names_shapes(function):
        return function
    if not _is_within_another(function):
        return _prepare(function, typechecker=typechecker)
    annotations = [(name, _known(hint)) for name, hint in function.__annotations__.items()]
    place = (function.__code__, function.__module__, typechecker, *annotations)
    try:
        check = _checks.get(place)
    except TypeError:  # an annotation that cannot be remembered
        return _prepare(function, typechecker=typechecker)
    if check is None:
        check = _checks[place] = _check(function, typechecker)

    @wraps(function)
    def checked(*args, **kwargs):
        before = getattr(_now, "function", None)
        _now.function = function
        try:
            return check(*args, **kwargs)
        finally:
            _now.function = before

    return checked


def install():
    """Let jaxtyping's import hook, which looks its decorator up by name, find this one."""
    jaxtyping.jaxtyped = jaxtyped
