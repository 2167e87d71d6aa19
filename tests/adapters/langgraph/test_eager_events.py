"""Tests of the events of an agent whose tools start early: those of the original, and none twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler, dispatch_custom_event
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import create_retriever_tool, tool
from support.agents import INPUT, KINDS, World, agent, world
from support.writing_llm import call

from teola_plugin.langchain import TeolaEmbeddings, TeolaVectorStore, read_only

CONFIG: dict[str, Any] = {"tags": ["mine"], "metadata": {"who": "me"}, "configurable": {"user": "u"}}


@pytest.fixture
def at() -> Iterator[World]:
    with world() as made:
        yield made


class Docs(BaseRetriever):
    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [Document(f"of {query}")]


def asks_others(at: World, *, coroutine: bool) -> Any:
    """Return a tool that calls a chain, a model and a retriever, and sends events of its own."""
    prompt = ChatPromptTemplate.from_template("about {x}").with_config(tags=["prompts"])
    chain = prompt | FakeListChatModel(responses=["words"]).with_config(tags=["models"], metadata={"m": 1})
    step = RunnableLambda(lambda x: chain.invoke({"x": x}).content).with_config(run_name="step")

    def look(topic: str) -> str:
        """Looks."""
        at.ran.append(topic)
        dispatch_custom_event("looked", {"at": topic})
        return step.invoke(topic) + Docs(tags=["docs"]).invoke(topic)[0].page_content

    async def alook(topic: str) -> str:
        """Looks."""
        at.ran.append(topic)
        reply = await chain.ainvoke({"x": topic})
        return str(reply.content) + (await Docs(tags=["docs"]).ainvoke(topic))[0].page_content

    made: Any = tool("look", tags=["looking"], metadata={"tool": True}) if False else tool("look")(look)
    made.tags, made.metadata = ["looking"], {"tool": True}
    return read_only(made.model_copy(update={"coroutine": alook}) if coroutine else made)


class RecordingHandler:
    """Everything a handler is told, ids by their order of appearance."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self._ids: dict[UUID, int] = {}

    def note(self, name: str, given: Any, kwargs: dict[str, Any]) -> None:
        ids = [self._id(kwargs.get(key)) for key in ("run_id", "parent_run_id")]
        metadata = {k: v for k, v in (kwargs.get("metadata") or {}).items() if k not in ("langgraph_checkpoint_ns",)}
        metadata.pop("checkpoint_ns", None)
        self.told.append((name, *ids, kwargs.get("tags"), metadata, kwargs.get("name"), without_ids(given)))

    def _id(self, given: UUID | None) -> int | None:
        return None if given is None else self._ids.setdefault(given, len(self._ids))


def without_ids(given: Any) -> Any:
    """Return messages without ids of messages and calls."""
    if isinstance(given, dict):
        return {key: without_ids(one) for key, one in given.items() if key not in ("id", "tool_call_id", "run_id")}
    if isinstance(given, list | tuple):
        return [without_ids(one) for one in given]
    if hasattr(given, "model_dump") and hasattr(given, "type"):
        return type(given).__name__, without_ids({k: v for k, v in given.model_dump().items() if "metadata" not in k})
    return str(given) if isinstance(given, str) else type(given).__name__


NAMES = [
    *("on_chain_start", "on_chain_end", "on_chat_model_start", "on_llm_end", "on_retriever_start", "on_retriever_end"),
    *("on_tool_start", "on_tool_end", "on_tool_error", "on_custom_event"),
]


class Sync(BaseCallbackHandler, RecordingHandler):
    pass


class Async(AsyncCallbackHandler, RecordingHandler):
    pass


for _name in NAMES:

    def _sync(self: Any, first: Any, *args: Any, _name: str = _name, **kwargs: Any) -> None:
        self.note(_name, (first, *args) if "start" in _name or "custom" in _name else first, kwargs)

    async def _async(self: Any, first: Any, *args: Any, _name: str = _name, **kwargs: Any) -> None:
        self.note(_name, (first, *args) if "start" in _name or "custom" in _name else first, kwargs)

    setattr(Sync, _name, _sync)
    setattr(Async, _name, _async)


@pytest.mark.parametrize("kind", ["create_agent", "react"])
@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
@pytest.mark.parametrize("coroutine", [False, True])
def test_handlers_get_calls_inside_a_prefetched_tool_when_claimed(
    at: World, kind: str, way: str, coroutine: bool
) -> None:
    plain = KINDS[kind](at.model, [asks_others(at, coroutine=coroutine)])

    def events_of(graph: Any, *more: Any) -> list[Any]:
        at.ran.clear()
        at.writes(call("look", topic="sheep"), *more)
        handler = Sync() if way == "invoke" else Async()
        config = {**CONFIG, "callbacks": [handler]}
        if way == "invoke":
            graph.invoke(INPUT, config)
        else:
            asyncio.run(graph.ainvoke(INPUT, config))
        assert at.ran == ["sheep"]
        return handler.told

    fast = at.fast(plain)
    assert events_of(fast, at.has_run()) == events_of(plain)
    assert at.llm.fulfilled_waits == [True] and [s.outcome for s in fast.last_trace().steps if s.is_prefetched] == [
        "claimed"
    ]


