"""Commands that measure the paper's figures and tables: experiment, report."""

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

import ffmem
from ffmem.cli.options import (
    device_option,
    folder_argument,
    index_dtype_option,
    index_model_option,
    out_option,
    resumable,
)
from ffmem.config_fields import add_options, dataclass_options, take_options
from ffmem.corpus.corpus import Corpus
from ffmem.experiments.base import NAMES, ExperimentConfig, corpus_like
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
@click.option("--corpus", metavar="CORPUS", help="Corpus to draw Section 5's prefixes from.")
@experiment_options
def experiment(name: str, folder: Path, out: Path, corpus: str | None, **options: Any) -> None:
    """Reproduce one figure or table of the paper.

    NAME is patterns, token-removal, agreement, next-token-rank, max-probability, predictive-values,
    active-memories, zero-agreement, stop-words, residual-prediction, residual-probability,
    prediction-cases, last-layer-composition or neural-memory.

    Writes NAME.json, NAME.svg and NAME.pdf to OUT, unless OUT has a result with the same index,
    settings and versions. By default, the corpus is read like that of the index.
    """
    index, source = _take_corpus(folder, corpus, options)
    (result,) = ffmem.experiment(name, index, out, corpus=source, progress=Progress(), **options)
    click.echo(result)
    click.echo(f"Wrote {name}.json, {name}.svg and {name}.pdf to {out}.")


@click.command()
@click.argument("folders", metavar="DIR|REPORT...", nargs=-1, required=True)
@out_option
@click.option("--corpus", metavar="CORPUS", help="Corpus to draw Section 5's prefixes from.")
@click.option("--compare", is_flag=True, help="Compare the reports of several models.")
@experiment_options
@click.pass_context
def report(
    context: click.Context,
    /,
    folders: tuple[str, ...],
    out: Path,
    corpus: str | None,
    compare: bool,
    **options: Any,
) -> None:
    """Reproduce all figures and tables in a report.

    Writes report.html (a single self-contained file), report.md, and JSON, SVG and PDF of every
    experiment to OUT. Interrupted? Rerun the command: finished experiments are kept.

    With --compare, REPORT... are folders that this command wrote, one per model; NAME=REPORT gives
    a model another name. Writes comparison.html, .md, .json and SVG to OUT: every claim of the
    paper on all models, and each figure with all of them. Loads no model.
    """
    if compare:
        _check_nothing_measured(context, options)
        click.echo(f"Wrote {ffmem.compare_reports(folders, out)}.")
        return
    if len(folders) > 1:
        raise click.UsageError(
            f"{len(folders)} folders were given: {', '.join(folders)}. A report is of one index; to"
            " compare finished reports, add --compare."
        )
    if corpus is None:
        raise click.UsageError("Missing option '--corpus': Section 5 needs prefixes.")
    index, source = _take_corpus(Path(folders[0]), corpus, options)
    assert source is not None
    with resumable():
        page = ffmem.report(index, out, source, progress=Progress(), **options)
    click.echo(f"Wrote {page}.")


def _check_nothing_measured(context: click.Context, options: dict[str, Any]) -> None:
    """Raise if an option of the measurement was given with --compare, which measures nothing."""
    given = [
        f"--{name.replace('_', '-')}"
        for name in ("corpus", *options)
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(
            f"--compare measures nothing, so it takes no {', '.join(given)}. Pass them to"
            " `ffmem report` of each model."
        )


def _take_corpus(
    folder: Path, name: str | None, options: dict[str, Any]
) -> tuple[Index, Corpus | None]:
    """Return the index, and the corpus of Section 5; its options are removed from the others."""
    index = as_index(folder)
    given = {option: value for option, value in take_options(options, Corpus).items() if value}
    if name is not None:
        return index, corpus_like(index, name, **given)
    if given:
        names = ", ".join(f"--{option.replace('_', '-')}" for option in given)
        raise click.UsageError(f"{names}: pass --corpus too.")
    return index, None
