"""Tests of two nodes on one machine: placement uses both, and no query is lost with a node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
from support.ray_nodes import ray_nodes

from teola_plugin.cluster import deploy
from teola_plugin.cluster.config import PoolConfig
from teola_plugin.cluster.connection import actor
from teola_plugin.cluster.names import actor_name
from teola_plugin.graph import Query
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.conformance import chain

pytestmark = pytest.mark.chaos
ENGINE = {"kind": "fake", "replicas": 2, "cpus": 1, "options": {"like": "embedder", "seconds": 0.05}}


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Start a head and one more node, with one CPU each, so that each gets one replica."""
    with ray_nodes(1, 1) as made:
        yield made


def replicas() -> list[dict[str, Any]]:
    found: dict[str, Any] = ray.get(actor(actor_name("nodes", "embedder")).status.remote(), timeout=60)
    return list(found["replicas"])


def test_queries_use_both_nodes_and_survive_losing_one(cluster: Any) -> None:
    [other] = cluster.worker_nodes
    deploy.up(PoolConfig.model_validate({"name": "nodes", "engines": {"embedder": ENGINE}}), cluster.address)
    with EnginePool.connect(cluster.address, pool="nodes") as pool:
        assert len({one["node"] for one in replicas()}) == 2
        texts = [f"t{i}" for i in range(4)]

        def submit(count: int) -> list[Any]:
            return [pool.runtime.submit(Query({"input": texts}), chain(4, "embedder"), {}) for _ in range(count)]

        expected = list(submit(1)[0].output.result(60))
        for run in submit(20):
            run.output.result(60)
        batches = ray.get(actor(actor_name("nodes", "embedder")).recent_batches.remote())
        assert {batch["replica"] for batch in batches} == {"0", "1"}
        runs = submit(40)
        cluster.remove_node(other, allow_graceful=False)
        assert all(list(run.output.result(120)) == expected for run in runs)
        assert all(list(run.output.result(60)) == expected for run in submit(5))
