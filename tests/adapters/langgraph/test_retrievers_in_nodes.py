"""Retrievers of a listed store that nodes and functions call in loops: all queries are embedded at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypedDict

import pytest
from langchain_core.runnables import RunnableLambda
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
LATENCY_S = 0.1
KEY = SecretStr("key")


class State(TypedDict, total=False):
    """The state of the graphs."""

    queries: list[str]
    texts: list[str]
    answer: str


class OtherEmbeddings(OpenAIEmbeddings):
    """Embeddings of a class that is not on the list of those that several threads may call."""


class App:
    """A model, and a retriever of a store in memory. Their requests go to one server each."""

    def __init__(self, chat: OpenAIStub, server: EmbeddingStub, embeddings: type[OpenAIEmbeddings]) -> None:
        self.model = ChatOpenAI(model=CHAT_MODEL, temperature=0.0, base_url=chat.base_url, api_key=KEY)
        self.store = InMemoryVectorStore(
            embeddings(model=MODEL, check_embedding_ctx_length=False, base_url=server.base_url, api_key=KEY)
        )
        self.store.add_texts(["oats", "rye and barley", "wheat"])
        self.retriever = self.store.as_retriever(search_kwargs={"k": 2})


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
        results = [app.retriever.invoke(query) for query in state["queries"]]
        return {"texts": [document.page_content for documents in results for document in documents]}

    return graph_of(search, answer_with(app))


def loop(app: App) -> Any:
    def search(state: State) -> State:
        documents = []
        for query in state["queries"]:
            documents.extend(app.retriever.invoke(query))
        return {"texts": [document.page_content for document in documents]}

    return graph_of(search, answer_with(app))


def function_in_a_chain(app: App) -> Any:
    def search(state: State) -> str:
        documents = [app.retriever.invoke(query) for query in state["queries"]]
        return str(app.model.invoke(f"{[one.page_content for found in documents for one in found]}").content)

    return RunnableLambda(search)


def coroutine(app: App) -> Any:
    async def search(state: State) -> State:
        results = [await app.retriever.ainvoke(query) for query in state["queries"]]
        return {"texts": [document.page_content for documents in results for document in documents]}

    return graph_of(search)


def writes_between_searches(app: App) -> Any:
    """What is written for one query is found by the next."""

    def search(state: State) -> State:
        texts = []
        for query in state["queries"]:
            texts += [document.page_content for document in app.retriever.invoke(query)]
            app.store.add_texts([f"{query}!" * 2])
        return {"texts": texts}

    return graph_of(search, answer_with(app))


def writes_before_the_searches(app: App) -> Any:
    def write(state: State) -> State:
        app.store.add_texts(state["queries"])
        return {"answer": "written"}

    def search(state: State) -> State:
        return {"texts": [app.retriever.invoke("bb")[0].page_content]}

    return graph_of(write, search)


def writes_beside_a_node(app: App) -> Any:
    """The search follows one of two nodes that run side by side; the other one writes."""

    def think(state: State) -> State:
        return {"answer": str(app.model.invoke("think").content)}

    def write(state: State) -> None:
        app.store.add_texts(["bb"])

    def search(state: State) -> State:
        return {"texts": [app.retriever.invoke("bb")[0].page_content]}

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
            texts.append(app.retriever.invoke(query)[0].page_content)
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
        return {"texts": [app.retriever.invoke(state["queries"][0])[0].page_content]}

    builder = StateGraph(State)
    builder.add_node("search", search)
    builder.add_conditional_edges(START, send, ["search"])
    return builder.compile()


def metadata_of_the_store(app: App) -> Any:
    """The documents share their metadata with the store, so the last query stands in all of them."""

    def search(state: State) -> State:
        documents = []
        for query in state["queries"]:
            for document in app.retriever.invoke(query):
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
) -> Requests:
    """Call an app, changed or not, in one way. An error is its result."""
    chat, server = servers
    app = change(build(App(chat, server, embeddings)))
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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", GAINING)
def test_queries_of_a_loop_are_embedded_at_once(servers: Any, build: Build, way: str) -> None:
    if build is coroutine and way == "invoke":
        pytest.skip("its node runs on a loop only")
    expected = called(servers, build, way, original)

    result = called(servers, build, way, accelerate)

    assert result[:3] == expected[:3]
    assert (expected.most_at_once, result.most_at_once) == (1, 3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", IN_PLACE)
def test_searches_beside_code_of_the_users_stay_in_place(servers: Any, build: Build, way: str) -> None:
    expected = called(servers, build, way, original)

    result = called(servers, build, way, accelerate)

    assert result == expected


@pytest.mark.parametrize("way", WAYS)
def test_documents_share_their_metadata_with_the_store(servers: Any, way: str) -> None:
    expected = called(servers, metadata_of_the_store, way, original)

    result = called(servers, metadata_of_the_store, way, accelerate)

    assert result[:3] == expected[:3]


def test_embeddings_that_are_not_listed_are_called_one_at_a_time(servers: Any) -> None:
    expected = called(servers, comprehension, "invoke", original, OtherEmbeddings)

    result = called(servers, comprehension, "invoke", accelerate, OtherEmbeddings)

    assert result == expected


def test_error_of_an_embedding_request_is_the_originals(servers: Any) -> None:
    _, server = servers

    def refuse(path: str, body: dict[str, Any]) -> Any:
        return (400, {}, {"error": {"message": "it refuses"}}) if body["input"] in ("bb", ["bb"]) else None

    results = []
    for change in (original, accelerate):
        server.replace = refuse
        try:
            results.append(called(servers, comprehension, "invoke", change))
        finally:
            server.replace = lambda path, body: None

    assert results[0].result == results[1].result
    assert "it refuses" in str(results[0].result)


def test_explanation_says_that_queries_are_searched_at_once(servers: Any) -> None:
    explained = accelerate(comprehension(App(*servers, OpenAIEmbeddings))).explain()

    assert "search.retrieve: all items at once, when its node begins" in explained
