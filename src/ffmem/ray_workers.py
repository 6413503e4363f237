"""Workers in Ray actors, with Ray's own restarts and retries; its public API only.

    with connect("local", 4, {"CPU": 2}) as cluster:    # or "auto", or a head node's address
        slot = RaySlot(cluster.ray, make, threads=2, gpus=0)
        slot.start().result()

Ray itself is imported when it is needed. A Ray that is started here ends with the block; the user's
own stays as it is.
"""

import logging
import math
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ffmem.errors import ClusterGone, FfmemError, WorkerError, one_line

COMPARED_PACKAGES = ("ffmem", "torch", "transformers")
"""Another version of these may give other bytes."""

RESTARTS = 2
"""How often Ray restarts an actor, and gives it the same task again."""

OBJECT_STORE = 80 * 2**20
"""Bytes of a local Ray's object store, its minimum: only names and small numbers pass through."""

ADDRESS_TIMEOUT = 5.0
"""Seconds that an address has to answer."""

NODES_TIMEOUT = 30.0
"""Seconds that a Ray has to say which nodes it has."""

RETRY_SECONDS = 0.5
"""Time before a failed query is repeated."""


# Workers


class _Actor:
    """What runs in a Ray actor; Ray makes a new one when it restarts the actor."""

    def __init__(self, make: Callable[[], Any], versions: dict[str, str]) -> None:
        self.make, self.versions = make, versions
        self.name = secrets.token_hex(4)
        self.worker: Any = None

    def ready(self) -> str:
        """Make the worker: here and not in `__init__`, so that an error reaches us as it is."""
        if self.worker is None:
            if self.versions != _versions():
                raise WorkerError(
                    f"{socket.gethostname()} has {_versions()}, but the run was started with"
                    f" {self.versions}. Install the same versions on every node."
                )
            self.worker = self.make()
        return self.name

    def call(self, method: str, arguments: tuple[Any, ...]) -> str:
        self.ready()
        getattr(self.worker, method)(*arguments)
        return self.name


def _versions() -> dict[str, str]:
    """Return the versions of the compared packages, without the build (`+cpu`)."""
    found = {}
    for name in COMPARED_PACKAGES:
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            found[name] = "none"
    return found


class RaySlot:
    """A place for one worker (`ffmem.parallel.Slot`): a Ray actor."""

    n_deaths = RESTARTS + 1

    def __init__(self, ray: Any, make: Callable[[], Any], threads: int, gpus: float) -> None:
        self.names: set[str] = set()
        self._ray, self._make = ray, make
        self._actor_class = ray.remote(
            num_cpus=threads, num_gpus=gpus, max_restarts=RESTARTS, max_task_retries=RESTARTS
        )(_Actor)
        self._actor: Any = None

    def start(self) -> "Future[str]":
        """Ask Ray for an actor; the future is done when its worker is made."""
        self._actor = self._actor_class.remote(self._make, _versions())
        future: Future[str] = self._actor.ready.remote().future()
        return future

    def submit(self, method: str, arguments: tuple[Any, ...]) -> "Future[str]":
        """Call a method of the worker."""
        future: Future[str] = self._actor.call.remote(method, arguments).future()
        return future

    def stop(self) -> None:
        """Kill the actor."""
        if self._actor is not None:
            with suppress(Exception):  # the cluster may be gone
                self._ray.kill(self._actor)
            self._actor = None

    def cause_of_death(self, error: BaseException) -> str | None:
        """Return what Ray says about the actor's death, if the error is about that."""
        if not isinstance(error, self._ray.exceptions.RayActorError):
            return None
        text = str(error)
        if "its owner has died" in text:  # this process, as a dead node sees it
            raise _cluster_is_gone("of this run")
        _, mark, reason = text.rpartition("\nThe actor ")
        reason = f"The actor {reason}".partition("Some common causes include")[0] if mark else text
        return one_line(Exception(reason))


# The cluster


