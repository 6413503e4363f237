import ast
import inspect
import pickle
import re
from dataclasses import fields
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import ffmem
from ffmem.cli import cli
from ffmem.errors import FfmemError, NoStaticValues, UnknownFamily, name_parameters
from ffmem.indexing.partials import DamagedPartialError
from ffmem.storage import Storage
from ffmem.training.trainer import DivergenceError


@pytest.mark.parametrize(
    "error",
    [
        FfmemError("A message."),
        UnknownFamily("bert", "it has none"),
        NoStaticValues("Cannot do this."),
        DivergenceError(7, "the loss is nan", 5),
        DamagedPartialError(Storage(Path("run")), "a.arrow", "cut"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_out_of_a_worker_as_it_was_raised(error):
    same = pickle.loads(pickle.dumps(error))
    assert type(same) is type(error)
    assert str(same) == str(error)


# Options of the command line, and parameters of Python functions


def test_python_callers_read_the_names_of_parameters():
    text = "--batch-tokens 5: use `ffmem index --start bos` (--in all, -t 3) or drop --no-models."
    expected = (
        "`batch_tokens` 5: use `ffmem index --start bos` (`place` all, `t` 3) or drop"
        " `models=False`."
    )
    assert str(FfmemError(text)) == expected
    assert str(FfmemError(expected)) == expected
    for other in ("a--b", "-5 is below 0", "x -- y", "-1", "well-known", "'--sort' or path=--x"):
        assert str(FfmemError(other)) == other
    with pytest.raises(FfmemError, match=r"^`unit` words: unknown unit\. Use sentence, line"):
        ffmem.Corpus("some.txt", unit="words")
    with pytest.raises(FfmemError, match=r"^`batch_tokens` 0: use a whole number at least 1"):
        ffmem.index("mini-wiki", "some.txt", "out", batch_tokens=0)


def test_a_command_reads_the_names_of_its_options(corpus_file, model_folder, tmp_path):
    @click.command()
    def command():
        with pytest.raises(FfmemError, match=r"^--unit words: unknown unit"):
            ffmem.Corpus(str(corpus_file), unit="words")

    CliRunner().invoke(command, [], catch_exceptions=False)
    arguments = ["index", str(model_folder), str(corpus_file), "--out", str(tmp_path / "index")]
    done = CliRunner().invoke(cli, [*arguments, "--unit", "words"])
    assert str(done.exception).startswith("--unit words: unknown unit")


def test_every_option_that_an_error_names_is_a_parameter_in_python():
    known = {field.name for field in fields(ffmem.Corpus)}
    for name in ffmem.__all__:
        known |= set(inspect.signature(getattr(ffmem, name)).parameters)
    source = Path(ffmem.__file__).parent
    named = set()
    for path in source.rglob("*.py"):
        if "cli" not in path.parts:
            for text in error_texts(ast.parse(path.read_text("utf-8"))):
                named |= set(re.findall(r"`([a-z_]+)[=`]", name_parameters(text))) - set(
                    re.findall(r"`([a-z_]+)[=`]", text)
                )
    assert len(named) > 30
    assert named - known == set()


def error_texts(tree):
    """Yield every text within `raise Something(...)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            for part in ast.walk(node.exc):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value
