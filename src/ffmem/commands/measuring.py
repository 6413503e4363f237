"""Commands that measure the paper's figures and tables: experiment, report."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ffmem import measuring
from ffmem.commands.options import (
    NumberOrAll,
    device_option,
    folder_argument,
    out_option,
)
from ffmem.experiments.names import NAMES
from ffmem.indexing.config import MAX_THREADS
from ffmem.progress import Progress


def study_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add how experiments sample, how their corpus is read, and where the model runs."""
    for option in reversed(
        (
            click.option("--corpus", metavar="VALID", help="Prefixes of Section 5 come from here."),
            click.option(
                "--sample",
                type=NumberOrAll("prefixes"),
                default=4000,
                show_default=True,
                help="How many prefixes, or all.",
            ),
            click.option(
                "--draw",
                type=click.Choice(["sentences", "tokens"]),
                default="sentences",
                show_default=True,
                help="One prefix per sentence, or uniformly over all prefixes.",
            ),
            click.option("--seed", default=0, show_default=True, help="Of everything random."),
            click.option(
                "--per-layer",
                type=click.IntRange(min=1),
                default=10,
                show_default=True,
                help="Memories of a layer for token removal; the paper took 100.",
            ),
            click.option(
                "--triggers",
                type=click.IntRange(min=1),
                default=20,
                show_default=True,
                help="Triggers of each for token removal; the paper took 50.",
            ),
            click.option("--unit", help="sentence, line or window:N; else as the index."),
            click.option("--column", help="Field of the text; else as the index."),
            click.option(
                "--detokenize",
                type=click.Choice(["wikitext"]),
                help="Undo WikiText's tokenisation first.",
            ),
            click.option(
                "--limit", type=click.IntRange(min=1), help="Read this many sentences at most."
            ),
            click.option("--model", help="Where the model is now, if it has moved."),
            click.option(
                "--dtype",
                type=click.Choice(["float32", "bfloat16"]),
                help="Number format of the model; else as the index.",
            ),
            device_option,
            click.option(
                "--threads",
                type=click.IntRange(1, MAX_THREADS),
                help="Threads; the same number gives the same bytes.",
            ),
        )
    ):
        command = option(command)
    return command


@click.command()
@click.argument("name", metavar="NAME", type=click.Choice(NAMES))
@folder_argument
@out_option
@click.option("--prompt", help="One text instead of a sample, for Section 5.")
@study_options
def experiment(name: str, folder: Path, out: Path, **options: Any) -> None:
    """Measure one figure or table of the paper on an indexed model.

    NAME is patterns, token-removal, agreement, next-token-rank, max-probability, predictive-values,
    active-memories, zero-agreement, stop-words, residual-prediction, residual-probability,
    prediction-cases, last-layer-composition or neural-memory.

    Writes OUT/NAME.json, NAME.svg and NAME.pdf. If OUT/NAME.json is there already, of the same
    index, settings and versions, it is not measured again.
    """
    measuring.experiment(name, folder, out, progress=Progress(), **options)
    click.echo(f"Wrote {name}.json, {name}.svg and {name}.pdf to {out}.")


@click.command()
@folder_argument
@out_option
@study_options
def report(folder: Path, out: Path, corpus: str | None, **options: Any) -> None:
    """Measure every figure and table of the paper, and write a report.

    Writes OUT/report.html (one file that needs nothing else), report.md, and JSON, SVG and PDF of
    every experiment. Interrupted? Rerun the command: finished experiments are kept.
    """
    if corpus is None:
        raise click.UsageError("Missing option '--corpus': Section 5 needs prefixes.")
    path = measuring.report(folder, out, corpus, progress=Progress(), **options)
    click.echo(f"Wrote {path}.")
