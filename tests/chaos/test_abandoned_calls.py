"""Tests of callers that leave early: Ctrl-C, streams, generators that nobody closes, loops that end.

Nothing hangs, no work goes on, there is one clear error, and the next call is answered.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableParallel
from langgraph.graph import END, START, StateGraph

from teola_plugin import accelerate
from teola_plugin.engines import profiles
from teola_plugin.engines.fake import fake_engines
from teola_plugin.langchain import ChatTeola
from teola_plugin.pool import EnginePool

SECONDS = 2.0
"""What nobody gives up takes about so long, or longer."""


class Own(BaseChatModel):
    """Answers in pieces, over `seconds`; `done` counts calls that came to their end."""

    seconds: float = SECONDS
    under_way: list[str] = []
    done: list[str] = []

    @property
    def _llm_type(self) -> str:
        return "own"

    @contextmanager
    def _call(self, messages: Any) -> Iterator[list[str]]:
        content = str(messages[-1].content)
        self.under_way.append(content)
        try:
            yield [f"{content} {n} " for n in range(20)]
        finally:
            self.under_way.remove(content)
        self.done.append(content)

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        with self._call(messages) as pieces:
            for _ in pieces:
                time.sleep(self.seconds / 20)
            return ChatResult(generations=[ChatGeneration(message=AIMessage("".join(pieces)))])

    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        with self._call(messages) as pieces:
            await asyncio.sleep(self.seconds)
            return ChatResult(generations=[ChatGeneration(message=AIMessage("".join(pieces)))])

    def _stream(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        with self._call(messages) as pieces:
            for piece in pieces:
                time.sleep(self.seconds / 20)
                yield ChatGenerationChunk(message=AIMessageChunk(piece))

    async def _astream(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        with self._call(messages) as pieces:
            for piece in pieces:
                await asyncio.sleep(self.seconds / 20)
                yield ChatGenerationChunk(message=AIMessageChunk(piece))


def chain_of(model: BaseChatModel) -> Runnable[Any, Any]:
    """Return a chain of two independent steps, and a step after them."""
    ask = ChatPromptTemplate.from_template
    return RunnableParallel(a=ask("a {word}") | model, b=ask("b {word}") | model) | ask("then {a} {b}") | model


def graph_of(model: BaseChatModel) -> Any:
    """Build a graph of nodes in sequence."""

    def first(state: dict[str, Any]) -> dict[str, Any]:
        return {"word": model.invoke(f"first {state['word']}").text[:20]}

    async def afirst(state: dict[str, Any]) -> dict[str, Any]:
        return {"word": (await model.ainvoke(f"first {state['word']}")).text[:20]}

    def second(state: dict[str, Any]) -> dict[str, Any]:
        return {"word": model.invoke(f"second {state['word']}").text[:20]}

    async def asecond(state: dict[str, Any]) -> dict[str, Any]:
        return {"word": (await model.ainvoke(f"second {state['word']}")).text[:20]}

    from langchain_core.runnables import RunnableLambda

    graph = StateGraph(dict)
    graph.add_node("first", RunnableLambda(first, afirst))
    graph.add_node("second", RunnableLambda(second, asecond))
    graph.add_edge(START, "first")
    graph.add_edge("first", "second")
    graph.add_edge("second", END)
    return graph.compile()


class World:
    """An accelerated object, quick or slow, and what must be over when nobody wants it any more."""

    def __init__(self, kind: str, build: Callable[[BaseChatModel], Any]) -> None:
        self.own = kind == "own"
        self.pool = (
            None if self.own else EnginePool.local(fake_engines(profiles.scaled(profiles.rtx3090(), 1.8))).start()
        )
        self.model: Any = Own(under_way=[], done=[]) if self.own else ChatTeola(pool=self.pool, max_tokens=40)
        self.plain = build(self.model)
        self.fast = accelerate(self.plain)
        self.threads = set(threading.enumerate())

    def busy(self) -> list[str]:
        if self.pool is None:
            left = list(self.model.under_way)
        else:

            async def looked() -> list[str]:
                assert self.pool is not None
                return [
                    *(name for name in self.pool.engine_names if self.pool.engine(name).load().requests),
                    *self.pool.runtime._driver.runs,
                ]

            left = self.pool.runtime.loop.run(looked()).result(5)
        early = [
            one.name for one in threading.enumerate() if one not in self.threads and one.name.startswith("teola-early")
        ]
        return left + early

    def settled(self, seconds: float = 3.0) -> None:
        """Wait until no work is left."""
        deadline = time.monotonic() + seconds
        while left := self.busy():
            assert time.monotonic() < deadline, f"still at work: {left}"
            time.sleep(0.01)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


@pytest.fixture(params=["pool", "own"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[chain_of, graph_of], ids=["chain", "graph"])
def world(request: pytest.FixtureRequest, kind: str) -> Iterator[World]:
    made = World(kind, request.param)
    yield made
    made.close()


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


def streamed(obj: Any, given: Any) -> list[Any]:
    return list(obj.stream(given))


WAYS: dict[str, Callable[[Any, Any], object]] = {
    "invoke": lambda obj, given: obj.invoke(given),
    "batch": lambda obj, given: obj.batch([given, {"word": "y"}]),
    "stream": streamed,
}


@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_ends_a_sync_call_and_its_requests(world: World, way: str) -> None:
    """The call ends as soon as the original's, which waits for the threads that it has started."""
    plain = interrupted(lambda: WAYS[way](world.plain, {"word": "x"}))
    world.settled(3 * SECONDS)
    assert interrupted(lambda: WAYS[way](world.fast, {"word": "x"})) < plain + 1.0
    world.settled(3 * SECONDS if world.own else 3.0)  # a thread that waits for a model cannot be stopped


