"""A listed store that nodes and functions search in loops, themselves or by a retriever: all queries are embedded at
once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple, TypedDict

import pytest
from langchain_classic.embeddings import CacheBackedEmbeddings
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from langchain_core.stores import InMemoryByteStore
from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langgraph.graph import START, StateGraph
from langgraph.types import Send
from pydantic import SecretStr
from support.embedding_stub import MODEL, EmbeddingStub, embedding_stub
from support.openai_stub import MODEL as CHAT_MODEL
from support.openai_stub import OpenAIStub, openai_stub

from teola_plugin import accelerate

QUERIES = ["a", "bb", "ccc"]
LATENCY_S = 0.2
KEY = SecretStr("key")


class State(TypedDict, total=False):
    """The state of the graphs."""

    queries: list[str]
    texts: list[str]
    answer: str


class OtherEmbeddings(OpenAIEmbeddings):
    """Embeddings of a class that is not on the list of those that several threads may call."""


class App:
    """A model, and a store in memory. Their requests go to one server each."""

    def __init__(
        self,
        chat: OpenAIStub,
        server: EmbeddingStub,
        embeddings: type[OpenAIEmbeddings] = OpenAIEmbeddings,
        form: str = "retriever",
    ) -> None:
        self.model = ChatOpenAI(model=CHAT_MODEL, temperature=0.0, base_url=chat.base_url, api_key=KEY)
        self.store = InMemoryVectorStore(
            embeddings(model=MODEL, check_embedding_ctx_length=False, base_url=server.base_url, api_key=KEY)
        )
        self.store.add_texts(["oats", "rye and barley", "wheat"])
        self.retriever = self.store.as_retriever(search_kwargs={"k": 2})
        self.search, self.asearch = (FORMS | REFUSED | ONE_AT_A_TIME)[form](self)


def search_by_retriever(app: App) -> Any:
    return app.retriever.invoke, app.retriever.ainvoke


def search_store(app: App) -> Any:
    def search(query: str) -> Any:
        return app.store.similarity_search(query, k=2)

    async def asearch(query: str) -> Any:
        return await app.store.asimilarity_search(query, 2)

    return search, asearch


def search_with_scores(app: App) -> Any:
    def search(query: str) -> Any:
        return [document for document, score in app.store.similarity_search_with_score(query, 2)]

    async def asearch(query: str) -> Any:
        return [document for document, score in await app.store.asimilarity_search_with_score(k=2, query=query)]

    return search, asearch


def search_for_diversity(app: App) -> Any:
    def search(query: str) -> Any:
        return app.store.max_marginal_relevance_search(query, k=2, fetch_k=3)

    async def asearch(query: str) -> Any:
        return await app.store.amax_marginal_relevance_search(query, k=2, fetch_k=3)

    return search, asearch


def search_by_vector(app: App) -> Any:
    embeddings = app.store.embeddings

    def search(query: str) -> Any:
        return app.store.similarity_search_by_vector(embeddings.embed_query(query), k=2)

    async def asearch(query: str) -> Any:
        return await app.store.asimilarity_search_by_vector(await embeddings.aembed_query(query), k=2)

    return search, asearch


def search_by_document_vectors(app: App) -> Any:
    embeddings = app.store.embeddings

    def search(query: str) -> Any:
        return app.store.similarity_search_by_vector(embeddings.embed_documents([query])[0], k=2)

    async def asearch(query: str) -> Any:
        vectors = await embeddings.aembed_documents([query])
        return await app.store.asimilarity_search_by_vector(embedding=vectors[0], k=2)

    return search, asearch


def search_in_a_tool(app: App) -> Any:
    @tool
    def search(query: str) -> Any:
        """Search for a query."""
        return app.store.similarity_search(query, k=2)

    @tool
    async def asearch(query: str) -> Any:
        """Search for a query."""
        return await app.store.asimilarity_search(query, k=2)

    return lambda query: search.invoke({"query": query}), lambda query: asearch.ainvoke({"query": query})


def search_with_cached_documents(app: App) -> Any:
    """Queries are not cached."""
    app.store.embedding = CacheBackedEmbeddings.from_bytes_store(
        app.store.embeddings, InMemoryByteStore(), key_encoder="sha256"
    )
    return search_store(app)


FORMS: dict[str, Callable[[App], Any]] = {
    "retriever": search_by_retriever,
    "store": search_store,
    "scores": search_with_scores,
    "diversity": search_for_diversity,
    "vector": search_by_vector,
    "document vectors": search_by_document_vectors,
    "tool": search_in_a_tool,
}
"""How the queries are searched for: sync and async functions."""


def search_with_a_filter(app: App) -> Any:
    """A function of the user's own decides about each document."""
    return (lambda query: app.store.similarity_search(query, k=2, filter=lambda document: True)), None


