"""A Ray cluster and a shared pool on it for one benchmark or test; both end with the block."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from teola_plugin import EnginePool
from teola_plugin.cluster import deploy
from teola_plugin.cluster.config import PoolConfig
from teola_plugin.cluster.names import NAMESPACE

STORE = 100 * 2**20
"""Bytes of shared memory: values are small."""


@contextmanager
def ray_node(cpus: int = 2) -> Iterator[str]:
    """A cluster of one node on the loopback. Gives its address."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(
        address="local",  # and not one that happens to run on this machine
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=STORE,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


@contextmanager
def shared_pool(engines: Mapping[str, Any], name: str = "bench") -> Iterator[EnginePool]:
    """A pool of these engines (as in its YAML), started, on a cluster of its own."""
    with ray_node() as address:
        deploy.up(PoolConfig.model_validate({"name": name, "engines": engines}), address)
        with EnginePool.connect(address, pool=name) as pool:
            yield pool
