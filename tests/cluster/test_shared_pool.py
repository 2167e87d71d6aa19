"""Tests of apps on the shared pool: the answers of one process, batches of several apps, engines that come and go."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from support.apps import advanced_rag

from teola_plugin.cluster import deploy
from teola_plugin.cluster.config import EngineConfig, PoolConfig
from teola_plugin.cluster.connection import actor
from teola_plugin.cluster.host.replica_host import ReplicaHost
from teola_plugin.cluster.names import actor_name, engine_spec
from teola_plugin.engines.fake import fake_engines
from teola_plugin.errors import ConfigError, EngineError, EngineOverloaded, RegistrationError
from teola_plugin.graph import PrimitiveKind, Query
from teola_plugin.passes import DEFAULT_PASSES
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Chunk, EmbedText, Generate, IngestRow, Message, Prompt, Sampling
from teola_plugin.runtime.conformance import chain

K = PrimitiveKind
ROOT = Path(__file__).parents[2]


def embed(pool: EnginePool, text: str, engine: str = "embedder") -> list[float]:
    return list(pool.call(K.EMBEDDING, engine, [EmbedText(text)]).result(30)[0])


def host(pool: str, engine: str) -> Any:
    return actor(actor_name(pool, engine))


@pytest.fixture
def local() -> Iterator[EnginePool]:
    with EnginePool.local(fake_engines()) as pool:
        yield pool


def rag(pool: EnginePool, passes: Any) -> Any:
    template, calls, inputs = advanced_rag()
    plan = pool.plan(template, {"index": 12}, passes=passes)
    run = pool.runtime.submit(Query({"input": inputs}), plan.graph, calls)
    try:
        return run.output.result(30)
    finally:
        pool.admin("store", "delete_collection", "docs").result(30)


def test_rag_app_on_shared_pool_equals_local_pool(shared: EnginePool, local: EnginePool) -> None:
    expected = rag(local, ())
    assert rag(shared, ()) == expected
    assert rag(shared, DEFAULT_PASSES) == expected


def test_shared_pool_reports_its_engines_like_a_local_one(shared: EnginePool, local: EnginePool) -> None:
    assert set(shared.engine_names) == {*local.engine_names, "slow", "wide"}
    for name in local.engine_names:
        assert shared.engine(name).kinds == local.engine(name).kinds
        assert shared.profiles[name].batching == local.profiles[name].batching
    assert shared.versions()["llm"] == local.versions()["llm"]


def test_primitives_of_a_chain_are_submitted_together(shared: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pre-scheduling: no step of the chain waits for this process, which adopts what is under way already."""
    adopted: list[str] = []
    for engine in ("embedder", "slow"):
        port: Any = shared.runtime.port(engine)
        adopt = port.adopt
        monkeypatch.setattr(port, "adopt", lambda name, *args, adopt=adopt: (adopted.append(name), adopt(name, *args)))
    run = shared.runtime.submit(Query({"input": [f"t{i}" for i in range(6)]}), chain(6, "embedder", "slow"), {})
    run.output.result(30)
    assert len(adopted) == 5


def test_followers_of_a_cancelled_query_are_withdrawn(shared: EnginePool) -> None:
    run = shared.runtime.submit(Query({"input": ["a", "b", "c"]}), chain(3, "slow"), {})
    run.cancel()
    run.trace.result(30)
    assert embed(shared, "after", "slow")
    status = ray.get(host("fakes", "slow").status.remote())
    assert status["queued"] == 0 and status["replicas"][0]["running"] == 0


def test_batches_contain_queries_of_several_apps(shared: EnginePool, fakes_address: str) -> None:
    with EnginePool.connect(fakes_address, pool="fakes") as other:
        embed(shared, "warm", "slow")
        held = shared.call(K.EMBEDDING, "slow", [EmbedText("first, so that the others queue up")])
        runs = [
            pool.runtime.submit(Query({"input": [f"{app}{i}"]}, app=app), chain(1, "slow"), {})
            for i in range(3)
            for app, pool in (("one", shared), ("two", other))
        ]
        held.result(30)
        spans = [run.trace.result(30) for run in runs if run.output.result(30) is not None]
    found = {(s.app, s.batch) for trace in spans if trace is not None for s in trace.spans if s.engine == "slow"}
    assert {batch for app, batch in found if app == "one"} & {batch for app, batch in found if app == "two"}
    kept = ray.get(host("fakes", "slow").recent_batches.remote())
    assert any(set(batch["apps"]) >= {"one", "two"} for batch in kept)


_CLIENT = """
import json, sys
from teola_plugin.graph import PrimitiveKind as K, Query
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.conformance import chain
address, app = sys.argv[1:]
with EnginePool.connect(address, pool="fakes") as pool:
    queries = [Query({"input": [f"{app} {i}"] * 5}, app=app) for i in range(10)]
    runs = [pool.runtime.submit(query, chain(5, "embedder"), {}) for query in queries]
    print(json.dumps([list(run.output.result(60)) for run in runs]))
"""


def test_client_processes_share_the_pool(fakes_address: str, local: EnginePool) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    clients = {
        app: subprocess.Popen(
            [sys.executable, "-c", _CLIENT, fakes_address, app], stdout=subprocess.PIPE, env=env, text=True
        )
        for app in ("one", "two")
    }
    for app, client in clients.items():
        out, _ = client.communicate(timeout=120)
        assert client.returncode == 0
        assert json.loads(out) == [embed(local, f"{app} {i}") for i in range(10)]


