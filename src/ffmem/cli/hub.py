"""Commands for the Hugging Face Hub: push, pull."""

from pathlib import Path
from typing import Any

import click

import ffmem
from ffmem.cli.options import PATH, folder_argument, resumable
from ffmem.progress import Progress

repository_argument = click.argument("repository", metavar="ORG/NAME")


@click.command()
@folder_argument
@repository_argument
@click.option("--private", is_flag=True, help="Create a private dataset.")
@click.option("--revision", metavar="BRANCH", help="Branch to push to, created if necessary.")
@click.option(
    "--license",
    default="unknown",
    metavar="ID",
    help="License of the text, as an id of the Hub.",
)
@click.option("--replace", is_flag=True, help="Replace another index in the dataset.")
def push(folder: Path, repository: str, **options: Any) -> None:
    """Push an index to the Hugging Face Hub.

    Creates a dataset with a card, including patterns. Log in first with `hf auth login`, or set
    HF_TOKEN. The index contains its corpus: push only text that you may publish.
    """
    click.echo(ffmem.push(folder, repository, progress=Progress(), **options))


@click.command()
@repository_argument
@click.argument("folder", metavar="DIR", type=PATH)
@click.option("--revision", metavar="REVISION", help="Branch, tag or commit.")
@resumable()
def pull(repository: str, folder: Path, revision: str | None) -> None:
    """Pull an index from the Hugging Face Hub.

    Every hash is checked before DIR appears. Interrupted? Rerun the command to resume.
    """
    click.echo(repr(ffmem.pull(repository, folder, revision=revision, progress=Progress())))
