"""An agent with function calls: the model chooses tools, an engine runs them, the model answers with what they say.

Run it from the root of the checkout::

    python -m examples.apps.agent                          real engines of this machine
    python -m examples.apps.agent --fakes --compare        latencies of an RTX 3090, no model
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool, tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode

from examples.apps.prompts import CALL, INSTRUCTION
from examples.apps.runner import App, run
from teola_plugin import EnginePool
from teola_plugin.langchain import ChatTeola, on_engine, read_only

ANSWER_TOKENS = 64
SENT: list[str] = []
"""Mails that were sent."""


@read_only
@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"The weather in {city} is mild, with rain in the evening."


@read_only
@tool
def price(product: str) -> str:
    """The price of a product."""
    return f"The price of the {product} is {20 + len(product)} euros."


@tool
def send_mail(to: str) -> str:
    """Send a mail to somebody."""
    SENT.append(to)
    return f"A mail was sent to {to}."


TOOLS: Sequence[BaseTool] = (weather, price, send_mail)


class State(MessagesState, total=False):
    answer: str


def app(pool: EnginePool, *, proxy: str = "llm", tokens: int = ANSWER_TOKENS) -> CompiledStateGraph[State]:
    """Nothing in here knows of `accelerate`. Input: `messages`; output: `messages` and `answer`. Every node has a sync
    and an async form, for `invoke` and `ainvoke`."""
    llm, tools = ChatTeola(pool=pool, max_tokens=tokens), on_engine(TOOLS, pool)
    caller = llm.bind_tools(tools, tool_choice="any")

    def plan(state: State) -> dict[str, Any]:
        return {"messages": [caller.invoke(for_call(state["messages"][-1].content))]}

    async def aplan(state: State) -> dict[str, Any]:
        return {"messages": [await caller.ainvoke(for_call(state["messages"][-1].content))]}

    def report(state: State) -> dict[str, Any]:
        told = [message.content for message in results(state["messages"])]
        reply = llm.invoke(for_answer(question(state["messages"]), told))
        return {"messages": [reply], "answer": reply.content}

    async def areport(state: State) -> dict[str, Any]:
        told = [message.content for message in results(state["messages"])]
        reply = await llm.ainvoke(for_answer(question(state["messages"]), told))
        return {"messages": [reply], "answer": reply.content}

    graph = StateGraph(State)
    graph.add_node("plan", RunnableLambda(plan, aplan))
    graph.add_node("tools", ToolNode(tools))
    graph.add_node("report", RunnableLambda(report, areport))
    graph.add_edge(START, "plan")
    graph.add_edge("plan", "tools")
    graph.add_edge("tools", "report")
    graph.add_edge("report", END)
    return graph.compile()


def for_call(request: Any) -> list[tuple[str, str]]:
    return [("system", CALL), ("human", f"Request: {request}")]


def for_answer(asked: str, told: list[Any]) -> list[tuple[str, str]]:
    passage = "\n".join(told)
    return [("system", INSTRUCTION), ("human", f"Question: {asked}\n\nPassage:\n{passage}\n\nAnswer:")]


def results(messages: list[AnyMessage]) -> list[AnyMessage]:
    return [message for message in messages if message.type == "tool"]


def question(messages: list[AnyMessage]) -> str:
    return str(next(message.content for message in reversed(messages) if message.type == "human"))


def given(args: argparse.Namespace) -> dict[str, Any]:
    return {"messages": [HumanMessage(args.question)]}


class AgentApp(App):
    """Its sources are what the tools said."""

    def sources(self, result: Any) -> list[str]:
        return [f"{message.name}: {message.content}" for message in results(result["messages"])]


APP = AgentApp("agent", app, given, "What is the weather in Rome?", TOOLS)

if __name__ == "__main__":
    run(APP)
