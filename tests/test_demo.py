import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import pytest
from click.testing import CliRunner

import ffmem
from ffmem import demo
from ffmem.cli import cli
from ffmem.indexing.store import Index
from ffmem.mini_wiki import MODEL
from tests.indexing.folders import write_corpus

SOURCE = str(Path(ffmem.__file__).parent.parent)

NO_NETWORK = """\
import os, sys

def refuse(event, arguments):
    if event == "socket.connect":
        host = arguments[1][0] if isinstance(arguments[1], tuple) else "localhost"
    elif event == "socket.getaddrinfo":
        host = arguments[0]
    else:
        return
    if host not in (None, "localhost", "127.0.0.1", "::1"):
        with open(os.environ["ASKED"], "a") as asked:
            asked.write(f"{event} {host}\\n")
        raise OSError("no network in this test")

sys.addaudithook(refuse)
"""
"""A `sitecustomize`: every Python process refuses all but this machine, and leaves a note."""


@pytest.fixture
def offline(tmp_path):
    """The environment of a process without a network, for which nothing was fetched before."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(NO_NETWORK, encoding="utf-8")
    away = {name: str(tmp_path / name) for name in ("FFMEM_CACHE", "HF_HOME", "ASKED")}
    paths = os.pathsep.join((str(tmp_path / "site"), SOURCE))
    return os.environ | away | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def asked_for(offline):
    """Return what was asked of the network."""
    asked = Path(offline["ASKED"])
    return asked.read_text(encoding="utf-8") if asked.exists() else ""


def test_the_demonstration_indexes_and_shows(tmp_path, capsys, model_folder):
    """The real path, with a tiny model and text in place of those that are downloaded."""
    choice = replace(
        demo.FULL,
        model=str(model_folder),
        corpus=str(write_corpus(tmp_path / "corpus.txt")),
        valid=str(write_corpus(tmp_path / "valid.txt", seed=1)),
        words=("e",),
        sizes={"sample": 20, "per_layer": 1, "triggers": 2},
    )
    index = demo.demo(choice, tmp_path / "demo", limit=40)
    shown = capsys.readouterr().out
    assert index.manifest.corpus.sentences <= 40
    assert "'e'" in shown
    assert "promotes" in shown
    assert (tmp_path / "demo-report/report.html").exists()
    assert str(tmp_path / "demo-report/report.html") in shown
    assert f"ffmem show {tmp_path / 'demo'} L" in shown


def test_on_a_terminal_the_explorer_opens_before_the_index_is_finished(tmp_path, offline):
    """The tiny demo, to its end and without a network."""
    out, (screen, terminal) = tmp_path / "tiny", pty.openpty()
    command = [sys.executable, "-m", "ffmem", "demo", "--tiny", "--limit", "60", "--out", str(out)]
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n', encoding="utf-8")
    browser.chmod(0o755)
    environment = offline | {"BROWSER": str(browser), "COLUMNS": "200"}
    child = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    shown, was_finished = "", None
    late = threading.Timer(300, child.kill)  # the terminal would be read for ever
    late.start()
    try:
        while "Press Ctrl-C" not in shown:
            shown += os.read(screen, 65536).decode(errors="replace")
            if was_finished is None and (found := re.search(r"at (http://\S+) and fills", shown)):
                was_finished = (out / "manifest.json").exists()
                with urlopen(found[1]) as page:
                    home = page.read().decode()
        with urlopen(f"{found[1]}api/figures") as figures:
            assert json.load(figures)
        child.send_signal(signal.SIGINT)
        with suppress(OSError):  # how a terminal says that nobody writes to it any more
            while part := os.read(screen, 65536):
                shown += part.decode(errors="replace")
        assert child.wait(30) == 0, shown
    finally:
        late.cancel()
        child.kill()
        os.close(screen)
    assert was_finished is False
    assert opened.read_text(encoding="utf-8").strip() == found[1]
    assert "So far: " in home
    assert "Loading mini-wiki" in shown
    assert "promotes" in shown
    assert "lists of triggers" in shown
    assert f"ffmem serve {out}" in shown
    assert (tmp_path / "tiny-report/report.html").exists()
    assert asked_for(offline) == ""
    assert not (tmp_path / "FFMEM_CACHE").exists()
    manifest = Index(out).manifest
    assert manifest.model.source == "mini-wiki"
    assert [part.source for part in manifest.corpus.sources] == ["mini-wiki:train"]
    assert manifest.corpus.sentences == 60
    for file in tmp_path.glob("tiny*/**/*.json"):
        assert str(MODEL) not in file.read_text(encoding="utf-8"), file


def test_where_there_is_no_network_only_this_machine_can_be_reached(offline):
    """The control of the test above: what it forbids is noticed, in children too."""

    def run(code):
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, env=offline, check=False)

    ask = "import socket; socket.create_connection(('192.0.2.1', 9), timeout=1)"
    child = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {ask!r}]))"
    for code in (ask, child):
        done = run(code)
        assert done.returncode == 1
        assert "no network in this test" in done.stderr
        assert "192.0.2.1" in asked_for(offline)
    near = "import socket; s = socket.create_server(('127.0.0.1', 0));"
    near += " socket.create_connection(s.getsockname()).close()"
    assert run(near).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], (demo.FULL, Path("demo"), 2000, False)),
        (["--tiny"], (demo.TINY, Path("demo-tiny"), None, False)),
        (["--tiny", "--out", "here", "--limit", "7"], (demo.TINY, Path("here"), 7, False)),
        (["--limit", "9"], (demo.FULL, Path("demo"), 9, False)),
    ],
)
def test_the_command_takes_the_choices_own_folder_and_limit(monkeypatch, arguments, expected):
    asked = []
    monkeypatch.setattr(demo, "demo", lambda *given: asked.append(given))
    done = CliRunner().invoke(cli, ["demo", "--no-serve", *arguments])
    assert done.exit_code == 0
    assert asked == [expected]
