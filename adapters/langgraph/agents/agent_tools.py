"""The tools of a graph that may be called, or have their requests sent, while the model still writes.

Nothing of a tool is prefetched where somebody may stand between the model's answer and the tool. A node that calls a
model has to lead to the tools directly: what runs between them (hooks after the model, a node that asks a human) has
the last word, and so does `interrupt()` anywhere on the way.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from langchain_core.callbacks import BaseCallbackManager
from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.tools import BaseTool, StructuredTool, Tool
from langchain_core.utils.function_calling import convert_to_openai_tool

from teola_plugin.adapters.langchain.tools import NOTHING_DECLARED, ReadOnlyTools
from teola_plugin.adapters.langgraph.agents.tool_inputs import ToolPlanner, ToolWork, needs_runtime_context, tool_work
from teola_plugin.adapters.langgraph.agents.tool_prefetch import ToolHistory, is_streamed
from teola_plugin.shims.langchain_agents import (
    ToolNodeParts,
    agent_model,
    react_model,
    retriever_of,
    tool_node_parts,
    tool_node_with,
)
from teola_plugin.shims.mcp import ignores_runtime
from teola_plugin.tracer.langgraph.shape import GraphShape, NodeShape, shape_of

_CONFIG_MODULE = "langchain_core.runnables.config"
_MAX_OBJECTS = 2000
"""Objects that are looked at in one search. Code that holds more may use anything."""


@dataclass(slots=True)
class Reach:
    """Things that some code may use, and that keep a tool from being called before its place."""

    asks_human: bool = False
    """It names `interrupt`."""
    needs_runtime_context: bool = False
    """It uses what a graph lends to a node: the stream, the store, the config."""
    has_events: bool = False
    """It uses objects that listeners hear of: Runnables, callbacks."""


def reach(obj: Any) -> Reach:
    """Search a function, or any object that holds functions."""
    result, pending, seen = Reach(), [obj], dict[int, Any]()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        if len(seen) >= _MAX_OBJECTS:
            return Reach(True, result.needs_runtime_context, True)
        seen[id(value)] = value  # kept, so that no other object gets the same id
        _add_uses_of(result, value)
        pending += _parts(value)
    return result


def _add_uses_of(result: Reach, value: Any) -> None:
    """Add to `result` what one object shows of the code that uses it.

    The code may ask a human, read what only its node has, or report events. A name that contains `interrupt` in the
    code of a function is taken for a question to a human.
    """
    module = str(getattr(value, "__module__", "")) if isinstance(value, FunctionType) else ""
    if isinstance(value, ModuleType):
        module = value.__name__
    is_lent = module.startswith("langgraph.config")
    result.needs_runtime_context |= is_lent or module in ("langgraph.types", "langgraph.runtime", _CONFIG_MODULE)
    cls = value if isinstance(value, type) else type(value)
    result.has_events |= issubclass(cls, (Runnable, BaseCallbackManager)) or module.startswith(
        "langchain_core.callbacks"
    )
    if isinstance(value, FunctionType):
        names = set(_names(value.__code__)) - {KeyboardInterrupt.__name__}
        result.asks_human |= any("interrupt" in name.lower() for name in names)
        for used in (value.__globals__.get(name) for name in names):
            home = getattr(used, "__module__", ""), getattr(used, "__name__", "")
            result.asks_human |= home == ("langgraph.types", "interrupt")


def _names(code: CodeType) -> Iterator[str]:
    """Yield the global and attribute names that code uses, also in functions inside it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _parts(value: Any) -> Iterable[Any]:
    """Return what is to be looked at in a value."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, BaseTool | BaseLanguageModel | type | ModuleType):
        return ()
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        code = getattr(value.__func__, "__code__", None)
        return [value.__func__, *_attributes(value.__self__, set() if code is None else set(_names(code)))]
    if isinstance(value, FunctionType):
        return _referenced(value)
    if isinstance(value, Runnable):
        return list(vars(value).values())
    call = vars(type(value)).get("__call__")
    return [MethodType(call, value)] if isinstance(call, FunctionType) else ()


def _referenced(function: FunctionType) -> Iterator[Any]:
    """Yield the objects that a function refers to: closure, globals, defaults, and attributes of these.

    Globals of installed code are left out: it is known by its name alone.
    """
    names = set(_names(function.__code__))
    values = list(function.__defaults__ or ())
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it has no value yet
            values.append(cell.cell_contents)
    if _is_users(function):
        values += (function.__globals__[name] for name in names & function.__globals__.keys())
    for value in values:
        yield value
        yield from _attributes(value, names)
    yield vars(function).get("__wrapped__")


def _attributes(value: Any, names: set[str]) -> Iterator[Any]:
    """Yield attributes of a module, or of an object of the user's class, that code with these names may use."""
    attributes = getattr(value, "__dict__", None)
    if isinstance(value, FunctionType | type | Runnable) or not isinstance(attributes, dict):
        return
    yield from (attributes[name] for name in names & attributes.keys())
    for cls in type(value).__mro__ if not isinstance(value, ModuleType) else ():
        methods = (vars(cls).get(name) for name in names)
        yield from (MethodType(one, value) for one in methods if isinstance(one, FunctionType) and _is_users(one))