@pytest.mark.parametrize("way", ["ainvoke", "astream"])
def test_ctrl_c_in_an_event_loop_ends_all_requests(world: World, way: str) -> None:
    async def run() -> None:
        if way == "ainvoke":
            await world.fast.ainvoke({"word": "x"})
        else:
            async for _ in world.fast.astream({"word": "x"}):
                pass

    assert interrupted(lambda: asyncio.run(run())) < 2.0
    world.settled()


def test_closed_stream_ends_its_requests(world: World) -> None:
    async def leave() -> None:
        async with asyncio.timeout(20):
            pieces = world.fast.astream({"word": "x"})
            async for _ in pieces:
                break
            await pieces.aclose()

    asyncio.run(leave())
    world.settled()


def test_collected_stream_ends_its_requests(world: World) -> None:
    """The generator is garbage while its loop goes on."""

    async def forget() -> None:
        pieces = world.fast.astream({"word": "x"})
        task = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        del pieces, task
        gc.collect()
        for _ in range(300):
            if not world.busy():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"still at work: {world.busy()}")

    asyncio.run(asyncio.wait_for(forget(), 20))


def test_cancelled_task_ends_its_requests(world: World) -> None:
    async def cancel() -> None:
        task = asyncio.ensure_future(world.fast.ainvoke({"word": "x"}))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(cancel(), 20))
    world.settled()


def test_timed_out_call_ends_its_requests(world: World) -> None:
    async def wait() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(world.fast.ainvoke({"word": "x"}), 0.2)

    asyncio.run(wait())
    world.settled()


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_closing_the_loop_during_a_call_ends_its_requests(world: World) -> None:
    """Nobody should do this, but notebooks do: the loop is closed while its tasks still run."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        task = loop.create_task(world.fast.ainvoke({"word": "x"}))
        loop.run_until_complete(asyncio.sleep(0.2))
        assert not task.done()
    finally:
        loop.close()
        asyncio.set_event_loop(None)
    del task, loop
    gc.collect()
    world.settled(4 * SECONDS)  # a request that runs comes to its end, and finds that nobody waits for it
    assert asyncio.run(asyncio.wait_for(quick(world), 20))


async def quick(world: World) -> Any:
    """Make one more call, and return its answer."""
    if world.own:
        world.model.seconds = 0.0
    return await world.fast.ainvoke({"word": "x"})
