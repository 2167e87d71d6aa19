"""Workflows without a framework, and a component of the user's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_type

from langchain_text_splitters import RecursiveCharacterTextSplitter

from teola_plugin import EnginePool
from teola_plugin.graph import Attributes, Primitive, PrimitiveKind, Ref, named
from teola_plugin.workflow import (
    PER_QUERY,
    Branch,
    Chunking,
    Component,
    Condition,
    Config,
    Decomposition,
    Deployment,
    Document,
    Embedding,
    Flow,
    Function,
    Generation,
    Indexing,
    Ingestion,
    Input,
    Kind,
    Loop,
    Map,
    Prompt,
    QueryExpansion,
    Reranking,
    Result,
    Searching,
    Synthesis,
    Tool,
    Value,
    WebSearch,
    Workflow,
    on_engine,
    reads,
    setting,
)

DOCUMENT_QA = Workflow(
    "document_qa",
    Indexing("index", chunk_size=256, chunk_overlap=30, collection=PER_QUERY)
    >> QueryExpansion("queries", n=3, prompt="{question} {n}", max_tokens=12)
    >> Searching("found", query="queries", k=16, collection=PER_QUERY, filter=(("place", "farm"),))
    >> Reranking("best", passages="found", k=3)
    >> Synthesis("answer", context="best", mode="refine", prompt=Prompt("{question} {context}", "Be short.")),
    inputs=[Input("question", doc="what is asked", default="?"), Input("documents", Kind.DOCUMENTS)],
    output="answer",
    sources="best",
)


def splitter(*, chunk_size: int, chunk_overlap: int) -> RecursiveCharacterTextSplitter:
    return RecursiveCharacterTextSplitter(chunk_size=chunk_size, chunk_overlap=chunk_overlap)


def first(found: list[str]) -> str:
    return found[0]


def joined() -> list[Flow | Component]:
    """Whatever can be joined."""
    a, b = Generation("a", "{question}"), Generation("b", Prompt("{a}", "Be short."), engine="small_llm", stop=["\n"])
    c, d = Searching("c", query="a"), Synthesis("d", context="c", combine_prompt="{question} {answers}")
    chunks = Chunking("chunks", splitter=splitter) >> Embedding("vectors", texts="chunks", role="document")
    return [
        a,
        a >> b,
        a >> [b, c] >> d,
        [a, c >> d] >> b,
        [a >> b, a >> c] >> d,
        a >> [b >> c, d],
        chunks >> Ingestion("rows", vectors="vectors"),
        Condition("needed", value="a", test=lambda verdict: verdict != "yes")
        >> Branch("one", condition="needed", then=WebSearch("web") >> d, otherwise="c"),
        Map("each", over="a", flow=[b, c] >> d, each="line"),
        Loop("again", init="a", flow=Generation("draft_2", "{draft}"), until="enough", max_rounds=2),
        Function("f", first, pure=True, reads={"found": "c"}) >> Function("g", lambda a: a, gives=Kind.TEXT),
        Tool("t", first, read_only=True) >> Tool("u", engine="tools", reads={"place": "question"}),
        Generation("e", {"text": "{question}", "system": "Be short."}, items="lines", expected=3, top_p=1),
    ]


def running(pool: EnginePool) -> None:
    app = DOCUMENT_QA.deploy(pool, passes=(), config={"chunk_size": 128})
    assert_type(app, Deployment)
    given = {"question": "?", "documents": [Document("Lambs eat oats."), "Hay is dry grass."]}
    result = app.run(given, {"answer.mode": "tree"}, tenant="acme", deadline_s=5.0)
    assert_type(result, Result)
    print(result.answer, result.sources[0].text, result.outputs["queries"], result.to_dict())
    print(result.trace.seconds if result.trace else None, DOCUMENT_QA.config({"best.k": 2}).to_dict())
    stream = app.stream(given)
    print("".join(stream), stream.result().answer, app.explain(given), app.plan(given).graph)
    waiting = app.submit(given, DOCUMENT_QA.config(k=3))
    assert_type(waiting.result(timeout=1.0), Result)
    assert_type(waiting.result().config, Config)


async def in_a_loop(app: Deployment) -> Result:
    stream = app.astream({"question": "?"})
    async for piece in stream:
        print(piece.upper())
    await app.submit({"question": "?"})
    assert_type(await stream, Result)
    return await app.arun({"question": "?"}, weight=2.0)


@dataclass(frozen=True)
class Nearest(Component):
    """A question -> the nearest passages, said primitive by primitive."""

    question: str = reads("question", Kind.TEXT)
    k: int = setting(2, "passages", minimum=1)
    mode: str = setting("near", "how", choices=("near", "far"))
    words: tuple[str, ...] = setting(())
    told: Prompt = setting("{question}", "what is told", type="prompt")
    embedder: str = on_engine("embedder", PrimitiveKind.EMBEDDING)
    store: str = on_engine("store", PrimitiveKind.SEARCHING)

    def decompose(self, decomposition: Decomposition) -> Value:
        texts, vectors = named(texts=Ref("$question")), named(vectors=Ref("vector"))
        found = decomposition.primitives(
            Primitive("vector", PrimitiveKind.EMBEDDING, self.embedder, texts, size=1),
            Primitive("search", PrimitiveKind.SEARCHING, self.store, vectors, attributes=Attributes(k=self.k)),
        )
        return Value(found, Kind.PASSAGES, self.k)


nearest = Workflow("nearest", Nearest("found", k=3) >> Generation("answer", "{question} {found}"))