_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def _is_users(function: FunctionType) -> bool:
    """Return True for a function of the user's: neither Python's, nor installed, nor ours.

    It goes by the path of the file with the function's code, and by its module for this package.
    """
    is_ours = str(function.__module__).startswith("teola_plugin.")
    return not is_ours and not function.__code__.co_filename.startswith(_INSTALLED)


Names = frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class AgentTool:
    """A tool that is prefetched, or whose requests to engines are."""

    tool: BaseTool
    work: ToolWork | None
    """Its requests to engines, if they follow from its arguments."""
    can_be_prefetched: bool
    """True if its function may be called before its place."""
    is_read_only: bool
    """True if it changes nothing: its author says so, or it was made of a retriever."""
    has_events: bool
    """True if its function calls objects that listeners hear of."""
    history: ToolHistory = field(default_factory=ToolHistory)

    def may_prefetch(self, config: RunnableConfig) -> bool:
        """Return True if a call can be hidden from everybody who listens where the model is called with this config.

        False also under a limit of concurrency in the config, and for a tool whose earlier prefetch had to be stopped
        because it reads what only its place in the graph gives it.
        """
        is_heard = self.has_events and is_streamed(config)
        return self.can_be_prefetched and self.history.allows_prefetch(config) and not is_heard

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
        """Return True if a graph that stops at these nodes (`interrupt_before`, ...) stops at one of ours.

        Each of `stops` is a collection of names, `*` for all nodes, or None for no stop. Ours are the nodes of models
        and tools, between which nothing may start early if somebody has to approve it.
        """
        nodes = self.models | self.nodes
        return any(stop == "*" or (not isinstance(stop, str) and not nodes.isdisjoint(stop or ())) for stop in stops)


def tools_below(graph: Any) -> list[BaseTool]:
    """Return the tools of a graph's tool nodes, and of graphs that are its nodes."""
    tools, bound = list[BaseTool](), [node.bound for node in getattr(graph, "nodes", {}).values()]
    for runnable in bound:
        parts = tool_node_parts(runnable)
        tools += tools_below(runnable) if parts is None else parts.tools.values()
    return tools


def agent_tools(graph: Any, planner: ToolPlanner, read_only: ReadOnlyTools = NOTHING_DECLARED) -> AgentTools | None:
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
    result = AgentTools(_prefetchable(parts_by_node.values(), planner, read_only), models, nodes, returning)
    return None if result.is_interrupted(graph.interrupt_before_nodes, graph.interrupt_after_nodes) else result


def _prefetchable(
    nodes: Iterable[ToolNodeParts], planner: ToolPlanner, read_only: ReadOnlyTools
) -> dict[str, AgentTool]:
    """Return the prefetchable tools by name, without those of one name in two nodes: which is called is not known."""
    result: dict[str, AgentTool] = {}
    ambiguous: set[str] = set()
    for node in nodes:
        for name, tool in node.tools.items():
            ambiguous |= {name} & result.keys()
            needs_injection = name in node.injected and not ignores_runtime(tool)
            prefetchable = None if needs_injection else _agent_tool(tool, planner, read_only)
            if prefetchable is not None:
                result[name] = prefetchable
    return {name: tool for name, tool in result.items() if name not in ambiguous}


def _agent_tool(tool: BaseTool, planner: ToolPlanner, read_only: ReadOnlyTools) -> AgentTool | None:
    """Return how a tool may be prefetched; None if it may ask a human, or if nothing of it can start before its place.

    The tool itself is called before its place only if it is declared read-only and needs nothing that only its node
    has. Otherwise its requests to engines are.
    """
    functions = [function for name in ("func", "coroutine") if (function := getattr(tool, name, None)) is not None]
    uses = reach(functions)
    if uses.asks_human:
        return None
    is_declared = read_only.declares(tool)
    reads, work = is_declared or retriever_of(tool) is not None, tool_work(tool, planner)
    takes_context = any(map(needs_runtime_context, functions)) and not ignores_runtime(tool)
    is_function = type(tool) in (StructuredTool, Tool)
    can_be_prefetched = is_declared and is_function and not takes_context and not uses.needs_runtime_context
    return AgentTool(tool, work, can_be_prefetched, reads, uses.has_events) if reads or work is not None else None


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


def text_of_tool(tool: Any) -> str:
    """Return about what a model is told of a tool."""
    try:
        return json.dumps(convert_to_openai_tool(tool))
    except Exception:  # it has no description that the framework can make
        return ""
