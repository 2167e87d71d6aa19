"""Tests of closed pools: also those who wait get a clear error, and a pool can be started again."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.prompts import ChatPromptTemplate

from teola_plugin import accelerate
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeStore, Faults, fake_engines
from teola_plugin.errors import EngineUnavailable
from teola_plugin.graph import Graph, Primitive, PrimitiveKind, Query, Ref, named
from teola_plugin.langchain import ChatTeola, TeolaEmbeddings
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Chunk, EmbedText, Generate, IngestRow, Prompt, SearchVector
from teola_plugin.runtime.query_run import Claiming

K = PrimitiveKind
EMBED = Graph([Primitive("e", K.EMBEDDING, "embedder", named(texts=Ref("$input")))], Ref("e"))
CODE = Graph([Primitive("c", K.CALL, inputs=named(value=Ref("$input")), call="c")], Ref("c"))
ROW = IngestRow("docs", Chunk("1", "text"), (1.0, 0.0))
ASK = [Generate(Prompt(text="what?"))]
HANGS = Faults(hang_on=lambda _: True)


def pool_threads() -> set[threading.Thread]:
    """Return the threads of pools' loops in this process."""
    return {thread for thread in threading.enumerate() if thread.name == "teola-pool" and thread.is_alive()}


@pytest.fixture
def before() -> set[threading.Thread]:
    """Return the threads that exist before the test. Objects without a pool share one for the whole process."""
    return pool_threads()


@pytest.fixture
def hangs() -> Iterator[EnginePool]:
    """Create a pool whose engines never answer."""
    made = EnginePool.local(fake_engines(llm=HANGS, embedder=HANGS)).start()
    yield made
    made.close()


async def streamed(pool: EnginePool) -> None:
    async for _ in ChatTeola(pool=pool).astream("x"):
        pass


def chain(pool: EnginePool) -> Any:
    return ChatPromptTemplate.from_template("Say {word}") | ChatTeola(pool=pool)


WAYS: dict[str, Callable[[EnginePool], object]] = {
    "call": lambda pool: pool.call(K.EMBEDDING, "embedder", [EmbedText("x")]).result(),
    "streamed": lambda pool: pool.call(K.PREFILLING, "llm", ASK, stream=True).result(),
    "query": lambda pool: pool.runtime.submit(Query({"input": "x"}), EMBED, {}).output.result(),
    "model": lambda pool: ChatTeola(pool=pool).invoke("x"),
    "async model": lambda pool: asyncio.run(ChatTeola(pool=pool).ainvoke("x")),
    "async stream": lambda pool: asyncio.run(streamed(pool)),
    "embeddings": lambda pool: TeolaEmbeddings(pool=pool).embed_documents(["x", "y"]),
    "chain": lambda pool: chain(pool).invoke({"word": "x"}),
    "accelerated": lambda pool: accelerate(chain(pool)).invoke({"word": "x"}),
    "accelerated, async": lambda pool: asyncio.run(accelerate(chain(pool)).ainvoke({"word": "x"})),
    "accelerated, streamed": lambda pool: list(accelerate(chain(pool)).stream({"word": "x"})),
    "accelerated, batch": lambda pool: accelerate(chain(pool)).batch([{"word": "x"}, {"word": "y"}]),
}


@pytest.mark.parametrize("way", WAYS)
def test_running_call_raises_engine_unavailable_when_pool_closes(hangs: EnginePool, way: str) -> None:
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(WAYS[way], hangs)
        time.sleep(0.1)
        assert not waiting.done()
        hangs.close()
        with pytest.raises(EngineUnavailable, match="the engine pool is closed") as caught:
            waiting.result(10)
    assert "start()" in caught.value.hint


@pytest.mark.parametrize("way", WAYS)
def test_call_after_close_raises_engine_unavailable(hangs: EnginePool, way: str) -> None:
    hangs.close()
    with pytest.raises(EngineUnavailable, match="the engine pool is closed"):
        WAYS[way](hangs)


def test_close_ends_admin_calls_and_unverified_searches() -> None:
    """A search that was made ahead is claimed after the store was asked for its version, which may take long."""
    version_requested = threading.Event()

    class Slow(FakeStore):
        async def version(self, collection: str) -> Any:
            version_requested.set()
            await asyncio.sleep(60)

    with EnginePool.local([Slow("store")]) as pool:
        searched = SearchVector("docs", (1.0, 0.0), k=1)
        run = pool.runtime.watch(Query({"input": "x"}), joins=True)
        run.claiming = Claiming.ALLOWED
        assert run.call(K.SEARCHING, "store", [searched]).result(5) == [()]
        waiting = [run.call(K.SEARCHING, "store", [searched]), pool.admin("store", "version", "docs")]
        assert version_requested.wait(5)
        pool.close()
    for one in waiting:
        with pytest.raises(EngineUnavailable, match="the engine pool is closed"):
            one.result(10)


