"""Running the explorer: a socket, the application on it, and the URL to open.

`serve` blocks until it is stopped. `start_server` serves in a process of its own, also before the
index is finished, or even begun.
"""

import gc
import logging
import multiprocessing
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from uvicorn import Config, Server

from ffmem.errors import FfmemError, one_line
from ffmem.parallel import hide_main_module
from ffmem.progress import Progress
from ffmem.signatures import check_arguments
from ffmem.web.auth import check_token
from ffmem.web.catalog import Catalog

PORT = 8800

GRACE_SECONDS = 2
"""Time that running requests have when the server stops."""

NEW = "new"
"""Asks for a new token."""


@check_arguments
def serve(
    folders: str | Path | Sequence[str | Path],
    *,
    reports: Sequence[str | Path] = (),
    host: str = "127.0.0.1",
    port: int = PORT,
    token: str | None = None,
    allowed: Sequence[str] = (),
    model: str | None = None,
    adapter: str | None = None,
    device: str = "auto",
    db: str | None = None,
    load_model: bool = True,
    wait: bool = False,
    ready: Callable[[str], None] = print,
) -> None:
    """Serve indexes on a local web page until you stop it; returns nothing.

    Indexes may be unfinished: their pages fill in while they are built.

    Args:
        folders: The indexes.
        reports: Folders that `report` or `experiment` wrote; DIR-report is found automatically.
        host: Address to listen on; any but the local one needs a token.
        port: Port to listen on; 0 picks a free port.
        token: Token that visitors need; "new" generates one.
        allowed: Other names of this machine that browsers may use.
        model: New location of the model, if it has moved.
        adapter: New location of its adapter, if it has moved.
        device: Where the model runs.
        db: File of the annotation study; Default: DIR-annotations.sqlite.
        load_model: Whether to load the model at once, or when a page first needs it.
        ready: Called with the address of the page.
        wait: Also serve folders that do not exist yet.
    """
    folders = [folders] if isinstance(folders, str | Path) else folders
    if not folders:
        raise FfmemError("No index was given. Pass its folder: `ffmem serve DIR`.")
    secret = secrets.token_urlsafe(24) if token == NEW else token
    if secret is not None:
        check_token(secret)
    elif not is_loopback(host):
        raise FfmemError(
            f"--host {host} lets other machines in, which requires a token. Add --token new to"
            " generate one, or drop --host to serve only this machine."
        )
    catalog = Catalog.open([*map(Path, folders)], [*map(Path, reports)], wait)
    listening = listen(host, port)
    for folder in catalog.folders.values():
        if not folder.is_growing and (reason := folder.current().search.prepare()):
            Progress().say(f"{folder.name} cannot be searched: {reason}")
    from ffmem.web.app import make_app
    from ffmem.web.worker import ModelWorker

    app = make_app(
        catalog,
        ModelWorker(model, device, adapter),
        db=db,
        token=secret,
        hosts=[host, socket.gethostname(), *allowed],
        load_models=load_model,
    )
    # No access log: URLs hold prompts, and may hold the token.
    config = Config(
        app,
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    # Loaded objects stay: keep the garbage collector from scanning them during requests.
    gc.freeze()
    with listening, suppress(KeyboardInterrupt):  # which is how it ends
        ready(server_url(listening, secret))
        QuietServer(config).run(sockets=[listening])


@dataclass
class RunningServer:
    """An explorer in a process of its own; it ends with the process that started it."""

    url: str
    """The URL to open."""
    _process: BaseProcess

    def wait(self) -> None:
        """Wait until the server ends: at Ctrl-C, or when another thread stops it."""
        with suppress(KeyboardInterrupt):
            self._process.join()
        self.stop()

    def stop(self) -> None:
        """Stop the server."""
        self._process.terminate()
        self._process.join(GRACE_SECONDS + 3)
        if self._process.is_alive():
            self._process.kill()


def start_server(
    folder: str | Path,
    report: str | Path | None = None,
    *,
    port: int | None = None,
    load_model: bool = False,
) -> RunningServer:
    """Serve one index in a process of its own, and return its URL and a handle to stop it.

    The index may be unfinished: pages show what there is, and fill up. The folder need not even
    exist yet; until there is data, the page says so and reloads itself. When the
    manifest appears, the server switches to the finished index; patterns and the results in
    `report` (and in `DIR-report`) appear when they are written.

        server = start_server("demo")        # at once
        webbrowser.open(server.url)
        ffmem.index(model, corpus, "demo")   # pages fill up meanwhile
        server.wait()                        # until Ctrl-C; or server.stop()

    Args:
        folder: Folder of the index.
        report: Folder of the report; DIR-report is found without it.
        port: Port to listen on. Default: 8800, or a free one if that is taken; 0 takes a free one.
        load_model: Whether to load the model of a finished index at once; else a page that needs
            the model loads it. Leave it off while an index is being built: both would compete for
            the cores.
    """
    if port is None:
        port = PORT if is_free(PORT) else 0
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    reports = [] if report is None else [Path(report)]
    arguments = (sender, Path(folder), reports, port, load_model)
    process = context.Process(target=_serve_in_process, args=arguments, daemon=True)
    with hide_main_module():
        process.start()
    sender.close()
    try:
        url, error = receiver.recv()
    except EOFError:
        url, error = None, "The explorer could not start; its error is printed above."
    if error is not None:
        process.join()
        raise FfmemError(error)
    return RunningServer(url, process)


def _serve_in_process(
    sender: Connection, folder: Path, reports: list[Path], port: int, load_model: bool
) -> None:
    """Serve, and send the URL or an error; end when the parent process ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        serve(
            [folder],
            reports=reports,
            port=port,
            load_model=load_model,
            wait=True,
            ready=lambda url: sender.send((url, None)),
        )
    except FfmemError as error:
        sender.send((None, str(error)))


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
        listen("127.0.0.1", port).close()
    except FfmemError:
        return False
    return True


def listen(host: str, port: int) -> socket.socket:
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
        reason = getattr(error, "strerror", None) or one_line(error)
        raise FfmemError(
            f"Cannot listen on {host}, port {port}: {reason}."
            " Choose another with --port; 0 picks a free one."
        ) from None
    return listening


def server_url(listening: socket.socket, token: str | None) -> str:
    """Return the URL to open in a browser, with the token."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
