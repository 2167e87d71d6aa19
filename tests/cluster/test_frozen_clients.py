"""Tests that a client which hangs or sends invalid messages harms no other client."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from teola_plugin.cluster import deploy
from teola_plugin.cluster.config import PoolConfig
from teola_plugin.cluster.connection import actor
from teola_plugin.cluster.names import actor_name
from teola_plugin.errors import EngineError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import EmbedText, Generate, Message, Prompt, Sampling
from teola_plugin.runtime.loop_thread import CallHandle

K = PrimitiveKind
ROOT = Path(__file__).parents[2]
POOL = "frozen"
SILENCE = 1.5
"""Seconds after which this host takes a client for dead."""
ENGINES: dict[str, Any] = {
    "llm": {"kind": "fake", "options": {"machine": "rtx3090"}},
    "wide": {"factory": "teola_plugin.engines.fake.engines:FakeEmbedder", "options": {"dimension": 1024}},
    "routed": {"kind": "fake", "replicas": 2, "options": {"like": "llm", "machine": "rtx3090"}},
}
BUSY = """
import sys
from teola_plugin.requests.payloads import EmbedText, Generate, Message, Prompt, Sampling
from teola_plugin.graph import PrimitiveKind as K
from teola_plugin.pool import EnginePool
with EnginePool.connect(sys.argv[1], pool=sys.argv[2]) as pool:
    prompts = [Prompt((Message("user", f"{n}?"),)) for n in range(32)]
    asks = [Generate(prompt, Sampling(max_tokens=150)) for prompt in prompts]
    asked = [pool.call(K.PREFILLING, "llm", [ask], stream=True) for ask in asks]
    print("asked", flush=True)
    while not all(handle._future.done() for handle in asked):
        large = [pool.call(K.EMBEDDING, "wide", [EmbedText(str(n)) for n in range(30)]) for _ in range(2)]
        assert all(len(vector) == 1024 for handle in large for vector in handle.result(60))
    pieces = ["".join(piece.text for piece in handle.pieces) for handle in asked]
    values = [handle.result(60)[0].text for handle in asked]
    assert pieces == values, (pieces, values)
    print("answered", sum(map(len, values)), flush=True)
"""
"""Texts and large vectors stream to it, so that there is news all the time, in shared memory, too."""


@pytest.fixture(scope="module")
def pool(ray_address: str) -> Iterator[EnginePool]:
    deploy.up(PoolConfig.model_validate({"name": POOL, "engines": ENGINES}), ray_address)
    try:
        with EnginePool.connect(ray_address, pool=POOL) as pool:
            yield pool
    finally:
        deploy._kill(ray, POOL)


def host(engine: str) -> Any:
    return actor(actor_name(POOL, engine))


def status(engine: str = "llm") -> dict[str, Any]:
    found: dict[str, Any] = ray.get(host(engine).status.remote(), timeout=10)
    return found


def watch(**closely: float) -> None:
    ray.get([host(engine).watch_closely.remote(**closely) for engine in ("llm", "wide")], timeout=10)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, f"it did not happen within {seconds} s"
        time.sleep(0.05)


def submit(pool: EnginePool, words: str, engine: str = "llm") -> CallHandle:
    ask = Generate(Prompt((Message("user", words),)), Sampling(max_tokens=4))
    return pool.call(K.PREFILLING, engine, [ask])


def answer(pool: EnginePool) -> str:
    vectors = pool.call(K.EMBEDDING, "wide", [EmbedText("x")]).result(10)
    return str(submit(pool, "anybody there?").result(10)[0].text) + str(vectors[0][:2])


@pytest.mark.parametrize("how", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_frozen_client_does_not_block_other_clients(pool: EnginePool, ray_address: str, how: signal.Signals) -> None:
    """A client is stopped while its answers stream. When it continues, it gets all of them."""
    expected = answer(pool)
    command = [sys.executable, "-c", BUSY, ray_address, POOL]
    busy = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True)
    try:
        assert busy.stdout is not None and busy.stdout.readline() == "asked\n"
        until(lambda: status()["replicas"][0]["running"] > 8)
        busy.send_signal(how)
        watch(every=0.1, silence=SILENCE)
        for engine in ("llm", "wide"):  # the still one is given up
            until(lambda engine=engine: answer(pool) == expected and status(engine)["clients"] == 1)
        for _ in range(5):
            assert answer(pool) == expected
        until(lambda: status()["queued"] == status()["replicas"][0]["running"] == 0)  # nobody wants its requests
        watch()
        if how is signal.SIGSTOP:
            busy.send_signal(signal.SIGCONT)
            out, _ = busy.communicate(timeout=60)
            assert busy.returncode == 0 and out.startswith("answered")
    finally:
        busy.kill()
        busy.communicate()


def test_invalid_unicode_does_not_block_other_requests(pool: EnginePool) -> None:
    """The host cannot route such a request by its blocks. It fails alone, and later requests are answered."""
    odd, after = submit(pool, "half a pair: \ud800", "routed"), submit(pool, "a whole one", "routed")
    assert after.result(10)[0].text
    with contextlib.suppress(EngineError):
        odd.result(10)
    assert submit(pool, "and later", "routed").result(10)[0].text
