"""What a tool asks engines of the pool for, as far as that is known from its arguments alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.runnables import RunnableParallel
from langchain_core.tools import BaseTool

from teola_plugin.adapters.early_work import shape
from teola_plugin.adapters.langchain.accelerate import the_pool_of
from teola_plugin.graph import IMPURE_KINDS
from teola_plugin.passes import Optimised, Pass
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.query_run import PartRun, QueryRun
from teola_plugin.shims.langchain_agents import retriever_of
from teola_plugin.tracer.draft import Traced
from teola_plugin.tracer.langchain.trace import trace


@dataclass(frozen=True, slots=True, eq=False)
class ToolWork:
    """The engine work of a tool, as a graph of its arguments. The tool itself runs in its place, and claims it."""

    pool: EnginePool
    traced: Traced
    value: Callable[[Mapping[str, Any]], Any]
    """The arguments -> what the graph reads."""
    passes: tuple[Pass | str, ...] | None
    speculate: str

    def begin(self, run: QueryRun, args: Mapping[str, Any]) -> PartRun:
        """It joins a live query. Raises `KeyError` where an argument is missing."""
        value = self.value(args)
        return run.part(self._planned(value).graph, self.traced.calls, value)

    def _planned(self, value: Any) -> Optimised:
        sizes = shape(self.traced, value)
        return self.pool.plan(self.traced.template, sizes, passes=self.passes, speculate=self.speculate)

    @property
    def useful(self) -> bool:
        """Whether it asks engines for anything, and changes nothing there."""
        graph = self._planned(None).graph
        writes = any(effect.writes for p in graph for effect in p.effects if p.kind not in IMPURE_KINDS)
        return not writes and any(p.on_engine for p in graph)


def work_of(tool: BaseTool, passes: Iterable[Pass | str] | None, speculate: str) -> ToolWork | None:
    """Of a tool that LangChain made of a pool-backed retriever; None for any other."""
    retriever = retriever_of(tool)
    pool = None if retriever is None else the_pool_of(retriever)
    if pool is None:
        return None
    traced = trace(RunnableParallel({tool.name: retriever}))  # named after the tool, in traces
    chosen = None if passes is None else tuple(passes)
    work = ToolWork(pool, traced, lambda args: args["query"], chosen, speculate)
    return work if work.useful else None