class RayCluster:
    """A Ray that we are connected to."""

    def __init__(self, ray: Any, address: str, per_worker: dict[str, float]) -> None:
        self.ray = ray
        self.address = address
        self._per_worker = {name: n for name, n in per_worker.items() if n}
        self._room = math.inf
        self._nodes: list[Any] | None = None
        self._thread: threading.Thread | None = None
        self._unanswered_since: float | None = None

    def check(self, block: bool = False) -> float:
        """Return how many workers the nodes have room for.

        Raise if the cluster is gone: no node is alive, or nothing has answered for a while. Without
        `block`, an answer counts from a later call on.
        """
        while True:
            if self._unanswered_since is None:
                self._unanswered_since = time.monotonic()
            end = self._unanswered_since + NODES_TIMEOUT
            if self._thread is None:
                self._nodes = None
                # In a thread, because a dead cluster may never answer.
                self._thread = threading.Thread(target=self._ask, daemon=True)
                self._thread.start()
            if block:
                self._thread.join(max(0.0, end - time.monotonic()))
            if not self._thread.is_alive():
                self._thread = None
                if self._nodes is not None:
                    self._unanswered_since = None
                    return self._count_room(self._nodes)
            if time.monotonic() > end:
                raise _cluster_is_gone(f"of --ray {self.address}")
            if not block:
                return self._room
            time.sleep(RETRY_SECONDS)

    def _count_room(self, nodes: list[Any]) -> float:
        alive = [node["Resources"] for node in nodes if node["Alive"]]
        if not alive:
            raise _cluster_is_gone(f"of --ray {self.address}")
        self._room = float(sum(self._room_on(resources) for resources in alive))
        return self._room

    def _room_on(self, resources: dict[str, float]) -> int:
        return min(int(resources.get(name, 0) // n) for name, n in self._per_worker.items())

    def _ask(self) -> None:
        with suppress(Exception):
            self._nodes = self.ray.nodes()


def _cluster_is_gone(which: str) -> ClusterGone:
    return ClusterGone(
        f"The Ray {which} is gone: none of its nodes answers. Committed work is kept: rerun the"
        " command to resume."
    )


@contextmanager
def connect(address: str, cpus: int, per_worker: dict[str, float]) -> Iterator[RayCluster]:
    """Connect to a Ray; "local" starts one with some CPUs, which ends with the block.

    `per_worker` has the CPUs and GPUs that one worker takes.
    """
    ray = _import_ray(address)
    if ray.is_initialized():  # the user's own, which stays as it is
        yield RayCluster(ray, address, per_worker)
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    # No usage statistics, and no printed errors of actors that were stopped.
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_IGNORE_UNHANDLED_ERRORS": "1"}
    if address == "local":
        found = address
        options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE}
        options |= {"num_cpus": cpus}
        names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
        if not any(name in os.environ for name in names):
            variables["RAY_AUTH_TOKEN"] = _auth_token()
    else:
        found = _find_address(address)
    with _environment(variables):
        try:
            try:
                ray.init(address=found, **options)
            except Exception as error:
                raise WorkerError(
                    f"Cannot connect to the Ray of --ray {address}: {type(error).__name__}:"
                    f" {one_line(error)}. Run ffmem on a node of the cluster, with the cluster's"
                    " Python, Ray and token."
                ) from error
            yield RayCluster(ray, address, per_worker)
        finally:
            ray.shutdown()


def check_ray(address: str) -> None:
    """Raise unless Ray is installed, and one answers at the address."""
    if not _import_ray(address).is_initialized() and address != "local":
        _find_address(address)


def _import_ray(address: str) -> Any:
    try:
        import ray
    except ImportError:
        raise FfmemError(
            f"--ray {address} needs Ray, which is not installed: pip install 'ffmem[ray]'"
        ) from None
    return ray


@cache
def _auth_token() -> str:
    """Return one token for all Rays of this process: Ray reads it only once."""
    return secrets.token_hex(32)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables that new processes inherit, except those that the user has set."""
    before = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    os.environ.update(values | before)
    try:
        yield
    finally:  # Ray sets more of them, which must not count as the user's next time
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]
        os.environ.update(before)


# Addresses


def _find_address(address: str) -> str:
    """Return the address of the Ray that `--ray` names, if one answers there.

    `ray.init` itself waits for minutes at an address without a Ray, and then ends the process.
    """
    shown = f"--ray {address}"
    if address == "auto":
        address = _running_address()
        shown += f" (found {address})"
    if address.startswith("ray://"):
        raise FfmemError(
            f"{shown} is a Ray Client address, whose actors die with the connection. Run ffmem on a"
            " node of the cluster, with --ray auto or --ray HOST:6379."
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise FfmemError(f"{shown} is not an address. Use local, auto or HOST:PORT.")
    try:
        problem = _probe(host.strip("[]"), int(port))
    except OSError as error:
        problem = f"Nothing answers there ({error})"
    if problem:
        raise FfmemError(
            f"{shown}: {problem}. Use the address that `ray start --head` printed (port 6379 by"
            " default), and check firewalls."
        )
    return address


def _running_address() -> str:
    """Return the address of the cluster that $RAY_ADDRESS names, or that runs on this machine."""
    if (named := os.environ.get("RAY_ADDRESS", "")) not in ("", "auto", "local"):
        return named
    # Where `ray start` leaves its address for `ray.init("auto")`.
    path = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray/ray_current_cluster"
    with suppress(OSError):
        if found := path.read_text(encoding="utf-8").strip():
            return found
    raise FfmemError(
        "No Ray was found for --ray auto. Start one with `ray start --head`, pass its address, or"
        " let ffmem start one with --ray local."
    )


def _probe(host: str, port: int) -> str:
    """Return what is wrong with an address; nothing if a Ray head node may listen there."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    with socket.create_connection((host, port), timeout=ADDRESS_TIMEOUT) as connection:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return ""
        connection.sendall(preface)
        try:
            answer = connection.recv(9)
        except TimeoutError:
            answer = b""
    is_settings_frame = answer[3:4] == bytes([4])
    return "" if is_settings_frame else "That address is not a Ray head node"