def test_engine_errors_reach_the_client(shared: EnginePool) -> None:
    with pytest.raises(EngineError, match="bad request"):
        shared.call(K.EMBEDDING, "embedder", [42]).result(30)
    ask = Generate(Prompt((Message("user", "hello"),)), Sampling(max_tokens=4))
    with pytest.raises(EngineError):
        shared.call(K.PREFILLING, "embedder", [ask]).result(30)


class OnlyHere:
    """A class of a module that the cluster cannot import under this name."""

    __module__ = "__main__"


@pytest.mark.parametrize("metadata", [{"lock": threading.Lock()}, {"own": OnlyHere()}])
def test_unserializable_payload_fails_alone(shared: EnginePool, metadata: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "OnlyHere", OnlyHere, raising=False)
    rows = [IngestRow("odd", Chunk("a", "x", data), [1.0]) for data in (metadata, {})]
    bad, good = (shared.call(K.INGESTION, "store", [row]) for row in rows)
    assert good.result(30)
    with pytest.raises(EngineError, match="plain data"):
        bad.result(30)
    shared.admin("store", "delete_collection", "odd").result(30)


def test_replicas_scale_up_and_down_during_queries(shared: EnginePool) -> None:
    runs = [shared.runtime.submit(Query({"input": [f"s{i}"] * 12}), chain(12, "slow"), {}) for i in range(4)]
    slow = host("fakes", "slow")
    assert ray.get(slow.scale.remote(3)) == 3
    more = [shared.runtime.submit(Query({"input": [f"m{i}"]}), chain(1, "slow"), {}) for i in range(4)]
    assert len(ray.get(slow.status.remote())["replicas"]) == 3
    assert ray.get(slow.scale.remote(1)) == 1
    assert all(run.output.result(30) is not None for run in (*runs, *more))
    with pytest.raises(ray.exceptions.RayTaskError, match="needs a replica"):
        ray.get(slow.scale.remote(0))


RULE = {"max_replicas": 2, "queued_per_replica": 2, "up_after_s": 0, "down_after_s": 1}
LIMITED: dict[str, Any] = {
    "scaled": {"kind": "fake", "autoscale": RULE, "options": {"like": "llm", "machine": "rtx3090"}},
    "small": {"kind": "fake", "max_queued": 8, "options": {"like": "embedder", "seconds": 0.2}},
}


@pytest.fixture(scope="module")
def limited(ray_address: str) -> Iterator[EnginePool]:
    deploy.up(PoolConfig.model_validate({"name": "limited", "engines": LIMITED}), ray_address)
    try:
        with EnginePool.connect(ray_address, pool="limited") as pool:
            yield pool
    finally:
        deploy._kill(ray, "limited")


def test_deployed_autoscaler_follows_the_queue(limited: EnginePool) -> None:
    def count() -> int:
        return len(ray.get(host("limited", "scaled").status.remote())["replicas"])

    def until(wanted: int) -> bool:
        ends = time.monotonic() + 60
        while count() != wanted and time.monotonic() < ends:
            time.sleep(0.1)
        return count() == wanted

    ask = Generate(Prompt((Message("user", "hello"),)), Sampling(max_tokens=100))
    handles = [limited.call(K.PREFILLING, "scaled", [ask]) for _ in range(200)]
    assert until(2)
    assert len({handle.result(120)[0].text for handle in handles}) == 1
    assert until(1)


def test_too_many_requests_are_refused_with_a_hint(limited: EnginePool) -> None:
    handles = [limited.call(K.EMBEDDING, "small", [EmbedText(str(i))]) for i in range(30)]
    ends = [handle._future.exception(30) for handle in handles]
    refused = [error for error in ends if error is not None]
    assert refused and all(isinstance(error, EngineOverloaded) and error.retryable for error in refused)
    assert sum(error is None for error in ends) >= 8
    assert embed(limited, "later", "small")


def test_connecting_to_a_missing_pool_raises(ray_address: str) -> None:
    with pytest.raises(RegistrationError, match=r"no pool 'nothing'.*"):
        EnginePool.connect(ray_address, pool="nothing")
    with pytest.raises(ConfigError, match="connected"):
        EnginePool.connect("127.0.0.1:1", pool="fakes")


def test_client_of_another_version_is_refused(fakes_address: str) -> None:
    from teola_plugin.cluster.wire import Hello

    with pytest.raises(ray.exceptions.RayTaskError, match="same version"):
        ray.get(host("fakes", "llm").hello.remote(Hello("x", 999, (3, 11), "9.9")))


def test_tenant_is_forgotten_on_every_replica(shared: EnginePool) -> None:
    shared.forget("t")  # engines that learn nothing have nothing to forget
    host, forgotten = ReplicaHost(engine_spec("llm", EngineConfig(kind="fake")), "0"), list[str]()

    async def forget(tenant: str) -> None:
        forgotten.append(tenant)

    host.engine.forget = forget  # type: ignore[attr-defined]
    asyncio.run(host.forget("t"))
    assert forgotten == ["t"]
