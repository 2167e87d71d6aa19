"""Tests of callers of LlamaIndex objects that leave early (see test_abandoned_calls.py)."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import TextNode

from teola_plugin import accelerate
from teola_plugin.engines import profiles
from teola_plugin.engines.fake import fake_engines
from teola_plugin.llamaindex import TeolaEmbedding, TeolaLLM
from teola_plugin.pool import EnginePool

QUESTION = "what do lambs eat?"
# LlamaIndex's spans, when the coroutines that they are in are thrown away: with plain engines, too.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def thrown_away() -> Iterator[None]:
    """Collect garbage here, where warnings are expected, so that no later test gets them."""
    yield
    gc.collect()


class World:
    """A query engine on slow fakes, plain and accelerated."""

    def __init__(self, mode: str = "accumulate", **settings: Any) -> None:
        self.pool = EnginePool.local(fake_engines(profiles.scaled(profiles.rtx3090(), 1.5))).start()
        llm, embedder = TeolaLLM(pool=self.pool, max_tokens=40), TeolaEmbedding(pool=self.pool)
        nodes = [TextNode(text=f"lamb {n} eats {n} straws") for n in range(3)]
        index = VectorStoreIndex(nodes, embed_model=embedder)
        self.plain = index.as_query_engine(llm=llm, response_mode=mode, **settings)
        self.fast = accelerate(self.plain)

    def busy(self) -> list[str]:
        async def looked() -> list[str]:
            left = [name for name in self.pool.engine_names if self.pool.engine(name).load().requests]
            return left + list(self.pool.runtime._driver.runs)

        found: list[str] = self.pool.runtime.loop.run(looked()).result(5)
        return found

    def settled(self, seconds: float = 3.0) -> None:
        deadline = time.monotonic() + seconds
        while left := self.busy():
            assert time.monotonic() < deadline, f"still at work: {left}"
            time.sleep(0.01)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.pool.close()


def interrupted(work: Callable[[], object], after: float = 0.4) -> float:
    """Return the seconds until the call ends after a Ctrl-C, sent as a terminal sends it."""
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
    began = time.monotonic()
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        timer.join()
    return time.monotonic() - began


@pytest.mark.parametrize("way", ["query", "aquery"])
def test_ctrl_c_ends_a_query_and_its_requests(world: World, way: str) -> None:
    def query_of(engine: Any) -> Callable[[], object]:
        return (lambda: engine.query(QUESTION)) if way == "query" else lambda: asyncio.run(engine.aquery(QUESTION))

    plain = interrupted(query_of(world.plain))
    world.settled(10.0)
    assert interrupted(query_of(world.fast)) < plain + 1.0
    world.settled()


def test_cancelled_task_ends_its_requests(world: World) -> None:
    async def cancel() -> None:
        task = asyncio.ensure_future(world.fast.aquery(QUESTION))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(cancel(), 20))
    world.settled()


@pytest.mark.parametrize("closes", [True, False])
def test_abandoned_stream_ends_its_requests(closes: bool) -> None:
    world = World("compact", streaming=True)
    try:
        response = world.fast.query(QUESTION)
        pieces = response.response_gen
        next(iter(pieces))
        if closes:
            pieces.close()
        del response, pieces
        gc.collect()
        world.settled(5.0)
    finally:
        world.pool.close()


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_closing_the_loop_during_a_query_ends_its_requests(world: World) -> None:
    loop = asyncio.new_event_loop()
    try:
        task = loop.create_task(world.fast.aquery(QUESTION))
        loop.run_until_complete(asyncio.sleep(0.3))
        assert not task.done()
    finally:
        loop.close()
    del task, loop
    gc.collect()
    world.settled(15.0)
    assert asyncio.run(asyncio.wait_for(world.fast.aquery(QUESTION), 30))


def test_query_raises_if_the_pool_closes_during_it(world: World) -> None:
    closing = threading.Timer(0.3, world.pool.close)
    closing.start()
    with pytest.raises(Exception, match="the engine pool is closed"):
        world.fast.query(QUESTION)
    closing.join()
