"""Without the extra `models`, ffmem reads an index; whatever runs a model says what to install."""

import json
import os
import re
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import ffmem

ROOT = Path(__file__).parent.parent
EXTRA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
MODELS = {re.split("[<>=]", name)[0] for name in EXTRA["models"]} | {"google", "tokenizers"}

# The finder of installed packages finds none of them, so they are as good as not installed.
PROGRAM = f"""
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def find_others(name, path=None, target=None):
    return None if name.split(".")[0] in {sorted(MODELS)} else find(name, path, target)
PathFinder.find_spec = find_others
from ffmem.cli import main
main()
"""
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(Path(ffmem.__file__).parent.parent),
    "PYTHONUNBUFFERED": "1",
}


def run(*arguments):
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)


def test_the_extra_has_what_runs_models():
    assert {"torch", "transformers", "safetensors", "accelerate", "gguf"} <= MODELS


def test_an_index_is_shown_searched_exported_and_checked(tiny_index, tmp_path):
    folder = tiny_index.folder
    shown = run("show", folder, "L0N0", "--json")
    assert json.loads(shown.stdout)["cell"] == "L0N0", shown.stderr
    found = run("search", folder, "the")
    assert (found.returncode, found.stderr) == (0, "")
    exported = run("export", folder, tmp_path / "tables", "--to", "parquet")
    assert exported.returncode == 0, exported.stderr
    assert run("verify", folder).returncode == 0


def test_finished_reports_are_compared(tmp_path):
    folder = ROOT / "docs" / "results" / "mini-wiki"
    compared = run("report", "--compare", folder, "--out", tmp_path / "out")
    assert (compared.returncode, compared.stderr) == (0, "")
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["claims"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("describe", "mini-wiki"),
        ("index", "mini-wiki", "mini-wiki:valid", "--out", "OUT"),
        ("index", "mini-wiki", "mini-wiki:valid", "--out", "OUT", "--dry-run"),
        ("extend", "DIR", "mini-wiki:valid"),
        ("merge", "DIR", "DIR", "--out", "OUT"),
        ("trace", "DIR", "a prompt"),
        ("effect", "mini-wiki", "a prompt"),
        ("neighbours", "DIR", "L0N0"),
        ("edit", "mini-wiki", "--off", "L0N0", "--out", "OUT", "--no-report"),
        ("experiment", "agreement", "DIR", "--out", "OUT"),
        ("report", "DIR", "--corpus", "mini-wiki:valid", "--out", "OUT"),
        ("train", "--memory", "relu", "--layers=1", "--corpus", "mini-wiki:valid", "--out", "OUT"),
        ("demo", "--tiny", "--no-serve", "--out", "OUT"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_what_needs_a_model_says_what_to_install(arguments, tiny_index, tmp_path):
    given = {"DIR": str(tiny_index.folder), "OUT": str(tmp_path / "out")}
    done = run(*(given.get(one, one) for one in arguments))
    assert done.returncode == 1
    assert "Error: This needs a model: pip install 'ffmem[models]'." in done.stderr
    assert "Traceback" not in done.stderr


def test_the_explorer_serves_an_index_and_says_what_a_trace_needs(tiny_index):
    command = [sys.executable, "-c", PROGRAM, "serve", str(tiny_index.folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as server:
        try:
            address = server.stdout.readline().split()[-1].rstrip("/")
            for page in ("/", "/layer/0", "/m/L0N0", "/search?q=the", "/api/m/L0N0"):
                with urllib.request.urlopen(address + page, timeout=60) as answer:
                    assert answer.status == 200
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(address + "/api/trace?text=hello", timeout=60)
            with refused.value as answer:
                assert "pip install 'ffmem[models]'" in json.loads(answer.read())["error"]
                assert answer.code < 500
        finally:
            server.terminate()
