"""Tests of tenant, app, weight and deadline of a call, in every way that requests reach the pool."""

from __future__ import annotations

import asyncio
import gc
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from differential.recording import observe
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel
from support.recording import Arrival, arrivals

from teola_plugin import accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.indexing import TeolaIndexer
from teola_plugin.adapters.langchain.llm import TeolaLLM
from teola_plugin.adapters.langchain.rerank import TeolaRerank
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker, FakeStore
from teola_plugin.engines.fake.base import Faults
from teola_plugin.errors import QueryTimeout, RegistrationError
from teola_plugin.pool import EnginePool

Seen = list[Arrival]
ACME = {"configurable": {"teola_tenant": "acme", "teola_weight": 2.0}}


@pytest.fixture(scope="module")
def own() -> Iterator[EnginePool]:
    with EnginePool.local([FakeLLM(), FakeEmbedder(), FakeReranker(), FakeStore()]) as pool:
        _store(pool).add_texts(["a cat sits on a mat", "stocks fell today"])
        yield pool


@pytest.fixture(scope="module")
def all_seen(own: EnginePool) -> Seen:
    return arrivals(own)


@pytest.fixture
def seen(all_seen: Seen) -> Seen:
    all_seen.clear()
    return all_seen


def _store(pool: EnginePool) -> TeolaVectorStore:
    return TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool))


def app(pool: EnginePool) -> Runnable[Any, Any]:
    """Return an app that uses every kind of engine, in planned steps and in user code."""
    rerank, embeddings, index = TeolaRerank(pool=pool), TeolaEmbeddings(pool=pool), TeolaIndexer(store=_store(pool))

    def own(found: dict[str, Any]) -> dict[str, Any]:
        embeddings.embed_query("in a function")
        index.invoke(f"{found['answer']}")
        return {**found, "best": rerank.compress_documents(found["found"], "cat")}

    answer = ChatPromptTemplate.from_template("{question}") | ChatTeola(pool=pool, max_tokens=3) | StrOutputParser()
    both = RunnableParallel(answer=answer, found=(lambda x: x["question"]) | _store(pool).as_retriever())
    return both | RunnableLambda(own)


async def _drained(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


async def _one(value: Any) -> AsyncIterator[Any]:
    yield value


WAYS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "invoke": lambda c, x, config: c.invoke(x, config),
    "ainvoke": lambda c, x, config: asyncio.run(c.ainvoke(x, config)),
    "batch": lambda c, x, config: c.batch([x, x], config),
    "batch, bounded": lambda c, x, config: c.batch([x, x], {**config, "max_concurrency": 1}),
    "abatch": lambda c, x, config: asyncio.run(c.abatch([x, x], config)),
    "batch_as_completed": lambda c, x, config: list(c.batch_as_completed([x, x], config)),
    "abatch_as_completed": lambda c, x, config: asyncio.run(_drained(c.abatch_as_completed([x, x], config))),
    "stream": lambda c, x, config: list(c.stream(x, config)),
    "astream": lambda c, x, config: asyncio.run(_drained(c.astream(x, config))),
    "astream_log": lambda c, x, config: asyncio.run(_drained(c.astream_log(x, config))),
    "astream_events": lambda c, x, config: asyncio.run(_drained(c.astream_events(x, config, version="v2"))),
    "transform": lambda c, x, config: list(c.transform(iter([x]), config)),
    "atransform": lambda c, x, config: asyncio.run(_drained(c.atransform(_one(x), config))),
}


