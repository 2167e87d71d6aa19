"""Tests of sync composites that call their parts in sequence, with these calls started together.

They check counts, threads, order, events and errors.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
from differential.recording import observe
from langchain_classic.chains.summarize import load_summarize_chain
from langchain_classic.retrievers import (
    EnsembleRetriever,
    MultiQueryRetriever,
)
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from pydantic import Field
from support.event_order import EventOrder
from support.own_composites import (
    COMPOSITES,
    OWN,
    Chain,
    Counted,
    Lines,
    ensemble,
    map_reduce,
    queries,
    texts,
)
from support.own_leaves import Chat, Ledger, Notes, SyncChat

from teola_plugin import accelerate
from teola_plugin.adapters.langchain.composite_calls import CompositeRules, Threads
from teola_plugin.adapters.thread_safety import ThreadSafety
from teola_plugin.runtime.threads import DaemonThreads

every = pytest.mark.parametrize("make", COMPOSITES)


@every
def test_composite_runs_three_calls_at_once(make: Callable[[Ledger], Chain]) -> None:
    plain, fast = Ledger(), Ledger(meet=3)
    expected = make(plain).invoke("q")
    assert accelerate(make(fast), concurrent=OWN).invoke("q") == expected
    assert (plain.most_at_once, fast.most_at_once >= 3) == (1, True)
    assert fast.calls == plain.calls


@every
def test_composite_sends_the_events_of_the_original(make: Callable[[Ledger], Chain]) -> None:
    seen = [observe(made, "invoke", "q", tags=["mine"], metadata={"n": 1}) for made in both(make)]
    assert seen[0].events == seen[1].events
    assert seen[0].result == seen[1].result


def both(make: Callable[[Ledger], Chain], **options: Any) -> tuple[Chain, Chain]:
    return make(Ledger()), accelerate(make(Ledger(jitter=0.01)), concurrent=OWN, **options)


@every
def test_composite_sends_events_in_order_and_on_the_original_thread(make: Callable[[Ledger], Chain]) -> None:
    if make is texts:
        pytest.skip("`.map()` tells of its items in the order of a race, in the plain object too")
    plain, fast = EventOrder(), EventOrder()
    one, other = both(make)
    one.invoke("q", {"callbacks": [plain], "tags": ["mine"], "metadata": {"n": 1}})
    other.invoke("q", {"callbacks": [fast], "tags": ["mine"], "metadata": {"n": 1}})
    assert fast.events == plain.events
    assert fast.threads == plain.threads


@every
def test_speculate_off_keeps_composite_calls_sequential(make: Callable[[Ledger], Chain]) -> None:
    ledger = Ledger(jitter=0.002)
    accelerate(make(ledger), concurrent=OWN, speculate="off").invoke("q")
    assert ledger.most_at_once == 1


@every
def test_composite_without_concurrent_option_stays_sequential(make: Callable[[Ledger], Chain]) -> None:
    ledger = Ledger(jitter=0.002)
    accelerate(make(ledger)).invoke("q")
    assert ledger.most_at_once == 1


@every
@pytest.mark.parametrize("most", [1, 2])
def test_max_concurrency_bounds_composite_calls(make: Callable[[Ledger], Chain], most: int) -> None:
    if make is texts:
        pytest.skip("langchain-core 1.7 recurs for ever when a text model is mapped over with max_concurrency")
    plain, fast = Ledger(jitter=0.004), Ledger(jitter=0.004)
    make(plain).invoke("q", {"max_concurrency": most})
    accelerate(make(fast), concurrent=OWN).invoke("q", {"max_concurrency": most})
    assert fast.most_at_once <= max(1, plain.most_at_once)


@every
def test_composite_calls_overlap_in_batch_and_stream(make: Callable[[Ledger], Chain]) -> None:
    for call in (lambda chain: list(chain.stream("q")), lambda chain: chain.batch(["q"])):
        plain, fast = Ledger(), Ledger(meet=3)
        assert call(accelerate(make(fast), concurrent=OWN)) == call(make(plain))
        assert fast.most_at_once >= 3
        assert fast.calls == plain.calls


def test_concurrent_option_allows_overlapping_calls_of_a_sync_model() -> None:
    """Steps that need nothing of each other, on a model without async code: else one call of it at a time."""
    for named, most in (((), 1), ((SyncChat,), 3)):
        ledger = Ledger(meet=3) if named else Ledger(jitter=0.002)
        shared = SyncChat(ledger=ledger)
        prompts = [ChatPromptTemplate.from_template(f"{i} of {{x}}") for i in range(3)]
        chain: Chain = RunnablePassthrough.assign(s0=prompts[0] | shared)
        for i in (1, 2):
            chain = chain | RunnablePassthrough.assign(**{f"s{i}": prompts[i] | shared})
        accelerate(chain, concurrent=named).invoke({"x": 1})
        assert (ledger.most_at_once, ledger.calls.total()) == (most, 3)


# ------------------------------------------------------------ which calls


def test_equal_composite_calls_do_not_overlap() -> None:
    class Same(Lines):
        def _call(self, prompt: str, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
            return "one\none\ntwo\none"

    running: list[str] = []
    beside: list[str] = []

    class Watches(Notes):
        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
            beside.extend(one for one in running if one == query)
            running.append(query)
            try:
                return super()._get_relevant_documents(query, run_manager=run_manager)
            finally:
                running.remove(query)

    ledger = Ledger(jitter=0.01)
    accelerate(MultiQueryRetriever.from_llm(Watches(ledger=ledger), Same()), concurrent=OWN).invoke("q")
    assert ledger.calls == {"notes: one": 3, "notes: two": 1}
    assert not beside


def test_ensemble_calls_only_concurrent_retrievers_on_threads() -> None:
    class Here(Notes):
        seen: Any = Field(default_factory=set)

        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
            self.seen.add(threading.get_ident())
            return super()._get_relevant_documents(query, run_manager=run_manager)

    here, ledger = Here(), Ledger(meet=2)
    others = [Notes(ledger=ledger), Notes(ledger=ledger, tags=["b"])]
    both_ = EnsembleRetriever(retrievers=[here, others[0], here, others[1]], weights=[0.25] * 4)
    accelerate(both_, concurrent=others).invoke("q")
    assert here.seen == {threading.get_ident()}
    assert ledger.most_at_once == 2


def test_listed_classes_need_no_concurrent_option() -> None:
    pytest.importorskip("langchain_openai")
    from langchain_openai import OpenAIEmbeddings

    store = InMemoryVectorStore(OpenAIEmbeddings(api_key="none", check_embedding_ctx_length=False))
    local = InMemoryVectorStore(DeterministicFakeEmbedding(size=3))
    rules = CompositeRules([], Threads(ThreadSafety()))
    assert rules.allows(store.as_retriever())
    assert not rules.allows(local.as_retriever())


def test_accelerate_leaves_the_composite_unchanged() -> None:
    notes = Notes()
    several = MultiQueryRetriever.from_llm(notes, Lines())
    before = dict(vars(several))
    fast = accelerate(several, concurrent=[notes])
    assert vars(several) == before
    fast.invoke("q")
    assert fast.chain is several
    assert vars(several) == before


def test_retriever_with_own_callbacks_stays_sequential() -> None:
    ledger = Ledger(jitter=0.002)
    notes = Notes(ledger=ledger)
    vars(notes)["callbacks"] = [EventOrder()]
    composite = MultiQueryRetriever.from_llm(notes, Lines())
    accelerate(composite, concurrent=OWN).invoke("q")
    assert ledger.most_at_once == 1


def test_llm_cache_keeps_composite_calls_sequential() -> None:
    from langchain_core.globals import set_llm_cache

    ledger = Ledger(jitter=0.002)
    set_llm_cache(InMemoryCache())
    try:
        accelerate(map_reduce(ledger), concurrent=OWN).invoke("q")
    finally:
        set_llm_cache(None)
    assert ledger.most_at_once == 1


def test_rate_limiter_is_acquired_as_often_as_in_the_original() -> None:
    class Asked(InMemoryRateLimiter):
        times = 0

        def acquire(self, *, blocking: bool = True) -> bool:
            Asked.times += 1
            return True

    documents = [Document(f"text {i}") for i in range(3)]
    model = Counted(rate_limiter=Asked(), ledger=Ledger())
    chain = load_summarize_chain(model, chain_type="map_reduce")
    chain.invoke({"input_documents": documents})
    before, Asked.times = Asked.times, 0
    accelerate(chain, concurrent=[model]).invoke({"input_documents": documents})
    assert Asked.times == before == 4


_variable: ContextVar[str] = ContextVar("variable", default="unset")


@every
def test_concurrent_calls_see_context_variables_of_the_caller(make: Callable[[Ledger], Chain]) -> None:
    ledger = Ledger()
    ledger.look = _variable.get
    token = _variable.set("set")
    try:
        accelerate(make(ledger), concurrent=OWN).invoke("q")
    finally:
        _variable.reset(token)
    assert set(ledger.variables) == {"set"}


# ------------------------------------------------------------ failures


class Fails(Notes):
    at: str = "two"

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        self.error = f"no {query}" if query == self.at else ""
        self.ledger.work(f"notes: {query}", f"no {query}" if query == self.at else "")
        return [Document(query)]


@pytest.mark.parametrize("at", ["one", "two", "three"])
def test_failing_composite_raises_the_error_of_the_original(at: str) -> None:
    def failed(chain: Chain) -> tuple[str, list[str]]:
        order = EventOrder()
        with pytest.raises(ValueError, match=f"no {at}") as caught:
            chain.invoke("q", {"callbacks": [order]})
        return str(caught.value), order.events

    ledger = Ledger(jitter=0.005)
    plain = failed(MultiQueryRetriever.from_llm(Fails(at=at), Lines()))
    fast = failed(accelerate(MultiQueryRetriever.from_llm(Fails(at=at, ledger=ledger), Lines()), concurrent=OWN))
    assert fast == plain
    assert sum(ledger.calls.values()) <= 3


def test_no_composite_call_starts_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teola_plugin.adapters.langchain.composite_calls.MOST", 2)
    gate = threading.Event()

    class Many(Lines):
        def _call(self, prompt: str, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
            return "\n".join(f"q{i}" for i in range(9))

    class Waits(Notes):
        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
            self.ledger.calls[query] += 1
            if query == "q0":
                while len(self.ledger.calls) < 2:
                    pass
                raise ValueError("no")
            gate.wait(5)
            return []

    ledger = Ledger()
    with pytest.raises(ValueError, match="no"):
        accelerate(MultiQueryRetriever.from_llm(Waits(ledger=ledger), Many()), concurrent=OWN).invoke("q")
    gate.set()
    assert set(ledger.calls) == {"q0", "q1"}


def test_composite_calls_stay_sequential_if_no_thread_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teola_plugin.runtime.threads._threads", DaemonThreads(0))
    ledger = Ledger(jitter=0.002)
    assert accelerate(queries(ledger), concurrent=OWN).invoke("q") == queries(Ledger()).invoke("q")
    assert (ledger.most_at_once, ledger.calls.total()) == (1, 3)


def test_idle_threads_are_reused_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made = DaemonThreads(3)
    monkeypatch.setattr("teola_plugin.runtime.threads._threads", made)
    monkeypatch.setattr("teola_plugin.runtime.threads.IDLE_TIMEOUT_S", 0.05)
    fast = accelerate(ensemble(Ledger()), concurrent=OWN)
    for _ in range(50):
        fast.invoke("q")
        assert made.count <= 3
    for _ in range(500):
        if made.count == 0:
            break
        threading.Event().wait(0.01)
    assert (made.count, made.idle) == (0, 0)
    assert fast.invoke("q") == ensemble(Ledger()).invoke("q")


def test_run_starts_a_thread_beyond_the_limit() -> None:
    threads, both = DaemonThreads(1), threading.Barrier(3)
    threads.start(both.wait)
    threads.start(both.wait)
    both.wait(5)
    threads.run(both.wait, 1)
    assert threads.count == 2


def test_forked_process_starts_its_own_threads() -> None:
    fast = accelerate(ensemble(Ledger()), concurrent=OWN)
    expected = len(fast.invoke("q"))
    child = multiprocessing.get_context("fork").Process(target=_asked_in_child, args=(fast, expected))
    child.start()
    child.join(20)
    assert child.exitcode == 0


def _asked_in_child(fast: Any, expected: int) -> None:
    os._exit(0 if len(fast.invoke("q")) == expected else 1)


def test_failing_map_reduce_model_sends_the_events_of_the_original() -> None:
    class Breaks(Counted):
        def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
            if "text 1" in messages[-1].content:
                raise ValueError("broken")
            return super()._generate(messages, stop, run_manager, **kwargs)

    documents = [Document(f"text {i}") for i in range(3)]

    def failed(chain: Chain) -> list[str]:
        order = EventOrder()
        with pytest.raises(ValueError, match="broken"):
            chain.invoke({"input_documents": documents}, {"callbacks": [order]})
        return order.events

    chain = load_summarize_chain(Breaks(), chain_type="map_reduce")
    assert failed(accelerate(chain, concurrent=[Breaks])) == failed(chain)


def test_composite_in_a_chain_with_prefetched_models_is_called_once() -> None:
    """The chain's own table of provider calls knows nothing of the composite's retriever."""

    def chain(ledger: Ledger) -> Chain:
        ask = ChatPromptTemplate.from_template
        return (
            RunnablePassthrough.assign(a=ask("first {x}") | Chat(ledger=ledger))
            | RunnablePassthrough.assign(b=ask("second {x}") | Chat(ledger=ledger))
            | RunnablePassthrough.assign(documents=RunnableLambda(lambda given: given["x"]) | queries(ledger))
        )

    plain, fast = Ledger(), Ledger(jitter=0.01)
    expected = chain(plain).invoke({"x": "q"})["documents"]
    accelerated = accelerate(chain(fast), concurrent=OWN)
    assert accelerated._prefetch_plan is not None
    assert accelerated.invoke({"x": "q"})["documents"] == expected
    assert fast.calls == plain.calls
