"""Tests of connected pools that are closed, started again, or forked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.forking import in_fork
from support.private_names import ROOT

from teola_plugin.errors import EngineUnavailable
from teola_plugin.graph import PrimitiveKind
from teola_plugin.langchain import ChatTeola
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import EmbedText

K = PrimitiveKind


def embed(pool: EnginePool, engine: str = "embedder") -> list[float]:
    return list(pool.call(K.EMBEDDING, engine, [EmbedText("x")]).result(30)[0])


def test_closing_fails_running_calls_and_pool_restarts(fakes_address: str) -> None:
    pool = EnginePool.connect(fakes_address, pool="fakes")
    with ThreadPoolExecutor(1) as thread:
        for _ in range(2):
            pool.start()
            expected = embed(pool)
            waiting = thread.submit(embed, pool, "slow")
            time.sleep(0.05)
            pool.close()
            with pytest.raises(EngineUnavailable, match="the engine pool is closed"):
                waiting.result(10)
            with pytest.raises(EngineUnavailable, match="the engine pool is closed"):
                embed(pool)
    with pool:
        assert embed(pool) == expected
        assert embed(pool, "slow")


def test_forked_child_raises_and_leaves_the_parent_intact(shared: EnginePool, fakes_address: str) -> None:
    expected = embed(shared)
    with pytest.raises(EngineUnavailable, match="before this process was forked"):
        in_fork(lambda: ChatTeola(pool=shared).invoke("x"))
    with pytest.raises(EngineUnavailable, match="connected to Ray"):
        in_fork(lambda: EnginePool.connect(fakes_address, pool="fakes"))
    assert in_fork(lambda: shared.close() or "closed", seconds=30) == "closed"
    time.sleep(0.5)
    assert embed(shared) == expected and embed(shared, "slow")


EXITS = """
import sys, time
from cluster.test_shared_closing import embed
from support.forking import in_fork
from teola_plugin import EnginePool

with EnginePool.connect(sys.argv[1], pool="fakes") as pool:
    expected = embed(pool)
    assert in_fork(lambda: pool.close() or "closed", exits=True, seconds=30) == "closed"
    time.sleep(0.5)
    assert embed(pool) == expected and embed(pool, "slow")
"""


def test_forked_child_exits_cleanly(fakes_address: str) -> None:
    """In a process of its own: a child runs the exit handlers of everything that its parent has imported."""
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-c", EXITS, fakes_address]
    done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
