"""A real browser on a real server: what the tests and the screenshots share."""

import os
import shutil
import threading
from contextlib import contextmanager

from uvicorn import Config, Server

from ffmem.web.server import listen

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def browser_path():
    """Return where a browser is: as FFMEM_BROWSER says, or by its usual names; None if nowhere."""
    named = os.environ.get("FFMEM_BROWSER")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def running(app):
    """Serve an application on a free port of this machine, and give its address."""
    server = Server(Config(app, log_level="warning", access_log=False))
    with listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