def _fast(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> Runnable[Any, Any]:
    return accelerate(app(pool), app="shop")


def _piped(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> Runnable[Any, Any]:
    return _fast(pool, monkeypatch) | (lambda x: x)


def _unplanned(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> Runnable[Any, Any]:
    """Make planning fail, so that the original runs."""
    fast = _fast(pool, monkeypatch)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no plan today")

    monkeypatch.setattr(pool, "plan", refuse)
    return fast


def _without_early_work(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> Runnable[Any, Any]:
    return accelerate(app(pool), app="shop", passes=())


FORMS = {"fast": _fast, "piped": _piped, "unplanned": _unplanned, "only traced": _without_early_work}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_request_context_reaches_every_engine(
    form: str, way: str, own: EnginePool, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = FORMS[form](own, monkeypatch)
    WAYS[way](chain, {"question": "where is the cat"}, ACME)
    assert {one.engine for one in seen} == {"llm", "embedder", "store", "reranker"}
    assert {(one.tenant, one.app, one.weight) for one in seen} == {("acme", "shop", 2.0)}


@pytest.mark.parametrize("way", WAYS)
def test_request_context_of_a_plain_chain_reaches_every_engine(way: str, own: EnginePool, seen: Seen) -> None:
    WAYS[way](app(own), {"question": "where is the cat"}, ACME)
    assert {one.engine for one in seen} == {"llm", "embedder", "store", "reranker"}
    assert {(one.tenant, one.app, one.weight) for one in seen} == {("acme", "default", 2.0)}


DIRECT: dict[str, tuple[Callable[[EnginePool], Any], Any]] = {
    "chat": (lambda pool: ChatTeola(pool=pool, max_tokens=2), "hello"),
    "text": (lambda pool: TeolaLLM(pool=pool, max_tokens=2), "hello"),
    "bound arguments": (lambda pool: ChatTeola(pool=pool).bind(max_tokens=2), "hello"),
    "retriever": (lambda pool: _store(pool).as_retriever(), "cat"),
    "mmr": (lambda pool: _store(pool).as_retriever(search_type="mmr"), "cat"),
    "indexer": (lambda pool: TeolaIndexer(store=_store(pool)), "one text"),
    "reranker": (
        lambda pool: TeolaRerank(pool=pool).as_runnable(),
        {"query": "cat", "documents": [Document("a"), Document("b")]},
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DIRECT)
def test_request_context_of_a_direct_call_reaches_its_engine(name: str, way: str, own: EnginePool, seen: Seen) -> None:
    make, given = DIRECT[name]
    WAYS[way](make(own), given, ACME)
    assert seen and {(one.tenant, one.weight) for one in seen} == {("acme", 2.0)}


@pytest.mark.parametrize("name", DIRECT)
def test_each_input_of_a_batch_has_its_own_tenant(name: str, own: EnginePool, seen: Seen) -> None:
    make, given = DIRECT[name]
    make(own).batch([given, given], [{"configurable": {"teola_tenant": tenant}} for tenant in ("one", "two")])
    assert {one.tenant for one in seen} == {"one", "two"}


# ------------------------------------------------------------ what a value means


def test_none_as_tenant_means_no_tenant(own: EnginePool, seen: Seen) -> None:
    none = {"configurable": {"teola_tenant": None, "teola_deadline_s": None, "teola_weight": None}}
    accelerate(app(own)).invoke({"question": "cat"}, none)
    ChatTeola(pool=own, max_tokens=2).invoke("hello", none)
    assert {(one.tenant, one.weight) for one in seen} == {("", 1.0)}


@pytest.mark.parametrize(
    ("key", "value"),
    [("teola_deadline_s", "soon"), ("teola_deadline_s", [5]), ("teola_weight", "heavy"), ("teola_weight", 0)],
)
def test_invalid_request_context_raises_and_names_the_key(key: str, value: Any, own: EnginePool, seen: Seen) -> None:
    config: Any = {"configurable": {key: value}}
    chain = accelerate(app(own))
    calls: list[Callable[[], Any]] = [
        lambda: chain.invoke({"question": "cat"}, config),
        lambda: chain.batch([{"question": "cat"}] * 2, config),
        lambda: list(chain.stream({"question": "cat"}, config)),
        lambda: ChatTeola(pool=own).invoke("hello", config),
    ]
    for call in calls:
        with pytest.raises(RegistrationError, match=key):
            call()
    assert seen == []


# ------------------------------------------------------------ calls inside of calls


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("transform", "atransform")])
@pytest.mark.parametrize("inner", ["batch", "invoke", "stream", "leaf"])
def test_nested_call_with_a_tenant_uses_that_tenant(way: str, inner: str, own: EnginePool, seen: Seen) -> None:
    nested, model = accelerate(app(own)), ChatTeola(pool=own, max_tokens=2)
    beta: Any = {"configurable": {"teola_tenant": "beta"}}
    mark = len(seen)

    def ask(x: Any) -> Any:
        nonlocal mark
        before = len(seen)
        if inner == "leaf":
            model.invoke("for beta", beta)
        else:
            WAYS[inner](nested, x, beta)
        found = seen[before:]
        assert found
        theirs.extend(found)
        return x

    theirs: Seen = []
    fast = accelerate(RunnableLambda(ask) | ChatPromptTemplate.from_template("{question}") | model)
    WAYS["invoke" if way == "invoke" else way](fast, {"question": "cat"}, ACME) if "batch" not in way else fast.invoke(
        {"question": "cat"}, ACME
    )
    assert {one.tenant for one in theirs} <= {"beta", "acme"} and "beta" in {one.tenant for one in theirs}
    assert sum(one.tenant == "acme" for one in seen) <= 2  # the last step, perhaps ahead of its place
    assert {one.tenant for one in seen} == {"acme", "beta"}


def test_nested_call_with_an_earlier_deadline_times_out(own: EnginePool) -> None:
    nested = accelerate(app(own))

    def ask(x: Any) -> Any:
        nested.invoke(x, {"configurable": {"teola_deadline_s": 0.0}})

    fast = accelerate(RunnableLambda(ask) | ChatTeola(pool=own))
    with pytest.raises(QueryTimeout):
        fast.invoke({"question": "cat"}, {"configurable": {"teola_deadline_s": 60.0}})


def test_nested_call_inherits_the_tenant(own: EnginePool, seen: Seen) -> None:
    nested = accelerate(app(own))
    fast = accelerate(RunnableLambda(lambda x: nested.invoke(x, {"configurable": {"mine": 1}})) | (lambda x: str(x)))
    fast.invoke({"question": "cat"}, ACME)
    plain: Runnable[Any, Any] = RunnableLambda(lambda x: nested.invoke(x, {"configurable": {"mine": 1}}))
    plain.invoke({"question": "cat"}, ACME)
    assert seen and {one.tenant for one in seen} == {"acme"}


async def test_task_that_outlives_its_query_keeps_the_tenant(own: EnginePool, seen: Seen) -> None:
    model, ended, tasks = ChatTeola(pool=own, max_tokens=2), asyncio.Event(), []

    async def later() -> None:
        await ended.wait()
        await TeolaEmbeddings(pool=own).aembed_query("after the end")
        await model.ainvoke("after the end")

    async def step(x: Any) -> Any:
        tasks.append(asyncio.create_task(later()))
        return x

    fast = accelerate(ChatPromptTemplate.from_template("{question}") | model | RunnableLambda(step), app="shop")
    config: Any = {"configurable": {"teola_tenant": "acme", "teola_deadline_s": 30.0}}
    await fast.ainvoke({"question": "cat"}, config)
    fast.last_trace()
    seen.clear()
    ended.set()
    await tasks[0]
    assert [(one.engine, one.tenant, one.app) for one in seen] == [
        ("embedder", "acme", "shop"),
        ("llm", "acme", "shop"),
    ]


# ------------------------------------------------------------ streams that nobody reads, or not to their end


def _live(pool: EnginePool) -> int:
    """Return the number of running queries, once the pool's loop has handled all that was posted."""
    loop: Any = pool.runtime.loop
    driver: Any = pool.runtime._driver
    loop.run(asyncio.sleep(0)).result(5)
    return len(driver.runs)


def _collect() -> None:
    gc.collect(1)  # what was made just now


async def test_stream_starts_no_query_before_the_first_read(own: EnginePool, seen: Seen) -> None:
    fast, given = accelerate(app(own)), {"question": "where is the cat"}
    made = [
        fast.astream_events(given, ACME, version="v2"),
        fast.astream_events(given, ACME, version="v1"),
        fast.astream(given, ACME),
        fast.stream(given, ACME),
    ]
    await asyncio.sleep(0.05)
    assert _live(own) == 0 and seen == []
    del made


async def test_dropped_stream_ends_its_query(own: EnginePool) -> None:
    fast, given = accelerate(app(own)), {"question": "where is the cat"}
    for make in (lambda: fast.astream(given), lambda: fast.astream_events(given, version="v2")):
        read = make()
        await anext(read)
        assert _live(own) == 1
        del read
        _collect()
        await _until(lambda: _live(own) == 0)
    again = fast.stream(given)
    next(again)
    assert _live(own) == 1
    del again
    _collect()
    assert _live(own) == 0


def test_stream_of_a_closed_loop_ends_its_query(own: EnginePool) -> None:
    read = accelerate(app(own)).astream({"question": "where is the cat"})
    loop = asyncio.new_event_loop()
    loop.run_until_complete(anext(read))
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    del read
    _collect()
    assert _live(own) == 0


async def _until(what: Callable[[], bool]) -> None:
    for _ in range(1000):
        if what():
            return
        await asyncio.sleep(0.01)
    assert what()


# ------------------------------------------------------------ deadlines


def _late(seconds: float) -> Any:
    return {"configurable": {"teola_deadline_s": seconds}}


async def test_deadline_interrupts_async_user_code(own: EnginePool) -> None:
    async def forever(x: Any) -> Any:
        await asyncio.sleep(30)

    chain = ChatPromptTemplate.from_template("{question}") | ChatTeola(pool=own, max_tokens=2) | forever
    for fast in (accelerate(chain), accelerate(RunnableLambda(forever), pool=own), accelerate(RunnableLambda(forever))):
        for work in (
            lambda fast=fast: fast.ainvoke({"question": "cat"}, _late(0.1)),
            lambda fast=fast: _drained(fast.astream({"question": "cat"}, _late(0.1))),
            lambda fast=fast: _drained(fast.astream_events({"question": "cat"}, _late(0.1), version="v2")),
            lambda fast=fast: fast.abatch([{"question": "cat"}] * 2, _late(0.1)),
        ):
            with pytest.raises(QueryTimeout, match="deadline"):
                await asyncio.wait_for(work(), 10)


def test_result_after_the_deadline_raises_query_timeout(own: EnginePool) -> None:
    def slow(x: Any) -> Any:
        time.sleep(0.15)
        return x

    chain = ChatPromptTemplate.from_template("{question}") | ChatTeola(pool=own, max_tokens=2) | slow
    fast = accelerate(chain)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: fast.invoke({"question": "cat"}, _late(0.1)),
        lambda: list(fast.stream({"question": "cat"}, _late(0.1))),
        lambda: fast.batch([{"question": "cat"}] * 2, _late(0.1)),
    )
    for call in calls:
        with pytest.raises(QueryTimeout, match="deadline"):
            call()
        trace = fast.last_trace()
        assert trace is not None and trace.outcome == "timeout"
    [late, _] = fast.batch([{"question": "cat"}] * 2, _late(0.1), return_exceptions=True)
    assert isinstance(late, QueryTimeout)


@pytest.mark.parametrize("way", ["invoke", "stream", "batch, bounded"])
def test_deadline_applies_if_planning_failed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeLLM(faults=Faults(hang_on=lambda request: True))
    with EnginePool.local([model, FakeEmbedder(), FakeReranker(), FakeStore()]) as pool:
        fast = _unplanned(pool, monkeypatch)
        with pytest.raises(QueryTimeout, match="deadline"):
            WAYS[way](fast, {"question": "cat"}, _late(0.1))
        with pytest.raises(QueryTimeout, match="deadline"):
            ChatTeola(pool=pool).invoke("hello", _late(0.1))


@pytest.mark.parametrize("bounded", [{}, {"max_concurrency": 2}])
@pytest.mark.parametrize("way", ["batch", "abatch"])
def test_batch_times_out_at_its_deadline(way: str, bounded: Any, own: EnginePool) -> None:
    """Which is counted from its begin, since all inputs go through a step before any of them goes on."""
    fast = accelerate(ChatPromptTemplate.from_template("{question}") | ChatTeola(pool=own, max_tokens=2) | _slow)
    given = [{"question": f"cat {i}"} for i in range(4)]

    def called(**options: Any) -> Any:
        config: Any = {**bounded, **_late(0.1)}
        if way == "batch":
            return fast.batch(given, config, **options)
        return asyncio.run(fast.abatch(given, config, **options))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of LangChain's: a bounded abatch that is cancelled
        with pytest.raises(QueryTimeout):
            called()
        assert [type(error) for error in called(return_exceptions=True)] == [QueryTimeout] * 4
        gc.collect()
    assert _live(own) == 0


def test_batch_with_max_concurrency_bounds_engine_requests() -> None:
    running = most = 0

    class Counting(FakeLLM):
        async def execute(self, batch: Any) -> Any:
            nonlocal running, most
            running += len(batch)
            most = max(most, running)
            await asyncio.sleep(0.02)
            async for result in super().execute(batch):
                yield result
            running -= len(batch)

    with EnginePool.local([Counting(), FakeEmbedder(), FakeReranker(), FakeStore()]) as pool:
        model = ChatTeola(pool=pool, max_tokens=2)
        two = ChatPromptTemplate.from_template("{question}") | model | StrOutputParser()
        fast = accelerate(two | ChatPromptTemplate.from_template("again: {x}") | model | StrOutputParser())
        given = [{"question": f"cat {i}"} for i in range(8)]
        assert fast.batch(given, {"max_concurrency": 1}) == fast.original.batch(given, {"max_concurrency": 1})
        assert most == 1


@pytest.mark.parametrize("way", ["batch", "abatch"])
def test_bounded_batch_with_fallbacks_runs_as_the_original(way: str, own: EnginePool, seen: Seen) -> None:
    """Fallbacks try all inputs, then those that have failed: so it stays, with the same options."""
    failing = RunnableLambda(lambda x: x["nothing"])
    answer = ChatPromptTemplate.from_template("{question}") | ChatTeola(pool=own, max_tokens=2)
    chain = answer | (failing.with_fallbacks([RunnableLambda(lambda x: x.content)]))
    fast, given = accelerate(chain, app="shop"), [{"question": f"cat {i}"} for i in range(4)]

    def observed(one: Any) -> Any:
        config: Any = {**ACME, "max_concurrency": 2}
        return observe(one, way, given[0], **config)

    plain, found = observed(chain), observed(fast)
    assert (found.result, found.events) == (plain.result, plain.events)
    assert {(one.tenant, one.app) for one in seen} == {("acme", "default"), ("acme", "shop")}
    with pytest.raises(QueryTimeout):
        WAYS[way](accelerate(answer | _slow.with_fallbacks([_slow])), given[0], _late(0.1))


_slow: Runnable[Any, Any] = RunnableLambda(lambda x: time.sleep(0.15))
