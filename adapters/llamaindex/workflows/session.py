"""What an accelerated workflow knows beyond the original, and how a run of it begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from teola_plugin.adapters.calls import joined
from teola_plugin.adapters.llamaindex.session import Given, Run, Session, Settings
from teola_plugin.adapters.llamaindex.substitution import Accelerate
from teola_plugin.adapters.llamaindex.workflows.agent_runs import AgentRun, agent_runner, in_agent_run, is_agent
from teola_plugin.adapters.llamaindex.workflows.report import rows
from teola_plugin.adapters.llamaindex.workflows.runs import kept_open
from teola_plugin.adapters.llamaindex.workflows.tools import ToolParts
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
    """Of a workflow, or of an agent: it has no plan as a whole, its parts have."""

    def __init__(
        self,
        original: Any,
        served: Any,
        pool: EnginePool | None,
        terms: Settings,
        part: Accelerate,
        like: WorkflowSession | None = None,
    ) -> None:
        super().__init__(original, served, pool, terms, part)
        self._agent = pool is not None and is_agent(served)
        self._runner: Any
        self._tools: ToolParts
        if like is not None:  # what LlamaIndex keeps by object, such as limits, is shared
            self._runner, self._tools = like._runner, like._tools
        else:
            self._runner, self._tools = agent_runner(served) if self._agent else served, ToolParts(part)

    def _same_object(self, terms: Settings) -> WorkflowSession:
        return WorkflowSession(self.original, self.served, self.pool, terms, self._part, self)

    def entry(self, entry: str, texts: int = 0) -> TracedEntry:
        """The report; the graph of a workflow is made of those of its parts, when they are called."""
        walk = Lowering()
        walk.draft.nodes[:] = rows(self.served, self.pool)
        return TracedEntry(walk.draft.finish(Ref(INPUT), "workflow"), (), frozenset())

    def explained(self, entry: str, input: Any = None) -> Explanation:
        from teola_plugin.adapters.expectations import ended_trace
        from teola_plugin.adapters.llamaindex.workflows.report import explained

        return explained(self.served, self.pool, self._part, ended_trace(self._last))

    # ------------------------------------------------------------ one run

    def enter(self, name: str, args: tuple[Any, ...], kwargs: Given) -> Any:
        """Return what the original's `run` gives. Its steps, and what they begin, belong to the run's query."""
        call = self._begin(RUN, None, is_async=True)
        with call.failing(), joined(call.whole, call.terms), in_agent_run(self._agent_run(call.run)):
            made = call.node.run(*args, **kwargs)
        return kept_open(call, made)

    def _running(self, entry: str, given: Given | None) -> Any:
        return self._runner

    def _agent_run(self, run: Run | None) -> AgentRun | None:
        if run is None or self.pool is None or not isinstance(run.whole, QueryRun):
            return None
        run.whole.has_user_code = True
        return AgentRun(self.pool, run.whole, self._tools, self.terms.passes) if self._agent else None
