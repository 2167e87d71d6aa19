"""Tests of chains of the user's own models and retrievers without a pool, compared with the original."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import time
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import pytest
from differential.recording import WAYS, Recorder, observe
from langchain_core.callbacks import AsyncCallbackHandler
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough
from support.own_leaves import Chat, Ledger, Notes, SyncChat, Text

from teola_plugin import accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.engines.fake import fake_engines
from teola_plugin.pool import EnginePool

Chain = Runnable[Any, Any]
LONG = bool(os.environ.get("TEOLA_TEST_LONG"))
QUESTION = {"question": "why"}


def ask(text: str, model: Chain) -> Chain:
    return ChatPromptTemplate.from_messages([("system", "be short"), ("human", text)]) | model | StrOutputParser()


def three_assigns(ledger: Ledger) -> Chain:
    """Return a chain of three independent assigns, one after the other."""
    return (
        RunnablePassthrough.assign(a=ask("{question}?", Chat(ledger=ledger, says="a")))
        .assign(b=ask("{question}!", Chat(ledger=ledger, says="b", tags=["own"], metadata={"k": 1})))
        .assign(c=ask("{question}.", Chat(ledger=ledger, says="c", name="Cee").bind(stop=["x"])))
    )


def rewritten(ledger: Ledger) -> Chain:
    """Return a chain with a dependent branch, an independent one, a retriever, and user code at the end."""
    short = ask("shorter: {question}", Chat(ledger=ledger, says="short").with_config(tags=["t"], run_name="Short"))
    return (
        RunnablePassthrough.assign(short=short)
        .assign(docs=itemgetter("question") | Notes(ledger=ledger, tags=["r"]))
        .assign(found=itemgetter("short") | Notes(ledger=ledger))
        .assign(idea=ask("idea for {question}", Text(ledger=ledger)))
        | (lambda x: {**x, "n": len(x["docs"]) + len(x["found"])})
        | ask("{n} {idea} {short}", Chat(ledger=ledger, says="end"))
    )


def with_user_code(ledger: Ledger) -> Chain:
    def shout(x: Any) -> Chain:
        return ask("inner {question}", Chat(ledger=ledger, says="inner"))

    return (
        RunnablePassthrough.assign(a=RunnableLambda(lambda x: x["question"].upper()))
        .assign(b=ask("{question}", Chat(ledger=ledger, says="b")))
        .assign(c=RunnableLambda(shout))
        .assign(d=ask("{question} {a}", Chat(ledger=ledger, says="d")))
    )


def local_models(ledger: Ledger) -> Chain:
    """Return a chain of models with sync code only. Two steps use the same object."""
    same = SyncChat(ledger=ledger, says="same")
    return (
        RunnablePassthrough.assign(a=ask("{question}?", same))
        .assign(b=ask("{question}!", SyncChat(ledger=ledger, says="other")))
        .assign(c=ask("{question}.", same))
    )


def branches(ledger: Ledger) -> Chain:
    """Return a chain of a parallel and a sequence of assigns, with names and configs."""
    first = RunnableParallel(
        q=itemgetter("question"), x=ask("x {question}", Chat(ledger=ledger, says="x")).with_config(run_name="Ex")
    )
    late = ask("y {q}", Chat(ledger=ledger, says="y")).with_config(metadata={"late": True})
    return (first | RunnablePassthrough.assign(y=late)).with_config(tags=["whole"], run_name="Whole")


def early_failure(ledger: Ledger) -> Chain:
    return RunnablePassthrough.assign(a=ask("{question}", Chat(ledger=ledger, says="a", error="a is down"))).assign(
        b=ask("{question}", Chat(ledger=ledger, says="b"))
    )


def late_failure(ledger: Ledger) -> Chain:
    return RunnablePassthrough.assign(a=ask("{question}", Chat(ledger=ledger, says="a"))).assign(
        b=ask("{question}", Chat(ledger=ledger, says="b", error="b is down")) | RunnableLambda(len)
    )


def retriever_failure(ledger: Ledger) -> Chain:
    return RunnablePassthrough.assign(a=ask("{question}", Chat(ledger=ledger, says="a"))).assign(
        b=itemgetter("question") | Notes(ledger=ledger, error="no notes")
    )


CHAINS: dict[str, Callable[[Ledger], Chain]] = {
    make.__name__: make
    for make in (three_assigns, rewritten, with_user_code, local_models, branches, late_failure, retriever_failure)
}


SPECULATE = {"with_user_code": "all"}
"""Otherwise nothing passes a function."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CHAINS)
def test_prefetching_chain_gives_results_calls_and_events_of_the_original(name: str, way: str) -> None:
    plain_ledger, fast_ledger = Ledger(), Ledger()
    chain, fast = (
        CHAINS[name](plain_ledger),
        accelerate(CHAINS[name](fast_ledger), speculate=SPECULATE.get(name, "auto")),
    )
    assert fast._prefetch_plan is not None
    plain, accelerated = observe(chain, way, QUESTION), observe(fast, way, QUESTION)
    assert accelerated.result == plain.result
    if "failure" in name and "batch" in way:  # which siblings began, and were heard, is a race in the plain object, too
        assert max(fast_ledger.calls.values()) <= 3
    else:
        assert fast_ledger.calls == plain_ledger.calls
        assert accelerated.events == plain.events


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
@pytest.mark.parametrize("make", [three_assigns, rewritten, with_user_code, local_models])
def test_no_call_is_made_twice_in_any_interleaving(make: Callable[[Ledger], Chain], way: str) -> None:
    plain_ledger, ledger = Ledger(), Ledger(jitter=0.004)
    expected = observe(make(plain_ledger), way, QUESTION)
    fast = accelerate(make(ledger))
    for _ in range(25 if LONG else 6):
        ledger.calls.clear()
        outcome = observe(fast, way, QUESTION)
        assert (outcome.result, outcome.events) == (expected.result, expected.events)
        assert ledger.calls == plain_ledger.calls


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "batch", "abatch"])
def test_calls_of_independent_steps_overlap(way: str) -> None:
    inputs = 3 if "batch" in way else 1
    alone, ledger = Ledger(), Ledger(meet=3 * inputs)
    plain = observe(three_assigns(alone), way, QUESTION)
    accelerated = observe(accelerate(three_assigns(ledger)), way, QUESTION)
    assert alone.most_at_once <= inputs
    assert ledger.most_at_once == 3 * inputs
    assert accelerated == plain
    assert ledger.calls == alone.calls


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_sync_model_gets_one_call_at_a_time(way: str) -> None:
    ledger = Ledger(jitter=0.004)
    same = SyncChat(ledger=ledger, says="same")
    chain = RunnablePassthrough.assign(a=ask("1 {question}", same)).assign(b=ask("2 {question}", same))
    fast = accelerate(chain)
    for _ in range(10 if LONG else 3):
        assert observe(fast, way, QUESTION).result == observe(chain, way, QUESTION).result
    assert ledger.most_at_once == 1


