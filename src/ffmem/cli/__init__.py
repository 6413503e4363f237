"""The `ffmem` command.

A command's module is imported when the command is called, so `ffmem --help` imports none. An
`FfmemError` is printed on one line, with exit code 1. Any other exception is a bug, and keeps its
traceback.
"""

import errno
import sys
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click

from ffmem.errors import FfmemError

GROUPS = {
    "Index": {
        "describe": ("index", "Show what ffmem reads in a model."),
        "index": ("index", "Index the memories of a model over a corpus."),
        "status": ("index", "Show indexing progress."),
        "extend": ("index", "Add a corpus to a finished index."),
        "merge": ("index", "Merge indexes of parts of a corpus."),
        "verify": ("index", "Check every hash and invariant of an index."),
    },
    "Look": {
        "show": ("show", "Show a memory: its triggers, value, key and patterns."),
        "search": ("show", "Search memories by value, trigger and pattern."),
        "neighbours": ("trace", "Find memories with similar values or keys."),
        "export": ("show", "Export every memory for other programs."),
    },
    "Measure": {
        "trace": ("trace", "Trace a prompt through the layers of a model."),
        "effect": ("trace", "Measure how memories affect the next token."),
        "circuit": ("trace", "Show which memories feed a prediction, and each other."),
        "experiment": ("experiment", "Reproduce one figure or table of the paper."),
        "report": ("experiment", "Reproduce all figures and tables in a report."),
        "compare": ("edit", "Compare two indexes, or two models, memory by memory."),
    },
    "Change": {
        "edit": ("edit", "Write edits of memories into a model's weights."),
        "write": ("edit", "Write a fact into an idle memory."),
        "train": ("train", "Train a small model with one kind of memory."),
    },
    "Annotate": {
        "patterns": ("patterns", "Find patterns in the triggers of memories."),
        "annotate": ("annotate", "Run a study with human annotators."),
    },
    "Share": {
        "push": ("hub", "Push an index to the Hugging Face Hub."),
        "pull": ("hub", "Pull an index from the Hugging Face Hub."),
        "mcp": ("mcp", "Serve indexes as tools for language-model agents."),
    },
    "Serve": {
        "serve": ("serve", "Serve indexes on a local web page."),
        "demo": ("serve", "Index a model, run the paper's figures, open the explorer."),
    },
}
"""Groups of commands, as the help lists them: the module and the help of each command."""

COMMANDS = {name: about for group in GROUPS.values() for name, about in group.items()}


ALIASES = {"neighbors": "neighbours"}
"""Other spellings of commands, which the help does not list."""


class LazyGroup(click.Group):
    """A group that imports the module of a command when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, None if there is none of this name."""
        cmd_name = ALIASES.get(cmd_name, cmd_name)
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"ffmem.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is called; suggest one if the name is misspelled."""
        close = get_close_matches(args[0], COMMANDS, n=1)
        if args[0] not in {*COMMANDS, *ALIASES} and close and not args[0].startswith("-"):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {close[0]!r}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an interrupt ends it without click's "Aborted!": work done is kept."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(1)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in their groups, all of them on one screen."""
        formatter.write("\n")
        for group, commands in GROUPS.items():
            title = group
            for name, (_, help) in commands.items():
                formatter.write(f"{title:10}{name:12}{help}\n")
                title = ""


HELP = """Read the feed-forward layers of a language model as key-value memories.

\b
MODEL   a Hugging Face folder or Hub id, a .gguf file, a fairseq model.pt,
        or smollm2-135m, gemma-3-270m, mini-wiki
CORPUS  a .txt, .jsonl or .parquet file or a folder of them, - for stdin,
        wikitext-2:train, mini-wiki:train, or hf:ID
"""


@click.group(
    cls=LazyGroup,
    help=HELP,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
)
@click.version_option(package_name="ffmem")
def cli() -> None:
    """Run a command."""


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
                " Use a shorter one."
            ) from None
        if error.errno != errno.ENOSPC:
            raise
        raise SystemExit("Error: Cannot write the output: the disk is full.") from None
