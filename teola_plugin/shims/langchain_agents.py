"""Private names of LangChain's agents, tools and chat histories, and of LangGraph's tool node: each touched here, in a
function that says what happens without it.

Seen unchanged from langchain-core 1.7.0, langchain 1.4.0 and langgraph 1.2.0 on. Nothing of langchain or langgraph is
imported here: their objects are known by where their functions come from.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, NamedTuple

from teola_plugin.shims import report_missing


class AgentModel(NamedTuple):
    """The model that the model node of `create_agent` calls, and the arguments of the call."""

    node: str
    """The node's name."""
    model: Any
    """As it was given: no tools are bound to it."""
    tools: tuple[Any, ...]
    """What is bound to it for a call, in order: tools, and descriptions of tools that the provider runs."""
    system_message: Any
    """Stands before the messages of the state; None for none."""
    wrapped: bool
    """Whether middleware may change the request, or ask another model."""
    structured: bool
    """Whether a format of the answer is asked for, which adds tools or arguments."""


def agent_model(graph: Any) -> AgentModel | None:
    """Return the model of a graph that `create_agent` compiled; None for any other graph.

    Private: the variables of the closure of `create_agent.<locals>.model_node`; since langchain 1.0.0. Where they are
    called otherwise: None, and the node is the user's own code to us.
    """
    node = getattr(graph, "nodes", {}).get("model")
    function = getattr(getattr(node, "bound", None), "func", None)
    if not _is_from(function, "langchain.agents.factory", "create_agent.<locals>.model_node"):
        return None
    closure = _closure(function)
    variables = ("model", "default_tools", "system_message", "wrap_model_call_handler", "initial_response_format")
    if closure is None or not all(name in closure for name in variables):
        report_missing("langchain", f"create_agent({', '.join(variables)})", "nothing of an agent starts early")
        return None
    model, tools, system, handler, answer = (closure[name] for name in variables)
    return AgentModel("model", model, tuple(tools), system, handler is not None, answer is not None)


class ReactModel(NamedTuple):
    """The chain that the model node of `create_react_agent` calls."""

    node: str
    chain: Any
    """From the state to the answer: a Runnable of the prompt, and of the model with its tools. None where a function
    of the user's own chooses the model for each call."""
    prompt: Any
    """As it was given: a text, a message, a Runnable or a function; None for none."""
    takes_messages: bool
    """True if each call gets the messages of a state that is a dictionary: no hook chooses others before it."""


def react_model(graph: Any) -> ReactModel | None:
    """Return the chain of a graph that langgraph's `create_react_agent` compiled; None for any other graph.

    Private: the variables of the closures of `create_react_agent.<locals>.call_model`, and of `_resolve_model` and
    `_get_model_input_state` in it; since langgraph-prebuilt 1.0.0. Where they are called otherwise: None, and the node
    is the user's own code to us.
    """
    node = getattr(graph, "nodes", {}).get("agent")
    function = getattr(getattr(node, "bound", None), "func", None)
    where = "create_react_agent.<locals>.call_model"
    if not _is_from(function, "langgraph.prebuilt.chat_agent_executor", where):
        return None
    closure = _closure(function) or {}
    prompts = _closure(closure.get("_resolve_model")) or {}
    states = _closure(closure.get("_get_model_input_state")) or {}
    variables = ("static_model", "prompt", "pre_model_hook", "state_schema")
    if not all(name in {**closure, **prompts, **states} for name in variables):
        report_missing(
            "langgraph-prebuilt", f"create_react_agent({', '.join(variables)})", "nothing of an agent starts early"
        )
        return None
    has_fields = hasattr(states["state_schema"], "model_fields")
    takes_messages = states["pre_model_hook"] is None and not has_fields
    return ReactModel("agent", closure["static_model"], prompts["prompt"], takes_messages)


# ------------------------------------------------------------ chat histories

_CHAIN_VARIABLES = {"_call_runnable_sync": "runnable_sync", "_call_runnable_async": "runnable_async"}


def chain_with_history(function: Any) -> Any:
    """Return the chain that a function of `RunnableWithMessageHistory` returns for each call; None for any other one.

    Private: the closures of two functions in its constructor; since langchain-core 1.7.0. Where they are called
    otherwise: None, and the chain is planned when it is called first, without the functions in it.
    """
    for name, variable in _CHAIN_VARIABLES.items():
        where = f"RunnableWithMessageHistory.__init__.<locals>.{name}"
        if _is_from(function, "langchain_core.runnables.history", where):
            return (_closure(function) or {}).get(variable)
    return None


# ------------------------------------------------------------ tools


def retriever_of(tool: Any) -> Any:
    """Return the retriever of a tool that `create_retriever_tool` made; None for any other tool.

    Private: the variables of the closures of the two functions inside `create_retriever_tool`; since langchain-core
    1.7.0. Where they are called otherwise: None, and the tool runs as user code does.
    """
    retrievers = []
    for name, function in (("func", getattr(tool, "func", None)), ("afunc", getattr(tool, "coroutine", None))):
        if not _is_from(function, "langchain_core.tools.retriever", f"create_retriever_tool.<locals>.{name}"):
            return None
        retrievers.append((_closure(function) or {}).get("retriever"))
    return retrievers[0] if retrievers[0] is retrievers[1] else None


