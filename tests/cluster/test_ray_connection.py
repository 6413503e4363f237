import socket
import sys
import time
from contextlib import closing
from functools import lru_cache
from threading import Thread

import pytest

from ffmem.cluster import ray_connection
from ffmem.cluster.ray_connection import RayConnection
from ffmem.errors import FfmemError

pytest.importorskip("ray", reason="Ray is not installed (pip install 'ffmem[ray]')")


@pytest.fixture(autouse=True)
def unconnected(monkeypatch):
    """Each test begins without a Ray, and leaves none."""
    import ray

    assert not ray.is_initialized()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield
    assert not ray.is_initialized()


@pytest.fixture
def free_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return server.getsockname()[1]


def serving(server, answer):
    """Answer every caller with the same bytes, or not at all."""
    with server:
        talk, _ = server.accept()
        with talk:
            talk.recv(100)
            if answer is None:
                talk.recv(100)
            else:
                talk.sendall(answer)


def refused(address):
    """Return why an address was refused, and see that this took no long time."""
    started = time.monotonic()
    with pytest.raises(FfmemError) as error:
        RayConnection(address, 1)
    assert time.monotonic() - started < 15
    return str(error.value)


def test_an_address_where_nothing_listens_is_told_at_once(free_port):
    address = f"127.0.0.1:{free_port}"
    assert refused(address).startswith(f"--ray {address}: nothing can be reached there (")


def test_a_host_that_does_not_exist_is_told():
    assert "nothing can be reached there (" in refused("no-such-host.invalid:6379")


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None])
def test_somebody_who_is_no_ray_is_told(answer, monkeypatch):
    monkeypatch.setattr(ray_connection, "PATIENCE", 0.5)
    server = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{server.getsockname()[1]}"
    thread = Thread(target=serving, args=(server, answer))
    thread.start()
    assert "who answers there is no Ray" in refused(address)
    thread.join()


@pytest.mark.parametrize("address", ["6379", "host", ":6379", "host:x", "host:0", "host:70000", ""])
def test_what_is_no_address_is_refused(address):
    assert "is no address. Give local, auto or HOST:PORT." in refused(address)


def test_ray_client_is_refused_with_what_to_do_instead():
    assert "Run ffmem on a machine of the cluster" in refused("ray://head:10001")


@pytest.fixture
def alone(monkeypatch):
    """Others may run a Ray on this machine: it must not be found, let alone used."""
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", lru_cache(set))

    def last(address):
        monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda _: address)

    return last


def test_auto_without_any_ray_is_told(alone):
    alone(None)
    assert refused("auto").startswith("No Ray was found for --ray auto. Start one with `ray start")


def test_auto_does_not_wait_for_a_ray_that_was_killed(alone, free_port):
    alone(f"127.0.0.1:{free_port}")
    assert f"--ray auto (found 127.0.0.1:{free_port}): nothing can be reached" in refused("auto")


def test_auto_takes_the_address_that_the_environment_names(monkeypatch, free_port):
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port}")
    assert f"--ray auto (found 127.0.0.1:{free_port}): nothing can be reached" in refused("auto")


def test_a_missing_ray_is_told_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FfmemError, match=r"not installed here. .*pip install 'ffmem\[ray\]'"):
        RayConnection("local", 1)
