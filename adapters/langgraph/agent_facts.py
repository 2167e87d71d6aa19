"""What `explain()` tells of agents: what their model is asked, and when their tools begin."""

from __future__ import annotations

import json
from typing import Any

from langchain_core.utils.function_calling import convert_to_openai_tool

from teola_plugin.adapters.langgraph.agents.eager_tools import EagerTools
from teola_plugin.adapters.langgraph.explain import PREFILLED, CallFacts, ToolFacts
from teola_plugin.graph import PromptPart
from teola_plugin.shims.langchain_agents import AgentModel, tool_node_parts
from teola_plugin.tracer.langchain.classes import leaf_of
from teola_plugin.tracer.leaf import GenerationLeaf


def described(agent: AgentModel) -> str:
    return "an agent's model" + ("; middleware may change what it is asked" if agent.wrapped else "")


def asked_by(agent: AgentModel, prefills: bool) -> CallFacts:
    """What the agent's model is asked. `prefills`: whether its next prompts are, while tools run."""
    told = [*map(_tool_text, agent.tools), *([] if agent.system_message is None else [agent.system_message.text])]
    constant = [PromptPart.literal(text) for text in told if text]
    why = "nothing stands before its first call"
    if prefills:
        why += f"; {PREFILLED}"
    return CallFacts(agent.node, engine_of(agent.model), (*constant, PromptPart.var("messages")), why=why)


def engine_of(model: Any) -> str:
    """The engine that a model is on; empty for none."""
    leaf = leaf_of(model, {})
    return leaf.engine if isinstance(leaf, GenerationLeaf) else ""


def _tool_text(tool: Any) -> str:
    """As a model is told of it, about."""
    try:
        return json.dumps(convert_to_openai_tool(tool))
    except Exception:  # it has no description that the framework can make
        return ""


def tools_of(bound: Any, eager: EagerTools | None) -> tuple[ToolFacts, ...]:
    """Of a node that runs tools; none of any other."""
    parts = tool_node_parts(bound)
    if parts is None:
        return ()
    return tuple(_tool(name, eager, name in parts.injected, parts.wrapped) for name in parts.tools)


def _tool(name: str, eager: EagerTools | None, injected: bool, wrapped: bool) -> ToolFacts:
    known = None if eager is None else eager.tools.get(name)
    if known is not None:
        what = "it runs" if known.runs else "its engine work begins"
        return ToolFacts(name, early=f"{what} when the model has written its call")
    if wrapped:
        return ToolFacts(name, why="its calls are handed to middleware, which may hold them back")
    if injected:
        return ToolFacts(name, why="it takes what only its place can give it: state, a store, the id of its call")
    if eager is None:
        return ToolFacts(name, why="somebody may decide before it, or nothing runs ahead")
    return ToolFacts(name, why="it is not declared read-only, and is no retriever of the pool's alone")