def call_arguments(tool: Any, args: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of a tool's function for these arguments of the model. Raise what the tool's schema raises.

    Private: `BaseTool._to_args_and_kwargs`; since langchain-core 1.7.0. Without it: None, and the tool is called in its
    place, never early.
    """
    parse = getattr(tool, "_to_args_and_kwargs", None)
    if parse is None:
        report_missing("langchain-core", "BaseTool._to_args_and_kwargs", "no tool starts early")
        return None
    positional, keywords = parse(copy.copy(dict(args)), None)
    return tuple(positional), dict(keywords)


class ToolNodeParts(NamedTuple):
    """The parts of a tool node."""

    tools: Mapping[str, Any]
    injected: frozenset[str]
    """Tools that take arguments which the model does not write: state, store, runtime, the id of the call."""
    wrapped: bool
    """Whether each call is handed to a function of the user's own, or of middleware, which may hold it back."""


def tool_node_parts(node: Any) -> ToolNodeParts | None:
    """Return the parts of a `ToolNode`; None for anything else, or for a class of the user's own.

    Private: `_injected_args`, `_wrap_tool_call` and `_awrap_tool_call` of `langgraph.prebuilt.tool_node.ToolNode`, and
    `_injected_args_keys` of tools; since langgraph-prebuilt 1.0.0 and langchain-core 1.7.0. Without one of them: None,
    and no tool of the node begins before its place.
    """
    names = ("_injected_args", "_wrap_tool_call", "_awrap_tool_call", "_run_one", "_arun_one", "_func", "_afunc")
    if not _is_from(type(node), "langgraph.prebuilt.tool_node", "ToolNode"):
        return None
    for name in names:
        if not hasattr(node, name):
            report_missing("langgraph-prebuilt", f"ToolNode.{name}", "no tool of an agent starts early")
            return None
    tools, injected = dict(node.tools_by_name), node._injected_args
    taking = frozenset(name for name, tool in tools.items() if _takes_injected(tool, injected.get(name)))
    wrapped = node._wrap_tool_call is not None or node._awrap_tool_call is not None
    return ToolNodeParts(tools, taking, wrapped)


def _takes_injected(tool: Any, injected: Any) -> bool:
    fields = vars(injected) if hasattr(injected, "__dict__") else None
    return fields is None or any(fields.values()) or bool(getattr(tool, "_injected_args_keys", True))


def tool_calls_in(node: Any, input: Any) -> list[Any]:
    """Return the calls that a `ToolNode` makes for an input, each a dictionary with `name`, `args` and `id`.

    Private: `ToolNode._parse_input`; since langgraph-prebuilt 1.0.0. Without it, and for an input that the node
    refuses: none, and calls of models in tools start in their place.
    """
    parse = getattr(node, "_parse_input", None)
    if parse is None:
        report_missing("langgraph-prebuilt", "ToolNode._parse_input", "calls of models in tools start in their place")
        return []
    try:
        calls, *_ = parse(input)
    except Exception:  # the node will raise it, too
        return []
    return list(calls)


RunOne = Callable[..., Any]
"""(tool call, ...) -> the message that comes of it; for a loop, a coroutine of that."""


def tool_node_with(node: Any, around: Callable[[RunOne], RunOne], in_loop: Callable[[RunOne], RunOne]) -> Any:
    """Return a copy of a `ToolNode` whose functions that run a single call are wrapped.

    `around` wraps the sync one, `in_loop` the coroutine one: tools claim prefetched calls there. Private: `_run_one`,
    `_arun_one`, `_func` and `_afunc`; since langgraph-prebuilt 1.0.0. `tool_node_parts` checks that they are there.
    """
    copied = copy.copy(node)
    attributes = vars(copied)
    attributes["func"], attributes["afunc"] = copied._func, copied._afunc
    attributes["_run_one"] = around(MethodType(type(node)._run_one, copied))
    attributes["_arun_one"] = in_loop(MethodType(type(node)._arun_one, copied))
    return copied


def graph_keys(configurable: Mapping[str, Any]) -> list[str]:
    """Return the keys under which LangGraph keeps what it lends to a task: its runtime, its writers, its scratchpad.

    Private: that these keys begin with `__pregel_` (`langgraph._internal._constants`); since langgraph 0.2. Where they
    do not: none, and no code of the user's own is run before its place.
    """
    return [key for key in configurable if key.startswith("__pregel_")]


def _is_from(function: Any, module: str, name: str) -> bool:
    return getattr(function, "__module__", "") == module and getattr(function, "__qualname__", "") == name


def _closure(function: Any) -> dict[str, Any] | None:
    """Return the variables of a function's closure by name; None where one has no value yet."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    try:
        return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)) if code else None
    except ValueError:
        return None
