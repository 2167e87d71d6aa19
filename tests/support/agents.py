"""Agents whose model is a `WritingLLM`, for the tests of tools that start while their call is being written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import BaseTool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent, tools_condition

from support.writing_llm import WritingLLM, Written
from teola_plugin import accelerate
from teola_plugin.engines.fake import FakeEmbedder, FakeStore
from teola_plugin.langchain import ChatTeola
from teola_plugin.pool import EnginePool

INPUT = {"messages": [HumanMessage("what is it?")]}
Make = Callable[..., Any]


def agent(model: Any, tools: Sequence[BaseTool], **options: Any) -> Any:
    """Create an agent by LangChain's `create_agent`."""
    return create_agent(model, tools, system_prompt="Use your tools.", **options)


def react(model: Any, tools: Sequence[BaseTool], **options: Any) -> Any:
    """Create an agent by LangGraph's `create_react_agent`."""
    return create_react_agent(model, tools, prompt="Use your tools.", **options)


def react_v1(model: Any, tools: Sequence[BaseTool], **options: Any) -> Any:
    return react(model, tools, version="v1", **options)


def by_hand(model: Any, tools: Sequence[BaseTool], **options: Any) -> Any:
    """Build an agent graph whose model node is a sync function, also when the graph is called by async code."""
    bound = model.bind_tools(tools)

    def think(state: MessagesState) -> Any:
        return {"messages": [bound.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("act", ToolNode(tools))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition, {"tools": "act", "__end__": "__end__"})
    graph.add_edge("act", "think")
    return graph.compile(**options)


KINDS: dict[str, Make] = {"create_agent": agent, "react": react, "react_v1": react_v1, "by_hand": by_hand}


class World:
    """A pool with a `WritingLLM`, a model on it, and a record of what the tools of a test did."""

    def __init__(self) -> None:
        self.llm, self.embedder, self.store = WritingLLM(), FakeEmbedder(), FakeStore()
        self.pool = EnginePool.local(llm=self.llm, embedder=self.embedder, store=self.store)
        self.model = ChatTeola(pool=self.pool)
        self.ran: list[Any] = []

    def writes(self, *pieces: Written, final_answer: str = "done") -> None:
        """Set what the LLM writes as the first answer of a conversation.

        After tools have run it writes `final_answer`.
        """
        self.llm.writes = lambda prompt: [final_answer] if prompt.messages[-1].role == "tool" else list(pieces)

    def has_run(self, times: int = 1) -> Callable[[], bool]:
        """Return a condition: True once the tools have run at least `times` times."""
        return lambda: len(self.ran) >= times

    def fast(self, graph: Any, **options: Any) -> Any:
        """Return the accelerated graph, on this pool."""
        return accelerate(graph, pool=self.pool, **options)


@contextmanager
def world() -> Iterator[World]:
    """Yield a `World` whose pool runs."""
    setup = World()
    with setup.pool:
        yield setup


def run(graph: Any, way: str, **options: Any) -> Any:
    """Call a graph sync (`way="invoke"`) or async. Return the messages of its final state."""
    if way == "invoke":
        return graph.invoke(INPUT, **options)["messages"]
    return asyncio.run(graph.ainvoke(INPUT, **options))["messages"]


def summarize_messages(messages: Sequence[Any]) -> list[Any]:
    """Return messages without their ids, as tuples: type, content, name, status and tool calls."""
    summaries = []
    for message in messages:
        calls = [(call["name"], call["args"]) for call in message.tool_calls] if isinstance(message, AIMessage) else []
        summaries.append((type(message).__name__, message.content, message.name, getattr(message, "status", ""), calls))
    return summaries
