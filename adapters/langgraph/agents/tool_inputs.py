"""What follows from the arguments that a model writes for a tool, before the tool is called.

The arguments of the tool's function are known if no code of the user's own has a say in them. The requests to engines
of the pool are known if the tool was made of a retriever, or if the tracer understands its function.
"""

from __future__ import annotations

import datetime
import decimal
import inspect
import types
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from langchain_core.runnables import RunnableParallel
from langchain_core.tools import BaseTool, StructuredTool, Tool
from pydantic import BaseModel

from teola_plugin.adapters.planned_queries import expected_sizes, log_fallback
from teola_plugin.passes import Optimised, Pass
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.query_run import QueryRun, SubplanRun, current_position
from teola_plugin.shims.langchain_agents import call_arguments, retriever_of, tool_node_parts
from teola_plugin.tracer.draft import TraceResult
from teola_plugin.tracer.functions import trace_function
from teola_plugin.tracer.langchain.trace import trace

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


# ------------------------------------------------------------ arguments of the tool's function

_PLAIN_TYPES = (str, int, float, bool, bytes, type(None), Any)
_PRINTED_TYPES = (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)
_CONTAINERS = (list, tuple, dict, set, frozenset, Union, types.UnionType)
_USER_CODE = {"__init__", "__new__", "model_post_init", "model_validate", "__get_pydantic_core_schema__", "__setattr__"}
_INJECTED = ("callbacks", "config", "run_manager", "runtime", "store", "writer", "state", "tool_call_id")
"""Parameters that a framework fills in where the call is made."""
_INJECTED_TYPES = ("RunnableConfig", "Callback", "Runtime", "Injected", "BaseStore", "StreamWriter")


def function_arguments(tool: BaseTool, args: Mapping[str, Any]) -> Arguments | None:
    """Return what the tool's function is called with for these arguments of the model; None if its schema is not plain.

    Raises what the schema raises for arguments that it refuses.
    """
    return call_arguments(tool, args) if is_plain(tool.args_schema) else None


def named_arguments(tool: Any, args: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a tool's function by the names of its parameters; None if its schema is not plain.

    `tool`: made of a function. Raises what the schema raises for arguments that it refuses.
    """
    arguments = function_arguments(tool, args)
    if arguments is None:
        return None
    names = inspect.signature(tool.func or tool.coroutine).parameters
    return {**dict(zip(names, arguments[0], strict=False)), **arguments[1]}


def needs_runtime_context(function: Callable[..., Any]) -> bool:
    """Return True if a function takes what only its place gives: a config, a run manager, state, a store."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    return any(
        name in _INJECTED or any(injected in str(parameter.annotation) for injected in _INJECTED_TYPES)
        for name, parameter in parameters.items()
    )


def is_plain(schema: Any) -> bool:
    """Return True if arguments are checked by code of the framework alone.

    That is so without a schema, and for a model of plain fields without validators of the user's own. Models of
    pydantic 1 are not looked into.
    """
    if schema is None or isinstance(schema, dict):
        return True
    if not isinstance(schema, type) or not issubclass(schema, BaseModel):
        return False
    subclasses = schema.__mro__[: schema.__mro__.index(BaseModel)]
    if any(_USER_CODE & vars(cls).keys() for cls in subclasses):
        return False
    decorators = schema.__pydantic_decorators__
    kinds = ("validators", "field_validators", "root_validators", "model_validators")
    if any(getattr(decorators, kind, True) for kind in kinds):
        return False
    return all(
        field.default_factory in (None, list, dict, set)
        and all(map(_is_constraint, field.metadata))
        and _is_plain_type(field.annotation)
        for field in schema.model_fields.values()
    )


def _is_constraint(metadata: Any) -> bool:
    """Return True for a description, a bound, a length or a pattern; False for a function."""
    if isinstance(metadata, str):
        return True
    is_librarys = type(metadata).__module__.split(".", 1)[0] in ("annotated_types", "pydantic")
    values = getattr(metadata, "__dict__", {}).values()
    return is_librarys and not hasattr(metadata, "func") and not any(map(callable, values))


