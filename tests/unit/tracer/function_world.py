"""A pool of fakes, the objects that functions are made of, and what is asked of engines early."""

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
from teola_plugin.requests.payloads import Prompt, Sampling, Warmup
from teola_plugin.requests.request import Request
from teola_plugin.runtime.context import current_run
from teola_plugin.tracer.draft import TraceResult


def answer(prompt: Prompt, sampling: Sampling) -> str:
    """Lists, grades and words that depend on the prompt."""
    said = prompt.flat()
    if "queries" in sampling.json_schema:
        return json.dumps({"queries": [f"about {len(said)}", "moss", "oats"]})
    if "grade" in sampling.json_schema:
        return json.dumps({"grade": "yes" if len(said) % 2 else "no"})
    if "one per line" in said:
        return "oats\nivy\nmoss"
    return f"so many words: {len(said)}"


@dataclass(frozen=True)
class World:
    pool: EnginePool
    llm: ChatTeola
    store: TeolaVectorStore
    retriever: Any
    reranker: TeolaRerank
    engines: tuple[Any, ...]
    seen: list[list[Request]] = field(default_factory=list)

    def asked(self) -> Counter[str]:
        """What engines were asked for since the last time, but for warm-ups."""
        found = Counter(
            f"{request.kind.name} {request.payload}" for one in self.seen for request in one if not _warm(request)
        )
        for one in self.seen:
            one.clear()
        return found

    def count(self) -> int:
        return sum(not _warm(request) for one in self.seen for request in one)

    def warmed(self) -> int:
        return sum(_warm(request) for one in self.seen for request in one)


def _warm(request: Request) -> bool:
    return isinstance(request.payload, Warmup)


def alike(value: Any) -> Any:
    """The value, without what differs between two calls of a model."""
    if isinstance(value, BaseMessage):
        return type(value), value.content, getattr(value, "tool_calls", None)
    if isinstance(value, dict):
        return {key: alike(one) for key, one in value.items()}
    return [alike(one) for one in value] if isinstance(value, (list, tuple)) else value


def world(llm: EngineProfile | None = None) -> World:
    engines = (FakeLLM("llm", llm, answer), FakeEmbedder("embedder"), FakeReranker("reranker"), FakeStore("store"))
    pool = EnginePool.local(engines=list(engines)).start()
    store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="farm")
    store.add_documents([Document(f"all about {word}", id=word) for word in ("oats", "ivy", "moss", "lime")])
    retriever = store.as_retriever(search_kwargs={"k": 2})
    made = World(pool, ChatTeola(pool=pool, max_tokens=32), store, retriever, TeolaRerank(pool=pool, top_n=2), engines)
    made.seen.extend(record(engine) for engine in engines)
    return made


def called(func: Callable[..., Any], given: Any, *, spread: bool = False) -> Any:
    """What the plain function gives; `spread`: its arguments are the items of a dictionary."""
    made = func(**given) if spread else func(given)
    return asyncio.run(_awaited(made)) if inspect.isawaitable(made) else made


async def _awaited(made: Any) -> Any:
    return await made


@dataclass(frozen=True)
class Beside:
    """A plain function's call inside a live query whose part began before."""

    value: Any
    early: int
    """Requests that engines had before the function began."""
    asked: Counter[str]
    wasted: int
    warmed: int
    """Prompts whose beginning was prefilled."""


def _begun(world: World, wanted: int, patience: float) -> int:
    """Requests, once there are so many; or once nothing has come for a while."""
    found, since = world.count(), time.monotonic()
    while found < wanted and time.monotonic() - since < patience:
        time.sleep(0.002)
        if world.count() > found:
            found, since = world.count(), time.monotonic()
    time.sleep(0.01)
    return world.count()


def beside(
    world: World,
    traced: TraceResult,
    func: Callable[[], Any],
    value: Mapping[str, Any],
    early: int,
    *,
    speculate: str = "auto",
    patience: float = 5.0,
) -> Beside:
    """Waits for so many early requests before the plain function is called; `patience`: seconds for the next of them,
    few where so many need not come."""
    world.asked()
    plan = world.pool.plan(traced.template, traced.sizes(value), speculate=speculate)
    run = world.pool.runtime.watch(Query({"input": value}), joins=True)
    part = run.part(plan.graph, traced.calls, value)
    begun = _begun(world, early, patience)
    token = current_run.set(run)
    try:
        made = func()
    finally:
        current_run.reset(token)
        part.close()
        run.close()
    trace = run.trace.result(5)
    assert trace is not None
    warmed = world.warmed()
    return Beside(made, begun, world.asked(), trace.wasted()[0], warmed)
