"""Arguments, options and output that several commands share."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ffmem.config_fields import Command, add_options
from ffmem.errors import CorpusError
from ffmem.hub import is_hub_address
from ffmem.models.arguments import resolve_model


class OrderedGroup(click.Group):
    """A group that lists its commands in the order of their definition."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(self.commands)


class WholeNumber(click.IntRange):
    """A whole number in a range, shown as N."""

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the placeholder of the value in help texts."""
        return "N"


PATH = click.Path(path_type=Path)
AT_LEAST_1 = WholeNumber(min=1)

folder_argument = click.argument("folder", metavar="DIR", type=PATH)


def check_model(_: click.Context, __: click.Parameter, name: str) -> str:
    """Return a MODEL or DIR; raise on a wrong path, before torch is imported."""
    if not is_hub_address(name):
        resolve_model(name)
    return name


model_argument = click.argument("model", callback=check_model)
model_or_index_argument = click.argument(
    "model_or_index", metavar="MODEL_OR_DIR", callback=check_model
)
out_option = click.option("--out", required=True, type=PATH, help="Folder to write.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
seed_option = click.option("--seed", default=0, metavar="N", help="Random seed.")
device_option = click.option(
    "--device",
    default="auto",
    metavar="DEVICE",
    help="auto, cpu, cuda, cuda:N, mps, or split (layers over all GPUs).",
)
dtype_option = click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    help="Model dtype.",
)
index_dtype_option = click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Model dtype. Default: that of the index.",
)
adapter_option = click.option(
    "--adapter", metavar="FOLDER", help="Merge an adapter, such as LoRA, into the model."
)
index_model_option = add_options(
    click.option("--model", metavar="MODEL", help="New location of the model, if it has moved."),
    click.option(
        "--adapter", metavar="FOLDER", help="New location of its adapter, if it has moved."
    ),
)
index_start_option = click.option(
    "--start",
    metavar="TOKEN",
    help="Start token: auto, none, bos, eos, or a token. Default: that of the index.",
)
chat_option = click.option(
    "--chat",
    is_flag=True,
    help="Prompts are conversations: a user's text, JSON messages, or a .json file of them.",
)
reports_option = click.option(
    "--report",
    "reports",
    multiple=True,
    type=PATH,
    metavar="FOLDER",
    help="Folder of a report or experiment. Default: DIR-report.",
)
db_option = click.option(
    "--db",
    metavar="FILE",
    envvar="FFMEM_ANNOTATIONS",
    help="File of the annotation study. Default: DIR-annotations.sqlite.",
)


model_or_index_options = add_options(
    click.option("--model", metavar="MODEL", help="New location of DIR's model, if it has moved."),
    click.option(
        "--adapter",
        metavar="FOLDER",
        help="Merge an adapter, such as LoRA, into MODEL; or new location of DIR's adapter.",
    ),
)
"""For MODEL_OR_DIR."""

prompt_options = add_options(
    index_start_option, model_or_index_options, index_dtype_option, device_option
)


def split_commas(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> list[str]:
    """Return the parts of comma-separated lists."""
    found = [part.strip() for value in values for part in value.split(",")]
    if not all(found):
        raise click.UsageError("The name of a memory is empty. Write it like L5N1234.")
    return found


def parse_numbers(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[str, float]:
    """Return the number of every cell."""
    found: dict[str, float] = {}
    for part in split_commas(context, option, values):
        cell, equals, number = part.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not equals or not math.isfinite(value):
            raise click.UsageError(
                f"--{option.name} {part}: pass a memory and a finite number, like L5N1234=2.5."
            )
        if found.setdefault(cell.strip(), value) != value:
            raise click.UsageError(f"--{option.name} gives {cell.strip()} two numbers. Keep one.")
    return found


def parse_tokens(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Return the token of every cell; a token may have spaces and commas."""
    found: dict[str, str] = {}
    for value in values:
        cell, equals, token = value.partition("=")
        if not equals or not token:
            raise click.UsageError(
                f"--redirect {value}: pass a memory and a token, like 'L5N1234= Paris'."
            )
        if found.setdefault(cell.strip(), token) != token:
            raise click.UsageError(f"--redirect gives {cell.strip()} two tokens. Keep one.")
    return found


def cell_option(*names: str, help: str, **settings: Any) -> Callable[[Command], Command]:
    """Return an option that names memories; it may be repeated."""
    common: dict[str, Any] = {"metavar": "CELL", "multiple": True, "callback": split_commas}
    return click.option(*names, help=help, **(common | settings))


edit_options = add_options(
    cell_option("--off", help="Switch a memory, or an expert, off."),
    cell_option("--set", help="Set a coefficient.", metavar="CELL=X", callback=parse_numbers),
    cell_option(
        "--scale", help="Multiply a coefficient.", metavar="CELL=X", callback=parse_numbers
    ),
    cell_option("--mean", help="Set a coefficient to its mean."),
    cell_option(
        "--redirect",
        help="Make a value promote a token, with the smallest change; -CELL: for negative m.",
        metavar="CELL=TOKEN",
        callback=parse_tokens,
    ),
    click.option(
        "--margin",
        type=float,
        metavar="X",
        help="Lead of that token, in standard deviations of the value's logits. Default: 0.5.",
    ),
)
"""Edits of memories; each may be given several times, all but --redirect with commas too."""


@contextmanager
def resumable() -> Iterator[None]:
    """Say how to resume a command that is interrupted; also a decorator of the command."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("Interrupted. Rerun the command to resume.", err=True)
        raise


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that have a value, and are not an empty list of them.

    The public function has the defaults of the others.
    """
    return {name: value for name, value in options.items() if value not in (None, (), [], {})}


def read_chat_file(prompt: str | None) -> Any:
    """Return the messages of a `.json` file; any other prompt as it is."""
    if prompt is None or not prompt.endswith(".json") or "\n" in prompt:
        return prompt
    try:
        found = json.loads(Path(prompt).expanduser().read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise CorpusError(
            f"Cannot read the messages of {prompt}: {error}. Use a file with a list of messages:"
            ' [{"role": "user", "content": "…"}, …].'
        ) from None
    return found["messages"] if isinstance(found, dict) and "messages" in found else found


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    click.echo(json.dumps(value, ensure_ascii=False, indent=2))


def print_result(result: Any, as_json: bool) -> None:
    """Print a result as JSON or as text."""
    if as_json:
        print_json(result.to_dict())
    else:
        click.echo(str(result))