def search_with_a_method_of_the_object(app: App) -> Any:
    original: Any = app.store.similarity_search
    app.store.similarity_search = lambda query, k: original(query, k)  # type: ignore[method-assign, assignment, misc]
    return search_store(app)


def search_with_other_names(app: App) -> Any:
    """What is passed as the second argument is no number of documents."""

    class Store(InMemoryVectorStore):
        def similarity_search(self, query: str, start: int = 0, k: int = 1, **_: Any) -> Any:  # type: ignore[override]
            return super().similarity_search(query, k=2)[start:]

    store = Store(app.store.embeddings)
    store.add_texts(["oats", "rye and barley", "wheat"])
    return (lambda query: store.similarity_search(query, 1)), None


def search_with_cached_embeddings(app: App) -> Any:
    """What was embedded once is not embedded again, so two searches for one query send one request."""
    cached = CacheBackedEmbeddings.from_bytes_store(
        app.store.embeddings, InMemoryByteStore(), query_embedding_cache=True, key_encoder="sha256"
    )
    app.store.embedding = cached
    return (lambda query: [*app.store.similarity_search(query, k=2), *app.store.similarity_search(query, k=1)]), None


def retrieve_with_cached_embeddings(app: App) -> Any:
    search_with_cached_embeddings(app)
    return (lambda query: [*app.retriever.invoke(query), *app.retriever.invoke(query)]), None


def embed_with_cached_embeddings(app: App) -> Any:
    search_with_cached_embeddings(app)
    embed = app.store.embeddings.embed_query  # type: ignore[union-attr]
    return (lambda query: [Document(str(embed(query)), id=query), Document(str(embed(query)))]), None


def embed_documents_with_cached_embeddings(app: App) -> Any:
    search_with_cached_documents(app)
    embed = app.store.embeddings.embed_documents  # type: ignore[union-attr]
    return (lambda query: [Document(str(embed([query]))), Document(str(embed([query])))]), None


REFUSED: dict[str, Callable[[App], Any]] = {
    "filter": search_with_a_filter,
    "method of the object": search_with_a_method_of_the_object,
    "other names": search_with_other_names,
    "cached embeddings": search_with_cached_embeddings,
    "cached retriever": retrieve_with_cached_embeddings,
    "cached vectors": embed_with_cached_embeddings,
    "cached document vectors": embed_documents_with_cached_embeddings,
}
"""Searches that stay in their place."""
ONE_AT_A_TIME = {"cached documents": search_with_cached_documents}
"""Searches that are prefetched one after the other."""
Build = Callable[[App], Any]


def graph_of(*nodes: Any) -> Any:
    """Compile a graph of these functions, one after the other."""
    builder = StateGraph(State)
    previous = START
    for node in nodes:
        builder.add_node(node.__name__, node)
        builder.add_edge(previous, node.__name__)
        previous = node.__name__
    return builder.compile()


def answer_with(app: App) -> Any:
    def answer(state: State) -> State:
        return {"answer": str(app.model.invoke(", ".join(state["texts"])).content)}

    return answer


def comprehension(app: App) -> Any:
    def search(state: State) -> State:
        results = [app.search(query) for query in state["queries"]]
        return {"texts": [document.page_content for documents in results for document in documents]}

    return graph_of(search, answer_with(app))


def loop(app: App) -> Any:
    def search(state: State) -> State:
        documents = []
        for query in state["queries"]:
            documents.extend(app.search(query))
        return {"texts": [document.page_content for document in documents]}

    return graph_of(search, answer_with(app))


def function_in_a_chain(app: App) -> Any:
    def search(state: State) -> str:
        documents = [app.search(query) for query in state["queries"]]
        return str(app.model.invoke(f"{[one.page_content for found in documents for one in found]}").content)

    return RunnableLambda(search)


def coroutine(app: App) -> Any:
    async def search(state: State) -> State:
        results = [await app.asearch(query) for query in state["queries"]]
        return {"texts": [document.page_content for documents in results for document in documents]}

    return graph_of(search)


def writes_between_searches(app: App) -> Any:
    """What is written for one query is found by the next."""

    def search(state: State) -> State:
        texts = []
        for query in state["queries"]:
            texts += [document.page_content for document in app.search(query)]
            app.store.add_texts([f"{query}!" * 2])
        return {"texts": texts}

    return graph_of(search, answer_with(app))


def writes_before_the_searches(app: App) -> Any:
    def write(state: State) -> State:
        app.store.add_texts(state["queries"])
        return {"answer": "written"}

    def search(state: State) -> State:
        return {"texts": [app.search("bb")[0].page_content]}

    return graph_of(write, search)


