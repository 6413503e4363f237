"""The `ffmem` command.

Heavy libraries are imported inside the functions called, so that `show` and `search` start at
once. An `FfmemError` is an answer: one line, exit code 1. Anything else is a bug, with traceback.
"""

import errno
import sys
from pathlib import Path

import click

from ffmem.commands import (
    annotating,
    comparing,
    editing,
    effects,
    indexing,
    looking,
    measuring,
    patterning,
    serving,
    tracing,
    training,
)
from ffmem.commands.options import Ordered
from ffmem.errors import FfmemError


@click.group(cls=Ordered, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ffmem")
def cli() -> None:
    """Read the feed-forward layers of a language model as key-value memories.

    MODEL is a Hugging Face folder, a .gguf file, a fairseq model.pt with its dict.txt, a Hub id
    (org/name@revision), or a name: smollm2-135m, mini-wiki.

    CORPUS is a .txt, .jsonl or .parquet file (also .gz), a folder of them, - for standard input,
    wikitext-2:train|valid|test, mini-wiki:train|valid, or hf:ID[:CONFIG][:SPLIT].
    """


for command in (
    *(indexing.describe, indexing.index, indexing.status),
    *(indexing.extend, indexing.merge),
    *(looking.show, looking.search, serving.serve),
    *(tracing.trace, effects.effect, tracing.neighbours, editing.edit, comparing.compare),
    *(measuring.experiment, measuring.report, training.train),
    *(patterning.patterns, annotating.annotate),
    *(looking.export, indexing.verify),
):
    cli.add_command(command)


@cli.command()
@click.option("--tiny", is_flag=True, help="mini-wiki over mini-wiki:train: needs no network.")
@click.option(
    "--out",
    show_default="demo, or demo-tiny",
    type=click.Path(path_type=Path),
    help="Folder to write.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    show_default="2000; with --tiny, all",
    help="Sentences to read.",
)
@click.option("--no-serve", is_flag=True, help="Do not open the explorer at the end.")
def demo(tiny: bool, out: Path | None, limit: int | None, no_serve: bool) -> None:
    """Index smollm2-135m over a part of WikiText-2, measure the paper, open the explorer.

    With --tiny, all in a minute and without a network: a small model that comes with ffmem, over a
    small text that does. The explorer is opened on a terminal only.
    """
    from ffmem.demo import FULL, TINY, explore
    from ffmem.demo import demo as run_demo

    choice = TINY if tiny else FULL
    folder = out or choice.out
    run_demo(choice, folder, limit or choice.limit)
    if not no_serve and sys.stdout.isatty():
        explore(folder)


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
                f"Error: {name[:100]}… is too long a name for a file ({len(name):,} letters)."
                " Give a shorter one."
            ) from None
        if error.errno != errno.ENOSPC:
            raise
        raise SystemExit("Error: The output cannot be written: no room left there.") from None
