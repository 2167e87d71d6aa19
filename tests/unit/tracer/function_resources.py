"""A pool of fake engines, the objects that functions use, and functions that run with a plan."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from support.recording import record

from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.rerank import TeolaRerank
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker, FakeStore
from teola_plugin.graph import EngineProfile, Query
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Prompt, Request, Sampling, Warmup
from teola_plugin.runtime.query_run import current_run
from teola_plugin.tracer.draft import TraceResult


def answer(prompt: Prompt, sampling: Sampling) -> str:
    """Return a list, a grade or words that depend on the prompt."""
    text = prompt.flat()
    if "queries" in sampling.json_schema:
        return json.dumps({"queries": [f"about {len(text)}", "moss", "oats"]})
    if "grade" in sampling.json_schema:
        return json.dumps({"grade": "yes" if len(text) % 2 else "no"})
    if "one per line" in text:
        return "oats\nivy\nmoss"
    return f"so many words: {len(text)}"


@dataclass(frozen=True)
class Resources:
    """A pool of fake engines with records of their requests, and the objects on it that functions use."""

    pool: EnginePool
    llm: ChatTeola
    store: TeolaVectorStore
    retriever: Any
    reranker: TeolaRerank
    engines: tuple[Any, ...]
    records: list[list[Request]] = field(default_factory=list)
    """The requests that each engine got."""

    def take_requests(self) -> Counter[str]:
        """Return the requests since the last call of this method, without warm-ups."""
        requests = Counter(
            f"{r.kind.name} {r.payload}"
            for engine_requests in self.records
            for r in engine_requests
            if not _is_warmup(r)
        )
        for engine_requests in self.records:
            engine_requests.clear()
        return requests

    def request_count(self) -> int:
        return sum(not _is_warmup(request) for engine_requests in self.records for request in engine_requests)

    def warmup_count(self) -> int:
        return sum(_is_warmup(request) for engine_requests in self.records for request in engine_requests)


def _is_warmup(request: Request) -> bool:
    return isinstance(request.payload, Warmup)


def comparable(value: Any) -> Any:
    """Return the value without what differs between two calls of a model."""
    if isinstance(value, BaseMessage):
        return type(value), value.content, getattr(value, "tool_calls", None)
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    return [comparable(item) for item in value] if isinstance(value, (list, tuple)) else value


def make_resources(llm: EngineProfile | None = None) -> Resources:
    engines = (FakeLLM("llm", llm, answer), FakeEmbedder("embedder"), FakeReranker("reranker"), FakeStore("store"))
    pool = EnginePool.local(engines=list(engines)).start()
    store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="farm")
    store.add_documents([Document(f"all about {word}", id=word) for word in ("oats", "ivy", "moss", "lime")])
    retriever = store.as_retriever(search_kwargs={"k": 2})
    model, reranker = ChatTeola(pool=pool, max_tokens=32), TeolaRerank(pool=pool, top_n=2)
    resources = Resources(pool, model, store, retriever, reranker, engines)
    resources.records.extend(record(engine) for engine in engines)
    return resources


def call(func: Callable[..., Any], inputs: Any, *, as_keywords: bool = False) -> Any:
    """Return what a function, or a coroutine function, returns. `as_keywords`: `inputs` are its arguments by name."""
    result = func(**inputs) if as_keywords else func(inputs)
    return asyncio.run(_wait_for(result)) if inspect.isawaitable(result) else result


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


@dataclass(frozen=True)
class PrefetchedCall:
    """A call of a function inside a live query whose plan began before."""

    value: Any
    prefetched: int
    """Requests that engines had before the function began."""
    requests: Counter[str]
    wasted: int
    warmups: int
    """Prompts whose beginning was prefilled."""


def _wait_for_requests(resources: Resources, count: int, patience_s: float) -> int:
    """Return the number of requests, once there are `count`, or once none has come for `patience_s` seconds."""
    current, last_change = resources.request_count(), time.monotonic()
    while current < count and time.monotonic() - last_change < patience_s:
        time.sleep(0.002)
        if resources.request_count() > current:
            current, last_change = resources.request_count(), time.monotonic()
    time.sleep(0.01)
    return resources.request_count()


def call_prefetched(
    resources: Resources,
    traced: TraceResult,
    func: Callable[[], Any],
    inputs: Mapping[str, Any],
    prefetched: int,
    *,
    speculate: str = "auto",
    patience_s: float = 5.0,
) -> PrefetchedCall:
    """Call a function after its plan has made as many requests as `prefetched`.

    `patience_s` is the time to wait for each of them, short where so many need not come.
    """
    resources.take_requests()
    plan = resources.pool.plan(traced.template, traced.sizes(inputs), speculate=speculate)
    run = resources.pool.runtime.watch(Query({"input": inputs}), joins=True)
    part = run.begin_subplan(plan.graph, traced.calls, inputs)
    prefetched_count = _wait_for_requests(resources, prefetched, patience_s)
    token = current_run.set(run)
    try:
        value = func()
    finally:
        current_run.reset(token)
        part.close()
        run.close()
    trace = run.trace.result(5)
    assert trace is not None
    warmups = resources.warmup_count()
    return PrefetchedCall(value, prefetched_count, resources.take_requests(), trace.wasted()[0], warmups)
