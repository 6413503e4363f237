"""Commands that look into an index: show, search, export; none loads torch."""

from pathlib import Path
from typing import Any

import click

from ffmem import api
from ffmem.commands.options import folder_argument, json_option, print_json
from ffmem.counted import counted
from ffmem.progress import Progress


@click.command()
@folder_argument
@click.argument("cell")
@json_option
def show(folder: Path, cell: str, as_json: bool) -> None:
    """Show what triggers the memory CELL, such as L5N1234, and what its value promotes."""
    from ffmem.errors import StoreError
    from ffmem.patterns.kept import kept
    from ffmem.patterns.shown import lines, seen, to_dict

    index = api.open(folder)
    if index.live is not None:
        click.echo(f"The index is unfinished: {index.live.progress}.", err=True)
    memory = index[cell]
    try:
        patterns = seen(memory, kept(index))
    except StoreError as error:  # the memory itself is whole
        click.echo(f"Its patterns are not shown. {error}", err=True)
        patterns = []
    if as_json:
        print_json({**memory.to_dict(), "patterns": [to_dict(one) for one in patterns]})
    else:
        click.echo("\n".join([str(memory), *lines(patterns, memory.gated)]))


@click.command()
@folder_argument
@click.argument("query")
@click.option(
    "--in",
    "place",
    type=click.Choice(["values", "triggers", "patterns"]),
    default="values",
    show_default=True,
    help="What to search in.",
)
@click.option("--regex", is_flag=True, help="QUERY is a regular expression.")
@click.option("--layer", type=int, help="Only this layer.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Memories to show."
)
@json_option
def search(folder: Path, query: str, as_json: bool, place: str, **options: Any) -> None:
    """Find memories by the tokens of their values, the text of their triggers, or patterns."""
    from ffmem.indexing.memory import visible, visible_token
    from ffmem.patterns.searching import PatternHit

    readable = visible_token if place == "values" else visible
    hits = api.search(folder, query, place=place, **options)
    if as_json:
        print_json([hit._asdict() for hit in hits])
        return
    for hit in hits:
        best = f"{hit.side} {hit.rank}"
        who = f"  ({hit.kind}, {hit.source})" if isinstance(hit, PatternHit) else ""
        click.echo(f"{hit.cell:12} {hit.matches:4d}×  best: {best:12} {readable(hit.snippet)}{who}")
    if not hits:
        click.echo(f"No memory has {query!r} in its {place}.")


@click.command()
@folder_argument
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--to",
    type=click.Choice(["jsonl", "csv", "neuronpedia"]),
    required=True,
    help="Format; neuronpedia writes a new folder OUT.",
)
def export(folder: Path, out: Path, to: str) -> None:
    """Write every memory of an index to OUT, for other programs.

    In a CSV, an apostrophe stands before texts that a spreadsheet would take for a formula: those
    that begin with = + - @, a tab or a carriage return. OUT must not be a symbolic link.
    """
    made = api.open(folder)
    with Progress().bar("Writing", len(made), "memories") as step:
        api.export(made, to, out, step)
    click.echo(f"Wrote {counted(len(made), 'memories')} to {out}.", err=True)