@pytest.mark.parametrize(("most", "seen"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("way", ["invoke", "ainvoke", "batch", "abatch"])
def test_max_concurrency_bounds_prefetched_calls(way: str, most: int, seen: int) -> None:
    ledger = Ledger(jitter=0.004)
    fast = accelerate(three_assigns(ledger))
    for _ in range(5):
        observe(fast, way, QUESTION, max_concurrency=most)
    assert ledger.most_at_once <= seen
    assert (fast.last_trace() is None) == (most == 1)  # one at a time leaves nothing to gain: the original runs


@pytest.mark.parametrize(("most", "seen"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_bound_max_concurrency_limits_prefetched_calls(way: str, most: int, seen: int) -> None:
    ledger = Ledger(jitter=0.004)
    fast = accelerate(three_assigns(ledger).with_config(max_concurrency=most))

    for _ in range(5):
        observe(fast, way, QUESTION)

    assert ledger.most_at_once == seen


def test_max_concurrency_of_a_call_overrides_the_bound_one() -> None:
    ledger = Ledger(meet=3)
    fast = accelerate(three_assigns(ledger).with_config(max_concurrency=1))

    observe(fast, "ainvoke", QUESTION, max_concurrency=3)

    assert ledger.most_at_once == 3


def test_max_concurrency_bounds_batch_as_completed() -> None:
    ledger = Ledger(jitter=0.004)
    fast = accelerate(three_assigns(ledger))
    done = dict(fast.batch_as_completed([QUESTION] * 4, {"max_concurrency": 2}))
    assert sorted(done) == [0, 1, 2, 3]
    assert ledger.most_at_once <= 2


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_failure_of_the_earlier_call_is_raised(way: str) -> None:
    """Both fail; the later one, made ahead, must not be seen. The one documented extra is its call."""
    ledger = Ledger()
    failing = Chat(ledger=ledger, says="b", error="b is down")
    chain = RunnablePassthrough.assign(a=ask("{question}", Chat(ledger=ledger, says="a", error="a is down")))
    chain = chain.assign(b=ask("{question}", failing))
    plain, accelerated = observe(chain, way, QUESTION), observe(accelerate(chain), way, QUESTION)
    assert plain.result == "ValueError: a is down"
    assert accelerated == plain
    assert ledger.calls["a: why"] == 2
    assert ledger.calls["b: why"] <= 1


def test_exception_of_a_prefetched_call_is_the_same_object() -> None:
    class Broken(Exception):
        pass

    raised = Broken("mine")

    class Failing(Chat):
        async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
            raise raised

    chain = RunnablePassthrough.assign(a=ask("{question}", Chat())).assign(b=ask("{question}", Failing()))
    with pytest.raises(Broken) as caught:
        asyncio.run(accelerate(chain).ainvoke(QUESTION))
    assert caught.value is raised


user: contextvars.ContextVar[str] = contextvars.ContextVar("user", default="nobody")


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_prefetched_calls_see_the_context_of_the_caller(way: str) -> None:
    ledger = Ledger(meet=3)
    ledger.look = user.get
    token = user.set("ann")
    try:
        observe(accelerate(three_assigns(ledger)), way, QUESTION)
    finally:
        user.reset(token)
    assert ledger.variables == ["ann"] * 3


async def test_async_handlers_get_the_events_of_the_original() -> None:
    class Handler(AsyncCallbackHandler):
        def __init__(self) -> None:
            self.seen: list[str] = []

        async def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
            self.seen.append(f"start {kwargs['tags']}")

        async def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
            self.seen.append("end")

    async def events(chain: Chain) -> list[str]:
        handler = Handler()
        await chain.ainvoke(QUESTION, {"callbacks": [handler], "tags": ["mine"]})
        return handler.seen

    chain = three_assigns(Ledger())
    assert await events(accelerate(chain)) == await events(chain)


async def test_cancelling_the_caller_cancels_prefetched_calls() -> None:
    ledger = Ledger()
    ledger.meet = 99  # every call takes a second
    fast = accelerate(three_assigns(ledger))
    task = asyncio.create_task(fast.ainvoke(QUESTION))
    while ledger.now < 3:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(20):
        await asyncio.sleep(0)
    assert ledger.now == 0


async def test_cancelling_the_caller_cancels_a_claimed_prefetched_call() -> None:
    ended: list[str] = []
    begun = asyncio.Event()

    class Endless(Chat):
        async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("cancelled")

    class Patient(Chat):
        async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
            await begun.wait()
            return await super()._agenerate(*args, **kwargs)

    chain = RunnablePassthrough.assign(a=ask("{question}", Patient())).assign(b=ask("{question}", Endless()))
    fast, plain = accelerate(chain), Recorder()
    task = asyncio.create_task(fast.ainvoke(QUESTION, {"callbacks": [plain]}))
    while sum(plain.prompts.values()) < 2:  # the second call is claimed now
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5):
        while not ended:
            await asyncio.sleep(0.001)
    assert ended == ["cancelled"]


def test_call_without_gain_is_made_by_the_original() -> None:
    ledger = Ledger(meet=3)
    ledger.look = lambda: threading.current_thread().name == "teola-prefetch"
    fast = accelerate(three_assigns(ledger))
    fast.invoke(QUESTION)
    assert len(fast._prefetch_plan.sites) == 3 and len(fast._prefetch_plan.prefetched_sites) == 2
    assert sorted(ledger.variables) == [False, True, True]


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_sync_model_that_calls_itself_does_not_deadlock(way: str) -> None:
    class Recursive(SyncChat):
        inner: Any = None

        def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
            if "deep" not in messages[-1].content:
                self.inner.invoke({"question": "deep"})
            return super()._generate(messages, *args, **kwargs)

    model = Recursive()
    model.inner = accelerate(
        RunnablePassthrough.assign(a=ask("1 {question}", SyncChat())).assign(b=ask("2 {question}", model))
    )
    chain = RunnablePassthrough.assign(a=ask("{question}", Chat(ledger=Ledger(jitter=0.01)))).assign(
        b=ask("{question}", model)
    )
    assert observe(accelerate(chain), way, QUESTION).result == observe(chain, way, QUESTION).result


async def test_astream_events_prefetches_and_gives_the_originals_events() -> None:
    ledger = Ledger(meet=2)
    chain, fast = three_assigns(Ledger()), accelerate(three_assigns(ledger))

    async def events(one: Chain) -> list[str]:
        return sorted([f"{e['event']} {e['name']} {e['tags']}" async for e in one.astream_events(QUESTION)])

    assert await events(fast) == await events(chain)
    assert ledger.most_at_once > 1

    def inside(one: Chain) -> Chain:
        async def call(x: Any) -> Any:
            return await one.ainvoke(x)

        return RunnableLambda(call)

    assert await events(inside(fast)) == await events(inside(chain))
    assert sum(ledger.calls.values()) == 6


def untouched(chain: Chain, **options: Any) -> bool:
    fast = accelerate(chain, **options)
    return fast._prefetch_plan is None and fast.plan(QUESTION) is None


def test_chain_without_gain_is_left_unchanged() -> None:
    ledger = Ledger()
    notes = {"context": itemgetter("question") | Notes(), "question": itemgetter("question")}
    rag = RunnableParallel(notes) | ask("{context} {question}", Chat(ledger=ledger))
    assert untouched(rag)
    assert untouched(Chat())
    assert untouched(RunnablePassthrough.assign(a=ask("{question}", Chat())).assign(b=ask("{a}", Chat())))
    fast = accelerate(rag)
    assert fast.invoke(QUESTION) == rag.invoke(QUESTION)
    assert fast.last_trace() is None


def step_back(ledger: Ledger, second: Chain) -> Chain:
    """Return a chain of two parallel searches. Only the second one needs the first answer."""
    first = itemgetter("question") | Notes(ledger=ledger)
    both = RunnableParallel(normal=first, generic=itemgetter("generic") | second)
    return RunnablePassthrough.assign(generic=ask("{question}", Chat(ledger=ledger, says="g"))) | both


def test_search_parallel_to_an_equal_waiting_search_has_no_gain() -> None:
    ledger = Ledger()
    end = ask("{normal} {generic}", Chat(ledger=ledger))
    assert untouched(step_back(ledger, Notes(ledger=ledger)) | end)
    assert not untouched(step_back(ledger, Notes(ledger=Ledger())) | end)  # another one may be quicker
    alone = RunnableParallel(a=itemgetter("normal") | ask("{x}", Chat(ledger=ledger)), b=end)
    assert not untouched(step_back(ledger, Notes(ledger=ledger)) | alone)  # an answer needs the first search only


def test_speculate_off_and_no_passes_leave_the_original_unchanged() -> None:
    assert untouched(three_assigns(Ledger()), speculate="off")
    assert untouched(three_assigns(Ledger()), passes=())
    stateful = FakeListChatModel(responses=["1", "2"])
    assert untouched(RunnablePassthrough.assign(a=ask("{question}", stateful)).assign(b=ask("{question}", stateful)))


def test_accelerate_returns_original_if_disabled_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEOLA_DISABLE", "1")
    chain = three_assigns(Ledger())
    assert accelerate(chain) is chain


def test_mapped_calls_are_prefetched_if_the_list_needs_no_call() -> None:
    ledger = Ledger()

    def chain(made: Any) -> Any:
        first = RunnablePassthrough.assign(a=ask("{question}", Chat(ledger=ledger, says="a")))
        return first | RunnableLambda(made) | ask("{q}", Chat(ledger=ledger, says="m")).map()

    assert not untouched(chain(lambda x: [x["question"]] * 2))
    assert untouched(chain(lambda x: [x["a"]] * ledger.calls["m"]))  # user code


def test_a_retriever_never_overtakes_user_code_that_might_write() -> None:
    order: list[str] = []

    class Watched(Notes):
        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> Any:
            order.append("read")
            return super()._get_relevant_documents(query, run_manager=run_manager)

    def write(x: Any) -> str:
        time.sleep(0.02)
        order.append("write")
        return "done"

    chain = (
        RunnablePassthrough.assign(w=RunnableLambda(write))
        .assign(docs=itemgetter("question") | Watched())
        .assign(b=ask("{question}", Chat()))
    )
    fast = accelerate(chain)
    for _ in range(5):
        order.clear()
        fast.invoke(QUESTION)
        assert order == ["write", "read"]


def test_accelerate_neither_changes_nor_copies_user_objects() -> None:
    model = Chat()
    first = RunnablePassthrough.assign(a=ask("{question}", model))
    chain = first.assign(b=ask("{question}!", model))
    before = repr(chain)
    fast = accelerate(chain)
    assert fast.original is chain and repr(chain) == before
    assert fast.chain is chain
    assert len(fast._prefetch_plan.sites) == 2 and all(
        site.target is model for site in fast._prefetch_plan.sites.values()
    )


def test_trace_and_explain_include_prefetched_text_models() -> None:
    chain = RunnablePassthrough.assign(a=PromptTemplate.from_template("{question}?") | Text()).assign(
        b=PromptTemplate.from_template("{question}!") | Text()
    )
    fast = accelerate(chain)
    assert fast.invoke(QUESTION) == chain.invoke(QUESTION)
    trace = fast.last_trace()
    assert trace is not None and {s.engine for s in trace.spans} >= {"wrapped"}
    assert "wrapped" in fast.explain(QUESTION, details=True)


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_user_models_and_pool_models_overlap_in_one_chain(way: str) -> None:
    with EnginePool.local(fake_engines()) as pool:

        def chain(ledger: Ledger) -> Chain:
            pooled = ChatTeola(pool=pool, max_tokens=4)
            return (
                RunnablePassthrough.assign(a=ask("{question}?", Chat(ledger=ledger, says="a")))
                .assign(p=ask("{question}", pooled))
                .assign(b=ask("{question} {p}", Chat(ledger=ledger, says="b")))
                .assign(c=ask("{question}.", Chat(ledger=ledger, says="c")))
            )

        alone, ledger = Ledger(), Ledger(meet=3)
        plain = observe(chain(alone), way, QUESTION)
        fast = accelerate(chain(ledger))
        assert fast._prefetch_plan.pool is pool
        assert observe(fast, way, QUESTION) == plain
        assert ledger.calls == alone.calls and ledger.most_at_once == 3
        trace = fast.last_trace()
        assert trace is not None and {s.engine for s in trace.spans} >= {"wrapped", "llm"}


async def test_forty_concurrent_queries_make_each_call_once() -> None:
    plain, ledger = three_assigns(Ledger()), Ledger(jitter=0.01)
    fast = accelerate(three_assigns(ledger))
    given = [{"question": f"q{i}"} for i in range(40)]
    results = await asyncio.gather(*(fast.ainvoke(x) for x in given))
    assert results == [plain.invoke(x) for x in given]
    assert set(ledger.calls.values()) == {1}


def test_accelerated_chain_nested_in_another_makes_the_same_calls() -> None:
    ledger, other = Ledger(), Ledger()
    inner = accelerate(three_assigns(ledger))
    chain = RunnablePassthrough.assign(x=inner).assign(y=ask("{question}", Chat(ledger=ledger, says="y")))
    plain = RunnablePassthrough.assign(x=three_assigns(other)).assign(y=ask("{question}", Chat(ledger=other, says="y")))
    assert accelerate(chain).invoke(QUESTION) == plain.invoke(QUESTION)
    assert ledger.calls == other.calls
