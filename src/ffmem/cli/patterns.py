"""Commands about patterns in triggers: patterns detect, show, export, explain."""

from pathlib import Path
from typing import Any

import click

import ffmem
from ffmem.cli.options import (
    AT_LEAST_1,
    PATH,
    OrderedGroup,
    folder_argument,
    json_option,
    print_json,
    print_result,
    resumable,
    seed_option,
)
from ffmem.config_fields import dataclass_options
from ffmem.parallel import ExecutionConfig
from ffmem.progress import Progress
from ffmem.text import pluralize


@click.group(cls=OrderedGroup)
def patterns() -> None:
    """Find patterns in the triggers of memories.

    The paper's protocol asks people instead: see `ffmem annotate`.
    """


@patterns.command()
@folder_argument
@click.option(
    "--alpha",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.05,
    metavar="X",
    help="False discovery rate over all memories and tests.",
)
@seed_option
@dataclass_options(ExecutionConfig, only=("workers", "ray"), defaults={"workers": 1})
@click.option(
    "--shuffled",
    is_flag=True,
    help="Control: shuffle triggers among memories, and store nothing.",
)
@json_option
def detect(folder: Path, as_json: bool, **options: Any) -> None:
    """Find patterns without a language model.

    Looks for patterns in every memory's triggers of odd rank, and keeps those that the triggers of
    even rank confirm.
    """
    print_result(ffmem.detect(folder, progress=Progress(), **options), as_json)


@patterns.command()
@folder_argument
@click.argument("cell")
@json_option
def show(folder: Path, cell: str, as_json: bool) -> None:
    """Show the patterns of a memory, from all sources."""
    from ffmem.patterns.store import format_patterns, require_patterns

    index = ffmem.open(folder)
    memory = index[cell]
    sources = require_patterns(index)
    found = [one for source in sources for one in source.of(memory.cell)]
    if as_json:
        print_json([one.to_dict() for one in found])
        return
    click.echo("\n".join([str(memory.cell), *format_patterns(found, memory.gated)]))
    if not found:
        names = ", ".join(one.source for one in sources)
        click.echo(f"No pattern was found in its triggers (sources: {names}).")


@patterns.command()
@folder_argument
@click.argument("out", type=PATH)
def export(folder: Path, out: Path) -> None:
    """Write all patterns to a .parquet, .jsonl or .csv file.

    In a CSV, text that looks like a formula gets a leading apostrophe.
    """
    n = ffmem.export_patterns(folder, out)
    click.echo(f"Wrote {pluralize(n, 'patterns')} to {out}.", err=True)


@patterns.command()
@folder_argument
@click.argument("cells", metavar="[CELL]...", nargs=-1)
@click.option("--per-layer", type=AT_LEAST_1, help="Draw N memories per layer instead of CELLs.")
@click.option("--model", metavar="NAME", required=True, help="Model name at the endpoint.")
@click.option(
    "--url",
    metavar="URL",
    default="http://127.0.0.1:8080/v1",
    help="OpenAI-compatible endpoint; its key is read from OPENAI_API_KEY.",
)
@seed_option
@click.option(
    "--timeout",
    default=120.0,
    metavar="X",
    help="Seconds to wait for an answer.",
)
@json_option
@resumable()
def explain(folder: Path, cells: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Ask a language model for patterns.

    Tests each answer blind on other triggers. Interrupted? Rerun the command to resume.
    """
    print_result(ffmem.explain(folder, cells, progress=Progress(), **options), as_json)
