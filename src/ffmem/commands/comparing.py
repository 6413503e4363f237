"""The command that compares two indexes: compare."""

from pathlib import Path
from typing import Any

import click

from ffmem import acting
from ffmem.commands.options import device_option, json_option, out_option, print_json
from ffmem.progress import Progress


@click.command()
@click.argument("first", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("second", metavar="DIR", type=click.Path(path_type=Path))
@out_option
@click.option("--first-model", help="Where the first index's model is now, if it has moved.")
@click.option("--second-model", help="Where the second index's model is now, if it has moved.")
@click.option(
    "--no-models",
    is_flag=True,
    help="Compare the indexes alone: no model is loaded, no direction of a value compared.",
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Most changed memories to list.",
)
@device_option
@json_option
def compare(
    first: Path, second: Path, out: Path, no_models: bool, as_json: bool, **options: Any
) -> None:
    """Compare two indexes of one architecture over one corpus, memory by memory.

    For two checkpoints of a model, or a model before and after a fine-tune or an edit: overlap of
    triggers, change of the values, change of activity; second against first.

    Writes OUT/compare.json, memories.parquet, compare.svg and compare.pdf.
    """
    found = acting.compare(first, second, out, models=not no_models, progress=Progress(), **options)
    if as_json:
        print_json(found.to_dict())
    else:
        click.echo(str(found))
        click.echo(f"\nWrote compare.json, memories.parquet, compare.svg and compare.pdf to {out}.")
