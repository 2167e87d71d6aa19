"""`fast.report` and `fast.explain()` of a workflow: its steps; the model and the tools of an agent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from llama_index.core.agent.workflow import AgentWorkflow
from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent
from llama_index.core.base.base_query_engine import BaseQueryEngine

from teola_plugin.adapters.expectations import COMPARE, NO_POOL
from teola_plugin.adapters.explain import Explanation
from teola_plugin.adapters.llamaindex.substitution import Accelerate
from teola_plugin.adapters.llamaindex.workflows.tools import called_part
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.observe.text import duration
from teola_plugin.pool import EnginePool
from teola_plugin.shims.llamaindex.workflows import step_names
from teola_plugin.tracer.llamaindex.classes import is_pool_object
from teola_plugin.tracer.llamaindex.trace import trace
from teola_plugin.tracer.report import Level, TraceNode, TraceReport

CODE = "what it asks the pool for is part of the query"


def report_rows(workflow: Any, pool: EnginePool | None) -> list[TraceNode]:
    """Return a row for each step of a workflow, or for each model and tool of an agent."""
    code: Level = "original" if pool is None else "joined"
    if isinstance(workflow, BaseWorkflowAgent):
        return list(_agent_rows("agent", workflow, code))
    if isinstance(workflow, AgentWorkflow):
        members = workflow.agents.items()
        return [row for name, agent in members for row in _agent_rows(f'agents["{name}"]', agent, code)]
    return [_code_row(f"workflow.{name}", workflow, code) for name in step_names(workflow)]


def _code_row(path: str, node: Any, code: Level) -> TraceNode:
    """Return the row of a step or tool that runs the user's code."""
    return TraceNode(path, type(node).__name__, code, reason=CODE if code == "joined" else "")


def _agent_rows(path: str, agent: BaseWorkflowAgent, code: Level) -> Iterator[TraceNode]:
    llm = agent.llm
    yield TraceNode(f"{path}.llm", type(llm).__name__, "joined" if is_pool_object(llm) else "original")
    yield from _tool_rows(path, agent.tools or (), code)


def _tool_rows(path: str, tools: Iterable[Any], code: Level) -> Iterator[TraceNode]:
    for tool in tools:
        name, part = f'{path}.tools["{tool.metadata.name}"]', called_part(tool)
        if part is None or hasattr(part, "__teola_accelerated__"):
            yield _code_row(name, tool, code)
            continue
        entry = "query" if isinstance(part, BaseQueryEngine) else "retrieve"
        for row in trace(part, entry).traced.report:
            yield replace(row, path=f"{name}.{row.path}")


# ------------------------------------------------------------ prefetched calls


def explain_workflow(
    workflow: Any, pool: EnginePool | None, accelerate: Accelerate, trace: QueryTrace | None
) -> Explanation:
    """Return the explanation of a workflow. `accelerate`: accelerates the engines that an agent's tools call."""
    report = TraceReport(tuple(report_rows(workflow, pool)))
    if pool is None:
        return Explanation(report, (), f"no gain: {NO_POOL}")
    prefetched = tuple(_phrases_of_prefetched(workflow, accelerate))
    if not prefetched:
        return Explanation(report, (), "no gain is known: its steps run as they are written, each call in its place")
    took = f"the last call took {duration(trace.seconds)}" if trace is not None else ""
    return Explanation(report, prefetched, f"faster; {took or 'not estimated, as it decides while it runs'}: {COMPARE}")


def _phrases_of_prefetched(workflow: Any, accelerate: Accelerate) -> Iterator[str]:
    """Yield a phrase for each prefetched call of agents; the calls of other workflows' steps are not known before."""
    agents = workflow.agents if isinstance(workflow, AgentWorkflow) else {"agent": workflow}
    for name, agent in agents.items():
        tools: Iterable[Any] = (agent.tools or ()) if isinstance(agent, BaseWorkflowAgent) else ()
        if tools and is_pool_object(agent.llm):
            yield f"the next prompt of {name}, while its tools run"
        for tool in tools:
            part = called_part(tool)
            fast = None if part is None else accelerate(part)
            if fast is not None and fast is not part:
                yield from (f"in tool {tool.metadata.name}: {phrase}" for phrase in fast.__teola_explained__().early)
