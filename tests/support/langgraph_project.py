"""A project with a `langgraph.json`, laid out as LangGraph's templates, and what LangGraph's server does with it."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import StateGraph
from langgraph.pregel import Pregel
from langgraph.store.base import BaseStore

AGENT = """
import operator
import os
from contextlib import asynccontextmanager
from typing import Annotated

from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import interrupt
from typing_extensions import TypedDict

from project_prompts import PREFIX
from support.hosted_model import HostedModel
from teola_plugin import accelerate

model = HostedModel()


class State(TypedDict):
    question: str
    notes: Annotated[list[str], operator.add]
    answer: str


async def plan(state: State):
    notes = []
    for topic in state["question"].split(","):
        notes.append((await model.ainvoke(f"{PREFIX} {topic}")).text)
    return {"notes": notes}


def review(state: State):
    return {"answer": interrupt("Is that right?")}


def build(node=None):
    builder = StateGraph(State)
    builder.add_node("plan", plan)
    builder.add_edge(START, "plan")
    if node is None:
        builder.add_edge("plan", END)
    else:
        builder.add_node("review", node)
        builder.add_edge("plan", "review")
        builder.add_edge("review", END)
    return builder


original = build().compile()
graph = accelerate(build().compile())
reviewed = accelerate(build(review).compile())
builder = build()
number = 7
setting = os.environ.get("PROJECT_SETTING", "")


def make_graph():
    return accelerate(build().compile())


async def make_graph_later(config: RunnableConfig):
    assert "configurable" in config
    return build().compile()


@asynccontextmanager
async def make_graph_for_a_while(config: RunnableConfig):
    yield accelerate(build().compile())


def make_graph_with_runtime(runtime):
    raise NotImplementedError


def make_none():
    return None


def fail():
    raise ZeroDivisionError("no graph today")


async def answer_message(state: MessagesState):
    texts = [(await model.ainvoke(f"{topic}: {state['messages'][-1].text}")).text for topic in ("one", "two", "three")]
    return {"messages": [("ai", " | ".join(texts))]}


chat_builder = StateGraph(MessagesState)
chat_builder.add_node("answer_message", answer_message)
chat_builder.add_edge(START, "answer_message")
chat_builder.add_edge("answer_message", END)
chat = chat_builder.compile()


async def make_chat(config: RunnableConfig):
    return chat_builder.compile()
"""


def write_project(folder: Path, graphs: dict[str, Any], **more: Any) -> Path:
    """Write `langgraph.json` with these graphs and the modules that it names. Return its path."""
    (folder / "src").mkdir(parents=True, exist_ok=True)
    (folder / "src" / "agent.py").write_text(AGENT)
    (folder / "src" / "project_prompts.py").write_text('PREFIX = "Write about"\n')
    file = folder / "langgraph.json"
    file.write_text(json.dumps({"dependencies": ["./src"], "graphs": graphs, **more}))
    return file


# What langgraph_api 0.16.7 does, in its modules `graph` and `_factory_utils`: its packages cannot be installed beside
# ours, since they need older versions of some.


def load_graph(file: Path, variable: str) -> Any:
    """Return a graph or a factory as the server registers it, of a file of the project. Raise ValueError for others."""
    name = str(file).replace("/", "__").replace(".py", "").replace(" ", "_").lstrip(".")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    graph = module.__dict__[variable]
    if callable(graph):
        return graph
    if isinstance(graph, StateGraph):
        return graph.compile()
    if not isinstance(graph, Pregel):
        raise ValueError(f"{variable} is no graph")
    if isinstance(graph.checkpointer, BaseCheckpointSaver) or isinstance(graph.store, BaseStore):
        raise ValueError(f"{variable} has a checkpointer or a store of its own")
    return graph


@asynccontextmanager
async def graph_of_a_run(value: Any, graph_id: str, checkpointer: Any, store: Any) -> Any:
    """Yield the graph that the server runs: a copy with the server's checkpointer, store and name."""
    async with AsyncExitStack() as stack:
        if not isinstance(value, Pregel):
            value = value({"configurable": {}}) if inspect.signature(value).parameters else value()
        if hasattr(value, "__aenter__"):
            value = await stack.enter_async_context(value)
        elif inspect.iscoroutine(value):
            value = await value
        if isinstance(value, StateGraph):
            value = value.compile()
        assert isinstance(value, Pregel)
        update = {"checkpointer": checkpointer, "store": store}
        if value.name == "LangGraph":
            update["name"] = graph_id
        yield value.copy(update=update)
