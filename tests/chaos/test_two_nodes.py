"""Two nodes on one machine: placement uses both, and losing one loses no query."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from benchmarks.ray_cluster import STORE
from teola_plugin.cluster import deploy
from teola_plugin.cluster.config import PoolConfig
from teola_plugin.cluster.connection import actor
from teola_plugin.cluster.names import NAMESPACE, actor_name
from teola_plugin.graph import Query
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.conformance import chain

pytestmark = pytest.mark.chaos
ENGINE = {"kind": "fake", "instances": 2, "cpus": 1, "options": {"like": "embedder", "seconds": 0.05}}


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head and one more node, with a CPU each: an instance with one CPU has to go to either."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    with open(os.devnull, "w") as silent, contextlib.redirect_stderr(silent):
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": STORE})
        other = made.add_node(num_cpus=1, object_store_memory=STORE)
        ray.init(address=made.address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        try:
            yield made, other
        finally:
            ray.shutdown()
            made.shutdown()


def instances() -> list[dict[str, Any]]:
    found: dict[str, Any] = ray.get(actor(actor_name("nodes", "embedder")).status.remote(), timeout=60)
    return list(found["instances"])


def test_both_nodes_are_used_and_one_may_be_lost(cluster: Any) -> None:
    made, other = cluster
    deploy.up(PoolConfig.model_validate({"name": "nodes", "engines": {"embedder": ENGINE}}), made.address)
    with EnginePool.connect(made.address, pool="nodes") as pool:
        assert len({one["node"] for one in instances()}) == 2
        texts = [f"t{i}" for i in range(4)]

        def submit(count: int) -> list[Any]:
            return [pool.runtime.submit(Query({"input": texts}), chain(4, "embedder"), {}) for _ in range(count)]

        expected = list(submit(1)[0].output.result(60))
        for run in submit(20):
            run.output.result(60)
        batches = ray.get(actor(actor_name("nodes", "embedder")).recent_batches.remote())
        assert {batch["instance"] for batch in batches} == {"0", "1"}
        runs = submit(40)
        made.remove_node(other, allow_graceful=False)
        assert all(list(run.output.result(120)) == expected for run in runs)
        assert all(list(run.output.result(60)) == expected for run in submit(5))