def test_close_ends_queries_that_wait_for_user_code(hangs: EnginePool) -> None:
    go = threading.Event()
    run = hangs.runtime.submit(Query({"input": "x"}), CODE, {"c": lambda value: go.wait(20)})
    ahead = hangs.runtime.submit(Query({"input": "x"}), EMBED, {}, has_original=True)
    time.sleep(0.05)
    hangs.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        run.output.result(5)
    assert [one.trace.result(5) for one in (run, ahead)]
    go.set()


def test_restarted_pool_answers_equally_and_leaks_no_threads(before: set[threading.Thread]) -> None:
    llm, embedder = FakeLLM(), FakeEmbedder("embedder")
    pool = EnginePool.local([llm, embedder, FakeStore("store")])
    assert "not running" in repr(pool)
    with pytest.raises(EngineUnavailable, match="not running"):
        pool.call(K.PREFILLING, "llm", ASK)
    fast, answers = accelerate(chain(pool)), set()
    for _ in range(3):
        pool.start()
        profiles = pool.profiles
        answers.add(str(fast.invoke({"word": "x"}).content))
        answers.add(str(asyncio.run(fast.ainvoke({"word": "x"})).content))
        pool.close()
        assert pool.profiles == profiles
        with pytest.raises(EngineUnavailable, match="closed"):
            fast.invoke({"word": "x"})
    assert len(answers) == 1
    assert len(pool.traces) >= 6
    assert pool_threads() <= before


def test_stored_rows_survive_a_restart_of_the_pool() -> None:
    with EnginePool.local([FakeStore("store")]) as pool:
        pool.call(K.INGESTION, "store", [ROW]).result(5)
    with pool:
        assert pool.admin("store", "count", "docs").result(5) == 1


def test_handles_of_an_earlier_start_do_no_harm() -> None:
    with EnginePool.local(fake_engines(embedder=HANGS)) as pool:
        run = pool.runtime.submit(Query({"input": "x"}), EMBED, {}, has_original=True)
        handle = run.call(K.EMBEDDING, "embedder", [EmbedText("x")])
    with pool:
        handle.cancel()
        run.observe("e", 1)
        run.close()
        run.cancel()
        assert pool.call(K.PREFILLING, "llm", ASK).result(5)


def test_failed_start_of_a_pool_can_be_retried() -> None:
    class Fails(FakeEmbedder):
        tries = 0

        async def start(self) -> None:
            self.tries += 1
            if self.tries == 1:
                raise EngineUnavailable("not yet.", hint="again")

    pool = EnginePool.local([Fails("embedder"), FakeLLM()])
    with pytest.raises(EngineUnavailable, match="not yet"):
        pool.start()
    with pytest.raises(EngineUnavailable, match="closed"):
        pool.call(K.PREFILLING, "llm", ASK)
    with pool:
        assert pool.call(K.EMBEDDING, "embedder", [EmbedText("x")]).result(5)


def test_cancelled_start_stops_its_engines_and_threads(before: set[threading.Thread]) -> None:
    """The task is cancelled while engines start. Engines that have started are stopped, the others give up."""
    stopped: list[str] = []

    class Engine(FakeEmbedder):
        async def start(self) -> None:
            if self.name == "slow":
                begun.set()
                await asyncio.sleep(60)

        async def stop(self) -> None:
            stopped.append(self.name)

    begun, pool = threading.Event(), EnginePool.local([Engine("slow"), Engine("quick")])

    async def enters() -> None:
        async with pool:
            raise AssertionError("it cannot have started")

    async def breaks_off() -> None:
        task = asyncio.create_task(enters())
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(breaks_off())
    for thread in pool_threads() - before:
        thread.join(10)
    assert sorted(stopped) == ["quick", "slow"]
    assert pool_threads() <= before


def test_start_raises_if_another_thread_closes_the_pool() -> None:
    class Slow(FakeEmbedder):
        async def start(self) -> None:
            begun.set()
            await asyncio.sleep(60)

    begun, pool = threading.Event(), EnginePool.local([Slow("embedder")])
    with ThreadPoolExecutor(1) as thread:
        starting = thread.submit(pool.start)
        assert begun.wait(10)
        pool.close()
        with pytest.raises(EngineUnavailable, match="the engine pool is closed"):
            starting.result(10)


def test_concurrent_starts_and_closes_leave_the_pool_usable(before: set[threading.Thread]) -> None:
    pool = EnginePool.local(fake_engines())
    over = time.monotonic() + 1.0
    odd: list[BaseException] = []

    def toggles(closes: bool) -> None:
        while time.monotonic() < over:
            try:
                pool.close() if closes else pool.start()
                pool.call(K.EMBEDDING, "embedder", [EmbedText("x")]).result(10)
            except EngineUnavailable:
                pass
            except BaseException as error:
                odd.append(error)

    threads = [threading.Thread(target=toggles, args=(bool(n % 2),)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    pool.close()
    assert not odd
    assert pool_threads() <= before
    with pool:
        assert pool.call(K.EMBEDDING, "embedder", [EmbedText("x")]).result(10)
