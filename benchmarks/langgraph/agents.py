"""Agents as LangChain's documentation makes them: `create_agent` with tools, and a supervisor of two."""

from __future__ import annotations

import time
from typing import Any, Literal, TypedDict

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import create_retriever_tool, tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command

from benchmarks.langgraph.answers import AT_ONCE
from benchmarks.langgraph.kits import Kit
from teola_plugin.langchain import read_only

SYSTEM = (
    "You are a helpful assistant with access to the reports of a company and to the notes of its staff. Look up what "
    "you need before you answer; do not guess. Name the passages that an answer rests on, and say so if there are none."
)
SUPERVISOR = (
    "You are a supervisor tasked with managing a conversation between the following workers: researcher, writer. Given "
    "the following user request, respond with the worker to act next. Each worker will perform a task and respond with "
    "their results and status. When finished, respond with FINISH."
)


def search_reports(kit: Kit) -> Any:
    return create_retriever_tool(kit.retriever(), "search_reports", "Search the company's reports.")


def react(kit: Kit, *middleware: Any) -> Any:
    """Two collections, one after the other."""
    notes = create_retriever_tool(kit.retriever(kit.notes), "search_notes", "Search the notes of the staff.")
    return create_agent(kit.llm, [search_reports(kit), notes], system_prompt=SYSTEM, middleware=middleware)


def react_parallel(kit: Kit) -> Any:
    """Three searches in one answer."""
    return create_agent(kit.llm, [search_reports(kit)], system_prompt=f"{SYSTEM} {AT_ONCE}")


def slow_tools(kit: Kit) -> Any:
    """Two services that take a second each, called in one answer, and declared to only read."""

    @read_only
    @tool
    def share_price(company: str) -> str:
        """The price of a company's share."""
        time.sleep(kit.tool_s)
        return f"{company}: 17.40"

    @read_only
    @tool
    def headlines(topic: str) -> str:
        """What newspapers write on a topic."""
        time.sleep(kit.tool_s)
        return f"Nothing new on {topic}."

    return create_agent(kit.llm, [share_price, headlines], system_prompt=f"{SYSTEM} {AT_ONCE}")


class Router(TypedDict):
    """Worker to route to next. If no workers needed, route to FINISH."""

    next: Literal["researcher", "writer", "FINISH"]


def supervisor(kit: Kit) -> Any:
    """Its agents answer it, and it says who is next."""
    llm = kit.llm
    research_agent = create_agent(llm, [search_reports(kit)], system_prompt="You are a researcher. Look things up.")
    write_agent = create_agent(llm, [], system_prompt="You are a writer. Write down what the researcher has found.")

    def supervisor_node(state: MessagesState) -> Command[Literal["researcher", "writer", "__end__"]]:
        messages = [{"role": "system", "content": SUPERVISOR}, *state["messages"]]
        response = llm.with_structured_output(Router).invoke(messages)
        goto = response["next"]
        if goto == "FINISH":
            goto = END
        return Command(goto=goto)

    def research_node(state: MessagesState) -> Command[Literal["supervisor"]]:
        result = research_agent.invoke({"messages": [*state["messages"]]})
        found = HumanMessage(content=result["messages"][-1].content, name="researcher")
        return Command(update={"messages": [found]}, goto="supervisor")

    def write_node(state: MessagesState) -> Command[Literal["supervisor"]]:
        result = write_agent.invoke({"messages": [*state["messages"]]})
        text = HumanMessage(content=result["messages"][-1].content, name="writer")
        return Command(update={"messages": [text]}, goto="supervisor")

    builder = StateGraph(MessagesState)
    builder.add_edge(START, "supervisor")
    builder.add_node("supervisor", supervisor_node)
    builder.add_node("researcher", research_node)
    builder.add_node("writer", write_node)
    return builder.compile()
