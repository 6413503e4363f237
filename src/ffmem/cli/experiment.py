"""Commands that measure the paper's figures and tables: experiment, report."""

from pathlib import Path
from typing import Any

import click

import ffmem
from ffmem.cli.options import (
    device_option,
    folder_argument,
    index_dtype_option,
    index_model_option,
    out_option,
)
from ffmem.config_fields import add_options, dataclass_options
from ffmem.corpus.corpus import Corpus
from ffmem.experiments.base import NAMES, ExperimentConfig
from ffmem.progress import Progress

experiment_options = add_options(
    dataclass_options(ExperimentConfig),
    dataclass_options(Corpus, defaults={"unit": None, "column": None}),  # as the index has them
    index_model_option,
    index_dtype_option,
    device_option,
)


@click.command()
@click.argument("name", metavar="NAME", type=click.Choice(NAMES))
@folder_argument
@out_option
@click.option("--corpus", metavar="CORPUS", help="Corpus to draw Section 5's prefixes from.")
@experiment_options
def experiment(name: str, folder: Path, out: Path, **options: Any) -> None:
    """Reproduce one figure or table of the paper.

    NAME is patterns, token-removal, agreement, next-token-rank, max-probability, predictive-values,
    active-memories, zero-agreement, stop-words, residual-prediction, residual-probability,
    prediction-cases, last-layer-composition or neural-memory.

    Writes NAME.json, NAME.svg and NAME.pdf to OUT, unless OUT has a result with the same index,
    settings and versions. By default, the corpus is read like that of the index.
    """
    (result,) = ffmem.experiment(name, folder, out, progress=Progress(), **options)
    click.echo(result)
    click.echo(f"Wrote {name}.json, {name}.svg and {name}.pdf to {out}.")


@click.command()
@folder_argument
@out_option
@click.option(
    "--corpus", metavar="CORPUS", required=True, help="Corpus to draw Section 5's prefixes from."
)
@experiment_options
def report(folder: Path, out: Path, corpus: str, **options: Any) -> None:
    """Reproduce all figures and tables in a report.

    Writes report.html (a single self-contained file), report.md, and JSON, SVG and PDF of every
    experiment to OUT. Interrupted? Rerun the command: finished experiments are kept.
    """
    path = ffmem.report(folder, out, corpus, progress=Progress(), **options)
    click.echo(f"Wrote {path}.")
