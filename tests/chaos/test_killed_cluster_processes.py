"""Tests that kill processes of the shared pool while queries run: every query ends right, and none runs twice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import ray

from teola_plugin.cluster import deploy
from teola_plugin.cluster.config import PoolConfig
from teola_plugin.cluster.connection import actor
from teola_plugin.cluster.names import actor_name
from teola_plugin.engines.model_cache import llm_folder
from teola_plugin.graph import PrimitiveKind, Query
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import EmbedText, Generate, Generation, Message, Prompt, Sampling
from teola_plugin.runtime.conformance import chain

K = PrimitiveKind
LONG = bool(os.environ.get("TEOLA_TEST_LONG"))
pytestmark = pytest.mark.chaos


FAKES: dict[str, Any] = {
    "llm": {"kind": "fake", "replicas": 2, "options": {"machine": "rtx3090"}},
    "embedder": {"kind": "fake", "options": {"seconds": 0.05}},
}


@contextmanager
def running(address: str, name: str, **engines: Any) -> Iterator[EnginePool]:
    deploy.up(PoolConfig.model_validate({"name": name, "engines": engines}), address)
    try:
        with EnginePool.connect(address, pool=name) as pool:
            yield pool
    finally:
        deploy._kill(ray, name)


@pytest.fixture(scope="module")
def chaos(ray_address: str) -> Iterator[EnginePool]:
    with running(ray_address, "chaos", **FAKES) as pool:
        yield pool


def status(pool: str, engine: str) -> dict[str, Any]:
    found: dict[str, Any] = ray.get(actor(actor_name(pool, engine)).status.remote(), timeout=30)
    return found


def until(condition: Callable[[], bool], seconds: float) -> float:
    """Return the seconds until the condition is true."""
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        if condition():
            return time.monotonic() - begun
        time.sleep(0.05)
    pytest.fail(f"it did not happen within {seconds} s")


def ask(number: int) -> Generate:
    return Generate(Prompt((Message("user", f"question number {number}, please"),)), Sampling(max_tokens=8))


def answer_of(pool: EnginePool, number: int) -> str:
    """Return the answer. Its pieces must add up to it, so that none came twice."""
    handle = pool.call(K.PREFILLING, "llm", [ask(number)], stream=True)
    pieces = "".join(piece.text for piece in handle.pieces)
    [made] = handle.result(120)
    assert isinstance(made, Generation) and made.text == pieces
    return made.text


def all_up(pool: str, replicas: int) -> bool:
    found = [one for one in status(pool, "llm")["replicas"] if one["up"] and one["pid"]]
    return len(found) == replicas


def test_queries_survive_a_killed_replica(chaos: EnginePool) -> None:
    count = 200 if LONG else 60
    with ThreadPoolExecutor(32) as threads:
        expected = {number: answer_of(chaos, number) for number in range(10)}
        victim = status("chaos", "llm")["replicas"][0]["pid"]
        answers = [threads.submit(answer_of, chaos, number % 10) for number in range(count)]
        until(lambda: status("chaos", "llm")["replicas"][0]["running"] > 0, 20)
        os.kill(victim, signal.SIGKILL)
        recovered = until(lambda: all_up("chaos", 2) and status("chaos", "llm")["replicas"][0]["pid"] != victim, 30)
        print(f"recovered after {recovered:.1f} s")
        assert [answer.result(120) for answer in answers] == [expected[number % 10] for number in range(count)]


def test_queries_survive_a_killed_engine_host(chaos: EnginePool) -> None:
    texts = [f"t{i}" for i in range(5)]
    [expected] = chaos.call(K.EMBEDDING, "embedder", [EmbedText(texts[-1])]).result(30)
    host = actor(actor_name("chaos", "embedder"))
    runs = [chaos.runtime.submit(Query({"input": texts}), chain(5, "embedder"), {}) for _ in range(20)]
    ray.kill(host, no_restart=False)  # as when its process dies: Ray makes it again
    assert all(list(run.output.result(90)) == list(expected) for run in runs)


def test_hanging_replica_is_replaced(chaos: EnginePool) -> None:
    expected, host = answer_of(chaos, 1), actor(actor_name("chaos", "llm"))
    victim = status("chaos", "llm")["replicas"][0]["pid"]
    ray.get(host.watch_closely.remote(0.2, 0.5))
    os.kill(victim, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda _: answer_of(chaos, 1), range(8)))
        assert found == [expected] * 8
        until(lambda: all_up("chaos", 2) and status("chaos", "llm")["replicas"][0]["pid"] != victim, 30)
    finally:
        ray.get(host.watch_closely.remote(5.0, 10.0))
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            pass


@pytest.mark.skipif(not LONG, reason="starts two vLLM engines (make test-all)")
@pytest.mark.vllm
def test_queries_survive_a_killed_vllm_engine_core(ray_address: str) -> None:
    args = {"dtype": "float32", "kv_cache_memory_bytes": 256 << 20, "max_model_len": 2048}
    engine = {"kind": "vllm", "model": str(llm_folder()), "replicas": 2, "cores": ["0", "1"], "engine_args": args}
    with running(ray_address, "cores", llm=engine) as pool, ThreadPoolExecutor(8) as threads:
        expected = {number: answer_of(pool, number) for number in range(5)}
        for kill in (_engine_core, lambda pid: pid):
            answers = [threads.submit(answer_of, pool, number % 5) for number in range(20)]
            until(lambda: status("cores", "llm")["replicas"][0]["running"] > 0, 20)
            os.kill(kill(status("cores", "llm")["replicas"][0]["pid"]), signal.SIGKILL)
            assert [answer.result(240) for answer in answers] == [expected[number % 5] for number in range(20)]
            print(f"recovered after {until(lambda: all_up('cores', 2), 200):.1f} s, vLLM's own start-up included")
            assert answer_of(pool, 2) == expected[2]


@pytest.mark.skipif(not LONG, reason="starts vLLM (make test-all)")
@pytest.mark.vllm
def test_killed_actor_leaves_no_vllm_process(ray_address: str) -> None:
    args = {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "max_model_len": 1024}
    engine = {"kind": "vllm", "model": str(llm_folder()), "cores": ["0"], "engine_args": args}
    with running(ray_address, "orphans", llm=engine) as pool:
        answer_of(pool, 1)
        core = _engine_core(status("orphans", "llm")["replicas"][0]["pid"])
        assert psutil.pid_exists(core)
    until(lambda: not psutil.pid_exists(core), 15)


def _engine_core(pid: int) -> int:
    """Return the process in which vLLM computes."""
    below = psutil.Process(pid).children(recursive=True)
    return next(
        child.pid for child in below if "EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline())
    )


def test_killed_pool_leaves_no_replica_process(chaos: EnginePool) -> None:
    replicas = [one["pid"] for engine in FAKES for one in status("chaos", engine)["replicas"]]
    assert len(replicas) == 3 and all(map(psutil.pid_exists, replicas))
    deploy._kill(ray, "chaos")
    until(lambda: not any(map(psutil.pid_exists, replicas)), 20)
