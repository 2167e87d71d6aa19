"""Tests of LlamaIndex engines on real models: the answers, passages and streams of the original.

One app has `OpenAILike` on vLLM's API server, bound to an engine, with own embeddings and store. The other has
`TeolaLLM` on the session's vLLM, with the pool's embedder and PostgreSQL.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Any

import pytest
from llama_index.core import Settings, StorageContext, VectorStoreIndex
from llama_index.core.chat_engine import CondensePlusContextChatEngine
from llama_index.core.indices.query.query_transform import HyDEQueryTransform
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.postprocessor import SentenceTransformerRerank
from llama_index.core.query_engine import RetrieverQueryEngine, TransformQueryEngine
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import TextNode
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.llms.openai_like import OpenAILike
from support.api_server import MODEL, ApiServer

from teola_plugin import accelerate
from teola_plugin.adapters.llamaindex import TeolaEmbedding, TeolaLLM, TeolaRerank, TeolaVectorStore
from teola_plugin.engines.model_cache import reranker_folder
from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.engines.sentence_transformers import RerankingEngine
from teola_plugin.engines.sentence_transformers.embedding import EmbeddingEngine, packaged_minilm
from teola_plugin.pool import EnginePool
from teola_plugin.tracer.llamaindex.classes import reachable_objects

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.models,
]
QUESTION = "When is the else clause of a try statement executed?"
TEXTS = [part for part in topics["compound"][:6000].split("\n\n") if len(part) > 80][:14]
WAYS = ["query", "aquery", "stream", "astream"]
_loop = asyncio.Runner()
"""One loop for all: the package `openai` keeps connections between calls."""
_names = (f"answers{i}" for i in itertools.count())


@pytest.fixture(scope="module", autouse=True)
def _end_of_the_loop() -> Iterator[None]:
    yield
    _loop.close()


@dataclass
class Stock:
    """The parts from which engines are made."""

    llm: Any
    embedding: Any
    reranker: Any
    index: VectorStoreIndex
    pool: EnginePool
    bind: list[tuple[Any, str]] = field(default_factory=list)

    def fast(self, engine: Any) -> Any:
        held = {id(part) for part in reachable_objects(engine)}
        bind = [pair for pair in self.bind if id(pair[0]) in held]
        return accelerate(engine, pool=self.pool, bind=bind) if bind else accelerate(engine)

    def rag(self, mode: str = "compact", **more: Any) -> RetrieverQueryEngine:
        retriever = self.index.as_retriever(similarity_top_k=3)
        return RetrieverQueryEngine.from_args(retriever, llm=self.llm, response_mode=mode, **more)  # type: ignore[arg-type]

    def fusion(self, **more: Any) -> RetrieverQueryEngine:
        retriever = QueryFusionRetriever(
            [self.index.as_retriever(similarity_top_k=4)], llm=self.llm, num_queries=3, use_async=False
        )
        return RetrieverQueryEngine.from_args(
            retriever, llm=self.llm, node_postprocessors=[self.reranker], response_mode="refine", **more
        )


def made_of(embedding: Any, store: Any = None) -> VectorStoreIndex:
    nodes = [TextNode(id_=f"n{i}", text=text) for i, text in enumerate(TEXTS)]
    context = StorageContext.from_defaults(vector_store=store)
    return VectorStoreIndex(nodes, embed_model=embedding, storage_context=context)


@pytest.fixture(scope="module")
def own_stock(vllm_api: ApiServer) -> Iterator[Stock]:
    """Return the user's own objects, and engines that serve them. The store stays the user's."""
    llm = OpenAILike(
        model=MODEL,
        api_base=vllm_api.base_url,
        api_key="none",
        is_chat_model=True,
        temperature=0.0,
        max_tokens=12,
        max_retries=0,
        context_window=1000,
    )
    embedding = HuggingFaceEmbedding(packaged_minilm())
    reranker = SentenceTransformerRerank(model=str(reranker_folder()), device="cpu", top_n=3)
    engines = {
        "llm": OpenAIServer(base_url=vllm_api.base_url, model=MODEL, prefix_caching=True, priorities=True),
        "embedder": EmbeddingEngine("embedder", cores="0"),
        "reranker": RerankingEngine("reranker", reranker_folder(), cores="0"),
    }
    with EnginePool.local(engines) as pool:
        bind = [(llm, "llm"), (embedding, "embedder"), (reranker, "reranker")]
        yield Stock(llm, embedding, reranker, made_of(embedding), pool, bind)
    llm._get_client().close()
    _loop.run(llm._get_aclient().close())


@pytest.fixture(scope="module")
def pooled(real_pool: EnginePool) -> Stock:
    """Return pool-backed objects on real engines."""
    embedding = TeolaEmbedding(pool=real_pool)
    index = made_of(embedding, TeolaVectorStore(pool=real_pool, collection=next(_names)))
    llm = TeolaLLM(pool=real_pool, max_tokens=12, is_chat_model=False)
    return Stock(llm, embedding, TeolaRerank(pool=real_pool, top_n=3), index, real_pool)


@pytest.fixture(params=["own_stock", pytest.param("pooled", marks=pytest.mark.postgres)])
def stock(request: pytest.FixtureRequest) -> Iterator[Stock]:
    found: Stock = request.getfixturevalue(request.param)
    before = Settings._llm
    Settings._llm = found.llm
    asyncio.set_event_loop(_loop.get_loop())
    yield found
    Settings._llm = before
    asyncio.set_event_loop(None)


def answered(engine: Any, way: str) -> tuple[str, str, list[tuple[str, float]]]:
    """Return type, text and passages. Scores are rounded, because they depend on the batch in the last digits."""

    async def streamed() -> Any:
        found = await engine.aquery(QUESTION)
        return found, [piece async for piece in found.async_response_gen()]

    if way == "astream":
        found, pieces = _loop.run(streamed())
    elif way == "stream":
        found = engine.query(QUESTION)
        pieces = list(found.response_gen)
    else:
        found = engine.query(QUESTION) if way == "query" else _loop.run(engine.aquery(QUESTION))
        pieces = [str(found)]
    nodes = [(node.node.get_content(), round(float(node.score or 0.0), 4)) for node in found.source_nodes]
    return type(found).__name__, "".join(pieces), nodes


MAKES: dict[str, Callable[..., Any]] = {
    "compact": lambda x, **more: x.rag(**more),
    "tree": lambda x, **more: x.rag("tree_summarize", **more),
    "fusion": lambda x, **more: x.fusion(**more),
    "hyde": lambda x, **more: TransformQueryEngine(x.rag(**more), HyDEQueryTransform(x.llm)),
}


CASES = [
    *(("compact", way) for way in WAYS),
    *(("fusion", way) for way in WAYS),
    ("tree", "query"),
    ("tree", "astream"),
    ("hyde", "aquery"),
    ("hyde", "stream"),
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_accelerated_engines_answer_as_the_original(stock: Stock, name: str, way: str) -> None:
    engine = MAKES[name](stock, streaming=way in ("stream", "astream"))
    plain = answered(engine, way)
    stock.pool.reset()
    fast = stock.fast(engine)
    assert answered(fast, way) == plain and plain[1] and plain[2]
    trace = fast.last_trace()
    assert {"llm", "embedder"} <= set(trace.engines)
    assert not [span for span in trace.spans if span.outcome == "failed"]


def test_accelerated_conversation_equals_the_original(stock: Stock) -> None:
    def make() -> CondensePlusContextChatEngine:
        return CondensePlusContextChatEngine.from_defaults(
            stock.index.as_retriever(similarity_top_k=2),
            llm=stock.llm,
            memory=ChatMemoryBuffer.from_defaults(token_limit=600),
            node_postprocessors=[stock.reranker],
        )

    async def answers_of(engine: Any) -> list[str]:
        return [str(await engine.achat(text)) for text in (QUESTION, "And the finally clause?")]

    plain, fast = make(), stock.fast(make())
    assert [str(plain.chat(QUESTION)), "".join(plain.stream_chat("And then?").response_gen)] == [
        str(fast.chat(QUESTION)),
        "".join(fast.stream_chat("And then?").response_gen),
    ]
    assert _loop.run(answers_of(plain)) == _loop.run(answers_of(fast))
    assert [(m.role, m.content) for m in plain.chat_history] == [(m.role, m.content) for m in fast.chat_history]


@pytest.mark.parametrize("way", ["query", "aquery"])
def test_refusal_of_the_server_raises_the_clients_error(own_stock: Stock, way: str) -> None:
    """The exception of the user's own client, with its status."""
    llm = own_stock.llm.model_copy(update={"additional_kwargs": {"top_p": 7.0}})
    engine = RetrieverQueryEngine.from_args(own_stock.index.as_retriever(), llm=llm)
    errors = []
    for one in (engine, accelerate(engine, pool=own_stock.pool, bind=[(llm, "llm")])):
        with pytest.raises(Exception) as caught:
            answered(one, way)
        errors.append((type(caught.value), str(caught.value), getattr(caught.value, "status_code", None)))
    assert errors[0] == errors[1] and errors[0][2] == 400


def test_accelerated_engine_sends_no_extra_request(own_stock: Stock, vllm_api: ApiServer) -> None:
    """A server that is not declared to keep prefixes gets exactly as many requests as from the original."""
    engine = own_stock.fusion()
    with EnginePool.local(llm=OpenAIServer(base_url=vllm_api.base_url, model=MODEL)) as pool:
        counts = []
        for one in (engine, accelerate(engine, pool=pool, bind=[(own_stock.llm, "llm")])):
            before = vllm_api.metric("vllm:request_success_total")
            answered(one, "query")
            counts.append(vllm_api.metric("vllm:request_success_total") - before)
    assert counts[0] == counts[1] > 1


async def test_eight_concurrent_queries_answer_as_one(pooled: Stock) -> None:
    """On one loop, queries that share batches: each has the answer that it has alone."""
    engine = pooled.rag()
    questions = [f"{i}. {QUESTION}" for i in range(8)]
    alone = [str(await engine.aquery(question)) for question in questions]
    fast = pooled.fast(engine)
    assert [str(one) for one in await asyncio.gather(*map(fast.aquery, questions))] == alone
