"""Command-line options from a dataclass.

A configuration is written down once: a dataclass whose fields carry their help text and bounds.

    @dataclass(frozen=True, kw_only=True)
    class Config(Record):
        layers: int = option("Number of layers.", minimum=1)
        seed: int = option("Random seed.", 0, minimum=0)

        def __post_init__(self) -> None:
            check_options(self)

From it follow the options of a command (`@dataclass_options(Config)`), the checks of what Python
callers pass (`check_options`), and the file it is recorded in (`Record`).
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import click

from ffmem.errors import FfmemError
from ffmem.signatures import is_kind, kind_name

Command = Callable[..., Any]
AnyConfig = TypeVar("AnyConfig")

_METAVARS = {int: "N", float: "X"}


def option(
    help: str,
    default: Any = MISSING,
    *,
    minimum: int | float | None = None,
    maximum: int | float | None = None,
    above: int | float | None = None,
    below: int | float | None = None,
    choices: Sequence[str] = (),
    metavar: str | None = None,
    flag: str | None = None,
    compare: bool = True,
) -> Any:
    """Return a dataclass field that is an option, required unless it has a default.

    Bounds are inclusive (`minimum`, `maximum`) or exclusive (`above`, `below`). A field of type
    `int | str` takes a number or one of the `choices`. `flag` is the option's name if it is not the
    field's own, such as `-t`; `compare` is that of `dataclasses.field`.
    """
    bounds = {"minimum": minimum, "maximum": maximum, "above": above, "below": below}
    names = {"metavar": metavar, "flag": flag}
    metadata = {"help": help, "choices": tuple(choices), **names, **bounds}
    return field(default=default, metadata=metadata, compare=compare)


def dataclass_options(
    config: type, *, only: Sequence[str] = (), defaults: Mapping[str, Any] | None = None
) -> Callable[[Command], Command]:
    """Return a decorator that gives a click command one option per field, in their order.

    `only` names some of the fields. `defaults` are those of a command that has its own.
    """
    types = get_type_hints(config)
    options = [
        _click_option(
            one, _value_type(types[one.name]), (defaults or {}).get(one.name, one.default)
        )
        for one in _option_fields(config)
        if not only or one.name in only
    ]
    return add_options(*options)


def add_options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that adds several options, in their order."""

    def decorate(command: Command) -> Command:
        for add_option in reversed(options):
            command = add_option(command)
        return command

    return decorate


def take_options(values: dict[str, Any], config: type) -> dict[str, Any]:
    """Remove the options of a dataclass from a command's values, and return them."""
    names = [one.name for one in _option_fields(config)]
    return {name: values.pop(name) for name in names if name in values}


def from_parameters(config: type[AnyConfig], parameters: Mapping[str, Any]) -> AnyConfig:
    """Return the config of a function whose parameters include all of its options."""
    return config(**{one.name: parameters[one.name] for one in _option_fields(config)})


def check_options(config: Any, error: type[FfmemError] = FfmemError) -> None:
    """Raise unless every value of a config is what its field allows; None is always allowed."""
    types = get_type_hints(type(config))
    for one in _option_fields(config):
        value, meta = getattr(config, one.name), one.metadata
        name, kind = option_name(one), _value_type(types[one.name])
        if value is None or value in meta["choices"]:
            continue
        if kind in (int, float):
            if not _is_allowed(value, kind, meta):
                shown = repr(value) if isinstance(value, str) else value
                choices = "".join(f" or {choice!r}" for choice in meta["choices"])
                raise error(f"{name} {shown}: use {_bounds(kind, meta)}{choices}.")
        elif meta["choices"]:
            raise error(f"{name} {value}: unknown value. Use one of {', '.join(meta['choices'])}.")
        elif not is_kind(value, kind):
            raise error(f"{name} {value!r}: it must be {kind_name(kind)}.")


def option_name(one: Field[Any]) -> str:
    """Return the option of a field: `batch_tokens` is `--batch-tokens`."""
    return one.metadata["flag"] or f"--{one.name.replace('_', '-')}"


class NumberOrAll(click.ParamType[int | str]):
    """A number of something, or `all`."""

    name = "N|all"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | str:
        """Return the number, or `all`."""
        if value == "all":
            return "all"
        if not re.fullmatch(r"0*[1-9][0-9]{0,17}", str(value)):
            self.fail(f"{value!r} is neither a number nor 'all'.", param, ctx)
        return int(value)


class IntList(click.ParamType[list[int]]):
    """Comma-separated whole numbers."""

    name = "N,N…"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[int]:
        """Return the numbers."""
        if isinstance(value, list):
            return value
        parts = str(value).split(",")
        if not all(re.fullmatch(r"\s*[0-9]{1,18}\s*", part) for part in parts):
            self.fail(f"{value!r} is not a comma-separated list of numbers.", param, ctx)
        return [int(part) for part in parts]


def _option_fields(config: Any) -> list[Field[Any]]:
    return [one for one in fields(config) if "help" in one.metadata]


def _click_option(one: Field[Any], kind: Any, default: Any) -> Callable[[Command], Command]:
    """Return the click option of one field."""
    if kind is bool:
        return click.option(option_name(one), is_flag=True, help=one.metadata["help"])
    choices = one.metadata["choices"]
    settings: dict[str, Any] = {"required": True}
    if default is not MISSING:  # to click, a default of None is a default
        settings = {"default": default}
    return click.option(
        option_name(one),
        one.name,
        type=_click_type(kind, one.metadata),
        metavar=one.metadata["metavar"] or (None if choices else _METAVARS.get(kind)),
        help=one.metadata["help"],
        **settings,
    )


def _click_type(kind: Any, meta: Mapping[str, Any]) -> click.ParamType[Any]:
    """Return the click type of a field."""
    if get_origin(kind) is list:
        return IntList()
    if meta["choices"]:
        return NumberOrAll() if kind is int else click.Choice(list(meta["choices"]))
    if kind is str:
        return click.STRING
    low = meta["minimum"] if meta["above"] is None else meta["above"]
    high = meta["maximum"] if meta["below"] is None else meta["below"]
    is_open = {"min_open": meta["above"] is not None, "max_open": meta["below"] is not None}
    return (click.IntRange if kind is int else click.FloatRange)(low, high, **is_open)


def _value_type(kind: Any) -> Any:
    """Return the type of a field's values: X of `X | None`, int of `int | str`."""
    return get_args(kind)[0] if isinstance(kind, UnionType) else kind


def _is_allowed(value: Any, kind: type, meta: Mapping[str, Any]) -> bool:
    """Whether a value is a number of the kind, and within the bounds."""
    if type(value) is not int and (kind is int or type(value) is not float):
        return False
    return math.isfinite(value) and not (
        (meta["minimum"] is not None and value < meta["minimum"])
        or (meta["maximum"] is not None and value > meta["maximum"])
        or (meta["above"] is not None and value <= meta["above"])
        or (meta["below"] is not None and value >= meta["below"])
    )


def _bounds(kind: type, meta: Mapping[str, Any]) -> str:
    """Return what values a field takes, in words."""
    words = {"minimum": "at least", "above": "above", "maximum": "at most", "below": "below"}
    given = " and ".join(f"{word} {meta[n]:,}" for n, word in words.items() if meta[n] is not None)
    number = "a whole number" if kind is int else "a number" if given else "a finite number"
    return f"{number} {given}".rstrip()
