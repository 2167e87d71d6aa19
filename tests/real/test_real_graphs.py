"""Tests of four graphs of the benchmark on vLLM, MiniLM and PostgreSQL: original and accelerated end in the same state.

The session's model is random, so a schema limits its answers where that matters, and tools are forced.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from pydoc_data.topics import topics
from typing import Annotated, Any, Literal

import pytest
from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.documents import Document
from pydantic import BaseModel, Field

from benchmarks.graphs import aanswered, answered, calls_of
from benchmarks.langchain.kits import Keywords
from benchmarks.langgraph.agents import react
from benchmarks.langgraph.answers import Size
from benchmarks.langgraph.apps import App, shown
from benchmarks.langgraph.kits import Kit
from benchmarks.langgraph.rag_graphs import corrective_rag
from benchmarks.langgraph.workflows import human_interrupt, map_reduce
from teola_plugin import accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.pool import EnginePool

pytestmark = [pytest.mark.vllm, pytest.mark.postgres, pytest.mark.models]
ASKED = "When is the else clause of a try statement executed?"
TEXTS = [part for part in topics["compound"][:9000].split("\n\n") if len(part) > 80][:20]
Handler = Callable[[ModelRequest[Any]], ModelResponse[Any]]
AsyncHandler = Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]


class Three(BaseModel):
    subjects: list[Annotated[str, Field(min_length=3, max_length=30)]] = Field(min_length=3, max_length=3)


class One(BaseModel):
    id: Literal[0, 1, 2]


class LooksUpTwice(AgentMiddleware[Any, Any]):
    """Demands one tool, then the other, then an answer."""

    def wrap_model_call(self, request: ModelRequest[Any], handler: Handler) -> ModelResponse[Any]:
        return handler(self._told(request))

    async def awrap_model_call(self, request: ModelRequest[Any], handler: AsyncHandler) -> ModelResponse[Any]:
        return await handler(self._told(request))

    def _told(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        looked = sum(message.type == "tool" for message in request.messages)
        return request.override(tool_choice=("search_reports", "search_notes", "none")[looked])


APPS = {
    "corrective": App(corrective_rag, {"question": ASKED}, "generate"),
    "map-reduce": App(lambda kit: map_reduce(kit, topics=Three, best=One), {"topic": "statements"}),
    "react": App(lambda kit: react(kit, LooksUpTwice()), {"messages": [("user", ASKED)]}, "model"),
    "interrupt": App(human_interrupt, {"question": ASKED}, "revise", resume="Name the clause."),
}


@pytest.fixture(scope="module")
def kit(real_pool: EnginePool) -> Kit:
    documents = [Document(text, id=f"passage-{i}") for i, text in enumerate(TEXTS)]

    def filled(name: str, some: list[Document]) -> TeolaVectorStore:
        store = TeolaVectorStore(pool=real_pool, embedding=TeolaEmbeddings(pool=real_pool), collection=name)
        store.add_documents(some)
        return store

    chat = ChatTeola(pool=real_pool, max_tokens=64)
    stores = filled("graph-reports", documents[::2]), filled("graph-notes", documents[1::2])
    web = Keywords(documents=documents, seconds=0.0, k=2)
    return Kit(Size(3, 64), real_pool, chat, *stores, web, 0.0)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.mark.parametrize("name", APPS)
def test_accelerated_graph_ends_in_the_original_state(name: str, kit: Kit, runner: asyncio.Runner) -> None:
    app = APPS[name]
    plain = app.make(kit)
    fast = accelerate(plain, pool=kit.pool)
    found = []
    for graph, way in itertools.product((plain, fast), ("sync", "async")):
        kit.fresh()
        end = answered(graph, app) if way == "sync" else runner.run(aanswered(graph, app))
        found.append(shown(end))
        if graph is fast:
            trace = fast.last_trace()
            assert trace is not None
            assert "llm" in trace.engines
            assert not [span for span in trace.spans if span.outcome == "failed"]
    assert found[1:] == found[:1] * 3


@pytest.mark.parametrize("name", ["corrective", "react"])
def test_accelerated_graph_streams_the_original_messages(name: str, kit: Kit, runner: asyncio.Runner) -> None:
    """Messages are compared node by node. Pieces may be divided in other places."""
    app = APPS[name]
    plain = app.make(kit)

    async def messages_by_node(graph: Any) -> dict[str, list[str]]:
        config, (given,) = calls_of(app)
        texts: dict[tuple[str, str], str] = {}
        async for message, about in graph.astream(given, config, stream_mode="messages"):
            key = about["langgraph_node"], message.id
            texts[key] = texts.get(key, "") + message.text
        return {node: [t for (n, _), t in texts.items() if n == node] for node, _ in texts}

    kit.fresh()
    expected = runner.run(messages_by_node(plain))
    kit.fresh()
    assert runner.run(messages_by_node(accelerate(plain, pool=kit.pool))) == expected
    assert "".join(expected[app.answer_node])


def test_original_react_graph_calls_both_tools(kit: Kit) -> None:
    """Each of the two tools is called, with words of the model's own."""
    messages = APPS["react"].make(kit).invoke(APPS["react"].given)["messages"]
    called = [call for message in messages for call in getattr(message, "tool_calls", ())]
    assert [call["name"] for call in called] == ["search_reports", "search_notes"]
    assert all(call["args"]["query"] for call in called)
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai", "tool", "ai"]
