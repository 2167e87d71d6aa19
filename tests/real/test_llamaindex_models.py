"""Tests of LlamaIndex's sentence-transformers objects on engines: they give what they give alone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pydoc_data.topics import topics
from typing import Any

import pytest
from differential.llamaindex.recording import Recorder, recorded
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.callbacks import CallbackManager
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.postprocessor import SentenceTransformerRerank
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.huggingface import HuggingFaceEmbedding

from teola_plugin.adapters.llamaindex import TeolaVectorStore
from teola_plugin.adapters.llamaindex.binding.bind import bound
from teola_plugin.adapters.llamaindex.ingestion import TeolaVectorStoreIndex, accelerated_ingestion
from teola_plugin.adapters.routing import route_of
from teola_plugin.engines.model_cache import reranker_folder
from teola_plugin.engines.pgvector import PgVectorEngine
from teola_plugin.engines.sentence_transformers import RerankingEngine
from teola_plugin.engines.sentence_transformers.embedding import EmbeddingEngine, packaged_minilm
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool

pytestmark = pytest.mark.models
QUESTION = "When is the else clause of a try statement executed?"
TEXTS = [part for part in topics["compound"][:6000].split("\n\n") if len(part) > 80][:14]


@pytest.fixture(scope="module")
def pool() -> Iterator[EnginePool]:
    engines = {
        "embedder": EmbeddingEngine("embedder", cores="0"),
        "other": EmbeddingEngine("other", prompts={"query": "query: "}),
        "reranker": RerankingEngine("reranker", reranker_folder(), cores="0"),
    }
    with EnginePool.local(engines) as made:
        yield made


@pytest.fixture(scope="module")
def own_embedding() -> HuggingFaceEmbedding:
    return HuggingFaceEmbedding(packaged_minilm())


def observe(obj: Any, call: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
    """Return the result of a call and its events, without the vectors' last digits."""
    recorder = Recorder()
    obj.callback_manager = CallbackManager([recorder])
    with recorded(recorder):
        value = call(obj)
    events = (recorder.callbacks, recorder.events, recorder.spans)
    return value, [sorted((text.partition("vector")[0], n) for text, n in part.items()) for part in events]


EMBEDDINGS: dict[str, Callable[[HuggingFaceEmbedding], Any]] = {
    "query": lambda m: [m.get_query_embedding(QUESTION)],
    "aquery": lambda m: [asyncio.run(m.aget_query_embedding(QUESTION))],
    "text": lambda m: [m.get_text_embedding(TEXTS[0])],
    "atext": lambda m: [asyncio.run(m.aget_text_embedding(TEXTS[0]))],
    "batch": lambda m: m.get_text_embedding_batch(TEXTS),
    "abatch": lambda m: asyncio.run(m.aget_text_embedding_batch(TEXTS)),
    "mean": lambda m: [m.get_agg_embedding_from_queries([QUESTION, TEXTS[0]])],
    "none": lambda m: m.get_text_embedding_batch([]),
}


@pytest.mark.parametrize("way", EMBEDDINGS)
def test_bound_embeddings_equal_the_original(pool, own_embedding, way):
    made = bound(own_embedding, "embedder", pool)
    (fast, fast_said), (plain, plain_said) = observe(made, EMBEDDINGS[way]), observe(own_embedding, EMBEDDINGS[way])
    assert type(fast) is type(plain) and [type(v) for v in fast] == [list] * len(plain)
    assert len(fast) == len(plain)
    for one, other in zip(fast, plain, strict=True):
        assert one == pytest.approx(other, abs=1e-5) and type(one[0]) is type(other[0])
    assert fast_said == plain_said


def test_bound_embeddings_keep_their_class_and_settings(pool, own_embedding):
    made = bound(own_embedding, "embedder", pool)
    assert isinstance(made, HuggingFaceEmbedding) and type(own_embedding) is HuggingFaceEmbedding
    assert made.to_dict() == own_embedding.to_dict() and made.to_payload() == own_embedding.to_payload()
    assert made._model is own_embedding._model and route_of(made).engine == "embedder"


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"normalize": False}, None),  # the model itself normalizes
        ({"query_instruction": "query: "}, "before a query"),
        ({"text_instruction": "text: "}, "before a document"),
        ({"max_length": 64}, "cuts texts at 64 tokens"),
        ({"truncate_dim": 64}, "truncate_dim=64"),
        ({"parallel_process": True}, "many processes"),
    ],
)
def test_embeddings_are_refused_if_settings_change_vectors(pool, options, reason):
    model = HuggingFaceEmbedding(packaged_minilm(), **options)
    if reason is None:
        made = bound(model, "embedder", pool).get_text_embedding(TEXTS[0])
        assert made == pytest.approx(model.get_text_embedding(TEXTS[0]), abs=1e-5)
    else:
        with pytest.raises(RegistrationError, match=reason):
            bound(model, "embedder", pool)


