"""Commands that read an index without torch: show, search, export."""

from pathlib import Path

import click

import ffmem
from ffmem.cli.options import AT_LEAST_1, PATH, folder_argument, json_option, print_json
from ffmem.errors import StoreError
from ffmem.progress import Progress
from ffmem.text import pluralize


@click.command()
@folder_argument
@click.argument("cell")
@json_option
def show(folder: Path, cell: str, as_json: bool) -> None:
    """Show a memory: its triggers, value and patterns.

    CELL names the memory: L5N1234 is memory 1234 of layer 5. DIR may be hf:ORG/NAME, an index on
    the Hugging Face Hub, of which only the necessary parts are fetched.
    """
    from ffmem.patterns.store import format_patterns, open_patterns

    index = ffmem.open(folder)
    if index.live is not None:
        click.echo(f"The index is unfinished: {index.live.progress}.", err=True)
    memory = index[cell]
    try:
        patterns = [one for source in open_patterns(index) for one in source.of(memory.cell)]
    except StoreError as error:  # the memory itself is sound
        click.echo(f"Cannot show its patterns. {error}", err=True)
        patterns = []
    if as_json:
        print_json({**memory.to_dict(), "patterns": [one.to_dict() for one in patterns]})
    else:
        click.echo("\n".join([str(memory), *format_patterns(patterns, memory.gated)]))


@click.command()
@folder_argument
@click.argument("query")
@click.option(
    "--in",
    "place",
    type=click.Choice(["values", "triggers", "patterns"]),
    default="values",
    show_default=True,
    help="Where to search.",
)
@click.option("--regex", is_flag=True, help="QUERY is a regular expression.")
@click.option("--layer", type=int, metavar="N", help="Search this layer only.")
@click.option("--limit", type=AT_LEAST_1, default=20, show_default=True, help="Memories to show.")
@json_option
def search(
    folder: Path,
    query: str,
    place: str,
    regex: bool,
    layer: int | None,
    limit: int,
    as_json: bool,
) -> None:
    """Search memories by value, trigger or pattern.

    In values, QUERY is a token or the beginning of one; in triggers, a phrase; in patterns, words
    of a description.
    """
    hits = ffmem.search(folder, query, place, regex=regex, layer=layer, limit=limit)
    if as_json:
        print_json([hit._asdict() for hit in hits])
    else:
        click.echo(hits)


@click.command()
@folder_argument
@click.argument("out", type=PATH)
@click.option(
    "--to",
    type=click.Choice(["parquet", "jsonl", "csv", "neuronpedia"]),
    required=True,
    help="Format; parquet and neuronpedia make a new folder.",
)
def export(folder: Path, out: Path, to: str) -> None:
    """Export every memory for other programs.

    parquet: a folder of tidy tables (stats, values, triggers, samples, patterns), as Python's
    index.table() returns them. jsonl: a line per memory, as show --json prints it. csv: a row per
    trigger. neuronpedia: a folder in Neuronpedia's layout.

    In a CSV, text that a spreadsheet would take for a formula (it begins with = + - @, a tab or a
    carriage return) gets an apostrophe in front. OUT must not be a symbolic link.
    """
    index = ffmem.open(folder)
    ffmem.export(index, to, out, progress=Progress())
    click.echo(f"Wrote {pluralize(len(index), 'memories')} to {out}.", err=True)
