"""Which tools of a graph may begin before their place, and how their places claim what was begun."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, StructuredTool, Tool

from teola_plugin.adapters.langchain.read_only import is_read_only
from teola_plugin.adapters.langgraph.agents import approvals
from teola_plugin.adapters.langgraph.agents.arguments import takes_its_place
from teola_plugin.adapters.langgraph.agents.reach import reach
from teola_plugin.adapters.langgraph.agents.tool_prefetch import ToolHistory, is_streamed
from teola_plugin.adapters.langgraph.agents.tool_work import Planner, ToolWork, work_of
from teola_plugin.shims.langchain_agents import (
    ToolNodeParts,
    agent_model,
    react_model,
    retriever_of,
    tool_node_parts,
    tool_node_with,
)
from teola_plugin.tracer.langgraph.shape import shape_of

Names = frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class EagerTool:
    """A tool of which something may begin before its place."""

    tool: BaseTool
    work: ToolWork | None
    """What it asks engines for."""
    runs: bool
    """Whether its function may run early."""
    reads: bool
    """Whether it changes nothing: its author says so, or it was made of a retriever."""
    tells: bool
    """Whether its function calls what listeners hear of."""
    history: ToolHistory = field(default_factory=ToolHistory)

    def may_run_early(self, config: RunnableConfig) -> bool:
        """Whether a call made ahead, where the model is called with this config, can be kept from who listens there."""
        return self.runs and self.history.allows_prefetch(config) and not (self.tells and is_streamed(config))

    def method(self, *, has_loop: bool) -> str | None:
        """Return the method by which the tool is called early; None where there is no loop for its coroutine."""
        if has_loop and getattr(self.tool, "coroutine", None) is not None:
            return "_arun"
        return None if getattr(self.tool, "func", None) is None else "_run"


@dataclass(frozen=True, slots=True, eq=False)
class EagerTools:
    """What may begin early of one graph's tools, and where its model is listened to."""

    tools: Mapping[str, EagerTool]
    """By name; the others are called in their places."""
    models: Names
    """Nodes that lead to the tools directly."""
    nodes: Names
    """Those that run tools."""
    returns: Names
    """Tools whose results are shown to the model next."""

    def paused(self, *asked: Collection[str] | str | None) -> bool:
        """Whether the graph is to stop at one of the nodes: somebody decides there."""
        return any(approvals.paused(one, self.models | self.nodes) for one in asked)


def eager_tools_of(graph: Any, planner: Planner) -> EagerTools | None:
    """Of a compiled `StateGraph` with tool nodes: one that `create_agent` or `create_react_agent` made, or one written
    by hand. None where nothing may begin early: without such nodes, where calls are handed to middleware, where
    somebody is asked between the model's answer and its tools, and where nothing runs ahead at all."""
    shape = shape_of(graph)
    if shape is None or not planner.ahead:
        return None
    parts = {name: found for name, node in shape.nodes.items() if (found := tool_node_parts(node.bound))}
    nodes = frozenset(parts)
    models = approvals.models_before(shape, nodes)
    known = agent_model(graph) or react_model(graph)
    models = models if known is None else models & {known.node}  # hooks behind it are no models
    behind = {end for name in nodes for end in approvals.behind(shape, shape.nodes[name])}
    if not models or any(found.wrapped for found in parts.values()):
        return None
    again = known is not None or not models.isdisjoint(behind)
    tools = [tool for found in parts.values() for tool in found.tools.values()] if again else []
    returns = frozenset(tool.name for tool in tools if not tool.return_direct)
    made = EagerTools(_tools(parts.values(), planner), models, nodes, returns)
    return None if made.paused(graph.interrupt_before_nodes, graph.interrupt_after_nodes) else made


def _tools(parts: Iterable[ToolNodeParts], planner: Planner) -> dict[str, EagerTool]:
    """Two tools of one name in different nodes are none: nobody knows which will be called."""
    found: dict[str, EagerTool] = {}
    twice: set[str] = set()
    for node in parts:
        for name, tool in node.tools.items():
            twice |= {name} & found.keys()
            made = None if name in node.injected else _eager(tool, planner)
            if made is not None:
                found[name] = made
    return {name: one for name, one in found.items() if name not in twice}


def _eager(tool: BaseTool, planner: Planner) -> EagerTool | None:
    functions = [one for name in ("func", "coroutine") if (one := getattr(tool, name, None)) is not None]
    comes_to = reach(functions)
    if comes_to.asks:
        return None
    reads, work = is_read_only(tool) or retriever_of(tool) is not None, work_of(tool, planner)
    runs = _may_run(tool, functions) and not comes_to.places
    return EagerTool(tool, work, runs, reads, comes_to.tells) if reads or work is not None else None


def _may_run(tool: BaseTool, functions: Iterable[Callable[..., Any]]) -> bool:
    """Whether its author says that it changes nothing, and its functions take nothing but what the model writes."""
    known = is_read_only(tool) and type(tool) in (StructuredTool, Tool)
    return known and not any(map(takes_its_place, functions))


# ------------------------------------------------------------ their places

Around = Callable[[Callable[..., Any]], Callable[..., Any]]


def with_eager_tools(node: Any, around: Around, in_loop: Around) -> Any:
    """Return a copy of a `ToolNode` in which these wrap what runs one tool call; anything else as it is."""
    return node if tool_node_parts(node) is None else tool_node_with(node, around, in_loop)
