"""What a tool asks engines of the pool for, as far as that is known from its arguments alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.runnables import RunnableParallel
from langchain_core.tools import BaseTool, StructuredTool, Tool

from teola_plugin.adapters.early_work import log_fallback, shape
from teola_plugin.adapters.langgraph.agents.arguments import given, is_plain
from teola_plugin.passes import Optimised, Pass
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.context import current_place
from teola_plugin.runtime.query_run import PartRun, QueryRun
from teola_plugin.shims.langchain_agents import retriever_of
from teola_plugin.tracer.draft import TraceResult
from teola_plugin.tracer.functions import trace_function
from teola_plugin.tracer.langchain.trace import trace


@dataclass(frozen=True, slots=True)
class Planner:
    """On which engines, and by which rules, early work is planned."""

    pool: EnginePool
    passes: tuple[Pass, ...] | None = None
    speculate: str = "auto"

    @property
    def ahead(self) -> bool:
        """Whether anything may run ahead at all."""
        chosen = self.pool.passes if self.passes is None else self.passes
        return self.speculate != "off" and bool(chosen)

    def plan(self, traced: TraceResult, value: Any) -> Optimised:
        """The e-graph for an input."""
        return self.pool.plan(traced.template, shape(traced, value), passes=self.passes, speculate=self.speculate)

    def useful(self, traced: TraceResult) -> bool:
        """Whether it asks engines of the pool for anything, and changes nothing there."""
        graph = self.plan(traced, None).graph
        engines = {p.engine for p in graph if p.on_engine}
        writes = any(effect.writes for p in graph if p.on_engine for effect in p.effects)
        return bool(engines) and engines <= set(self.pool.engine_names) and not writes


@dataclass(frozen=True, slots=True, eq=False)
class ToolWork:
    """The engine work of a tool, as a graph of its arguments. The tool itself runs in its place, and claims it."""

    planner: Planner
    traced: TraceResult
    value: Callable[[Mapping[str, Any]], Any]
    """The arguments, as the model writes them -> what the graph reads. Raises for those that the tool refuses."""

    def begin(self, run: QueryRun, args: Mapping[str, Any]) -> PartRun:
        """It joins a live query. Raises what `value` raises."""
        value = self.value(args)
        graph = self.planner.plan(self.traced, value).graph
        form = current_place.get().form  # that of the model's node: its tools get the same handlers
        return run.part(graph, self.traced.calls, value, lookahead=True, form=form)  # later parts may adopt it


def work_of(tool: BaseTool, planner: Planner) -> ToolWork | None:
    """Of a tool that LangChain made of a retriever, or of a function that is understood; None where it asks the engines
    for nothing that is known from its arguments."""
    try:
        work = _of_retriever(tool, planner) or _of_function(tool, planner)
        return work if work is not None and planner.useful(work.traced) else None
    except Exception as error:
        log_fallback(error, tool, f"the tool {tool.name!r}")
        return None


def _of_retriever(tool: BaseTool, planner: Planner) -> ToolWork | None:
    retriever = retriever_of(tool)
    if retriever is None:
        return None
    traced = trace(RunnableParallel({tool.name: retriever}))  # named after the tool, in traces
    return ToolWork(planner, traced, lambda args: args["query"])


def _of_function(tool: BaseTool, planner: Planner) -> ToolWork | None:
    function = getattr(tool, "func", None) or getattr(tool, "coroutine", None)
    if type(tool) not in (StructuredTool, Tool) or function is None:
        return None
    names = tuple(inspect.signature(function).parameters)
    traced = trace_function(function, names, tool.name)
    return ToolWork(planner, traced, lambda args: _named(tool, names, args))


def _named(tool: BaseTool, names: tuple[str, ...], args: Mapping[str, Any]) -> dict[str, Any]:
    """What the function's parameters get: as its schema makes it, where that runs no code of the user's own."""
    parsed = given(tool, args) if is_plain(tool.args_schema) else None
    if parsed is None:
        return dict(args)
    return {**dict(zip(names, parsed[0], strict=False)), **parsed[1]}
