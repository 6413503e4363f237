import socket
import sys
import time
from contextlib import closing
from threading import Event, Thread

import pytest

from ffmem import ray_workers
from ffmem.errors import ClusterGone, FfmemError
from ffmem.parallel import ExecutionConfig

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
        ExecutionConfig(ray=address).check()
    assert time.monotonic() - started < 15
    return str(error.value)


def test_an_address_where_nothing_listens_is_told_at_once(free_port):
    address = f"127.0.0.1:{free_port}"
    assert refused(address).startswith(f"`ray` {address}: Nothing answers there (")


def test_a_host_that_does_not_exist_is_told():
    assert "Nothing answers there (" in refused("no-such-host.invalid:6379")


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None])
def test_somebody_who_is_no_ray_is_told(answer, monkeypatch):
    monkeypatch.setattr(ray_workers, "ADDRESS_TIMEOUT", 0.5)
    server = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{server.getsockname()[1]}"
    thread = Thread(target=serving, args=(server, answer))
    thread.start()
    assert "That address is not a Ray head node" in refused(address)
    thread.join()


@pytest.mark.parametrize("address", ["6379", "host", ":6379", "host:x", "host:0", "host:70000", ""])
def test_what_is_no_address_is_refused(address):
    assert "is not an address. Use local, auto or HOST:PORT." in refused(address)


def test_ray_client_is_refused_with_what_to_do_instead():
    assert "Run ffmem on a node of the cluster" in refused("ray://head:10001")


def test_auto_without_any_ray_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert refused("auto").startswith("No Ray was found for `ray` auto. Start one with `ray start")


def test_auto_does_not_wait_for_a_ray_that_was_killed(monkeypatch, tmp_path, free_port):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{free_port}")
    assert f"`ray` auto (found 127.0.0.1:{free_port}): Nothing answers" in refused("auto")


def test_auto_takes_the_address_that_the_environment_names(monkeypatch, free_port):
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port}")
    assert f"`ray` auto (found 127.0.0.1:{free_port}): Nothing answers" in refused("auto")


def test_a_missing_ray_is_told_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FfmemError, match=r"not installed: pip install 'ffmem\[ray\]'"):
        ExecutionConfig(ray="local").check()


class Nodes:
    """The nodes of a Ray, as `ray.nodes()` answers: one answer after the other, None fails."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def nodes(self):
        time.sleep(0.1)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            raise ConnectionError("no answer this time")
        return [{"Alive": cpus > 0, "Resources": {"CPU": cpus}} for cpus in answer]


def room(cluster):
    """Ask without waiting until the question has been answered, or has failed."""
    cluster.check()
    cluster._thread.join()
    return cluster.check()


def test_a_cluster_that_fails_to_answer_once_is_not_gone(monkeypatch):
    monkeypatch.setattr(ray_workers, "NODES_TIMEOUT", 0.5)
    cluster = ray_workers.RayCluster(
        Nodes([4.0], None, [8.0], None), "auto", {"CPU": 2.0, "GPU": 0.0}
    )
    assert room(cluster) == 2
    time.sleep(0.6)  # it need not be asked for a long time
    assert room(cluster) == 2
    assert room(cluster) == 4
    assert room(cluster) == 4
    time.sleep(0.6)
    with pytest.raises(ClusterGone, match="is gone"):
        room(cluster)


def test_who_needs_to_know_waits_until_the_cluster_answers():
    cluster = ray_workers.RayCluster(Nodes(None, None, [4.0]), "auto", {"CPU": 2.0})
    assert cluster.check(True) == 2


@pytest.mark.parametrize("block", [True, False])
def test_a_cluster_without_living_nodes_is_gone(block):
    cluster = ray_workers.RayCluster(Nodes([0.0]), "auto", {"CPU": 2.0})
    with pytest.raises(ClusterGone, match="is gone"):
        cluster.check(True) if block else room(cluster)


@pytest.mark.parametrize("fails", [True, False])
def test_a_cluster_that_never_answers_is_gone(monkeypatch, fails):
    monkeypatch.setattr(ray_workers, "NODES_TIMEOUT", 0.2)
    ray, end = Nodes(None), Event()
    if not fails:
        ray.nodes = lambda: end.wait(30)
    cluster = ray_workers.RayCluster(ray, "auto", {"CPU": 2.0})
    with pytest.raises(ClusterGone, match="is gone"):
        cluster.check(True)
    end.set()
