"""Options that edit memories: --off, --set, --scale, --mean, as `trace` and `edit` take them."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ffmem.causal.edits import Edits
    from ffmem.indexing.store import Index

NAMES = ("off", "set", "scale", "mean")


def edit_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the edits; each may be given many times, or with several cells between commas."""
    helps = {
        "off": ("CELL", "Switch a memory off."),
        "set": ("CELL=NUMBER", "Set its coefficient."),
        "scale": ("CELL=NUMBER", "Multiply its coefficient."),
        "mean": ("CELL", "Set its coefficient to its mean in the index."),
    }
    for name in reversed(NAMES):
        metavar, text = helps[name]
        option = click.option(f"--{name}", f"{name}_", metavar=metavar, multiple=True, help=text)
        command = option(command)
    return command


def taken(options: dict[str, Any]) -> dict[str, Any]:
    """Take the edits out of a command's options, as `Edits.of` wants them."""
    given = {name: parts(options.pop(f"{name}_")) for name in NAMES}
    return {
        "off": given["off"],
        "mean": given["mean"],
        **{name: _numbers(name, given[name]) for name in ("set", "scale")},
    }


def edits_of(
    options: dict[str, Any], index: "Index | None", positions: list[int] | None = None
) -> "Edits":
    """Take the edits out of a command's options."""
    from ffmem.causal.edits import Edits

    return Edits.of(**taken(options), index=index, positions=positions)


def parts(values: tuple[str, ...]) -> list[str]:
    """Return what stands between commas; nothing there is a mistake."""
    found = [part.strip() for value in values for part in value.split(",")]
    if not all(found):
        raise click.UsageError("An empty name was given where a memory is expected.")
    return found


def _numbers(name: str, parts: list[str]) -> dict[str, float]:
    """Return the number of every cell, refusing two for one."""
    found: dict[str, float] = {}
    for part in parts:
        cell, equals, number = part.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = float("nan")
        if not equals or not math.isfinite(value):
            raise click.UsageError(
                f"--{name} {part} was given. Write a memory and a finite number, like L5N1234=2.5."
            )
        if found.setdefault(cell.strip(), value) != value:
            raise click.UsageError(f"--{name} gives {cell.strip()} two numbers. Keep one.")
    return found
