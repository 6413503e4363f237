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
from typing import Any, get_args, get_origin, get_type_hints

import click

from ffmem.errors import FfmemError

Command = Callable[..., Any]

_METAVARS = {int: "N", float: "X"}


def option(
    help: str,
    default: Any = MISSING,
    *,
    minimum: int | float | None = None,
    above: int | float | None = None,
    below: int | float | None = None,
    choices: Sequence[str] = (),
    metavar: str | None = None,
    compare: bool = True,
) -> Any:
    """Return a dataclass field that is an option, required unless it has a default.

    Bounds are inclusive (`minimum`) or exclusive (`above`, `below`). `compare` is that
    of `dataclasses.field`.
    """
    bounds = {"minimum": minimum, "above": above, "below": below}
    metadata = {"help": help, "choices": tuple(choices), "metavar": metavar, **bounds}
    return field(default=default, metadata=metadata, compare=compare)


def dataclass_options(config: type) -> Callable[[Command], Command]:
    """Return a decorator that gives a click command one option per field, in their order."""
    types = get_type_hints(config)
    options = [
        _click_option(one, _value_type(types[one.name]))
        for one in fields(config)
        if "help" in one.metadata
    ]

    def decorate(command: Command) -> Command:
        for add_option in reversed(options):
            command = add_option(command)
        return command

    return decorate


def check_options(config: Any) -> None:
    """Raise unless every value of a config is within its field's bounds; None is always allowed."""
    for one in fields(config):
        value, meta = getattr(config, one.name), one.metadata
        if value is None or "help" not in meta:
            continue
        if meta["choices"] and value not in meta["choices"]:
            raise FfmemError(
                f"{option_name(one.name)} {value}: unknown value."
                f" Give one of {', '.join(meta['choices'])}."
            )
        wrong = isinstance(value, float) and not math.isfinite(value)
        wrong = wrong or (meta["minimum"] is not None and value < meta["minimum"])
        wrong = wrong or (meta["above"] is not None and value <= meta["above"])
        if wrong or (meta["below"] is not None and value >= meta["below"]):
            raise FfmemError(f"{option_name(one.name)} {value}: give {_bounds(meta)}.")


def option_name(field_name: str) -> str:
    """Return the option of a field: `batch_tokens` is `--batch-tokens`."""
    return f"--{field_name.replace('_', '-')}"


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


def _click_option(one: Field[Any], kind: Any) -> Callable[[Command], Command]:
    """Return the click option of one field."""
    if kind is bool:
        return click.option(option_name(one.name), is_flag=True, help=one.metadata["help"])
    settings: dict[str, Any] = {"required": True}
    if one.default is not MISSING:  # to click, a default of None is a default
        settings = {"default": one.default, "show_default": one.default is not None}
    return click.option(
        option_name(one.name),
        type=_click_type(kind, one.metadata),
        metavar=one.metadata["metavar"] or _METAVARS.get(kind),
        help=one.metadata["help"],
        **settings,
    )


def _click_type(kind: Any, meta: Mapping[str, Any]) -> click.ParamType[Any]:
    """Return the click type of a field."""
    if get_origin(kind) is list:
        return IntList()
    if meta["choices"]:
        return click.Choice(list(meta["choices"]))
    if kind is str:
        return click.STRING
    low = meta["minimum"] if meta["above"] is None else meta["above"]
    is_open = {"min_open": meta["above"] is not None, "max_open": meta["below"] is not None}
    return (click.IntRange if kind is int else click.FloatRange)(low, meta["below"], **is_open)


def _value_type(kind: Any) -> Any:
    """Return the type of a field's values other than None: X of `X | None`."""
    if isinstance(kind, UnionType):
        (kind,) = (one for one in get_args(kind) if one is not type(None))
    return kind


def _bounds(meta: Mapping[str, Any]) -> str:
    """Return what values a field takes, in words."""
    parts = {
        "at least": meta["minimum"],
        "above": meta["above"],
        "below": meta["below"],
    }
    given = " and ".join(f"{word} {bound}" for word, bound in parts.items() if bound is not None)
    return f"a number {given}" if given else "a finite number"
