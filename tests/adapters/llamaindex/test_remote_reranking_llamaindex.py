"""Tests of LlamaIndex's `CohereRerank` on a `RerankingServer`: nodes, scores, order and events of the object itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers.base import BaseEventHandler
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from support.embedding_stub import EmbeddingStub, embedding_stub, reranking_pool, score_of

from teola_plugin import accelerate
from teola_plugin.engines import RerankingServer
from teola_plugin.engines.fake import FakeEmbedder, FakeReranker, FakeStore
from teola_plugin.errors import EngineError, RegistrationError
from teola_plugin.llamaindex import TeolaEmbedding, TeolaVectorStore
from teola_plugin.pool import EnginePool

cohere_rerank = pytest.importorskip("llama_index.postprocessor.cohere_rerank", reason="needs its package")
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
QUERY = "what sleeps?"


def nodes() -> list[NodeWithScore]:
    texts = [TextNode(text=f"text {number}", id_=str(number), metadata={"n": number}) for number in range(8)]
    return [NodeWithScore(node=node, score=0.5) for node in texts]


@pytest.fixture
def stub() -> Iterator[EmbeddingStub]:
    with embedding_stub("cohere") as server:
        yield server


@pytest.fixture
def pool(stub: EmbeddingStub) -> Iterator[EnginePool]:
    with reranking_pool(stub) as pool:
        yield pool


def reranker(stub: EmbeddingStub, **options: Any) -> Any:
    return cohere_rerank.CohereRerank(**{"base_url": stub.url, "api_key": "mine", "model": "m", "top_n": 3, **options})


WAYS: dict[str, Callable[[Any], Any]] = {
    "sync": lambda one: one.postprocess_nodes(nodes(), query_str=QUERY),
    "async": lambda one: asyncio.run(one.apostprocess_nodes(nodes(), QueryBundle(QUERY))),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("top_n", [3, 20])
def test_bound_remote_reranker_returns_the_originals_nodes(
    top_n: int, way: str, stub: EmbeddingStub, pool: EnginePool
) -> None:
    own = reranker(stub, top_n=top_n)
    expected = WAYS[way](own)
    original_path, original_body = stub.log[0]

    answer = WAYS[way](pool.bound(own, "reranker"))

    assert answer == expected
    path, body = stub.log[1]
    assert path == original_path == "/v2/rerank"
    assert body == {key: value for key, value in original_body.items() if key != "top_n"}
    assert stub.headers[1]["authorization"] == stub.headers[0]["authorization"]


def query_engine(postprocessor: Any) -> Any:
    index = VectorStoreIndex([one.node for one in nodes()], embed_model=MockEmbedding(8))
    return RetrieverQueryEngine.from_args(
        index.as_retriever(similarity_top_k=8), llm=MockLLM(), node_postprocessors=[postprocessor]
    )


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("how", ["bind", "class", "auto"])
def test_query_engine_with_remote_reranker_gives_the_same_answer(
    how: str, is_async: bool, stub: EmbeddingStub, pool: EnginePool
) -> None:
    own = reranker(stub)
    engine = query_engine(own)
    expected = engine.query(QUERY)
    bind = [(type(own) if how == "class" else own, "reranker")]
    options: Any = {"engines": "auto"} if how == "auto" else {"pool": pool, "bind": bind}
    fast = accelerate(engine, **options)

    answer = asyncio.run(fast.aquery(QUERY)) if is_async else fast.query(QUERY)

    assert str(answer) == str(expected)
    assert answer.source_nodes == expected.source_nodes
    assert len(stub.log) == 2
    assert "top_n" not in stub.log[-1][1], "the object asked, not the engine"


def test_bound_remote_reranker_sends_the_originals_events(stub: EmbeddingStub, pool: EnginePool) -> None:
    class Events(BaseEventHandler):
        heard: list[Any] = []

        def handle(self, event: Any, **_: Any) -> None:
            if isinstance(event, ReRankStartEvent | ReRankEndEvent):
                self.heard.append((type(event).__name__, len(event.nodes), getattr(event, "model_name", "")))

    handler = Events()
    dispatcher = get_dispatcher()
    dispatcher.add_event_handler(handler)
    try:
        own = reranker(stub)
        engine = query_engine(own)
        engine.query(QUERY)
        expected, handler.heard = handler.heard, []
        accelerate(engine, pool=pool, bind=[(own, "reranker")]).query(QUERY)
    finally:
        dispatcher.event_handlers.remove(handler)
    assert handler.heard == expected == [("ReRankStartEvent", 8, "m"), ("ReRankEndEvent", 3, "")]


def test_reranking_no_nodes_sends_no_request(stub: EmbeddingStub, pool: EnginePool) -> None:
    assert pool.bound(reranker(stub), "reranker").postprocess_nodes([], query_str=QUERY) == []
    assert stub.log == []


def test_reranked_nodes_have_the_scores_of_the_server(stub: EmbeddingStub, pool: EnginePool) -> None:
    (best, *_) = pool.bound(reranker(stub), "reranker").postprocess_nodes(nodes(), query_str=QUERY)
    assert best.score == max(score_of(QUERY, one.node.get_content("embed")) for one in nodes())


def test_fields_set_later_on_bound_reranker_apply_to_calls(stub: EmbeddingStub, pool: EnginePool) -> None:
    own = reranker(stub)
    bound = pool.bound(own, "reranker")
    bound.postprocess_nodes(nodes(), query_str=QUERY)

    own.top_n = 1

    assert len(bound.postprocess_nodes(nodes(), query_str=QUERY)) == 1


def test_refused_rerank_request_raises_engine_error(stub: EmbeddingStub, pool: EnginePool) -> None:
    stub.replace = lambda path, body: (400, {}, {"message": "too many documents"})
    with pytest.raises(EngineError, match="too many documents"):
        pool.bound(reranker(stub), "reranker").postprocess_nodes(nodes(), query_str=QUERY)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"base_url": "http://localhost:1"}, "it talks to http://localhost:1/v2"), ({"model": "other"}, "'other'")],
)
def test_binding_a_reranker_of_another_server_or_model_raises(
    options: dict[str, Any], message: str, stub: EmbeddingStub, pool: EnginePool
) -> None:
    with pytest.raises(RegistrationError, match=message):
        pool.bound(reranker(stub, **options), "reranker")


def test_binding_a_remote_reranker_to_a_local_engine_raises(stub: EmbeddingStub) -> None:
    with (
        EnginePool.local([FakeReranker()]) as pool,
        pytest.raises(RegistrationError, match="the engine 'reranker' to no server"),
    ):
        pool.bound(reranker(stub), "reranker")


def test_binding_overridden_reranker_class_raises(stub: EmbeddingStub, pool: EnginePool) -> None:
    class Own(cohere_rerank.CohereRerank):  # type: ignore[name-defined, misc]
        def _postprocess_nodes(self, nodes: Any, query_bundle: Any = None) -> Any:
            return nodes[:1]

    with pytest.raises(RegistrationError, match=r"Own\._postprocess_nodes changes how it reranks"):
        pool.bound(Own(base_url=stub.url, api_key="mine", model="m"), "reranker")


def test_reranker_of_a_public_address_is_not_served() -> None:
    own = cohere_rerank.CohereRerank(api_key="mine", model="m")
    fast = accelerate(query_engine(own), engines="auto")
    assert "api.cohere.com/v2 is not known to be of this machine or a private network" in fast.explain(details=True)


def test_plan_includes_remote_reranking_and_sends_it_once(stub: EmbeddingStub) -> None:
    """If engines search as well, the plan requests the scores, and the object claims them."""
    server = RerankingServer(base_url=f"{stub.url}/v2", model="m", api_key="mine")
    with EnginePool.local([server, FakeEmbedder(), FakeStore()]) as pool:
        store = TeolaVectorStore(pool=pool, collection="planned")
        embeddings = TeolaEmbedding(pool=pool)
        store.add([one.node.model_copy(update={"embedding": embeddings.get_text_embedding("a")}) for one in nodes()])
        index = VectorStoreIndex.from_vector_store(store, embed_model=embeddings)
        own = reranker(stub)
        engine = RetrieverQueryEngine.from_args(
            index.as_retriever(similarity_top_k=8), llm=MockLLM(), node_postprocessors=[own]
        )
        expected = engine.query(QUERY)
        fast = accelerate(engine, pool=pool, bind=[(own, "reranker")])
        plan = fast.plan(QUERY)
        assert plan is not None
        assert [p.kind.name for p in plan.graph if p.engine == "reranker"] == ["RERANKING"]

        answer = fast.query(QUERY)

    assert [(one.node.text, one.score) for one in answer.source_nodes] == [
        (one.node.text, one.score) for one in expected.source_nodes
    ]
    assert len(stub.log) == 2
