"""The command that trains a model: train."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from ffmem.cli_options import dataclass_options
from ffmem.commands.options import corpus_of, corpus_options, json_option, out_option, print_json
from ffmem.errors import FfmemError
from ffmem.progress import Progress
from ffmem.training.config import TrainConfig


@click.command()
@click.option("--corpus", required=True, help="CORPUS to train on.")
@out_option
@click.option(
    "--valid",
    help="CORPUS for validation, read whole. Default: the last 1 % of the sentences.",
)
@dataclass_options(TrainConfig)
@corpus_options
@json_option
def train(corpus: str, out: Path, valid: str | None, as_json: bool, **options: Any) -> None:
    """Train a small language model with memories of one KIND.

    Interrupted? Rerun the command to resume; the result is byte-identical. The folder holds the
    weights of the best evaluation, as a model that every command takes.
    """
    train_corpus = corpus_of(corpus, options)
    valid_corpus = None if valid is None else replace(train_corpus, source=valid, limit=None)
    config = TrainConfig(**options)  # refuses contradictions before heavy imports
    from ffmem.training.report import format_result
    from ffmem.training.train import train as run

    try:
        result = run(config, train_corpus, out, valid_corpus, progress=Progress())
    except KeyboardInterrupt:
        raise FfmemError(
            f"Interrupted. Rerun the same command to resume from the last checkpoint in {out}."
        ) from None
    if as_json:
        print_json(asdict(result))
    else:
        click.echo(format_result(result))
