"""The `ffmem` command.

A command's module is imported when the command is called, so `ffmem --help` imports none. An
`FfmemError` is printed on one line, with exit code 1. Any other exception is a bug, and keeps its
traceback.
"""

import errno
import sys
from importlib import import_module
from typing import Any

import click

from ffmem.errors import FfmemError

COMMANDS = {
    "describe": ("index", "Show what ffmem sees in a model."),
    "index": ("index", "Index the memories of a model over a corpus."),
    "status": ("index", "Show indexing progress."),
    "extend": ("index", "Add a corpus to a finished index."),
    "merge": ("index", "Merge indexes of parts of a corpus."),
    "show": ("show", "Show a memory: its triggers, value and patterns."),
    "search": ("show", "Search memories by value, trigger or pattern."),
    "serve": ("serve", "Serve indexes on a local web page."),
    "trace": ("trace", "Trace a prompt through the layers of a model."),
    "effect": ("trace", "Measure how memories affect the next token."),
    "neighbours": ("trace", "Find memories with similar values or keys."),
    "edit": ("edit", "Write edits of memories into a model's weights."),
    "compare": ("edit", "Compare two indexes, memory by memory."),
    "experiment": ("experiment", "Measure one figure or table of the paper."),
    "report": ("experiment", "Measure all figures and tables, and write a report."),
    "train": ("train", "Train a small model with one kind of memory."),
    "patterns": ("patterns", "Find patterns in the triggers of memories."),
    "annotate": ("annotate", "Run a study with human annotators."),
    "export": ("show", "Export every memory for other programs."),
    "verify": ("index", "Check every hash and invariant of an index."),
    "demo": ("serve", "Index a model, measure the paper, open the explorer."),
}
"""The module and the help of every command, in the order in which people need them."""


class LazyGroup(click.Group):
    """A group that imports the module of a command when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, None if there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"ffmem.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an interrupt ends it without click's "Aborted!": work done is kept."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(1)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (_, help) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ffmem")
def cli() -> None:
    """Read the feed-forward layers of a language model as key-value memories.

    MODEL is a Hugging Face folder, a .gguf file, a fairseq model.pt with its dict.txt, a Hub id
    (org/name@revision), or a name: smollm2-135m, mini-wiki.

    CORPUS is a .txt, .jsonl or .parquet file (also .gz), a folder of them, - for standard input,
    wikitext-2:train|valid|test, mini-wiki:train|valid, or hf:ID[:CONFIG][:SPLIT].
    """


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        cli()
    except FfmemError as error:
        message = " ".join(str(error).split())
        raise SystemExit(f"Error: {message}") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            name = str(error.filename)
            raise SystemExit(
                f"Error: {name[:100]}… is too long for a file name ({len(name):,} characters)."
                " Give a shorter one."
            ) from None
        if error.errno != errno.ENOSPC:
            raise
        raise SystemExit("Error: Cannot write the output: the disk is full.") from None
