"""The commands that open the explorer, as processes of their own."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from click.testing import CliRunner

from ffmem.cli import cli
from ffmem.errors import FfmemError
from ffmem.web.server import listen


@contextmanager
def process(*arguments, **environment):
    """Start a Python that serves; interrupt it at the end, as Ctrl-C does."""
    made = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    try:
        yield made
    finally:
        made.send_signal(signal.SIGINT)
        try:
            made.said = made.communicate(timeout=20)[1]
        finally:
            made.kill()


def address_said_by(made):
    said = []
    for line in made.stdout:
        said.append(line)
        if found := re.search(r"at (http://\S+)", line):
            return found[1]
    raise AssertionError(f"no address: {said} {made.stderr.read()}")


def loads_the_model(address, seconds, **headers):
    """Return whether a page says within some seconds that the model is loaded or loading."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with urlopen(Request(address + "m/L1N3", headers=headers)) as page:
            if b"memory.js" in page.read():
                return True
        time.sleep(0.1)
    return False


def test_serve_says_where_it_is_loads_the_model_and_ends_at_an_interrupt(served_folder):
    with process("-m", "ffmem", "serve", str(served_folder), "--port", "0") as made:
        address = address_said_by(made)
        assert address.startswith("http://127.0.0.1:")
        with urlopen(address + "m/L1N3") as page:
            assert b"L1N3" in page.read()
        assert loads_the_model(address, 20)
    assert made.returncode == 0
    assert "Traceback" not in made.said


def test_an_interrupt_does_not_wait_for_a_prompt_to_end(served_folder):
    """A job that would take a minute is given up, without a traceback."""
    code = (
        "import sys, time; from pathlib import Path; from ffmem.web.views import trace;"
        " from ffmem.web.server import serve;"
        " trace.make_page = lambda *_: time.sleep(60);"
        " serve([Path(sys.argv[1])], port=0, ready=lambda a: print('at', a))"
    )
    with process("-u", "-c", code, str(served_folder)) as made:
        address = address_said_by(made)
        page = urlopen(address + "trace?text=a")
        assert b"<title>Trace" in page.read(400)  # the head of the page, which is sent first
    assert made.returncode == 0
    assert "Traceback" not in made.said
    page.close()


def test_a_token_is_made_and_the_model_left_alone_on_request(served_folder):
    arguments = ("serve", str(served_folder), "--port", "0", "--host", "0.0.0.0", "--no-model")
    arguments = (*arguments, "--token")
    with process("-m", "ffmem", *arguments) as made:
        address = address_said_by(made)
        port, token = re.fullmatch(r"http://[^:]+:(\d+)/\?token=([\w-]{20,})", address).groups()
        with pytest.raises(HTTPError, match="401") as refused:
            urlopen(f"http://127.0.0.1:{port}/api/m/L1N3")
        refused.value.close()
        sent = Request(f"http://127.0.0.1:{port}/api/m/L1N3")
        sent.add_header("Authorization", f"Bearer {token}")
        with urlopen(sent) as answer:
            assert answer.status == 200
        assert not loads_the_model(
            f"http://127.0.0.1:{port}/", 0.5, Authorization=f"Bearer {token}"
        )
    assert token not in made.said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "There is no index at nowhere"),
        (["{folder}", "--host", "0.0.0.0"], "--token"),
        (["{folder}", "--token", "short"], "at least 16"),
        (["{folder}", "--report", "nowhere"], "holds no experiment"),
        (["{folder}", "--host", "no.such.host.invalid"], "--token"),
    ],
)
def test_what_cannot_be_served_is_told_in_one_line(served_folder, arguments, message):
    given = [part.format(folder=served_folder) for part in arguments]
    done = CliRunner().invoke(cli, ["serve", *given])
    assert isinstance(done.exception, FfmemError)
    assert message in str(done.exception)
    assert "\n" not in str(done.exception)


def test_a_port_that_does_not_exist_is_refused_in_one_sentence():
    with pytest.raises(FfmemError, match=r"port must be 0-65535\. Choose another"):
        listen("127.0.0.1", 99999)