def writes_beside_a_node(app: App) -> Any:
    """The search follows one of two nodes that run side by side; the other one writes."""

    def think(state: State) -> State:
        return {"answer": str(app.model.invoke("think").content)}

    def write(state: State) -> None:
        app.store.add_texts(["bb"])

    def search(state: State) -> State:
        return {"texts": [app.search("bb")[0].page_content]}

    builder = StateGraph(State)
    for node in (think, write, search):
        builder.add_node(node.__name__, node)
    builder.add_edge(START, "think")
    builder.add_edge(START, "write")
    builder.add_edge("think", "search")
    return builder.compile()


def writes_under_a_condition(app: App) -> Any:
    def search(state: State) -> State:
        texts = []
        for query in state["queries"]:
            if query != "a":
                app.store.add_texts([query])
            texts.append(app.search(query)[0].page_content)
        return {"texts": texts}

    return graph_of(search)


def writes_in_a_called_graph(app: App) -> Any:
    inner = writes_before_the_searches(app)

    def search(state: State) -> State:
        return {"texts": [inner.invoke({"queries": [query]})["texts"][0] for query in state["queries"]]}

    return graph_of(search)


def writes_in_sent_tasks(app: App) -> Any:
    def send(state: State) -> list[Send]:
        return [Send("search", {"queries": [query]}) for query in state["queries"][:1]]

    def search(state: State) -> State:
        app.store.add_texts(state["queries"])
        return {"texts": [app.search(state["queries"][0])[0].page_content]}

    builder = StateGraph(State)
    builder.add_node("search", search)
    builder.add_conditional_edges(START, send, ["search"])
    return builder.compile()


def metadata_of_the_store(app: App) -> Any:
    """The documents share their metadata with the store, so the last query stands in all of them."""

    def search(state: State) -> State:
        documents = []
        for query in state["queries"]:
            for document in app.search(query):
                document.metadata["query"] = query
                documents.append(document)
        return {"texts": [f"{one.page_content} {one.metadata}" for one in documents]}

    return graph_of(search)


def filter_of_the_users(app: App) -> Any:
    """A function of the user's own decides about each document."""
    retriever = app.store.as_retriever(search_kwargs={"k": 2, "filter": lambda document: "e" in document.page_content})

    def search(state: State) -> State:
        return {"texts": [retriever.invoke(query)[0].page_content for query in state["queries"]]}

    return graph_of(search)


def documents_in_a_prompt(app: App) -> Any:
    """A search between two calls of a model, of which the second one reads the documents."""

    def search(state: State) -> str:
        thought = app.model.invoke("think").content
        documents = app.search(state["queries"][0])
        return str(app.model.invoke(f"{thought}: {documents[0].page_content}").content)

    return RunnableLambda(search)


def search_in_the_next_node(app: App) -> Any:
    def think(state: State) -> State:
        return {"answer": str(app.model.invoke("think").content)}

    def search(state: State) -> State:
        return {"texts": [app.search(state["queries"][0])[0].page_content]}

    return graph_of(think, search)


GAINING = (comprehension, loop, function_in_a_chain, coroutine)
WRITING = (
    writes_between_searches,
    writes_before_the_searches,
    writes_beside_a_node,
    writes_under_a_condition,
    writes_in_a_called_graph,
    writes_in_sent_tasks,
)
IN_PLACE = (*WRITING, filter_of_the_users)
WAYS = ("invoke", "ainvoke", "astream")


class Requests(NamedTuple):
    """The requests of one call, and its result."""

    result: Any
    embedded: list[Any]
    """The inputs of requests for embeddings, sorted."""
    prompts: list[str]
    most_at_once: int
    """The largest number of embedding requests that ran at the same time."""


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[OpenAIStub, EmbeddingStub]]:
    with openai_stub() as chat, embedding_stub(delay_s=LATENCY_S) as server:
        yield chat, server


def called(
    servers: tuple[OpenAIStub, EmbeddingStub],
    build: Build,
    way: str,
    change: Callable[[Any], Any],
    embeddings: type[OpenAIEmbeddings] = OpenAIEmbeddings,
    form: str = "retriever",
) -> Requests:
    """Call an app, changed or not, in one way. An error is its result."""
    chat, server = servers
    app = change(build(App(chat, server, embeddings, form)))
    chat.requests.clear()
    server.log.clear()
    server.most_at_once = 0

    async def read() -> list[Any]:
        return [piece async for piece in app.astream({"queries": QUERIES})]

    result: Any
    try:
        if way == "invoke":
            result = app.invoke({"queries": QUERIES})
        else:
            result = asyncio.run(read() if way == "astream" else app.ainvoke({"queries": QUERIES}))
    except Exception as error:
        result = type(error), str(error)
    prompts = sorted(str(body) for body in chat.generations)
    return Requests(result, sorted(map(str, server.inputs)), prompts, server.most_at_once)


