"""Commands that read an index, without torch unless asked for sources: show, search, export."""

from pathlib import Path
from typing import Any

import click

import ffmem
from ffmem.cli.options import (
    AT_LEAST_1,
    PATH,
    device_option,
    folder_argument,
    given,
    index_model_option,
    json_option,
    print_json,
)
from ffmem.errors import FfmemError, StoreError
from ffmem.indexing.filters import PATTERN_KINDS
from ffmem.progress import Progress
from ffmem.text import pluralize

SHARE = click.FloatRange(0, 1)


@click.command()
@folder_argument
@click.argument("cell")
@click.option("--top", type=AT_LEAST_1, default=10, help="Entries to show of every list.")
@click.option("--cases", is_flag=True, help="List triggers by gate and sign (gated models).")
@click.option("--sources", is_flag=True, help="Also show lower memories that feed it.")
@click.option("--prompt", metavar="TEXT", help="Measure sources exactly on this prompt.")
@click.option(
    "--position",
    type=int,
    metavar="N",
    help="Position to read in the prompt. Default: where |coefficient| is largest.",
)
@index_model_option
@device_option
@json_option
def show(
    folder: Path, cell: str, top: int, cases: bool, sources: bool, as_json: bool, **options: Any
) -> None:
    """Show a memory: its triggers, value, key and patterns.

    CELL names the memory: L5N1234 is memory 1234 of layer 5. DIR may be hf:ORG/NAME, an index on
    the Hugging Face Hub; only the necessary parts are downloaded. --sources loads the model.
    --json prints all entries, not only the first.
    """
    if not sources and {"prompt", "position"} & given(options).keys():
        raise click.UsageError("--prompt and --position need --sources.")
    from ffmem.patterns.store import format_patterns, open_patterns

    index = ffmem.open(folder)
    if index.live is not None:
        partial = " Triggers and statistics are partial." if index.live.n_prefixes else ""
        click.echo(f"The index is unfinished: {index.live.progress}.{partial}", err=as_json)
    memory = index[cell]
    if cases and not memory.gated:
        raise FfmemError(
            "--cases: this model is not gated, so its memories have no sign cases. Drop this"
            " option."
        )
    try:
        patterns = [one for source in open_patterns(index) for one in source.of(memory.cell)]
    except StoreError as error:  # the memory itself is sound
        click.echo(f"Cannot show its patterns. {error}", err=True)
        patterns = []
    found = None
    if sources:
        found = ffmem.sources(index, memory.cell, progress=Progress(), **options)
    if as_json:
        content = {**memory.to_dict(cases), "patterns": [one.to_dict() for one in patterns]}
        print_json(content if found is None else {**content, "sources": found.to_dict()})
    else:
        text = memory.format_cases(top) if cases else memory.format(top)
        more = [] if found is None else ["", str(found)]
        click.echo("\n".join([text, *format_patterns(patterns, memory.gated), *more]))


@click.command()
@folder_argument
@click.argument("query")
@click.option(
    "--in",
    "place",
    type=click.Choice(["all", "values", "triggers", "patterns"]),
    default="all",
    help="Where to search.",
)
@click.option("--regex", is_flag=True, help="QUERY is a regular expression.")
@click.option("--layer", type=int, metavar="N", help="Only this layer.")
@click.option("--bank", metavar="BANK", help="Only this bank: dense, S or E12.")
@click.option("--sign", type=click.Choice(["1", "-1"]), help="Only m > 0 (1) or m < 0 (-1).")
@click.option("--rank", type=AT_LEAST_1, help="Only matches at rank N or better.")
@click.option("--kind", type=click.Choice(PATTERN_KINDS), help="Only memories with such a pattern.")
@click.option("--min-active", type=SHARE, metavar="X", help="Smallest share of active prefixes.")
@click.option("--max-active", type=SHARE, metavar="X", help="Largest share of active prefixes.")
@click.option("--limit", type=AT_LEAST_1, default=20, help="Memories to show per place.")
@json_option
def search(
    folder: Path, query: str, place: str, sign: str | None, as_json: bool, **options: Any
) -> None:
    """Search memories by value, trigger and pattern.

    In values, QUERY is a token; in triggers, a phrase; in patterns, words of a description. In
    triggers, [ ] marks the match and │ the end of the prefix.
    """
    number = None if sign is None else int(sign)
    found = ffmem.search(folder, query, place, sign=number, **options)
    if not as_json:
        click.echo(found)
    elif isinstance(found, dict):
        print_json(found.to_dict())
    else:
        print_json([hit.to_dict() for hit in found])


@click.command()
@folder_argument
@click.argument("out", type=PATH)
@click.option(
    "--to",
    type=click.Choice(["parquet", "jsonl", "csv", "neuronpedia"]),
    required=True,
    help="Format; parquet and neuronpedia create a new folder.",
)
def export(folder: Path, out: Path, to: str) -> None:
    """Export every memory for other programs.

    parquet: a folder of tidy tables (stats, values, keys, triggers, samples, and patterns if they
    were looked for), as from index.table() in Python. jsonl: one line per memory, as printed by
    show --json. csv: one row per trigger. neuronpedia: a folder in Neuronpedia's layout.

    In a CSV, text that looks like a formula (starts with = + - @, a tab or a carriage return) gets
    a leading apostrophe. OUT must not be a symbolic link.
    """
    index = ffmem.open(folder)
    ffmem.export(index, to, out, progress=Progress())
    click.echo(f"Wrote {pluralize(len(index), 'memories')} to {out}.", err=True)
