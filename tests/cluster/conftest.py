"""One Ray cluster for all tests that need one."""

from tests.cluster.ray_cluster import ray_cluster  # noqa: F401