def _is_plain_type(annotation: Any) -> bool:
    """Return True if values of an annotation are checked by Pydantic alone, without code of the user's."""
    if annotation in _PLAIN_TYPES or annotation in _PRINTED_TYPES:
        return True
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return True
    if origin is Annotated:
        return _is_plain_type(inner[0]) and all(map(_is_constraint, inner[1:]))
    return (origin or annotation) in _CONTAINERS and all(one is ... or _is_plain_type(one) for one in inner)


def plain_tools(bound: Any) -> dict[str, Any]:
    """Return the tools of a tool node, by name, that are functions called with what the model writes, and nothing else.

    None of a node whose calls are handed to a function of the user's own or to middleware.
    """
    parts = tool_node_parts(bound)
    if parts is None or parts.wrapped:
        return {}
    return {
        name: tool
        for name, tool in parts.tools.items()
        if type(tool) in (StructuredTool, Tool) and name not in parts.injected and is_plain(tool.args_schema)
    }


# ------------------------------------------------------------ requests to engines


@dataclass(frozen=True, slots=True)
class ToolPlanner:
    """The engines that work of tools is planned on, and the rules for it."""

    pool: EnginePool
    passes: tuple[Pass, ...] | None = None
    speculate: str = "auto"

    def may_prefetch(self) -> bool:
        """Return False where the user has switched off everything that runs before its place.

        That is `speculate="off"`, or no passes at all, in the options of `accelerate` or else of the pool.
        """
        passes = self.pool.passes if self.passes is None else self.passes
        return self.speculate != "off" and bool(passes)

    def plan(self, traced: TraceResult, value: Any) -> Optimised:
        """Return the e-graph for an input."""
        return self.pool.plan(
            traced.template, expected_sizes(traced, value), passes=self.passes, speculate=self.speculate
        )


@dataclass(frozen=True, slots=True, eq=False)
class ToolWork:
    """The requests of a tool to engines, as a graph of its arguments. The tool claims them in its place."""

    planner: ToolPlanner
    traced: TraceResult
    to_input: Callable[[Mapping[str, Any]], Any]
    """Returns the graph's input for the arguments that the model writes. Raises for those that the tool refuses."""

    def start(self, run: QueryRun, args: Mapping[str, Any]) -> SubplanRun:
        """Start the requests as a part of a live query. Raises what `to_input` raises.

        `args`: the arguments that the model wrote for the tool. Requests that the tool itself makes later may take over
        the results.
        """
        value = self.to_input(args)
        graph = self.planner.plan(self.traced, value).graph
        form = current_position.get().form  # that of the model's node: its tools get the same handlers
        return run.begin_subplan(graph, self.traced.calls, value, lookahead=True, form=form)  # later parts may adopt it


def tool_work(tool: BaseTool, planner: ToolPlanner) -> ToolWork | None:
    """Return the requests that follow from a tool's arguments alone.

    None if there are none, if one goes to an engine outside the pool, or if one writes.
    """
    try:
        work = _traced_work(tool, planner)
        if work is None:
            return None
        requests = [p for p in planner.plan(work.traced, None).graph if p.on_engine]
        engines = {p.engine for p in requests}
        has_writes = any(effect.writes for p in requests for effect in p.effects)
        return work if engines and engines <= set(planner.pool.engine_names) and not has_writes else None
    except Exception as error:
        log_fallback(error, tool, f"the tool {tool.name!r}")
        return None


def _traced_work(tool: BaseTool, planner: ToolPlanner) -> ToolWork | None:
    """Return the requests of a tool that LangChain made of a retriever, or of a function that is understood."""
    retriever = retriever_of(tool)
    if retriever is not None:
        traced = trace(RunnableParallel({tool.name: retriever}))  # named after the tool, in traces
        return ToolWork(planner, traced, lambda args: args["query"])
    function = getattr(tool, "func", None) or getattr(tool, "coroutine", None)
    if type(tool) not in (StructuredTool, Tool) or function is None:
        return None
    names = tuple(inspect.signature(function).parameters)

    def to_input(args: Mapping[str, Any]) -> dict[str, Any]:
        arguments = named_arguments(tool, args)
        return dict(args) if arguments is None else arguments

    return ToolWork(planner, trace_function(function, names, tool.name), to_input)
