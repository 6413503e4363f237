"""`ffmem edit` on the command line."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

import ffmem
from ffmem.cli import cli
from ffmem.interventions.edits import Edits
from ffmem.interventions.forward import apply_edits
from ffmem.models.tokenizer import WordTokenizer
from tests.indexing.folders import indexed, write_corpus
from tests.interventions.checkpoints import saved, stored
from tests.tiny import tiny

ORACLE = Path(__file__).parent.parent / "oracle"


def run(*arguments):
    """Return exit code, output and error of `ffmem edit`."""
    done = CliRunner().invoke(cli, ["edit", *map(str, arguments)])
    if isinstance(done.exception, ffmem.FfmemError):
        return 1, done.stdout, f"{done.stderr}Error: {done.exception}"
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tiny("llama"), tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c.txt")


def test_an_edit_is_made_and_made_again(folder, corpus, tmp_path):
    measured = ("--corpus", corpus, "--unit", "line", "--limit", 30)
    edits = ("--off", "L0N1,L0N2", "--off", "1.3", "--set", "L1N4=2.5", "--scale", "L0N5=-1")
    code, out, err = run(folder, *edits, "--out", tmp_path / "edited", *measured)
    assert code == 0
    assert "| perplexity |" in out
    assert "in 30 sentences" in out or "left out" in out
    assert "mlp_bias is switched on" in err
    again = ("--edits", tmp_path / "edited" / "edits.json", "--no-report", "--json")
    code, out, err = run(folder, *again, "--out", tmp_path / "again")
    assert code == 0
    assert "Side effects were not measured." in err
    assert json.loads(out)["side_effects"] is None
    weights = [tmp_path / name / "model.safetensors" for name in ("edited", "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again").config.mlp_bias


def test_an_index_gives_model_means_and_start_token(folder, corpus, tmp_path):
    index = indexed(tmp_path / "index", corpus, ffmem.load(folder), start="eos")
    code, out, _ = run(
        *(tmp_path / "index", "--mean", "L0N3", "--model", folder, "--out", tmp_path / "out"),
        *("--corpus", corpus, "--unit", "line", "--json"),
    )
    assert code == 0
    found = json.loads(out)
    assert found["edits"][0]["constant"] == index["L0N3"].stats.mean
    assert found["side_effects"]["start"] == "</s>"
    assert found["hash_before"] == index.manifest.model.hash


def test_the_dtype_of_the_checkpoint_stays(corpus, tmp_path):
    folder = saved(tiny("gpt2").to(torch.float16), tmp_path / "model")
    code, _, err = run(folder, "--scale", "L0N1=0.3", "--out", tmp_path / "out", "--no-report")
    assert code == 0
    assert "stored in float16: rewritten numbers are rounded" in err
    assert stored(tmp_path / "out").dtype == torch.float16


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "Give either edits"),
        (("--off", "L0N1", "--edits", "x"), 2, "Give either edits"),
        (("--edits", "x"), 1, "No file x"),
        (("--off", "L9N1"), 1, "There is no memory L9N1"),
        (("--off", "nonsense"), 1, "is not the name of a memory"),
        (("--off", "L0N1", "--set", "L0N1=2"), 1, "edited twice"),
        (("--set", "L0N1"), 2, "L5N1234=2.5"),
        (("--mean", "L0N1"), 1, "stored in an index"),
        (("--off", "L0N1", "--corpus", "nowhere.txt"), 1, "nowhere.txt"),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(arguments, code, message, folder, tmp_path):
    report = () if "--corpus" in arguments else ("--no-report",)
    found, _, err = run(folder, *arguments, *report, "--out", tmp_path / "out")
    assert found == code
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_a_fairseq_checkpoint_becomes_a_folder_of_ours_with_its_dictionary(corpus, tmp_path):
    edits = ("--off", "L0N1,L3N2", "--set", "L1N4=2.5", "--scale", "L2N5=-0.3")
    measured = ("--corpus", corpus, "--unit", "line", "--limit", 5)
    code, out, err = run(ORACLE, *edits, *measured, "--out", tmp_path / "out")
    assert code == 0
    assert "| perplexity |" in out
    assert "import ffmem.networks.model" in err
    before, after = ffmem.load(ORACLE), ffmem.load(tmp_path / "out")
    assert (tmp_path / "out" / "dict.txt").read_bytes() == (ORACLE / "dict.txt").read_bytes()
    assert isinstance(after.tokenizer, WordTokenizer)
    assert after.tokenizer.fingerprint == before.tokenizer.fingerprint
    asked = {"off": ["L0N1", "L3N2"], "set": {"L1N4": 2.5}, "scale": {"L2N5": -0.3}}
    tokens = torch.tensor([[2, 5, 9, 40, 17, 30]])
    with apply_edits(before, Edits.of(**asked)):
        expected = before.logits(tokens)
    torch.testing.assert_close(after.logits(tokens), expected, rtol=2e-5, atol=2e-5)
