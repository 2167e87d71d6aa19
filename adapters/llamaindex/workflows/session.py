"""The session of an accelerated workflow or agent: its runs, each of which is a query, and what `explain()` says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llama_index.core.agent.workflow import AgentWorkflow
from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.workflow.errors import WorkflowCancelledByUser  # type: ignore[attr-defined]
from llama_index.core.workflow.handler import WorkflowHandler  # type: ignore[attr-defined]

from teola_plugin.adapters.calls import Deadline, interrupting, joined
from teola_plugin.adapters.explain import COMPARE, NO_POOL, describe_measured_gain, ended_trace, seconds_saved
from teola_plugin.adapters.llamaindex.copies import Accelerate
from teola_plugin.adapters.llamaindex.session import GraphInput, Session, Settings
from teola_plugin.adapters.llamaindex.started_calls import JoinedRun, Run, StartedCall
from teola_plugin.adapters.llamaindex.workflows.agent_runs import (
    AgentRun,
    ToolAccelerator,
    agent_runner,
    called_part,
    in_agent_run,
    is_agent,
)
from teola_plugin.adapters.plan_report import CallRow, PlanReport
from teola_plugin.adapters.planned_queries import log_fallback
from teola_plugin.adapters.routing import RoutingRules, under_routing
from teola_plugin.graph import INPUT, Ref
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.query_run import QueryRun, current_run
from teola_plugin.shims.llamaindex.workflows import Result, call_when_ended, intercept_result, step_names
from teola_plugin.tracer.llamaindex.classes import is_pool_object
from teola_plugin.tracer.llamaindex.lowering import Lowering
from teola_plugin.tracer.llamaindex.trace import TracedEntry, trace
from teola_plugin.tracer.report import Level, TraceNode, TraceReport

if TYPE_CHECKING:
    from teola_plugin.adapters.llamaindex.workflows.steps import StepPlans

RUN = "run"
"""The entry of a workflow."""


class WorkflowSession(Session):
    """The session of a workflow or an agent, which has no plan as a whole; its parts have plans."""

    def __init__(
        self,
        original: Any,
        pool: EnginePool | None,
        settings: Settings,
        accelerate_part: Accelerate,
        rules: RoutingRules | None = None,
        template: WorkflowSession | None = None,
    ) -> None:
        super().__init__(original, pool, settings, accelerate_part, rules)
        self._is_agent = pool is not None and is_agent(original)
        self._runner: Any
        self._tools: ToolAccelerator
        if template is not None:  # LlamaIndex keeps limits and the like by object: the runner is shared
            self._runner, self._tools = template._runner, template._tools
        else:
            self._runner, self._tools = (
                agent_runner(original) if self._is_agent else original,
                ToolAccelerator(accelerate_part),
            )

        self._step_plans: StepPlans | None = self._plan_steps() if template is None else template._step_plans

    def _plan_steps(self) -> StepPlans | None:
        """Return the plans of the steps' own calls; None on engines, for agents, and without LangChain's core.

        The reader of functions needs that package.
        """
        is_off = self.pool is not None or self.settings.speculate == "off" or is_agent(self.original)
        if is_off:
            return None
        try:
            from teola_plugin.adapters.llamaindex.workflows.steps import StepPlans, prefetch_in_steps
        except ImportError:
            return None
        prefetch_in_steps()
        plans = StepPlans(self.original, self.settings.threads)
        try:
            plans.prefetched_calls()  # before the first run: it takes a while
        except Exception as error:
            log_fallback(error, self.original, "the steps")
            return None
        return plans

    def _same_object(self, settings: Settings) -> WorkflowSession:
        return WorkflowSession(self.original, self.tracing_pool, settings, self._accelerate_part, self.rules, self)

    def entry(self, entry: str, texts: int = 0) -> TracedEntry:
        """Return an entry with the report alone; the graphs of the parts are planned when they are called."""
        lowering = Lowering()
        with self.routing():
            lowering.draft.nodes[:] = report_rows(self.original, self.pool)
        return TracedEntry(lowering.draft.finish(Ref(INPUT), "workflow"), (), frozenset())

    def report(self, entry: str, input: Any = None) -> PlanReport:
        """Return the report of a workflow's steps or an agent's model and tools, and of the last run. Nothing runs."""
        with self.routing():
            calls = [] if self._step_plans is None else self._step_plans.prefetched_calls()
            trace = ended_trace(self._last)
            rows = () if self._step_plans is None else tuple(self._step_plans.rows())
            return explain_workflow(self.original, self.pool, self._accelerate_part, trace, calls, rows)

    # ------------------------------------------------------------ one run

    def enter(self, name: str, args: tuple[Any, ...], kwargs: GraphInput) -> Any:
        """Return what the original's `run` returns. Its steps and their calls belong to the run's query."""
        with self.calling():
            call = self._begin(RUN, None, is_async=True)
            if self._step_plans is not None:
                call = self._prefetch_in_steps(call, self._step_plans)
            with call.failing(), joined(call.query_run, call.request_context), in_agent_run(self._agent_run(call.run)):
                handler = call.target.run(*args, **kwargs)
        return keep_query_open(call, handler)

    def _prefetch_in_steps(self, call: StartedCall, plans: StepPlans) -> StartedCall:
        """Return the call of a run whose steps prefetch their calls, unless these take no time."""
        gated = self.gate.begin(is_inside=current_run.get() is not None) if plans.prefetches_calls() else None
        run = self._trace_run(plans) if call.run is None else JoinedRun(call.run.query_run)
        if gated is None or not gated.is_in_place:
            return call._replace(prefetcher=plans.start_run(run), gated=gated)
        if run is not None and isinstance(run.query_run, QueryRun):
            gated.trace_in(run.query_run)
        return call._replace(gated=gated)

    def _trace_run(self, plans: StepPlans) -> Run | None:
        """Start the trace of a run whose steps prefetch calls; None if none does, or if it cannot be traced."""
        current = current_run.get()
        try:
            if not plans.prefetches_calls():
                return None
            run = self._watch_call([] if current is None else [current])
        except Exception as error:  # nothing of the original has run yet
            log_fallback(error, self.original, "the trace of a run")
            return None
        self._last[:] = [run]
        return run

    def _target_for(self, entry: str, graph_input: GraphInput | None) -> Any:
        return self._runner

    def _agent_run(self, run: Run | None) -> AgentRun | None:
        """Return the state of an agent's run; None for a workflow that is no agent, and for a call without a query."""
        pool = self.tracing_pool
        if run is None or pool is None or not isinstance(run.query_run, QueryRun):
            return None
        run.query_run.has_user_code = True
        return AgentRun(pool, run.query_run, self._tools, self.settings.passes) if self._is_agent else None


