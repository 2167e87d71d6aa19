"""Graphs whose nodes create models from the settings of a call, and a provider that records their requests."""

from __future__ import annotations

import asyncio
import time
from typing import Any, TypedDict

from langchain.chat_models import init_chat_model
from langgraph.graph import END, START, StateGraph

from support.openai_stub import OpenAIStub
from support.slow_answers import SlowAnswers

LATENCY_S = 0.05
Settings = dict[str, Any]
"""Keyword arguments of a call, such as `config`."""


class State(TypedDict, total=False):
    """The state of the graphs."""

    topic: str
    items: list[str]
    first: str
    second: str
    notes: list[str]


INPUT: State = {"topic": "oats", "items": ["a", "b", "c"]}


def compiled(*nodes: Any, context: Any = None) -> Any:
    """Compile a graph of these functions, one after the other."""
    builder = StateGraph(State, context_schema=context)
    previous = START
    for node in nodes:
        builder.add_node(node.__name__, node)
        builder.add_edge(previous, node.__name__)
        previous = node.__name__
    builder.add_edge(previous, END)
    return builder.compile()


def load_chat_model(name: str, url: str, key: str = "k") -> Any:
    provider, model = name.split("/", maxsplit=1)
    return init_chat_model(model, model_provider=provider, base_url=url, api_key=key)


class Answers(SlowAnswers):
    """Answers as text, or as JSON where the prompt asks for it."""

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = str(body["messages"][-1]["content"])
        return {"content": '{"text": "a note"}' if prompt.startswith("json") else f"answer to {prompt}"}


answers = Answers(LATENCY_S)


def requests_of(stub: OpenAIStub, graph: Any, way: str, settings: Settings) -> tuple[Any, list[str], int]:
    """Return the result of a call, the bodies that the server got, and how many it answered at the same time."""
    stub.requests.clear()
    answers.most_at_once = 0
    result = call_graph(graph, way, settings)
    time.sleep(0.03)
    return result, sorted(map(str, stub.generations)), answers.most_at_once


def call_graph(graph: Any, way: str, settings: Settings) -> Any:
    if way == "invoke":
        return graph.invoke(INPUT, **settings)
    if way == "ainvoke":
        return asyncio.run(graph.ainvoke(INPUT, **settings))
    return [
        (type(message).__name__, message.content)
        for message, _ in graph.stream(INPUT, stream_mode="messages", **settings)
    ]


def becomes_concurrent(
    stub: OpenAIStub, graph: Any, way: str, settings: Settings, expected: tuple[Any, list[str], int]
) -> bool:
    """Return True once calls of the graph run at the same time, since its plans for these settings are made then.

    All calls until then must give what the original gives.
    """
    for _ in range(20):
        result = requests_of(stub, graph, way, settings)
        assert result[:2] == expected[:2]
        if result[2] > 1:
            return True
    return False
