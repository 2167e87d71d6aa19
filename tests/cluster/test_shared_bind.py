"""Tests of `bind=` on a shared pool: engines of the cluster do the work of the user's own objects."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_huggingface import HuggingFaceEmbeddings
from langchain_openai import ChatOpenAI
from support.openai_stub import MODEL, OpenAIStub, openai_stub
from support.own_leaves import Chat, Ledger

from teola_plugin import accelerate
from teola_plugin.adapters.langchain.binding.huggingface import embeddings_on
from teola_plugin.cluster import deploy
from teola_plugin.cluster.client.shared_engine import SharedEngine, settings_of
from teola_plugin.cluster.config import PoolConfig
from teola_plugin.cluster.wire import EngineFacts
from teola_plugin.engines.fake import embed_words, fake_engines
from teola_plugin.engines.sentence_transformers.embedding import EmbeddingEngine, packaged_minilm
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool

Chain = Runnable[Any, Any]
QUESTION = {"question": "what is a primitive?"}
WAYS = ["invoke", "ainvoke", "batch", "stream"]
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


def answer_of(chain: Chain, way: str) -> Any:
    if way == "ainvoke":
        return asyncio.run(chain.ainvoke(QUESTION))
    if way == "batch":
        return chain.batch([QUESTION, QUESTION])
    if way == "stream":
        first, *others = list(chain.stream(QUESTION))
        for chunk in others:
            first = first + chunk
        return first
    return chain.invoke(QUESTION)


class Words(Embeddings):
    """The fake embedder's vectors, made at home."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [list(embed_words(text, "document")) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        raise AssertionError("the engine embeds")


@pytest.mark.parametrize("way", WAYS)
def test_bound_model_on_shared_pool_equals_local_pool(shared: EnginePool, way: str) -> None:
    model = Chat(ledger=Ledger())
    chain = ChatPromptTemplate.from_template("{question}") | model
    with EnginePool.local(fake_engines()) as local:
        expected = answer_of(accelerate(chain, pool=local, bind=[(model, "llm")]), way)
    found = answer_of(accelerate(chain, pool=shared, bind=[(model, "llm")]), way)
    contents = [[one.content for one in (value if way == "batch" else [value])] for value in (found, expected)]
    assert contents[0] == contents[1] and not model.ledger.calls


def test_bound_embeddings_are_served_by_the_shared_pool(shared: EnginePool) -> None:
    own = Words()
    from langchain_core.vectorstores import InMemoryVectorStore

    store = InMemoryVectorStore.from_texts(["a cat sits", "stocks fell"], own)
    chain = RunnableLambda(lambda given: given["question"]) | store.as_retriever(search_kwargs={"k": 1})
    fast = accelerate(chain, pool=shared, bind=[(own, "embedder")])
    assert fast.invoke({"question": "where sits a cat"})[0].page_content == "a cat sits"


def test_unknown_engine_in_bind_raises_with_known_names(shared: EnginePool) -> None:
    model = Chat(ledger=Ledger())
    with pytest.raises(RegistrationError, match="embedder"):
        accelerate(ChatPromptTemplate.from_template("{question}") | model, pool=shared, bind=[(model, "embeder")])


# ---------------------------------------------------------------- a server of OpenAI's protocol


@pytest.fixture(scope="module")
def carried(ray_address: str) -> Iterator[tuple[EnginePool, OpenAIStub]]:
    with openai_stub() as stub:
        engines = {"llm": {"kind": "openai", "base_url": stub.base_url, "model": MODEL}}
        deploy.up(PoolConfig.model_validate({"name": "carried", "engines": engines}), ray_address)
        try:
            with EnginePool.connect(ray_address, pool="carried") as pool:
                yield pool, stub
        finally:
            deploy._kill(ray, "carried")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("word", ["hello", "refuse"])
def test_chat_openai_keeps_its_own_code(carried: tuple[EnginePool, OpenAIStub], way: str, word: str) -> None:
    pool, stub = carried
    model = ChatOpenAI(base_url=stub.base_url, api_key="none", model=MODEL, temperature=0.0, max_retries=0)
    chain = ChatPromptTemplate.from_template(word + " {question}") | model

    def seen(one: Chain) -> Any:
        """What comes of it, and what the server was asked."""
        stub.requests.clear()
        try:
            value = answer_of(one, way)
            found: Any = [m.model_dump(exclude={"id"}) for m in (value if way == "batch" else [value])]
        except Exception as error:
            found = type(error), str(error)
        return found, [body["messages"] for _, body in stub.requests]

    assert seen(accelerate(chain, pool=pool, bind=[(model, "llm")])) == seen(chain)


def test_model_of_another_server_is_refused(carried: tuple[EnginePool, OpenAIStub]) -> None:
    model = ChatOpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", model=MODEL)
    with pytest.raises(RegistrationError, match="talks to http://127"):
        accelerate(ChatPromptTemplate.from_template("{q}") | model, pool=carried[0], bind=[(model, "llm")])


# ---------------------------------------------------------------- models of sentence-transformers


def facade(engine: EmbeddingEngine) -> Any:
    """Create a pool as `connect` does, from the report of a replica with this engine."""
    facts = EngineFacts(engine.name, engine.kinds, engine.profile, {}, ("0",), settings_of(engine))
    there = SharedEngine(pickle.loads(pickle.dumps(facts)))
    return _Facade(there)


class _Facade(EnginePool):
    """A pool of one engine that does not run."""

    engine_names = property(lambda self: (self._there.name,))  # type: ignore[assignment]
    shared = property(lambda self: True)  # type: ignore[assignment]

    def __init__(self, there: SharedEngine) -> None:
        self._there = there

    def engine(self, name: str) -> Any:
        return self._there


@pytest.mark.models
def test_embeddings_differing_from_the_remote_model_are_refused() -> None:
    own = HuggingFaceEmbeddings(model_name=packaged_minilm())
    assert embeddings_on(own, "embedder", facade(EmbeddingEngine())).engine == "embedder"
    for engine, message in (
        (EmbeddingEngine(model="other/model"), "other/model"),
        (EmbeddingEngine(options={"truncate_dim": 8}), "truncate_dim"),
        (EmbeddingEngine(prompts={"query": "q: "}), "q: "),
    ):
        with pytest.raises(RegistrationError, match=message):
            embeddings_on(own, "embedder", facade(engine))


@pytest.mark.models
async def test_llamaindex_models_are_compared_with_the_remote_one() -> None:
    from llama_index.embeddings.huggingface import HuggingFaceEmbedding

    from teola_plugin.adapters.llamaindex.binding.bind import bound

    own = HuggingFaceEmbedding(model_name=packaged_minilm())
    engine = EmbeddingEngine(normalize=True)
    await engine.start()
    try:
        assert bound(own, "embedder", facade(engine)) is not own
        engine.model.max_seq_length = 9
        with pytest.raises(RegistrationError, match="9"):
            bound(own, "embedder", facade(engine))
    finally:
        await engine.stop()
