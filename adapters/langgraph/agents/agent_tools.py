"""The tools of a graph that may be called, or have their requests sent, while the model still writes.

Nothing of a tool is prefetched where somebody may stand between the model's answer and the tool. A node that calls a
model has to lead to the tools directly: what runs between them (hooks after the model, a node that asks a human) has
the last word, and so does `interrupt()` anywhere on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, StructuredTool, Tool

from teola_plugin.adapters.langchain.engine_tools import is_read_only
from teola_plugin.adapters.langgraph.agents.reach import reach
from teola_plugin.adapters.langgraph.agents.tool_inputs import Planner, ToolWork, needs_place, tool_work
from teola_plugin.adapters.langgraph.agents.tool_prefetch import ToolHistory, is_streamed
from teola_plugin.shims.langchain_agents import (
    ToolNodeParts,
    agent_model,
    react_model,
    retriever_of,
    tool_node_parts,
    tool_node_with,
)
from teola_plugin.tracer.langgraph.shape import GraphShape, NodeShape, shape_of

Names = frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class AgentTool:
    """A tool that is prefetched, or whose requests to engines are."""

    tool: BaseTool
    work: ToolWork | None
    """Its requests to engines, if they follow from its arguments."""
    is_callable_early: bool
    """True if its function may be called before its place."""
    is_read_only: bool
    """True if it changes nothing: its author says so, or it was made of a retriever."""
    has_events: bool
    """True if its function calls objects that listeners hear of."""
    history: ToolHistory = field(default_factory=ToolHistory)

    def may_prefetch(self, config: RunnableConfig) -> bool:
        """Return True if a call can be hidden from everybody who listens where the model is called with this config."""
        is_heard = self.has_events and is_streamed(config)
        return self.is_callable_early and self.history.allows_prefetch(config) and not is_heard

    def method(self, *, has_loop: bool) -> str | None:
        """Return the method by which a prefetch calls the tool, the one that the original will call.

        None if the tool has nothing but a coroutine, and there is no loop.
        """
        if has_loop and getattr(self.tool, "coroutine", None) is not None:
            return "_arun"
        return None if getattr(self.tool, "func", None) is None else "_run"


@dataclass(frozen=True, slots=True, eq=False)
class AgentTools:
    """The tools of one graph that are prefetched, and the nodes around them."""

    tools: Mapping[str, AgentTool]
    """By name; the others are called in their places."""
    models: Names
    """Nodes that call a model and lead to the tools directly."""
    nodes: Names
    """Nodes that run tools."""
    returning: Names
    """Tools whose results are shown to the model next."""

    def is_interrupted(self, *stops: Collection[str] | str | None) -> bool:
        """Return True if a graph that stops at these nodes (`interrupt_before`, ...) stops at one of ours."""
        nodes = self.models | self.nodes
        return any(stop == "*" or (not isinstance(stop, str) and not nodes.isdisjoint(stop or ())) for stop in stops)


def agent_tools(graph: Any, planner: Planner) -> AgentTools | None:
    """Return the prefetchable tools of a compiled `StateGraph`: of `create_agent`, `create_react_agent`, or by hand.

    None where nothing may be prefetched: without tool nodes, where calls are handed to middleware, where somebody is
    asked between the model's answer and its tools, and where prefetching is switched off.
    """
    shape = shape_of(graph)
    if shape is None or not planner.may_prefetch():
        return None
    parts_by_node = {name: parts for name, node in shape.nodes.items() if (parts := tool_node_parts(node.bound))}
    nodes = frozenset(parts_by_node)
    models = _models_before(shape, nodes)
    agent = agent_model(graph) or react_model(graph)
    models = models if agent is None else models & {agent.node}  # hooks after it are no models
    if not models or any(parts.wrapped for parts in parts_by_node.values()):
        return None
    next_nodes = {end for name in nodes for end in _successors(shape, shape.nodes[name])}
    is_loop = agent is not None or not models.isdisjoint(next_nodes)
    tools = [tool for parts in parts_by_node.values() for tool in parts.tools.values()] if is_loop else []
    returning = frozenset(tool.name for tool in tools if not tool.return_direct)
    result = AgentTools(_prefetchable(parts_by_node.values(), planner), models, nodes, returning)
    return None if result.is_interrupted(graph.interrupt_before_nodes, graph.interrupt_after_nodes) else result


def _prefetchable(nodes: Iterable[ToolNodeParts], planner: Planner) -> dict[str, AgentTool]:
    """Return the prefetchable tools by name, without those of one name in two nodes: which is called is not known."""
    result: dict[str, AgentTool] = {}
    ambiguous: set[str] = set()
    for node in nodes:
        for name, tool in node.tools.items():
            ambiguous |= {name} & result.keys()
            prefetchable = None if name in node.injected else _agent_tool(tool, planner)
            if prefetchable is not None:
                result[name] = prefetchable
    return {name: tool for name, tool in result.items() if name not in ambiguous}


def _agent_tool(tool: BaseTool, planner: Planner) -> AgentTool | None:
    functions = [function for name in ("func", "coroutine") if (function := getattr(tool, name, None)) is not None]
    uses = reach(functions)
    if uses.asks_human:
        return None
    reads, work = is_read_only(tool) or retriever_of(tool) is not None, tool_work(tool, planner)
    is_declared = is_read_only(tool) and type(tool) in (StructuredTool, Tool)
    is_callable_early = is_declared and not any(map(needs_place, functions)) and not uses.needs_place
    return AgentTool(tool, work, is_callable_early, reads, uses.has_events) if reads or work is not None else None


WrapCall = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns the function that runs one call of a tool, wrapped."""


def watch_tool_node(node: Any, wrap: WrapCall, awrap: WrapCall) -> Any:
    """Return a copy of a `ToolNode` in which these wrap what runs one tool call; anything else as it is."""
    return node if tool_node_parts(node) is None else tool_node_with(node, wrap, awrap)


# ------------------------------------------------------------ nodes between a model and its tools


def _models_before(shape: GraphShape, tools: Names) -> Names:
    """Return the nodes that may lead to tool nodes directly, without anybody being asked on the way.

    Somebody may be asked in the node itself, in its conditional edges, in the tools, or in another of its successors.
    """
    models: set[str] = set()
    for name, node in shape.nodes.items():
        may_lead = any(not branch.ends or not tools.isdisjoint(branch.nodes) for branch in node.branches)
        if not tools or not (may_lead or not tools.isdisjoint((*node.successors, *node.joins))):
            continue
        names = {name, *_successors(shape, node), *tools}
        code = [shape.nodes[one].bound for one in names if one in shape.nodes]
        if not any(reach(one).asks_human for one in (*code, *(branch.path for branch in node.branches))):
            models.add(name)
    return frozenset(models)


def _successors(shape: GraphShape, node: NodeShape) -> Names:
    """Return the nodes that a node may lead to directly; all of them where a conditional edge does not say."""
    ends = (end for branch in node.branches for end in branch.nodes or shape.nodes)
    return frozenset((*node.successors, *node.joins, *ends))
