"""The command that trains a model: train."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from ffmem.cli.options import json_option, out_option, print_json, resumable
from ffmem.config_fields import dataclass_options, take_options
from ffmem.corpus.corpus import Corpus
from ffmem.models.arguments import require_models
from ffmem.progress import Progress
from ffmem.training.config import TrainConfig


@click.command()
@click.option("--corpus", metavar="CORPUS", required=True, help="Corpus to train on.")
@out_option
@click.option(
    "--valid",
    metavar="CORPUS",
    help="Validation corpus. Default: the last 1% of the sentences.",
)
@dataclass_options(TrainConfig)
@dataclass_options(Corpus, only=("unit", "column", "detokenize", "limit"))
@json_option
def train(corpus: str, out: Path, valid: str | None, as_json: bool, **options: Any) -> None:
    """Train a small model with one kind of memory.

    Saves the weights with the best validation loss, as a model that every command can load.
    Interrupted? Rerun the command to resume; the result is byte-identical.
    """
    train_corpus = Corpus(corpus, **take_options(options, Corpus))
    valid_corpus = None if valid is None else replace(train_corpus, source=valid, limit=None)
    config = TrainConfig(**options)  # raises on contradictions before heavy imports
    require_models()
    from ffmem.training.report import format_result
    from ffmem.training.train import train as run

    with resumable():
        result = run(config, train_corpus, out, valid_corpus, progress=Progress())
    if as_json:
        print_json(asdict(result))
    else:
        click.echo(format_result(result))
