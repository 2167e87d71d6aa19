"""Pools and engines, an own pass, an own engine, and a program that uses a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, assert_type

from teola_plugin import EngineError, EnginePool, TeolaError
from teola_plugin.cluster import deploy
from teola_plugin.cluster.config import PoolConfig
from teola_plugin.engines import (
    EmbeddingEngine,
    FullTextSearch,
    OpenAIServer,
    PgVectorEngine,
    RerankingEngine,
    ToolEngine,
    VllmEngine,
    WebSearchEngine,
)
from teola_plugin.engines.base import Done, Engine, EngineLoad, Failed, Request, Result
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker, FakeStore, Faults, fake_engines
from teola_plugin.engines.profiles import rtx3090, scaled
from teola_plugin.graph import Curve, EngineProfile, Graph, PrimitiveKind
from teola_plugin.passes import DEFAULT_PASSES, PassContext
from teola_plugin.requests.payloads import ScorePair
from teola_plugin.server.client import AsyncTeolaClient, TeolaClient, joining


def pools(config: Path) -> None:
    machine = rtx3090()
    llm, embedder = FakeLLM("llm", machine["llm"]), FakeEmbedder("embedder", machine["embedder"])
    EnginePool.local([llm, embedder, FakeStore("store")])
    EnginePool.local({"llm": llm, "embedder": embedder, "store": FakeStore("store")})
    EnginePool.local({"llm": [FakeLLM("llm"), FakeLLM("llm")]}, policy={"llm": "critical-path"})
    EnginePool.local({"llm": [FakeLLM("llm"), FakeLLM("llm")], "reranker": FakeReranker(faults=Faults())})
    EnginePool.local(fake_engines(scaled(machine, 0.3)), tracing="opentelemetry", details=True)
    EnginePool.local(llm="some/model", embedder=EmbeddingEngine(), reranker="a/model", store="embedded", drafts="ngram")
    EnginePool.from_yaml(config, passes=DEFAULT_PASSES).close()
    EnginePool.from_yaml("pool.yaml", passes=(*DEFAULT_PASSES, NoWarmUps("llm")))
    with EnginePool.connect() as one, EnginePool.connect("auto", pool="desk") as two:
        print(one.engine_names, two.profiles["llm"].max_batch)
    address: str = deploy.up(PoolConfig.parse("name: desk"))
    print(address)


def engines() -> list[Engine]:
    web = WebSearchEngine("web", service="searxng", base_url="http://localhost:8888", dedicated=True)
    files = FullTextSearch("files", [{"url": "oats.md", "title": "Oats", "text": "Oats are sown in spring."}])

    def weather(place: str) -> str:
        return f"It rains at {place}."

    return [
        VllmEngine("llm", "a/model", engine_args={"max_model_len": 2048}, drafts={"kind": "prompt"}),
        OpenAIServer(base_url="http://localhost:8000/v1", model="my-model", prefix_caching=True),
        EmbeddingEngine("embedder", "a/model", cores="0-1"),
        RerankingEngine("reranker", Path("a/model"), device="cpu"),
        PgVectorEngine("store", dsn="postgresql:///farm", index="hnsw"),
        ToolEngine("tools", [weather], read_only=[weather]),
        web,
        files,
        WordOverlap(),
    ]


class WordOverlap:
    """An engine of one's own."""

    kinds = frozenset({PrimitiveKind.RERANKING})
    profile = EngineProfile({PrimitiveKind.RERANKING: Curve.linear(0.0, 1e-5)})

    def __init__(self, name: str = "overlap") -> None:
        self.name = name

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        for request in batch:
            if isinstance(request.payload, ScorePair):
                yield Done(request.id, float(request.payload.text in request.payload.query))
            else:
                yield Failed(request.id, EngineError(f"{self.name} cannot do it.", engine=self.name))

    async def cancel(self, request_id: str) -> None: ...

    def size(self, request: Request) -> int:
        return 1

    def load(self) -> EngineLoad:
        return EngineLoad()

    async def reset(self) -> None: ...

    def versions(self) -> Mapping[str, str]:
        return {}


@dataclass(frozen=True, slots=True)
class NoWarmUps:
    """A pass of one's own."""

    engine: str
    name: ClassVar[str] = "no-warm-ups"

    def run(self, graph: Graph, context: PassContext) -> Graph:
        return graph


def asking(pool: EnginePool) -> None:
    with pool.watching("plain") as run:
        scores = pool.call(PrimitiveKind.RERANKING, "overlap", [ScorePair("oats", "oats")]).result()
    trace = run.trace.result()
    print(scores, trace.seconds if trace else None, [trace.app for trace in pool.traces])
    try:
        pool.engine("llm")
    except TeolaError as error:
        print(error.hint)


def client() -> None:
    with TeolaClient("http://localhost:8080", "key") as one, joining("query-1", app="desk"):
        found = one.wait(one.submit("document_qa", "What do lambs eat?").id)
        assert_type(found.text, str)
        for event in one.events(found.id):
            print(event.kind, event.text)


async def client_in_a_loop() -> None:
    async with AsyncTeolaClient("http://localhost:8080") as one:
        print((await one.submit("desk", inputs={"question": "?"}, settings={"k": 3})).status)
        async for event in one.events("query-1"):
            print(event.data)


with EnginePool.local(engines()) as started:
    asking(started)
client()
asyncio.run(client_in_a_loop())
