"""The graphs that are measured: how each is made and called, and what of it can be seen from outside its code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import BaseMessage

from benchmarks.langchain.cookbook import ASKED
from benchmarks.langgraph import agents, rag_graphs, workflows
from benchmarks.langgraph.kits import Kit

Given = dict[str, Any]
DOCUMENTS, TOKENS = (4, 10), (10, 60)
FEEDBACK = "Say where each statement comes from, and leave out what nobody has asked for."


@dataclass(frozen=True, slots=True)
class App:
    make: Callable[[Kit], Any]
    """The compiled graph."""
    given: Given
    answer_node: str = ""
    """The node whose message is the answer, for the time to its first token; empty where it is not one of words."""
    resume: str = ""
    """What a human says to its interrupt."""
    unseen: str = ""
    """Why the tracer cannot see what would have to begin earlier; empty where it can."""
    wide: bool = True
    """Whether the number of documents makes any difference."""
    gain: bool = True


QUESTION: Given = {"question": ASKED}
SPOKEN: Given = {"messages": [("user", ASKED)]}
AGENTS = "agents that the nodes' own code calls: what they ask for, and how often, is decided in their loops"

APPS: dict[str, App] = {
    "corrective RAG": App(rag_graphs.corrective_rag, QUESTION, "generate"),
    "corrective RAG, batch": App(lambda kit: rag_graphs.corrective_rag(kit, batch=True), QUESTION, "generate"),
    "self-RAG": App(rag_graphs.self_rag, {**QUESTION, "tries": 0}, "generate"),
    "adaptive router": App(rag_graphs.adaptive_rag, QUESTION, "generate"),
    "plan-and-execute": App(workflows.plan_and_execute, {"input": ASKED, "past_steps": []}, "answer"),
    "map-reduce with Send": App(workflows.map_reduce, {"topic": "the terms of contracts"}),
    "reflection": App(workflows.reflection, SPOKEN, "generate", wide=False),
    "supervisor": App(agents.supervisor, SPOKEN, unseen=AGENTS),
    "ReAct, two retrievers": App(agents.react, SPOKEN, "model"),
    "ReAct, three at once": App(agents.react_parallel, SPOKEN, "model"),
    "slow read-only tools": App(agents.slow_tools, SPOKEN, "model", wide=False),
    "human interrupt": App(workflows.human_interrupt, QUESTION, "revise", resume=FEEDBACK),
    "nothing to gain": App(workflows.one_node, SPOKEN, "chatbot", wide=False, gain=False),
}


def shown(found: Any) -> Any:
    """What the user sees of a final state: messages have ids, and tell what was cached, in the plain object, too."""
    if isinstance(found, BaseMessage):
        calls = [(call["name"], call["args"]) for call in getattr(found, "tool_calls", ())]
        return found.type, found.name, found.content, calls
    if isinstance(found, dict):
        return {key: shown(value) for key, value in found.items() if key != "__interrupt__"}
    if isinstance(found, list | tuple):
        return [shown(one) for one in found]
    return found
