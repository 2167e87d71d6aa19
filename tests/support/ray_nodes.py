"""A Ray cluster on this machine. It outlives this process's connections, so that several clusters can take turns."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.ray_cluster import STORE

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster


@contextlib.contextmanager
def ray_nodes(*cpus: int, gpus: int = 0) -> Iterator[Cluster]:
    """Start a cluster with one node for each number of CPUs, and connect this process to it.

    Ray is told that the first node has `gpus` GPUs. Afterwards the process is connected to its former cluster again.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray.cluster_utils import Cluster

    from teola_plugin.cluster.connection import connect

    before = ray.get_runtime_context().gcs_address if ray.is_initialized() else ""
    ray.shutdown()
    with _silent():
        cluster = Cluster()
        try:
            for number, count in enumerate(cpus):
                only_head: dict[str, Any] = {} if number else {"include_dashboard": False, "num_gpus": gpus}
                cluster.add_node(num_cpus=count, object_store_memory=STORE, **only_head)
            connect(cluster.address)
        except BaseException:
            cluster.shutdown()
            raise
    try:
        yield cluster
    finally:
        with _silent():
            ray.shutdown()
            cluster.shutdown()
            if before:
                connect(before)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with open(os.devnull, "w") as devnull, contextlib.redirect_stderr(devnull):
        yield