# ------------------------------------------------------------ the end of a run

GRACE_S = 5.0
"""Seconds in which a run may end by itself after its deadline, as in `handler.cancel_run()`."""


def keep_query_open(call: StartedCall, handler: Any) -> Any:
    """Return what `run()` returned; the query ends when that has its result."""
    if isinstance(handler, WorkflowHandler):
        if call.deadline is not None:
            deadline = call.deadline
            intercept_result(handler, lambda result, cancel: in_time(deadline, result, cancel))
        call_when_ended(handler, lambda error: _close_call(call, error))
        return handler
    if asyncio.iscoroutine(handler):  # a `run` of the user's own
        return _await_in_query(call, handler)
    call.close()
    return handler


def _close_call(call: StartedCall, error: BaseException | None) -> None:
    """End the query of a run that has ended: well, as cancelled by the user, or as failed."""
    if error is None:
        call.close()
        return
    is_cancelled = isinstance(error, WorkflowCancelledByUser)
    with contextlib.suppress(BaseException), call.failing():
        raise asyncio.CancelledError() if is_cancelled else error


async def _await_in_query(call: StartedCall, run: Awaitable[Any]) -> Any:
    with under_routing(call.rules), call.ending(), joined(call.query_run, call.request_context):
        async with interrupting(call.deadline):
            return await run


async def in_time(deadline: Deadline, result: Result, cancel: Result) -> Any:
    """Return the event that ends the run. Raise the error with which the run failed.

    Raise `QueryTimeout` after the deadline: the run is cancelled first, so that readers of its events learn of it.
    """
    task = asyncio.ensure_future(result())
    try:
        await asyncio.wait({task}, timeout=max(0.0, deadline.at - deadline.clock()))
        if not task.done():
            await cancel()
            await asyncio.wait({task}, timeout=GRACE_S)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raise
    if not task.done():
        task.cancel()
    elif not deadline.passed or (not task.cancelled() and _failed_by_itself(task)):
        return task.result()
    raise deadline.error()


def _failed_by_itself(task: asyncio.Future[Any]) -> bool:
    """Return True if the run failed with an error of its own."""
    error = task.exception()
    return error is not None and not isinstance(error, WorkflowCancelledByUser)


# ------------------------------------------------------------ report and explanation

CODE = "its requests to the pool are part of the query"


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
    """Yield the report's rows for an agent's tools: for one that calls an engine or retriever, those of that part."""
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
    workflow: Any,
    pool: EnginePool | None,
    accelerate: Accelerate,
    trace: QueryTrace | None,
    prefetched_calls: Iterable[str] = (),
    calls: tuple[CallRow, ...] = (),
) -> PlanReport:
    """Return the report of a workflow.

    `accelerate`: accelerates the engines that an agent's tools call. `prefetched_calls`: phrases for those of steps.
    `calls`: a row for each place in them that makes calls.
    """
    report = TraceReport(tuple(report_rows(workflow, pool)))
    prefetched = tuple(prefetched_calls)
    if pool is None and not prefetched:
        return PlanReport(report, (), f"no gain: {NO_POOL}", calls)
    if pool is not None:
        prefetched = tuple(_phrases_of_prefetched(workflow, accelerate))
    if not prefetched:
        in_place = "no gain is known: its steps run as they are written, each call at its usual time"
        return PlanReport(report, (), in_place, calls)
    expected = (
        f"not known yet, as it decides while it runs: {COMPARE}" if trace is None else describe_measured_gain(trace)
    )
    figures: Any = {} if trace is None else {"seconds": trace.seconds, "seconds_saved": seconds_saved(trace)}
    return PlanReport(report, prefetched, expected, calls, **figures)


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
                yield from (f"in tool {tool.metadata.name}: {phrase}" for phrase in fast.__teola_report__().prefetched)