def original(app: Any) -> Any:
    return app


@pytest.mark.parametrize(("way", "form"), [*product(WAYS, ["retriever", "store"]), *product(["ainvoke"], FORMS)])
@pytest.mark.parametrize("build", GAINING)
def test_queries_of_a_loop_are_embedded_at_once(servers: Any, build: Build, way: str, form: str) -> None:
    if build is coroutine and way == "invoke":
        pytest.skip("its node runs on a loop only")
    expected = called(servers, build, way, original, form=form)

    result = called(servers, build, way, accelerate, form=form)

    assert result[:3] == expected[:3]
    assert (expected.most_at_once, result.most_at_once) == (1, 3)


@pytest.mark.parametrize("form", [*FORMS, *ONE_AT_A_TIME])
@pytest.mark.parametrize("build", [documents_in_a_prompt, search_in_the_next_node])
def test_search_begins_beside_the_call_before_it(servers: Any, build: Build, form: str) -> None:
    chat, server = servers
    searches_begun: list[int] = []

    def answer_late(body: dict[str, Any]) -> dict[str, Any]:
        time.sleep(2 * LATENCY_S)
        searches_begun.append(len(server.log))
        return {"content": f"answer to {body['messages'][-1]['content']}"}

    chat.answer = answer_late
    try:
        expected, result = (called(servers, build, "invoke", change, form=form) for change in (original, accelerate))
    finally:
        chat.answer = None

    calls = len(searches_begun) // 2
    assert result[:3] == expected[:3]
    assert (searches_begun[0], searches_begun[calls]) == (0, 1)


@pytest.mark.parametrize("form", REFUSED)
@pytest.mark.parametrize("build", [comprehension, documents_in_a_prompt])
def test_search_that_is_not_certain_stays_in_its_place(servers: Any, build: Build, form: str) -> None:
    expected = called(servers, build, "invoke", original, form=form)

    result = called(servers, build, "invoke", accelerate, form=form)

    assert result == expected


@pytest.mark.parametrize("form", ["retriever", "store", "scores"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", IN_PLACE)
def test_searches_beside_code_of_the_users_stay_in_place(servers: Any, build: Build, way: str, form: str) -> None:
    expected = called(servers, build, way, original, form=form)

    result = called(servers, build, way, accelerate, form=form)

    assert result == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS)
def test_documents_share_their_metadata_with_the_store(servers: Any, way: str, form: str) -> None:
    expected = called(servers, metadata_of_the_store, way, original, form=form)

    result = called(servers, metadata_of_the_store, way, accelerate, form=form)

    assert result[:3] == expected[:3]


@pytest.mark.parametrize("form", ["retriever", "store"])
def test_embeddings_that_are_not_listed_are_called_one_at_a_time(servers: Any, form: str) -> None:
    expected = called(servers, comprehension, "invoke", original, OtherEmbeddings, form)

    result = called(servers, comprehension, "invoke", accelerate, OtherEmbeddings, form)

    assert result == expected


@pytest.mark.parametrize("form", FORMS)
def test_error_of_an_embedding_request_is_the_originals(servers: Any, form: str) -> None:
    _, server = servers

    def refuse(path: str, body: dict[str, Any]) -> Any:
        return (400, {}, {"error": {"message": "it refuses"}}) if body["input"] in ("bb", ["bb"]) else None

    results = []
    for change in (original, accelerate):
        server.replace = refuse
        try:
            results.append(called(servers, comprehension, "invoke", change, form=form))
        finally:
            server.replace = lambda path, body: None

    assert results[0].result == results[1].result
    assert "it refuses" in str(results[0].result)


@pytest.mark.parametrize("form", ["retriever", "store"])
def test_explanation_says_that_queries_are_searched_at_once(servers: Any, form: str) -> None:
    explained = accelerate(comprehension(App(*servers, form=form))).explain()

    assert "search.retrieve: all items at once, when its node begins" in explained


def test_explanation_names_the_class_whose_method_is_called(servers: Any) -> None:
    explained = accelerate(documents_in_a_prompt(App(*servers, form="vector"))).explain(details=True)

    rows = [line.split()[:3] for line in explained.splitlines()]
    assert ["prefetched", "search.embed", "OpenAIEmbeddings"] in rows
    assert ["prefetched", "search.retrieve", "InMemoryVectorStore"] in rows


def test_explanation_says_that_embeddings_have_a_cache(servers: Any) -> None:
    explained = accelerate(documents_in_a_prompt(App(*servers, form="cached embeddings"))).explain(details=True)

    assert any("InMemoryVectorStore" in line and "cache" in line for line in explained.splitlines())
