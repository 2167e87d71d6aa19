"""The calls of an accelerated workflow or agent: each run is a query."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from teola_plugin.adapters.calls import joined
from teola_plugin.adapters.llamaindex.session import GraphInput, Run, Session, Settings
from teola_plugin.adapters.llamaindex.substitution import Accelerate
from teola_plugin.adapters.llamaindex.workflows.agent_runs import AgentRun, agent_runner, in_agent_run, is_agent
from teola_plugin.adapters.llamaindex.workflows.report import report_rows
from teola_plugin.adapters.llamaindex.workflows.runs import keep_query_open
from teola_plugin.adapters.llamaindex.workflows.tools import ToolAccelerator
from teola_plugin.graph import INPUT, Ref
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.tracer.llamaindex.lowering import Lowering
from teola_plugin.tracer.llamaindex.trace import TracedEntry

if TYPE_CHECKING:
    from teola_plugin.adapters.explain import Explanation

RUN = "run"
"""The entry of a workflow."""


class WorkflowSession(Session):
    """The session of a workflow or an agent, which has no plan as a whole; its parts have plans."""

    def __init__(
        self,
        original: Any,
        target: Any,
        pool: EnginePool | None,
        terms: Settings,
        accelerate_part: Accelerate,
        template: WorkflowSession | None = None,
    ) -> None:
        super().__init__(original, target, pool, terms, accelerate_part)
        self._is_agent = pool is not None and is_agent(target)
        self._runner: Any
        self._tools: ToolAccelerator
        if template is not None:  # LlamaIndex keeps limits and the like by object: the runner is shared
            self._runner, self._tools = template._runner, template._tools
        else:
            self._runner, self._tools = (
                agent_runner(target) if self._is_agent else target,
                ToolAccelerator(accelerate_part),
            )

    def _same_object(self, terms: Settings) -> WorkflowSession:
        return WorkflowSession(self.original, self.target, self.pool, terms, self._accelerate_part, self)

    def entry(self, entry: str, texts: int = 0) -> TracedEntry:
        """Return an entry with the report alone; the graphs of the parts are planned when they are called."""
        lowering = Lowering()
        lowering.draft.nodes[:] = report_rows(self.target, self.pool)
        return TracedEntry(lowering.draft.finish(Ref(INPUT), "workflow"), (), frozenset())

    def explained(self, entry: str, input: Any = None) -> Explanation:
        from teola_plugin.adapters.expectations import ended_trace
        from teola_plugin.adapters.llamaindex.workflows.report import explain_workflow

        return explain_workflow(self.target, self.pool, self._accelerate_part, ended_trace(self._last))

    # ------------------------------------------------------------ one run

    def enter(self, name: str, args: tuple[Any, ...], kwargs: GraphInput) -> Any:
        """Return what the original's `run` returns. Its steps and their calls belong to the run's query."""
        call = self._begin(RUN, None, is_async=True)
        with call.failing(), joined(call.query_run, call.terms), in_agent_run(self._agent_run(call.run)):
            handler = call.target.run(*args, **kwargs)
        return keep_query_open(call, handler)

    def _target_for(self, entry: str, graph_input: GraphInput | None) -> Any:
        return self._runner

    def _agent_run(self, run: Run | None) -> AgentRun | None:
        if run is None or self.pool is None or not isinstance(run.whole, QueryRun):
            return None
        run.whole.has_user_code = True
        return AgentRun(self.pool, run.whole, self._tools, self.terms.passes) if self._is_agent else None
