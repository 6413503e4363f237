"""Running the explorer: a socket, the application on it, and the address to open."""

import gc
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from types import FrameType

from uvicorn import Config, Server

from ffmem.errors import FfmemError
from ffmem.progress import Progress
from ffmem.web.auth import check_token
from ffmem.web.library import Library

PORT = 8800

GRACE = 2
"""Seconds that running requests have when the server stops."""

NEW = "new"
"""Asks for a new token."""


def serve(
    folders: Sequence[Path],
    *,
    reports: Sequence[Path] = (),
    host: str = "127.0.0.1",
    port: int = PORT,
    token: str | None = None,
    allowed: Sequence[str] = (),
    model: str | None = None,
    device: str = "auto",
    db: str | None = None,
    load_model: bool = True,
    ready: Callable[[str], None] = print,
) -> None:
    """Serve indexes until you stop it; `ready` is called with the address to open.

    `db` is the database of the annotation study; else the one beside each index. Other machines
    need a token: a text of yours, or `new` to make one. Models load in the background unless
    `load_model` is off; then when a page first needs one.
    """
    if not folders:
        raise FfmemError("No index was given. Name the folder of one: `ffmem serve DIR`.")
    secret = secrets.token_urlsafe(24) if token == NEW else token
    if secret is not None:
        check_token(secret)
    elif not is_loopback(host):
        raise FfmemError(
            f"--host {host} lets other machines in, which needs a token. Add --token to make one,"
            " or leave --host out to serve this machine only."
        )
    library = Library.of(folders, reports)
    listening = bound(host, port)
    for shelf in library.shelves.values():
        if reason := shelf.prepare():
            Progress().say(f"{shelf.name} cannot be searched: {reason}")
    from ffmem.web.app import make_app
    from ffmem.web.studies import Studies
    from ffmem.web.worker import Worker

    hosts = [host, socket.gethostname(), *allowed]
    app = make_app(
        library,
        Worker(model, device),
        Studies(db),
        token=secret,
        hosts=hosts,
        load_models=load_model,
    )
    # No access log: addresses hold prompts, and may hold the token.
    config = Config(
        app,
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=GRACE,
    )
    # What is loaded now stays: keep the garbage collector from walking it during requests.
    gc.freeze()
    with listening, suppress(KeyboardInterrupt):  # which is how it ends
        ready(address(listening, secret))
        QuietServer(config).run(sockets=[listening])


class QuietServer(Server):
    """A server that does not log the requests it gave up when it was stopped."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop without logging."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        super().handle_exit(sig, frame)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host name or IP address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_free(port: int) -> bool:
    """Return whether a port of this machine is free."""
    try:
        bound("127.0.0.1", port).close()
    except FfmemError:
        return False
    return True


def bound(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Name the protocol: only then does asyncio turn off Nagle's delay, 40 ms per small answer.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(128)
    except (OSError, OverflowError) as error:
        listening.close()
        raise FfmemError(
            f"Cannot listen on {host}, port {port}: {getattr(error, 'strerror', None) or error}."
            " Choose another with --port; 0 takes any that is free."
        ) from None
    return listening


def address(listening: socket.socket, token: str | None) -> str:
    """Return the address to open in a browser, with the token."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
