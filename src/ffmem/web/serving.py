"""Running the explorer: a socket of this machine, the application on it, and where to look."""

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
from ffmem.web.guard import refuse_weak
from ffmem.web.library import Library, refuse_none

PORT = 8800

GRACE = 2
"""Seconds that answers under way have when the server is stopped."""

NEW = "new"
"""A token is to be made."""


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
    ready: Callable[[str], None] = print,
) -> None:
    """Serve indexes until somebody stops it; `ready` is told the address to open.

    `db` is the database of the annotators' study; else the one beside each index.

    Other machines are let in only with a token: a text of yours, or `new` for one that is made.
    """
    refuse_none(folders)
    secret = secrets.token_urlsafe(24) if token == NEW else token
    if secret is not None:
        refuse_weak(secret)
    elif not is_loopback(host):
        raise FfmemError(
            f"--host {host} lets other machines in, which needs a token: add --token, and one is"
            " made. Without it the explorer answers to this machine only."
        )
    library = Library.of(folders, reports)
    listening = bound(host, port)
    for shelf in library.shelves.values():
        if reason := shelf.prepare():
            Progress().say(f"{shelf.name} is shown without search: {reason}")
    from ffmem.web.app import make_app
    from ffmem.web.studies import Studies
    from ffmem.web.worker import Worker

    hosts = [host, socket.gethostname(), *allowed]
    app = make_app(library, Worker(model, device), Studies(db), token=secret, hosts=hosts)
    # No access log: addresses hold prompts, and may hold the token.
    config = Config(
        app,
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=GRACE,
    )
    # What is there now stays: collecting garbage need not look at it in the middle of a page.
    gc.freeze()
    with listening, suppress(KeyboardInterrupt):  # which is how it ends
        ready(address(listening, secret))
        QuietServer(config).run(sockets=[listening])


class QuietServer(Server):
    """A server that is stopped without a word about answers that it gave up."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop, quietly."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        super().handle_exit(sig, frame)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host name or number."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_free(port: int) -> bool:
    """Return whether nobody listens at a port of this machine."""
    try:
        bound("127.0.0.1", port).close()
    except FfmemError:
        return False
    return True


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 takes any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's delay off for sockets that name it only:
    # 40 ms for every small answer.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(128)
    except (OSError, OverflowError) as error:
        listening.close()
        raise FfmemError(
            f"Cannot listen at {host}, port {port}: {getattr(error, 'strerror', None) or error}."
            " Choose another with --port; 0 takes any that is free."
        ) from None
    return listening


def address(listening: socket.socket, token: str | None) -> str:
    """Return what to type into a browser, for the first time with the token."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
