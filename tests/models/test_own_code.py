"""Python code that comes with a model never runs, whatever standard input answers."""

import ast
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

import ffmem
from ffmem.errors import ModelError
from ffmem.models.load import load
from tests.models.test_load import write_gguf
from tests.tiny import tiny, tiny_tokenizer

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({ran!r}).touch()
class EvilConfig(LlamaConfig):
    model_type = "evil"
class EvilModel(LlamaForCausalLM):
    config_class = EvilConfig
class EvilTokenizer(PreTrainedTokenizerFast):
    pass
"""
MODEL = {"AutoModelForCausalLM": "evil.EvilModel"}
CONFIG = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig"} | MODEL}
TOKENIZER = {
    "tokenizer_class": "EvilTokenizer",
    "auto_map": {"AutoTokenizer": [None, "evil.EvilTokenizer"]},
}
KINDS = {
    "config": ("config.json", CONFIG),
    "model": ("config.json", {"model_type": "vit", "auto_map": MODEL}),
    "tokenizer": ("tokenizer_config.json", TOKENIZER),
}
REFUSED = r"needs its own Python code .*, which ffmem never runs\. Use a model that"


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """The file that exists as soon as the code of a model has run; `y` waits on standard input."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    return tmp_path / "ran"


@pytest.fixture
def folder(tmp_path, ran):
    """A tiny llama whose folder also holds code."""
    folder = tmp_path / "model"
    tiny("llama").save_pretrained(folder)
    tiny_tokenizer().tokenizer.save_pretrained(folder)
    (folder / "evil.py").write_text(CODE.format(ran=str(ran)))
    return folder


def ask_for_code(folder, kind):
    name, changes = KINDS[kind]
    settings = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(settings | changes))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_needs_its_own_code_is_refused_and_its_code_does_not_run(folder, ran, kind):
    ask_for_code(folder, kind)
    with pytest.raises(ModelError, match=REFUSED):
        load(folder)
    assert not ran.exists()
    assert sys.stdin.read() == "y\n" * 9


@pytest.mark.parametrize("kind", ["config", "tokenizer"])
def test_a_corpus_that_begins_with_y_does_not_run_code(folder, ran, tmp_path, kind):
    ask_for_code(folder, kind)
    done = subprocess.run(
        [sys.executable, "-m", "ffmem", "index", str(folder), "-", "--out", str(tmp_path / "x")],
        input="y\ny\nw3 w4 w5\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"Error: The model {folder} needs its own Python code")
    assert "Do you wish" not in done.stdout + done.stderr
    assert not ran.exists()


def test_a_gguf_file_does_not_run_the_code_beside_it(folder, ran, tmp_path, monkeypatch):
    monkeypatch.setenv("FFMEM_CACHE", str(tmp_path / "cache"))
    ask_for_code(folder, "tokenizer")
    gguf = folder / "tiny.gguf"
    write_gguf(gguf, tiny("llama"), ["<s>", "</s>", "a", "b", "ab", *map(str, range(59))])
    with pytest.raises(ModelError, match=REFUSED):
        load(gguf)
    assert not ran.exists()
    assert not (tmp_path / "cache").exists()


def test_a_model_that_transformers_knows_loads_without_the_code_it_names(folder, ran):
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"auto_map": CONFIG["auto_map"]}))
    assert load(folder).family == "llama"
    assert not ran.exists()


def test_every_call_that_loads_says_that_no_code_may_run():
    loaders = {"from_pretrained", "from_config", "load_dataset"}
    calls, open_ones = 0, []
    for path in Path(ffmem.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in loaders:
                calls += 1
                given = {ast.unparse(keyword) for keyword in node.keywords}
                if not given & {"**NO_REMOTE_CODE", "trust_remote_code=False"}:
                    open_ones.append(f"{path}:{node.lineno}")
    assert calls >= 9
    assert open_ones == []
