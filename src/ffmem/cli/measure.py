"""Commands that measure the paper's figures and tables: experiment, report."""

from pathlib import Path
from typing import Any

import click

import ffmem
from ffmem.cli.options import (
    AT_LEAST_1,
    NumberOrAll,
    add_options,
    device_option,
    folder_argument,
    index_dtype_option,
    index_model_option,
    out_option,
    seed_option,
)
from ffmem.cli_options import dataclass_options
from ffmem.corpus.corpus import Corpus
from ffmem.experiments.names import NAMES
from ffmem.indexing.config import MAX_THREADS
from ffmem.progress import Progress

experiment_options = add_options(
    click.option(
        "--sample",
        type=NumberOrAll("prefixes"),
        default=4000,
        show_default=True,
        help="Prefixes for Section 5.",
    ),
    click.option(
        "--draw",
        type=click.Choice(["sentences", "tokens"]),
        default="sentences",
        show_default=True,
        help="Draw one prefix per sentence, or uniformly over all.",
    ),
    seed_option,
    click.option(
        "--per-layer",
        type=AT_LEAST_1,
        default=10,
        show_default=True,
        help="Memories per layer for token removal; the paper took 100.",
    ),
    click.option(
        "--triggers",
        type=AT_LEAST_1,
        default=20,
        show_default=True,
        help="Triggers per memory for token removal; the paper took 50.",
    ),
    dataclass_options(Corpus, defaults={"unit": None, "column": None}),  # as the index has them
    index_model_option,
    index_dtype_option,
    device_option,
    click.option("--threads", type=click.IntRange(1, MAX_THREADS), help="CPU threads."),
)


@click.command()
@click.argument("name", metavar="NAME", type=click.Choice(NAMES))
@folder_argument
@out_option
@click.option("--corpus", metavar="VALID", help="CORPUS of the prefixes for Section 5.")
@click.option("--prompt", help="One text instead of a corpus, for Section 5.")
@experiment_options
def experiment(name: str, folder: Path, out: Path, **options: Any) -> None:
    """Measure one figure or table of the paper.

    NAME is patterns, token-removal, agreement, next-token-rank, max-probability, predictive-values,
    active-memories, zero-agreement, stop-words, residual-prediction, residual-probability,
    prediction-cases, last-layer-composition or neural-memory.

    Writes OUT/NAME.json, NAME.svg and NAME.pdf. A result in OUT with the same index, settings and
    versions is not measured again. How the corpus is read follows the index by default.
    """
    ffmem.experiment(name, folder, out, progress=Progress(), **options)
    click.echo(f"Wrote {name}.json, {name}.svg and {name}.pdf to {out}.")


@click.command()
@folder_argument
@out_option
@click.option(
    "--corpus", metavar="VALID", required=True, help="CORPUS of the prefixes for Section 5."
)
@experiment_options
def report(folder: Path, out: Path, corpus: str, **options: Any) -> None:
    """Measure all figures and tables, and write a report.

    Writes OUT/report.html (a single self-contained file), report.md, and JSON, SVG and PDF of every
    experiment. Interrupted? Rerun the command: finished experiments are kept.
    """
    path = ffmem.report(folder, out, corpus, progress=Progress(), **options)
    click.echo(f"Wrote {path}.")
