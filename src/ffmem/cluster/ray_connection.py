"""The way to a Ray: one of our own, a running one, or the one that this process is connected to.

    local        a Ray is started here, and ended with the connection
    auto         the Ray that runs on this machine (or that RAY_ADDRESS names)
    HOST:PORT    the Ray whose head listens there

What was not started here is never ended. Ray itself waits for minutes at an address where no Ray
is, and ends the process then; so the address is looked at before.
"""

import logging
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

from ffmem.errors import FfmemError

STORE = 80 * 2**20
"""Bytes of a local Ray's object store, its least: only names and small numbers pass through it."""

PATIENCE = 5.0
"""Seconds that an address has to answer, twice."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How a talk with a Ray's head begins: HTTP/2, and settings that change nothing."""

SETTINGS = 4
"""Fourth byte of a right answer."""

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_IGNORE_UNHANDLED_ERRORS": "1"}
"""Ray tells nobody about its use, and does not print the errors of those whom we let go."""


class RayConnection:
    """A Ray to work on. `ray` is the module, connected."""

    def __init__(self, address: str, cpus: int) -> None:
        self.ray = _imported(address)
        self._undo = ExitStack()
        if self.ray.is_initialized():
            return  # a user's own, which stays as it is
        try:
            self._connect(address, cpus)
        except BaseException:
            self._undo.close()
            raise

    def close(self) -> None:
        """Leave the Ray, and end it if it was started here."""
        self._undo.close()

    def _connect(self, address: str, cpus: int) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
        self._undo.enter_context(_environment(QUIET))
        if address == "local":
            self._undo.enter_context(_environment(_secret()))
            options |= {"include_dashboard": False, "object_store_memory": STORE, "num_cpus": cpus}
        found = address if address == "local" else _found(address)
        self._undo.enter_context(_silence())
        self._undo.callback(self.ray.shutdown)
        try:
            self.ray.init(address=found, **options)
        except Exception as error:
            raise FfmemError(
                f"Cannot use the Ray of --ray {address}: {type(error).__name__}:"
                f" {' '.join(str(error).split())} Run this on a machine that has joined the"
                " cluster (`ray start --address=HOST:PORT`), with the cluster's Python, Ray and"
                " token."
            ) from error


def refuse_unreachable(address: str) -> None:
    """Raise if no Ray can be worked on at an address."""
    if not _imported(address).is_initialized() and address != "local":
        _found(address)


def _imported(address: str) -> Any:
    try:
        import ray
    except ImportError:
        raise FfmemError(
            f"--ray {address} was asked for, and Ray is not installed here."
            " Install it: pip install 'ffmem[ray]'"
        ) from None
    return ray


def _secret() -> dict[str, str]:
    """Return a token for a Ray of our own, which lies in no file; none if the user has one."""
    own = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if any(name in os.environ for name in own):
        return {}
    return {"RAY_AUTH_TOKEN": _token()}


@cache
def _token() -> str:
    """Return one token for all of this process's own: Ray reads it only once."""
    return secrets.token_hex(32)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables that processes started meanwhile inherit; those that are set stay."""
    before = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    os.environ.update(values | before)
    try:
        yield
    finally:  # Ray itself sets some more, which must not count as the user's next time
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _silence() -> Iterator[None]:
    """Keep Ray from printing to stdout that a process died: events tell it, and stdout is ours.

    `log_to_driver` does not cover this, and no setting of Ray does.
    """
    from ray._private import worker

    name = "print_to_stdstream"
    printing = getattr(worker, name, None)
    if printing is None:
        yield
        return
    setattr(worker, name, lambda *data, **options: None)
    try:
        yield
    finally:
        setattr(worker, name, printing)


def _found(address: str) -> str:
    """Return the address of the Ray that is meant; an error if none answers there."""
    asked = f"--ray {address}"
    if address == "auto":
        address = _automatic()
        asked += f" (found {address})"
    if address.startswith("ray://"):
        raise FfmemError(
            f"{asked} is an address of Ray Client, whose workers are lost with the connection."
            " Run ffmem on a machine of the cluster, with --ray auto or --ray HOST:6379."
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise FfmemError(f"{asked} is no address. Give local, auto or HOST:PORT.")
    try:
        found = _answer(host.strip("[]"), int(port))
    except OSError as error:
        found = f"nothing can be reached there ({error})"
    if found:
        raise FfmemError(
            f"{asked}: {found}. Give the address that `ray start --head` printed (port 6379,"
            " unless another was chosen), and look for a firewall in between."
        )
    return address


def _automatic() -> str:
    """Return the address by RAY_ADDRESS, else of the Ray that runs, or ran last, on this machine.

    Ray's own search; `ray.init` would take a dead one for alive and wait for it.
    """
    from ray._private.services import get_ray_address_from_environment

    try:
        return str(get_ray_address_from_environment("auto", None))
    except ConnectionError:
        raise FfmemError(
            "No Ray was found for --ray auto. Start one with `ray start --head`, name its address,"
            " or let ffmem start its own with --ray local."
        ) from None


def _answer(host: str, port: int) -> str:
    """Return what is wrong with whoever answers at an address; nothing if it may be a Ray."""
    with socket.create_connection((host, port), timeout=PATIENCE) as talk:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return ""
        talk.sendall(PREFACE)
        talk.settimeout(PATIENCE)
        try:
            answer = talk.recv(9)
        except TimeoutError:
            answer = b""
    return "" if answer[3:4] == bytes([SETTINGS]) else "who answers there is no Ray"