def test_embeddings_with_the_prompts_of_the_engine_are_accepted(pool, own_embedding):
    model = HuggingFaceEmbedding(packaged_minilm(), query_instruction="query: ")
    made = bound(model, "other", pool)
    assert made.get_query_embedding("x") == pytest.approx(model.get_query_embedding("x"), abs=1e-5)
    assert made.get_query_embedding("x") != pytest.approx(own_embedding.get_query_embedding("x"), abs=1e-2)
    with pytest.raises(RegistrationError, match="before a query"):
        bound(own_embedding, "other", pool)


class _Own(HuggingFaceEmbedding):
    def _embed(self, inputs: Any, prompt_name: str | None = None) -> Any:
        return super()._embed([text.lower() for text in inputs], prompt_name)


def test_subclass_with_overridden_methods_is_refused(pool):
    with pytest.raises(RegistrationError, match=r"_Own\._embed"):
        bound(_Own(packaged_minilm()), "embedder", pool)


@pytest.mark.parametrize("options", [{}, {"top_n": 20}, {"keep_retrieval_score": True}])
@pytest.mark.parametrize("sync", [True, False])
def test_bound_reranker_equals_the_original(pool, options, sync):
    step = SentenceTransformerRerank(**{"top_n": 4, "model": str(reranker_folder()), "device": "cpu", **options})
    made = bound(step, "reranker", pool)

    def run(obj: Any) -> list[NodeWithScore]:
        nodes = [NodeWithScore(node=TextNode(id_=str(i), text=t), score=i / 9) for i, t in enumerate(TEXTS)]
        query = QueryBundle(QUESTION)
        given = obj.postprocess_nodes(nodes, query) if sync else asyncio.run(obj.apostprocess_nodes(nodes, query))
        return list(given)

    fast, plain = run(made), run(step)
    assert [one.node for one in fast] == [one.node for one in plain]
    assert [one.score for one in fast] == pytest.approx([one.score for one in plain], abs=1e-5)
    assert [type(one.score) for one in fast] == [type(one.score) for one in plain]
    assert _shape(observe(made, run)[1]) == _shape(observe(step, run)[1])
    assert isinstance(made, SentenceTransformerRerank) and type(step) is SentenceTransformerRerank


def _shape(events: list[Any]) -> list[Any]:
    """Return the names of events without scores, which differ in their last digits."""
    return [sorted((text.partition("{")[0], n) for text, n in part) for part in events]


def test_reranker_of_another_model_is_refused(pool):
    step = SentenceTransformerRerank(model=str(reranker_folder()), device="cpu")
    step.model = "cross-encoder/other"
    with pytest.raises(RegistrationError, match="cross-encoder/other"):
        bound(step, "reranker", pool)


@pytest.mark.postgres
@pytest.mark.parametrize("build", ["index", "pipeline"])
def test_index_on_real_engines_equals_the_original(own_embedding, build):
    """Rows in the same order, and neighbours with the same scores."""
    with EnginePool.local(embedder=EmbeddingEngine("embedder", cores="0"), store=PgVectorEngine("store")) as pool:
        stores = {}
        for name, model in (("plain", own_embedding), ("fast", bound(own_embedding, "embedder", pool))):
            store = stores[name] = TeolaVectorStore(pool=pool, collection=name)
            _build(build, name, model, store)
        rows = [[(r.id, r.text, dict(r.metadata)) for r in s.admin("find", ()).result()] for s in stores.values()]
        assert rows[0] == rows[1] and len(rows[0]) == len({row[0] for row in rows[0]}) > 20
        found = [
            VectorStoreIndex.from_vector_store(s, embed_model=own_embedding)
            .as_retriever(similarity_top_k=5)
            .retrieve(QUESTION)
            for s in stores.values()
        ]
        assert [one.node for one in found[0]] == [one.node for one in found[1]]
        assert [one.score for one in found[0]] == pytest.approx([one.score for one in found[1]], abs=1e-5)


def _build(build: str, name: str, model: Any, store: TeolaVectorStore) -> None:
    ids = itertools.count()
    splitter = SentenceSplitter(chunk_size=64, chunk_overlap=0, id_func=lambda *_: f"n{next(ids)}")
    documents = [Document(id_=f"d{i}", text=text) for i, text in enumerate(TEXTS)]
    if build == "pipeline":
        pipeline = IngestionPipeline(transformations=[splitter, model], vector_store=store)
        (pipeline if name == "plain" else accelerated_ingestion(pipeline)).run(documents=documents)
    else:
        cls = VectorStoreIndex if name == "plain" else TeolaVectorStoreIndex
        nodes = splitter.get_nodes_from_documents(documents)
        cls(nodes, embed_model=model, storage_context=StorageContext.from_defaults(vector_store=store))
