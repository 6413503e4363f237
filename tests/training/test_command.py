import json
import os
import pty
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ffmem.cli import cli
from ffmem.errors import FfmemError
from ffmem.training.config import TrainConfig
from ffmem.training.run_dir import TrainResult
from tests.training.small import write_corpus

SMALL = [
    *("--memory", "relu", "--layers", "1", "--width", "16", "--heads", "2", "--context", "16"),
    *("--batch-tokens", "64", "--steps", "12", "--unit", "line", "--threads", "1"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return str(write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt"))


def command(*given):
    return CliRunner().invoke(cli, ["train", *SMALL, *map(str, given)])


def test_it_trains_and_prints_the_result(corpus, tmp_path):
    out = tmp_path / "model"
    done = command("--corpus", corpus, "--out", out, "--match", "gelu", "--cutoffs", "8,16")
    assert done.exit_code == 0, done.output
    assert "Validation perplexity" in done.output
    assert "No --valid was given" in done.output
    assert "with gelu memories)" in done.output
    again = command(
        *("--corpus", corpus, "--out", out, "--match", "gelu", "--cutoffs", "8,16", "--json")
    )
    assert again.exit_code == 0
    result = TrainResult.of(json.loads(again.stdout))
    assert result.run.config.cutoffs == [8, 16]
    assert result.steps == 12


def test_every_field_is_an_option_with_the_same_default():
    needed = ["--memory", "relu", "--layers", "2", "--corpus", "text.txt", "--out", "model"]
    train = cli.get_command(click.Context(cli), "train")
    above = click.Context(cli, help_option_names=["-h", "--help"])  # as the group sets them
    options = train.make_context("train", needed, parent=above).params
    config = TrainConfig(**{field.name: options[field.name] for field in fields(TrainConfig)})
    assert repr(config) == repr(TrainConfig(memory="relu", layers=2))
    assert all(option.help for option in train.params)


@pytest.mark.parametrize("cutoffs", ["4,x", "", "-3", "1.5"])
def test_cutoffs_are_numbers(corpus, tmp_path, cutoffs):
    done = command("--corpus", corpus, "--out", tmp_path / "model", "--cutoffs", cutoffs)
    assert done.exit_code == 2
    assert "not a comma-separated list" in done.output


def test_contradictions_are_refused_before_the_corpus_is_looked_for(tmp_path):
    done = command("--corpus", "nowhere.txt", "--out", tmp_path / "model", "--epochs", 2)
    assert isinstance(done.exception, FfmemError)
    assert "--steps 12 and --epochs 2" in str(done.exception)


def test_a_terminal_shows_one_line_with_loss_speed_and_time_left(corpus, tmp_path):
    ours, theirs = pty.openpty()
    source = Path(__file__).parents[2] / "src"
    code = "from ffmem.cli.train import train; train()"
    done = subprocess.run(
        [sys.executable, "-c", code, *SMALL, "--corpus", corpus, "--out", tmp_path / "model"],
        stderr=theirs,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(source), "COLUMNS": "200", "TERM": "xterm"},
        check=True,
        text=True,
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        seen += part
    os.close(ours)
    shown = seen.decode()
    assert "Training 12/12" in shown
    assert "loss " in shown
    assert "tokens/s" in shown
    assert "validation perplexity" in shown
    assert done.stdout.startswith("Trained ")


def test_options_need_no_heavy_libraries():
    code = (
        "import sys, ffmem.cli.train\n"
        "heavy = {'torch', 'transformers', 'altair', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