def normal(events: list[Any]) -> list[Any]:
    """Return events without ids and times. A run is named by the runs around it."""
    names = {event["run_id"]: event["name"] for event in events}
    found = []
    for event in events:
        metadata = {k: v for k, v in event["metadata"].items() if "checkpoint_ns" not in k}
        parents = [names[one] for one in event["parent_ids"]]
        found.append((event["event"], event["name"], parents, event["tags"], metadata, without_ids(event["data"])))
    return found


async def stream_of(graph: Any, config: Any = None) -> list[Any]:
    return [event async for event in graph.astream_events(INPUT, config, version="v2")]


@pytest.mark.parametrize("kind", KINDS)
async def test_event_stream_with_prefetched_tools_equals_the_originals(at: World, kind: str) -> None:
    """A tool that calls nothing is early; so is the search of a retriever's tool."""
    store = TeolaVectorStore(pool=at.pool, embedding=TeolaEmbeddings(pool=at.pool))
    store.add_texts(["sheep eat grass"])

    @read_only
    @tool
    def weather(city: str) -> str:
        """The weather."""
        at.ran.append(city)
        return f"sunny in {city}"

    search = create_retriever_tool(store.as_retriever(), "search", "Searches.")
    plain = KINDS[kind](at.model, [weather, search])
    pieces = [call("weather", city="Rome"), call("search", query="sheep")]
    searched = at.store.batches
    at.writes(*pieces, at.has_run(), lambda: at.store.batches > searched)
    fast = at.fast(plain)
    made = sorted(normal(await stream_of(fast, CONFIG)), key=str)
    assert at.llm.fulfilled_waits == [True, True] and at.ran == ["Rome"] and at.store.batches == searched + 1
    at.writes(*pieces)
    assert made == sorted(normal(await stream_of(plain, CONFIG)), key=str)


@pytest.mark.parametrize("coroutine", [False, True])
async def test_tool_that_calls_runnables_is_not_prefetched_while_streaming(at: World, coroutine: bool) -> None:
    """The calls are found before the tool runs. Without a stream the tool starts early."""
    plain = agent(at.model, [asks_others(at, coroutine=coroutine)])
    fast = at.fast(plain)
    at.writes(call("look", topic="sheep"))
    assert normal(await stream_of(fast, CONFIG)) == normal(await stream_of(plain, CONFIG))
    assert at.ran == ["sheep"] * 2 and [s for s in fast.last_trace().steps if s.is_prefetched] == []
    at.writes(call("look", topic="sheep"), lambda: len(at.ran) > 2)
    await fast.ainvoke(INPUT)
    assert at.ran == ["sheep"] * 3 and [s.outcome for s in fast.last_trace().steps if s.is_prefetched] == ["claimed"]


class Hidden:
    """A tool whose calls cannot be seen before it makes them."""

    def __init__(self, func: Any, coroutine: Any) -> None:
        self.func_, self.coroutine_ = func, coroutine


@pytest.mark.parametrize("coroutine", [False, True])
async def test_tool_with_hidden_stream_events_is_stopped_and_run_again(at: World, coroutine: bool) -> None:
    """The first event stops the early tool, and later ones do not start early during a stream.

    Without a stream they do.
    """
    made = asks_others(at, coroutine=coroutine)
    hidden, end = Hidden(made.func, made.coroutine), "_"

    def look(topic: str) -> str:
        """Looks."""
        return str(getattr(hidden, "func" + end)(topic))

    async def alook(topic: str) -> str:
        """Looks."""
        return str(await getattr(hidden, "coroutine" + end)(topic))

    plain = agent(at.model, [made.model_copy(update={"func": look, "coroutine": alook if coroutine else None})])
    fast = at.fast(plain)
    at.writes(call("look", topic="sheep"), at.has_run())
    first = normal(await stream_of(fast, CONFIG))
    assert at.ran == ["sheep"] * 2
    at.ran.clear()
    at.writes(call("look", topic="sheep"))
    second = normal(await stream_of(fast, CONFIG))
    assert at.ran == ["sheep"] and [s for s in fast.last_trace().steps if s.is_prefetched] == []
    assert first == second == normal(await stream_of(plain, CONFIG))
    at.ran.clear()
    at.writes(call("look", topic="sheep"), at.has_run())
    await fast.ainvoke(INPUT)
    assert at.ran == ["sheep"] and [s.outcome for s in fast.last_trace().steps if s.is_prefetched] == ["claimed"]


@pytest.mark.parametrize("mode", ["updates", "values", "messages", "tasks", "debug"])
def test_graph_stream_with_prefetched_tool_equals_the_originals(at: World, mode: Any) -> None:
    @read_only
    @tool
    def weather(city: str) -> str:
        """The weather."""
        at.ran.append(city)
        return f"sunny in {city}"

    plain = agent(at.model, [weather])
    at.writes(call("weather", city="Rome"), at.has_run())
    fast = at.fast(plain)
    made = [kinds(one) for one in fast.stream(INPUT, stream_mode=mode)]
    assert at.llm.fulfilled_waits == [True] and at.ran == ["Rome"]
    at.writes(call("weather", city="Rome"))
    assert made == [kinds(one) for one in plain.stream(INPUT, stream_mode=mode)]


def kinds(given: Any) -> Any:
    if isinstance(given, dict):
        return {
            key: kinds(one) for key, one in given.items() if key not in ("id", "timestamp", "langgraph_checkpoint_ns")
        }
    if isinstance(given, list | tuple):
        return [kinds(one) for one in given]
    return without_ids(given) if hasattr(given, "model_dump") else type(given).__name__
