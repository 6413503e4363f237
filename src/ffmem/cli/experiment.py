"""Commands that measure the paper's figures and tables: experiment, report."""

from pathlib import Path
from typing import Any

import click

import ffmem
from ffmem.api.experiments import corpus_like
from ffmem.cli.options import (
    device_option,
    folder_argument,
    index_dtype_option,
    index_model_option,
    out_option,
)
from ffmem.config_fields import add_options, dataclass_options, take_options
from ffmem.corpus.corpus import Corpus
from ffmem.experiments.base import NAMES, ExperimentConfig
from ffmem.indexing.store import Index, as_index
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
@click.option("--corpus", metavar="CORPUS", help="Corpus of the prefixes for Section 5.")
@experiment_options
def experiment(name: str, folder: Path, out: Path, corpus: str | None, **options: Any) -> None:
    """Measure one figure or table of the paper.

    NAME is patterns, token-removal, agreement, next-token-rank, max-probability, predictive-values,
    active-memories, zero-agreement, stop-words, residual-prediction, residual-probability,
    prediction-cases, last-layer-composition or neural-memory.

    Writes NAME.json, NAME.svg and NAME.pdf to OUT, unless OUT has a result with the same index,
    settings and versions. The corpus is read as that of the index by default.
    """
    index, source = _take_corpus(folder, corpus, options)
    (result,) = ffmem.experiment(name, index, out, corpus=source, progress=Progress(), **options)
    click.echo(result)
    click.echo(f"Wrote {name}.json, {name}.svg and {name}.pdf to {out}.")


@click.command()
@folder_argument
@out_option
@click.option(
    "--corpus", metavar="CORPUS", required=True, help="Corpus of the prefixes for Section 5."
)
@experiment_options
def report(folder: Path, out: Path, corpus: str, **options: Any) -> None:
    """Measure all figures and tables, and write a report.

    Writes report.html (a single self-contained file), report.md, and JSON, SVG and PDF of every
    experiment to OUT. Interrupted? Rerun the command: finished experiments are kept.
    """
    index, source = _take_corpus(folder, corpus, options)
    assert source is not None
    click.echo(f"Wrote {ffmem.report(index, out, source, progress=Progress(), **options)}.")


def _take_corpus(
    folder: Path, name: str | None, options: dict[str, Any]
) -> tuple[Index, Corpus | None]:
    """Return the index, and the corpus of Section 5; its options are removed from the others."""
    index = as_index(folder)
    given = {option: value for option, value in take_options(options, Corpus).items() if value}
    if name is not None:
        return index, corpus_like(index, name, **given)
    if given:
        raise click.UsageError(f"{', '.join(given)}: give --corpus too.")
    return index, None
