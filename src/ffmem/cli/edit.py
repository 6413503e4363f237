"""Commands that change a model's memories and compare the result: edit, compare."""

from pathlib import Path
from typing import Any

import click

import ffmem
from ffmem.cli.options import (
    AT_LEAST_1,
    PATH,
    device_option,
    edit_options,
    index_model_option,
    index_start_option,
    json_option,
    model_or_index_argument,
    out_option,
    parse_edits,
    print_result,
)
from ffmem.config_fields import dataclass_options
from ffmem.corpus.corpus import Corpus
from ffmem.progress import Progress


@click.command()
@model_or_index_argument
@edit_options
@click.option("--edits", type=PATH, metavar="FILE", help="Apply the edits of an edits.json.")
@out_option
@click.option(
    "--corpus",
    metavar="CORPUS",
    default="wikitext-2:valid",
    show_default=True,
    help="Corpus to measure side effects on.",
)
@dataclass_options(Corpus, defaults={"limit": 200})
@click.option("--no-report", is_flag=True, help="Do not measure side effects.")
@index_start_option
@index_model_option
@device_option
@json_option
def edit(
    model_or_index: str,
    off: tuple[str, ...],
    set: tuple[str, ...],
    scale: tuple[str, ...],
    mean: tuple[str, ...],
    edits: Path | None,
    out: Path,
    corpus: str,
    no_report: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Write edits of memories into a model's weights.

    Writes a Hugging Face folder and measures side effects (side-effects.md and .json). Its
    edits.json repeats the edit: pass it with --edits. --mean needs an index instead of a model.
    --off also takes a whole expert, such as L5E12.
    """
    named = parse_edits(off, set, scale, mean)
    if any(named.values()) == (edits is not None):
        raise click.UsageError("Give either edits (--off, --set, --scale, --mean) or --edits FILE.")
    written = ffmem.edit(
        model_or_index,
        out,
        edits=edits,
        corpus=None if no_report else corpus,
        progress=Progress(),
        **named,
        **options,
    )
    print_result(written, as_json)


@click.command()
@click.argument("first", metavar="DIR", type=PATH)
@click.argument("second", metavar="DIR", type=PATH)
@out_option
@click.option(
    "--first-model", metavar="MODEL", help="Where the first index's model is now, if it has moved."
)
@click.option(
    "--second-model",
    metavar="MODEL",
    help="Where the second index's model is now, if it has moved.",
)
@click.option("--no-models", is_flag=True, help="Load no models; do not compare value directions.")
@click.option(
    "--top", type=AT_LEAST_1, default=50, show_default=True, help="Most changed memories to list."
)
@device_option
@json_option
def compare(
    first: Path, second: Path, out: Path, no_models: bool, as_json: bool, **options: Any
) -> None:
    """Compare two indexes, memory by memory.

    The models must share an architecture and the indexes a corpus: a model before and after
    fine-tuning, for example. Compares triggers, values and activity, and writes
    compare.json, memories.parquet, compare.svg and compare.pdf to OUT.
    """
    found = ffmem.compare(first, second, out, models=not no_models, progress=Progress(), **options)
    print_result(found, as_json)
    if not as_json:
        click.echo(f"\nWrote compare.json, memories.parquet, compare.svg and compare.pdf to {out}.")
