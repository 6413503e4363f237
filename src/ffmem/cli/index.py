"""Commands that make and check indexes: describe, index, status, extend, merge, verify."""

import time
from pathlib import Path
from typing import Any

import click

import ffmem
from ffmem.cli.options import (
    PATH,
    adapter_option,
    device_option,
    dtype_option,
    folder_argument,
    index_model_option,
    json_option,
    model_argument,
    out_option,
    print_json,
    resumable,
)
from ffmem.config_fields import dataclass_options, take_options
from ffmem.corpus.corpus import Corpus
from ffmem.errors import FfmemError
from ffmem.indexing.config import BuildOptions, IndexConfig
from ffmem.parallel import ExecutionConfig
from ffmem.progress import Progress
from ffmem.text import pluralize

WATCH_SECONDS = 5.0
"""Time between two lines of `status --watch`."""


@click.command()
@model_argument
@adapter_option
@dtype_option
@device_option
@json_option
def describe(model: str, adapter: str | None, dtype: str, device: str, as_json: bool) -> None:
    """Show what ffmem reads in a model.

    Prints its family, layers, memories, activation, norms and output head, and the errors of the
    self-check of the paper's equations.
    """
    with Progress().waiting(f"Loading {model}"):
        memories = ffmem.load(model, adapter=adapter, dtype=dtype, device=device)
    from ffmem.indexing.estimate import index_bytes
    from ffmem.models.load import describe as describe_model

    facts = {**describe_model(memories), "index_bytes": index_bytes(memories, IndexConfig.t)}
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        shown = _format(value)
        if isinstance(value, dict):
            shown = ", ".join(f"{key} {_format(part)}" for key, part in value.items())
        click.echo(f"{name.replace('_', ' '):16} {shown}")


def _format(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


@click.command()
@click.argument("model")
@click.argument("corpus")
@click.option("--out", type=PATH, help="Folder to write. Required without --dry-run.")
@dataclass_options(IndexConfig)
@dataclass_options(Corpus)
@dataclass_options(BuildOptions)
@adapter_option
@dtype_option
@click.option("--dry-run", is_flag=True, help="Estimate time, memory and disk; write nothing.")
def index(
    model: str,
    corpus: str,
    out: Path | None,
    adapter: str | None,
    dtype: str,
    device: str,
    dry_run: bool,
    **options: Any,
) -> None:
    """Index the memories of a model over a corpus.

    Finds which prefixes of CORPUS trigger each memory of MODEL, and which tokens its value
    promotes. Resumes an unfinished run with the same settings from what it saved last: whole
    chunks (--chunk-tokens), every half minute.
    """
    source = Corpus(corpus, **take_options(options, Corpus))
    config = take_options(options, IndexConfig)
    execution = take_options(options, ExecutionConfig)
    if dry_run:
        from ffmem.indexing.status import status as index_status

        if out is not None and out.is_dir() and any(out.iterdir()):
            click.echo(f"{out}: {index_status(out)}\nAll of it would take:")
        settings = {"adapter": adapter, "dtype": dtype, "device": device, **config, **execution}
        click.echo(ffmem.estimate(model, source, progress=Progress(), **settings))
        return
    if out is None:
        raise click.MissingParameter(param_hint="'--out'", param_type="option")
    with resumable():
        made = ffmem.index(
            model,
            source,
            out,
            adapter=adapter,
            dtype=dtype,
            device=device,
            progress=Progress(),
            **config,
            **execution,
            **options,
        )
    click.echo(repr(made))


@click.command()
@folder_argument
@click.option("--watch", is_flag=True, help="Repeat until the run is done.")
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
        time.sleep(WATCH_SECONDS)
        click.echo()


@click.command()
@folder_argument
@click.argument("corpus")
@dataclass_options(Corpus)
@index_model_option
@dataclass_options(BuildOptions)
@resumable()
def extend(folder: Path, corpus: str, **options: Any) -> None:
    """Add a corpus to a finished index.

    Uses the model and settings of the index.
    """
    source = Corpus(corpus, **take_options(options, Corpus))
    click.echo(repr(ffmem.extend(folder, source, progress=Progress(), **options)))


@click.command()
@click.argument("folders", metavar="DIR DIR…", nargs=-1, required=True, type=PATH)
@out_option
def merge(folders: tuple[Path, ...], out: Path) -> None:
    """Merge indexes of parts of a corpus."""
    click.echo(repr(ffmem.merge(folders, out, progress=Progress())))


@click.command()
@folder_argument
def verify(folder: Path) -> None:
    """Check every hash and invariant of an index.

    Rebuilds search files (search.sqlite) that do not match the index.
    """
    wrong = ffmem.verify(folder, Progress())
    for sentence in wrong[1:]:
        click.echo(sentence, err=True)
    if wrong:
        more = f" (and {len(wrong) - 1} more, above)" if len(wrong) > 1 else ""
        raise FfmemError(f"{folder} is corrupted: {wrong[0]}{more}")
    made = ffmem.open(folder)
    files = pluralize(len(made.manifest.files), "files")
    click.echo(f"OK: {files}, {pluralize(len(made), 'memories')}.")
