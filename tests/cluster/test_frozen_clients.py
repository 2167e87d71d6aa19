"""A client that stands still, or says what cannot be understood, is nobody's trouble but its own."""

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
from teola_plugin.engines.payloads import Generate, Message, Prompt, Sampling
from teola_plugin.errors import EngineError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.handles import CallHandle

K = PrimitiveKind
ROOT = Path(__file__).parents[2]
POOL = "frozen"
SILENCE = 1.5
"""Seconds after which this host takes a client for dead."""
ENGINES: dict[str, Any] = {
    "llm": {"kind": "fake", "options": {"machine": "rtx3090"}},
    "routed": {"kind": "fake", "instances": 2, "options": {"like": "llm", "machine": "rtx3090"}},
}
BUSY = """
import sys
from teola_plugin.engines.payloads import Generate, Message, Prompt, Sampling
from teola_plugin.graph import PrimitiveKind as K
from teola_plugin.pool import EnginePool
with EnginePool.connect(sys.argv[1], pool=sys.argv[2]) as pool:
    prompts = [Prompt((Message("user", f"{n}?"),)) for n in range(32)]
    asks = [Generate(prompt, Sampling(max_tokens=150)) for prompt in prompts]
    asked = [pool.call(K.PREFILLING, "llm", [ask], stream=True) for ask in asks]
    print("asked", flush=True)
    pieces = ["".join(piece.text for piece in handle.pieces) for handle in asked]
    values = [handle.result(60)[0].text for handle in asked]
    assert pieces == values, (pieces, values)
    print("answered", sum(map(len, values)), flush=True)
"""
"""Streams, so that there is news all the time."""


@pytest.fixture(scope="module")
def pool(ray_address: str) -> Iterator[EnginePool]:
    deploy.up(PoolConfig.model_validate({"name": POOL, "engines": ENGINES}), ray_address)
    try:
        with EnginePool.connect(ray_address, pool=POOL) as pool:
            yield pool
    finally:
        deploy._kill(ray, POOL)


def status() -> dict[str, Any]:
    found: dict[str, Any] = ray.get(actor(actor_name(POOL, "llm")).status.remote(), timeout=10)
    return found


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, f"it did not happen within {seconds} s"
        time.sleep(0.05)


def asked(pool: EnginePool, words: str, engine: str = "llm") -> CallHandle:
    ask = Generate(Prompt((Message("user", words),)), Sampling(max_tokens=4))
    return pool.call(K.PREFILLING, engine, [ask])


def answer(pool: EnginePool) -> str:
    return str(asked(pool, "anybody there?").result(10)[0].text)


def test_a_client_that_stands_still_holds_up_nobody(pool: EnginePool, ray_address: str) -> None:
    """It is stopped while its answers stream; when it goes on, it has them all."""
    expected, host = answer(pool), actor(actor_name(POOL, "llm"))
    command = [sys.executable, "-c", BUSY, ray_address, POOL]
    busy = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True)
    try:
        assert busy.stdout is not None and busy.stdout.readline() == "asked\n"
        until(lambda: status()["instances"][0]["running"] > 8)
        busy.send_signal(signal.SIGSTOP)
        ray.get(host.watch_closely.remote(0.1, 10.0, SILENCE), timeout=10)
        until(lambda: answer(pool) == expected and status()["clients"] == 1)  # the still one is given up
        for _ in range(5):
            assert answer(pool) == expected
        until(lambda: status()["queued"] == status()["instances"][0]["running"] == 0)  # nobody wants its requests
        ray.get(host.watch_closely.remote(), timeout=10)
        busy.send_signal(signal.SIGCONT)
        out, _ = busy.communicate(timeout=60)
        assert busy.returncode == 0 and out.startswith("answered")
    finally:
        busy.kill()
        busy.wait()


def test_a_text_that_is_no_unicode_silences_nobody(pool: EnginePool) -> None:
    """Its host cannot route it by its blocks. It ends by itself, and whoever comes after it has an answer."""
    odd, after = asked(pool, "half a pair: \ud800", "routed"), asked(pool, "a whole one", "routed")
    assert after.result(10)[0].text
    with contextlib.suppress(EngineError):
        odd.result(10)
    assert asked(pool, "and later", "routed").result(10)[0].text
