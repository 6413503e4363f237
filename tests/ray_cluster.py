"""A Ray cluster of three nodes on this machine, for tests; nodes can be killed and added.

Nothing of it outlives the fixture, and no Ray that it did not start is ever touched.
"""

import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.workers import gone

REPOSITORY = Path(__file__).parents[1]

PYTHONPATH = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "src")])
NODES = 3
STORE = 80 * 2**20
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": PYTHONPATH,
}


def descendants():
    return {process.pid for process in psutil.Process().children(recursive=True)}


class RayCluster:
    """A head and further nodes, one CPU each."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        options = {"include_dashboard": False, "num_cpus": 1, "object_store_memory": STORE}
        # Ray's processes then die with this one, however it ends.
        self._cluster = Cluster(initialize_head=True, head_node_args=options, shutdown_at_exit=True)
        self.session = Path(self._cluster.head_node.get_session_dir_path())
        self.mend()

    @property
    def address(self):
        return self._cluster.address

    def add_node(self):
        """Add a node with one CPU."""
        self._cluster.add_node(num_cpus=1, object_store_memory=STORE)

    def kill_node(self, pid=None):
        """Kill a node that is not the head, as when its power goes: that of a process, or any."""
        nodes = {_raylet(node): node for node in self._cluster.worker_nodes}
        raylet = next(iter(nodes)) if pid is None else psutil.Process(pid).ppid()
        below = psutil.Process(raylet).children(recursive=True)
        self._cluster.remove_node(nodes[raylet], allow_graceful=False)
        assert gone([process.pid for process in below])

    def pids_beside_the_head(self, pids):
        """Return those of some processes that run on nodes which can be killed."""
        raylets = {_raylet(node) for node in self._cluster.worker_nodes}
        return [pid for pid in pids if psutil.Process(pid).ppid() in raylets]

    def mend(self):
        """Add nodes until there are three."""
        while len(self._cluster.worker_nodes) < NODES - 1:
            self.add_node()

    def close(self):
        self._cluster.shutdown()


def _raylet(node):
    (started,) = node.all_processes["raylet"]
    return started.process.pid


@contextmanager
def started():
    """A cluster, and none of its processes afterwards."""
    before = descendants()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        cluster = RayCluster()
        try:
            yield cluster
        finally:
            ours = descendants() - before
            cluster.close()
            assert gone(ours), "the cluster has left processes behind"
            shutil.rmtree(cluster.session, ignore_errors=True)


@pytest.fixture(scope="session")
def gone_in_the_end():
    """Processes that must be gone when all tests are done: Ray's agents take a minute to end."""
    processes: list[psutil.Process] = []
    yield processes
    # A process that has the number of one that is gone is not running, to psutil.
    left = [process.pid for process in processes if process.is_running()]
    assert gone(left, 120), "a test has left processes behind"


@pytest.fixture(scope="session")
def ray_cluster():
    """Three nodes: `.address`, `.kill_node()`, `.add_node()`, `.mend()`."""
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'ffmem[ray]')")
    with started() as cluster:
        yield cluster
