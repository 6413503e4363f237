"""Commands that make indexes: describe, index, extend, merge, verify."""

import time
from pathlib import Path
from typing import Any

import click

from ffmem import api
from ffmem.commands.options import (
    corpus_of,
    corpus_options,
    device_option,
    fact,
    folder_argument,
    json_option,
    labour_options,
    model_options,
    out_option,
    print_json,
)
from ffmem.counted import counted
from ffmem.errors import FfmemError
from ffmem.indexing.config import MAX_THREADS
from ffmem.progress import Progress

WATCH = 5.0
"""Seconds between two looks of `status --watch`."""


@click.command()
@click.argument("model")
@model_options
@json_option
def describe(model: str, dtype: str, device: str, as_json: bool) -> None:
    """Say what ffmem sees in MODEL: family, layers, memories, and whether its equations hold."""
    from ffmem.models.describe import describe as describe_model

    facts = describe_model(api.load(model, dtype=dtype, device=device))
    if as_json:
        print_json(facts)
        return
    for name, found in facts.items():
        shown = fact(found)
        if isinstance(found, dict):
            shown = ", ".join(f"{key} {fact(value)}" for key, value in found.items())
        click.echo(f"{name.replace('_', ' '):16} {shown}")


@click.command()
@click.argument("model")
@click.argument("corpus")
@out_option
@click.option(
    "-t",
    type=click.IntRange(1, 10_000),
    default=50,
    show_default=True,
    help="Triggers to keep per memory.",
)
@corpus_options
@click.option(
    "--prefixes",
    type=click.Choice(["best", "all"]),
    default="best",
    show_default=True,
    help="The best prefix of each sentence may trigger, or all.",
)
@click.option(
    "--compat", type=click.Choice(["ff-layers"]), help="Imitate the authors' code: p = 0 … n-1."
)
@click.option(
    "--start",
    default="auto",
    show_default=True,
    help="Token in front of a sentence: auto, none, bos, eos, or the token.",
)
@click.option(
    "--batch-tokens",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Tokens of a batch.",
)
@click.option(
    "--chunk-tokens",
    type=click.IntRange(min=1),
    default=65_536,
    show_default=True,
    help="Tokens per chunk, the unit of work.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, MAX_THREADS),
    help="Threads of the pass, per worker; recorded, for the same bytes.",
)
@labour_options
@model_options
@click.option("--dry-run", is_flag=True, help="Show what it would take, measured on one batch.")
def index(
    model: str, corpus: str, out: Path, dtype: str, device: str, dry_run: bool, **options: Any
) -> None:
    """Find what triggers every memory of MODEL in CORPUS, and what its value promotes.

    Resumes an unfinished run with the same settings.
    """
    source = corpus_of(corpus, options)
    if dry_run:
        names = ("t", "prefixes", "compat", "start", "batch_tokens", "chunk_tokens", "threads")
        execution = {name: options[name] for name in ("workers", "ray", "gpus_per_worker")}
        config = {name: options[name] for name in names}
        click.echo(api.estimate(model, source, dtype=dtype, device=device, **config, **execution))
        return
    made = api.index(model, source, out, dtype=dtype, device=device, progress=Progress(), **options)
    click.echo(repr(made))


@click.command()
@folder_argument
@click.option("--watch", is_flag=True, help="Tell again every few seconds, until it is done.")
@json_option
def status(folder: Path, watch: bool, as_json: bool) -> None:
    """Show indexing progress."""
    from ffmem.indexing.status import status as index_status

    while True:
        found = index_status(folder)
        if as_json:
            print_json(found.to_dict())
        else:
            click.echo(found)
        if not watch or found.state == "finished":
            return
        time.sleep(WATCH)
        click.echo()


@click.command()
@folder_argument
@click.argument("corpus")
@corpus_options
@click.option("--model", help="Where the model is now, if it has moved.")
@labour_options
@device_option
def extend(folder: Path, corpus: str, model: str | None, device: str, **options: Any) -> None:
    """Add CORPUS to a finished index, with its model and settings."""
    source = corpus_of(corpus, options)
    made = api.extend(folder, source, model=model, device=device, progress=Progress(), **options)
    click.echo(repr(made))


@click.command()
@click.argument(
    "folders", metavar="DIR DIR…", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@out_option
def merge(folders: tuple[Path, ...], out: Path) -> None:
    """Put indexes of parts of a corpus together."""
    click.echo(repr(api.merge(folders, out, progress=Progress())))


@click.command()
@folder_argument
def verify(folder: Path) -> None:
    """Check every hash and invariant of an index.

    Search files (search.sqlite) that do not fit the index are made again.
    """
    wrong = api.verify(folder, Progress())
    for sentence in wrong[1:]:
        click.echo(sentence, err=True)
    if wrong:
        more = f" (and {len(wrong) - 1} more, above)" if len(wrong) > 1 else ""
        raise FfmemError(f"{folder} is not a sound index: {wrong[0]}{more}")
    made = api.open(folder)
    click.echo(
        f"Sound: {counted(len(made.manifest.files), 'files')}, {counted(len(made), 'memories')}."
    )
