"""What a workflow is made of, for `fast.report`: its steps, an agent's model and tools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from llama_index.core.agent.workflow import AgentWorkflow
from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent
from llama_index.core.base.base_query_engine import BaseQueryEngine

from teola_plugin.adapters.llamaindex.workflows.tools import part_of
from teola_plugin.pool import EnginePool
from teola_plugin.shims.llamaindex.workflows import step_names
from teola_plugin.tracer.llamaindex.classes import is_leaf
from teola_plugin.tracer.llamaindex.trace import trace
from teola_plugin.tracer.report import Level, TraceNode

CODE = "what it asks the pool for is part of the query"


def rows(workflow: Any, pool: EnginePool | None) -> list[TraceNode]:
    """A row for each step; for each model and tool of an agent."""
    code: Level = "original" if pool is None else "joined"
    if isinstance(workflow, BaseWorkflowAgent):
        return list(_of_agent("agent", workflow, code))
    if isinstance(workflow, AgentWorkflow):
        members = workflow.agents.items()
        return [row for name, agent in members for row in _of_agent(f'agents["{name}"]', agent, code)]
    return [_row(f"workflow.{name}", workflow, code) for name in step_names(workflow)]


def _row(path: str, node: Any, code: Level) -> TraceNode:
    """Of what runs code of the user's."""
    return TraceNode(path, type(node).__name__, code, reason=CODE if code == "joined" else "")


def _of_agent(path: str, agent: BaseWorkflowAgent, code: Level) -> Iterator[TraceNode]:
    llm = agent.llm
    yield TraceNode(f"{path}.llm", type(llm).__name__, "joined" if is_leaf(llm) else "original")
    yield from _of_tools(path, agent.tools or (), code)


def _of_tools(path: str, tools: Iterable[Any], code: Level) -> Iterator[TraceNode]:
    for tool in tools:
        name, part = f'{path}.tools["{tool.metadata.name}"]', part_of(tool)
        if part is None or hasattr(part, "__teola_accelerated__"):
            yield _row(name, tool, code)
            continue
        entry = "query" if isinstance(part, BaseQueryEngine) else "retrieve"
        for row in trace(part, entry).traced.report:
            yield replace(row, path=f"{name}.{row.path}")
