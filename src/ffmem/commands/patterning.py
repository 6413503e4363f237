"""Commands about patterns in triggers: patterns detect, show, export, explain."""

from pathlib import Path
from typing import Any

import click

from ffmem import api, patterning
from ffmem.commands.options import Ordered, folder_argument, json_option, print_json
from ffmem.counted import counted
from ffmem.progress import Progress


@click.group(cls=Ordered)
def patterns() -> None:
    """Find what recurs in the triggers of memories, by programs or a language model.

    Neither is the paper's protocol, which asks people: see `ffmem annotate`.
    """


@patterns.command()
@folder_argument
@click.option(
    "--alpha",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.05,
    show_default=True,
    help="False-discovery rate over all memories and everything that is tested.",
)
@click.option(
    "--space",
    type=click.Choice(["lsa", "minilm"]),
    default="lsa",
    show_default=True,
    help="Where topics are close: in statistics of the corpus, or in sentence embeddings.",
)
@click.option("--seed", default=0, show_default=True, help="Of everything random.")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Processes that share the layers; with --ray, actors.",
)
@click.option(
    "--ray",
    metavar="local|auto|ADDRESS",
    help="Work on Ray: one started here, one that is running, or at an address.",
)
@click.option(
    "--shuffled",
    is_flag=True,
    help="A control: deal the triggers out at random, keep nothing, tell what chance finds.",
)
@json_option
def detect(folder: Path, as_json: bool, **options: Any) -> None:
    """Find the patterns of every memory of an index, without a language model.

    They are looked for in the first 25 triggers and kept if the next 25 show them too.
    """
    found = patterning.detect(folder, progress=Progress(), **options)
    if as_json:
        print_json(found.to_dict())
    else:
        click.echo(str(found))


@patterns.command()
@folder_argument
@click.argument("cell")
@json_option
def show(folder: Path, cell: str, as_json: bool) -> None:
    """Show the patterns of the memory CELL, of all who saw some."""
    from ffmem.errors import FfmemError
    from ffmem.patterns.kept import kept
    from ffmem.patterns.searching import no_patterns
    from ffmem.patterns.shown import lines, seen, to_dict

    index = api.open(folder)
    memory = index[cell]
    several = kept(index)
    if not several:
        raise FfmemError(no_patterns(index))
    found = seen(memory, several)
    if as_json:
        print_json([to_dict(one) for one in found])
        return
    click.echo("\n".join([str(memory.cell), *lines(found, memory.gated)]))
    if not found:
        sources = ", ".join(patterns.source for patterns in several)
        click.echo(f"No pattern was found in its triggers (sources looked at: {sources}).")


@patterns.command()
@folder_argument
@click.argument("out", type=click.Path(path_type=Path))
def export(folder: Path, out: Path) -> None:
    """Write all patterns to OUT: a table as .parquet, .jsonl or .csv.

    In a CSV, an apostrophe stands before texts that a spreadsheet would take for a formula.
    """
    n = patterning.export_patterns(folder, out)
    click.echo(f"Wrote {counted(n, 'patterns')} to {out}.", err=True)


@patterns.command()
@folder_argument
@click.argument("cells", metavar="[CELL]...", nargs=-1)
@click.option(
    "--per-layer", type=click.IntRange(min=1), help="Draw so many memories of each layer instead."
)
@click.option("--model", required=True, help="The model's name at the endpoint.")
@click.option(
    "--url",
    default="http://127.0.0.1:8080/v1",
    show_default=True,
    help="An endpoint that speaks OpenAI's chat completions; its key: OPENAI_API_KEY.",
)
@click.option("--seed", default=0, show_default=True, help="Of everything random.")
@click.option("--timeout", default=120.0, show_default=True, help="Seconds for one answer.")
@json_option
def explain(folder: Path, cells: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Ask a language model for the patterns of memories, and test it blind on other triggers.

    Answers are kept as they come: a run that was stopped goes on where it stopped.
    """
    found = patterning.explain(folder, cells, progress=Progress(), **options)
    if as_json:
        print_json(found._asdict())
    else:
        click.echo(str(found))
