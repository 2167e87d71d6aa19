"""Tests of `engines="auto"`, which creates engines and bindings by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_classic.retrievers import ContextualCompressionRetriever, MultiQueryRetriever
from langchain_classic.retrievers.document_compressors import CrossEncoderReranker
from langchain_community.cross_encoders import HuggingFaceCrossEncoder
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from support.openai_stub import MODEL, OpenAIStub, openai_stub
from support.recording import arrivals

from teola_plugin import accelerate
from teola_plugin.adapters.automatic_engines import PROCESS, served_text
from teola_plugin.adapters.langchain.binding.rules import routing_of
from teola_plugin.adapters.langchain.composite_calls import Threads
from teola_plugin.adapters.options import Options
from teola_plugin.adapters.routing import under_routing
from teola_plugin.adapters.thread_safety import ThreadSafety
from teola_plugin.engines.model_cache import reranker_folder
from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.engines.sentence_transformers.embedding import packaged_minilm
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool

HuggingFaceEmbeddings = pytest.importorskip("langchain_huggingface", reason="needs models").HuggingFaceEmbeddings
Chain = Runnable[Any, Any]
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
QUESTION = {"question": "what is a primitive?"}
FACTS = ["lambs eat grass", "walls need lime", "a primitive is a step of a query", "moss grows in the shade"]


@pytest.fixture(scope="module")
def server() -> Iterator[OpenAIStub]:
    with openai_stub() as stub:
        yield stub


@pytest.fixture
def stub(server: OpenAIStub) -> OpenAIStub:
    server.requests.clear()
    server.headers.clear()
    return server


def model(stub: OpenAIStub, **options: Any) -> ChatOpenAI:
    given: dict[str, Any] = {"temperature": 0.0, "max_retries": 0, "base_url": stub.base_url, **options}
    return ChatOpenAI(api_key="mine", model=MODEL, **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def embeddings() -> HuggingFaceEmbeddings:
    return HuggingFaceEmbeddings(model_name=packaged_minilm())


def store_of(embeddings: Any) -> InMemoryVectorStore:
    store = InMemoryVectorStore(embeddings)
    store.add_documents([Document(fact) for fact in FACTS])
    return store


def asking(text: str, one: Any) -> Chain:
    return ChatPromptTemplate.from_template(text + " {question}") | one | StrOutputParser()


def rag(retriever: Any, llm: Any) -> Chain:
    prompt = ChatPromptTemplate.from_template("{context} Question: {question}")
    found = (lambda x: x["question"]) | retriever | (lambda found: "; ".join(one.page_content for one in found))
    return RunnablePassthrough.assign(context=found) | prompt | llm | StrOutputParser()


async def _joined(chain: Chain) -> str:
    return "".join([chunk async for chunk in chain.astream(QUESTION)])


WAYS: dict[str, Callable[[Chain], Any]] = {
    "invoke": lambda chain: chain.invoke(QUESTION),
    "ainvoke": lambda chain: asyncio.run(chain.ainvoke(QUESTION)),
    "stream": lambda chain: "".join(chain.stream(QUESTION)),
    "astream": lambda chain: asyncio.run(_joined(chain)),
}


@pytest.mark.models
@pytest.mark.parametrize("way", WAYS)
def test_engines_auto_serves_the_models_of_a_chain(stub: OpenAIStub, embeddings: Any, way: str) -> None:
    chain = rag(store_of(embeddings).as_retriever(search_kwargs={"k": 2}), model(stub))
    plain, sent = WAYS[way](chain), list(stub.requests)
    fast = accelerate(chain, engines="auto")
    assert {type(one.obj).__name__ for one in fast.serving.bound} == {"HuggingFaceEmbeddings", "ChatOpenAI"}
    stub.requests.clear()
    assert WAYS[way](fast) == plain
    assert stub.requests == sent, "the very requests of the plain object, and no other"
    trace = fast.last_trace()
    assert {span.engine for span in trace.spans} >= {name for _, name in fast.serving.bind}


@pytest.mark.models
def test_engines_auto_sends_no_extra_requests(stub: OpenAIStub, embeddings: Any) -> None:
    llm = model(stub)
    retriever = MultiQueryRetriever.from_llm(store_of(embeddings).as_retriever(search_kwargs={"k": 1}), llm)
    both = RunnableParallel(a=rag(retriever, llm), b=asking("b", llm)) | (lambda x: x["a"] + x["b"])
    plain, sent = both.invoke(QUESTION), sorted(map(str, stub.requests))
    stub.requests.clear()
    fast = accelerate(both, engines="auto")
    assert fast.invoke(QUESTION) == plain
    assert sorted(map(str, stub.requests)) == sent


def test_engines_auto_sends_nothing_before_the_first_call(stub: OpenAIStub) -> None:
    gone = model(stub, base_url="http://127.0.0.1:9/v1")
    fast = accelerate(asking("gone", gone), engines="auto")
    assert [one.obj for one in fast.serving.bound] == [gone] and not stub.requests
    with pytest.raises(Exception, match="Connection error") as plain:
        asking("gone", gone).invoke(QUESTION)
    with pytest.raises(Exception, match="Connection error") as ours:
        fast.invoke(QUESTION)
    assert type(ours.value) is type(plain.value)


@pytest.mark.models
def test_later_accelerate_calls_share_engines(stub: OpenAIStub, embeddings: Any) -> None:
    first = accelerate(rag(store_of(embeddings).as_retriever(), model(stub)), engines="auto")
    again = accelerate(rag(store_of(embeddings).as_retriever(), model(stub, temperature=0.5)), engines="auto")
    equal = HuggingFaceEmbeddings(model_name=packaged_minilm())
    other = accelerate(rag(store_of(equal).as_retriever(), model(stub)), engines="auto")
    names = [name for _, name in first.serving.bind]
    assert [name for _, name in again.serving.bind] == [name for _, name in other.serving.bind] == names
    assert first.serving.pool is again.serving.pool is other.serving.pool is PROCESS.pool
    changed = HuggingFaceEmbeddings(model_name=packaged_minilm(), encode_kwargs={"prompt": "query: "})
    bind = accelerate(rag(store_of(changed).as_retriever(), model(stub)), engines="auto").serving.bind
    name = next(engine for obj, engine in bind if obj is changed)
    assert name not in names, "it puts a prompt before its texts"


@pytest.mark.models
def test_served_embeddings_return_the_vectors_of_the_original(stub: OpenAIStub) -> None:
    import numpy as np

    for options in ({}, {"encode_kwargs": {"prompt": "query: ", "normalize_embeddings": True}}):
        own = HuggingFaceEmbeddings(model_name=packaged_minilm(), **options)
        fast = accelerate(store_of(own).as_retriever(), engines="auto")
        [bound] = fast.serving.bound
        made = fast.serving.pool.bound(own, bound.engine)
        assert np.allclose(made.embed_query("a\nb"), own.embed_query("a\nb"), atol=1e-5)
        assert np.allclose(made.embed_documents(FACTS), own.embed_documents(FACTS), atol=1e-5)


@pytest.mark.models
def test_engines_auto_serves_a_cross_encoder(embeddings: Any) -> None:
    encoder = HuggingFaceCrossEncoder(model_name=str(reranker_folder()))
    found = ContextualCompressionRetriever(
        base_compressor=CrossEncoderReranker(model=encoder, top_n=2), base_retriever=store_of(embeddings).as_retriever()
    )
    fast = accelerate(found, engines="auto")
    assert {type(one.obj).__name__ for one in fast.serving.bound} == {
        "HuggingFaceEmbeddings",
        "HuggingFaceCrossEncoder",
    }
    assert fast.invoke("what is a primitive?") == found.invoke("what is a primitive?")


@pytest.mark.models
def test_served_store_allows_concurrent_searches(embeddings: Any) -> None:
    """The embeddings of a store take one call at a time, unless the user allows more."""
    from langchain_community.vectorstores import FAISS

    retriever = FAISS.from_texts(FACTS, embeddings).as_retriever()
    _, rules, _ = routing_of(retriever, Options(engines="auto"))
    assert not Threads(ThreadSafety()).allow(retriever)
    with under_routing(rules):
        assert Threads(ThreadSafety()).allow(retriever)


# ------------------------------------------------------------ what is left alone


def left(fast: Any) -> dict[str, str]:
    return {type(one.obj).__name__: one.reason for one in fast.serving.left}


def test_model_of_a_public_host_is_not_served(stub: OpenAIStub) -> None:
    there, here = model(stub, base_url="https://api.openai.com/v1"), model(stub)
    fast = accelerate(RunnableParallel(a=asking("a", there), b=asking("b", here)), engines="auto")
    assert [one.obj for one in fast.serving.bound] == [here]
    assert "https://api.openai.com/v1 is not known to be of this machine" in left(fast)["ChatOpenAI"]


def test_model_that_bind_would_refuse_is_not_served(stub: OpenAIStub) -> None:
    class Own(HuggingFaceEmbeddings):
        def embed_query(self, text: str) -> list[float]:
            return super().embed_query(text.lower())

    own = Own(model_name=packaged_minilm())
    chain = rag(store_of(own).as_retriever(), model(stub))
    fast = accelerate(chain, engines="auto")
    assert "overrides how it embeds" in left(fast)["Own"]
    assert fast.invoke(QUESTION) == chain.invoke(QUESTION)


def test_model_in_a_function_closure_is_served(stub: OpenAIStub) -> None:
    llm, hidden = model(stub), model(stub)
    chain = RunnablePassthrough.assign(a=asking("a", llm)) | RunnableLambda(lambda x: hidden.invoke(x["a"]).content)
    expected = chain.invoke(QUESTION)

    fast = accelerate(chain, engines="auto")
    seen = arrivals(fast.serving.pool)

    assert fast.invoke(QUESTION) == expected
    assert {id(one.obj) for one in fast.serving.bound} == {id(llm), id(hidden)} and not fast.serving.left
    assert len(seen) == 2


def test_a_model_that_is_created_in_a_function_is_served(stub: OpenAIStub) -> None:
    chain = asking("a", model(stub)) | RunnableLambda(lambda text: model(stub).invoke(text).content)
    expected = chain.invoke(QUESTION)

    fast = accelerate(chain, engines="auto")
    seen = arrivals(fast.serving.pool)

    assert fast.invoke(QUESTION) == expected
    assert len(seen) == 2


async def test_a_graph_whose_nodes_create_their_models_is_served(stub: OpenAIStub) -> None:
    async def function(state: Any) -> Any:
        return {"question": (await model(stub).ainvoke(state["question"])).content}

    graph = StateGraph(dict)
    graph.add_node("function", function)
    graph.add_edge(START, "function")
    graph.add_edge("function", END)
    plain = graph.compile()
    expected = await plain.ainvoke(QUESTION)
    stub.requests.clear()

    fast = accelerate(plain, engines="auto")
    assert await fast.ainvoke(QUESTION) == expected
    seen = arrivals(PROCESS.pool)  # type: ignore[arg-type]
    assert await fast.ainvoke(QUESTION) == expected

    assert len(seen) == 1 and len(stub.requests) == 2


def test_models_of_graph_nodes_are_served(stub: OpenAIStub) -> None:
    llm, hidden = model(stub), model(stub)
    graph = StateGraph(dict)
    graph.add_node("chain", asking("a", llm) | RunnableLambda(lambda text: {"question": text}))
    graph.add_node("function", lambda state: {"question": hidden.invoke(state["question"]).content})
    graph.add_edge(START, "chain")
    graph.add_edge("chain", "function")
    graph.add_edge("function", END)
    plain = graph.compile()
    fast = accelerate(plain, engines="auto")
    assert fast.invoke(QUESTION) == plain.invoke(QUESTION)
    explanation = fast.explain()
    assert {id(one.obj) for one in fast._teola.serving.bound} == {id(llm), id(hidden)}
    assert "engine 'llm" in explanation and "left as it is" not in explanation


def test_engines_auto_creates_no_pool_without_models(stub: OpenAIStub) -> None:
    fast = accelerate(RunnableLambda(lambda x: x), engines="auto")
    assert fast.serving.pool is None and "No models were found." in fast.explain()
    assert accelerate(asking("a", model(stub))).serving is None


def test_unknown_value_of_engines_raises() -> None:
    with pytest.raises(RegistrationError, match="engines"):
        accelerate(RunnableLambda(lambda x: x), engines="yes")


# ------------------------------------------------------------ beside what the user says


def test_bind_option_takes_precedence_over_engines_auto(stub: OpenAIStub) -> None:
    mine, other = model(stub), model(stub)
    with EnginePool.local([OpenAIServer("mine", base_url=stub.base_url, model=MODEL)]) as pool:
        chain = RunnableParallel(a=asking("a", mine), b=asking("b", other))
        fast = accelerate(chain, pool=pool, bind=[(mine, "mine")], engines="auto")
        assert [(one.obj, one.engine) for one in fast.serving.bound] == [(other, "mine")], "of the pool that was given"
        assert fast.invoke(QUESTION) == chain.invoke(QUESTION)


def test_model_is_not_served_if_the_pool_lacks_its_engine(stub: OpenAIStub, fakes: EnginePool) -> None:
    fast = accelerate(asking("a", model(stub)), pool=fakes, engines="auto")
    assert "the pool has no OpenAIServer(base_url=" in left(fast)["ChatOpenAI"]


def test_engines_dedicated_enables_prefix_caching(stub: OpenAIStub) -> None:
    fast = accelerate(asking("a", model(stub)), engines="dedicated")
    [bound] = fast.serving.bound
    assert fast.serving.pool.profiles[bound.engine].prefix_caching
    paths = [path for path, _ in stub.requests]
    assert paths, "it was tried out"
    assert fast.invoke(QUESTION) == asking("a", model(stub)).invoke(QUESTION)


def test_serving_text_lists_models_engines_and_manual_setup(stub: OpenAIStub) -> None:
    fast = accelerate(RunnableParallel(a=asking("a", model(stub)), b=asking("b", model(stub))), engines="auto")
    [engine] = {name for _, name in fast.serving.bind}
    assert served_text(fast.serving).splitlines() == [
        *[f"ChatOpenAI 'echo': engine '{engine}', {stub.base_url}"] * 2,
        "",
        "By hand:",
        "    pool = EnginePool.local({",
        f"        '{engine}': OpenAIServer(base_url='{stub.base_url}', model='echo'),",
        "    }).start()",
        f"    accelerate(..., pool=pool, bind=[(chat_open_ai, '{engine}'), (chat_open_ai2, '{engine}')])",
    ]
    assert served_text(fast.serving) in fast.explain()


def test_model_that_is_not_loaded_is_not_served(embeddings: HuggingFaceEmbeddings) -> None:
    """The framework's own classes load when they are made."""
    lazy = HuggingFaceEmbeddings.model_construct(model_name=packaged_minilm())
    fast = accelerate(InMemoryVectorStore(lazy).as_retriever(), engines="auto")
    assert "left as it is, since its model is not loaded yet" in served_text(fast.serving)
    lazy._client = embeddings._client
    assert "engine 'embedder" in served_text(
        accelerate(InMemoryVectorStore(lazy).as_retriever(), engines="auto").serving
    )
