"""Arguments and options that several subcommands share, and how they print."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


class Ordered(click.Group):
    """Lists subcommands in the order in which people need them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of their definition."""
        return list(self.commands)


class NumberOrAll(click.ParamType[int | str]):
    """A number of something, or `all`."""

    name = "N|all"

    def __init__(self, what: str) -> None:
        self.what = what

    def convert(self, value: Any, param: Any, ctx: Any) -> int | str:
        """Return the number; `all` stays as it is."""
        if value == "all":
            return "all"
        if not re.fullmatch(r"0*[1-9][0-9]{0,17}", str(value)):
            self.fail(f"{value!r} is neither a number of {self.what} nor 'all'.", param, ctx)
        return int(value)


folder_argument = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
device_option = click.option(
    "--device",
    default="auto",
    show_default=True,
    help="auto, cpu, cuda, cuda:N, mps, or split: layers over all accelerators.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
out_option = click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="Folder to write."
)


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add where and in which numbers a model runs."""
    for option in (
        click.option(
            "--dtype",
            type=click.Choice(["float32", "bfloat16"]),
            default="float32",
            show_default=True,
            help="Number format of the pass.",
        ),
        device_option,
    ):
        command = option(command)
    return command


def crew_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add who does the work."""
    for option in (
        click.option(
            "--gpus-per-worker",
            type=click.FloatRange(min=0),
            default=0.0,
            help="Accelerators that Ray gives each worker.",
        ),
        click.option(
            "--ray",
            metavar="local|auto|ADDRESS",
            help="Work on Ray: one started here, one that is running, or at an address.",
        ),
        click.option(
            "--workers",
            type=click.IntRange(min=1),
            help="Processes that share the work; with --ray, actors.",
        ),
    ):
        command = option(command)
    return command


def labour_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add who reads a corpus, where they meet, and what they do about bad sentences."""
    for option in (
        click.option(
            "--bad-sentences",
            type=click.Choice(["stop", "skip"]),
            default="stop",
            show_default=True,
            help="What to do about sentences that the model cannot read.",
        ),
        click.option(
            "--shared",
            metavar="FOLDER|URL",
            help="Where workers meet, if they do not all see the folder of the index.",
        ),
    ):
        command = option(command)
    return crew_options(command)


def prompt_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add how a prompt starts, and where and in which numbers its model runs."""
    for option in (
        device_option,
        click.option(
            "--dtype",
            type=click.Choice(["float32", "bfloat16"]),
            help="Number format of the model; else as the index, or float32.",
        ),
        click.option("--model", help="Where the index's model is now, if it has moved."),
        click.option("--start", help="auto, none, bos, eos or a token; else as the index."),
    ):
        command = option(command)
    return command


def corpus_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add how a corpus is read."""
    for option in (
        click.option(
            "--limit", type=click.IntRange(min=1), help="Read this many sentences at most."
        ),
        click.option(
            "--detokenize",
            type=click.Choice(["wikitext"]),
            help="Undo WikiText's tokenisation first.",
        ),
        click.option("--column", default="text", show_default=True, help="Field of the text."),
        click.option(
            "--unit", default="sentence", show_default=True, help="sentence, line or window:N."
        ),
    ):
        command = option(command)
    return command


def corpus_of(source: str, options: dict[str, Any]) -> Any:
    """Take the options of a corpus out of a command's options."""
    from ffmem.corpus.corpus import Corpus

    names = ("unit", "column", "detokenize", "limit")
    return Corpus(source, **{name: options.pop(name) for name in names})


def fact(value: Any) -> str:
    """Return a fact as people write it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def print_json(value: Any) -> None:
    """Print a value as JSON for people and programs."""
    click.echo(json.dumps(value, ensure_ascii=False, indent=2))
