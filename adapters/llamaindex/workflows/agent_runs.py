"""Agents: their tools are parts of the run's query, and it is told when a turn of the model, and each tool, ends.

An agent runs as an object of a subclass that shares all attributes with it. What that overrides calls the original's,
and tells the run: which tools there are, that the model has chosen some, that one has its result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from llama_index.core.agent.workflow import AgentWorkflow, ToolCall, ToolCallResult
from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent
from llama_index.core.agent.workflow.workflow_events import AgentOutput, AgentSetup
from llama_index.core.workflow import Context
from pydantic import BaseModel

from teola_plugin.adapters.llamaindex.workflows.tool_wait import ToolWait, waits_for
from teola_plugin.adapters.llamaindex.workflows.tools import ToolParts
from teola_plugin.passes import Pass
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.context import current_place, placed
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.shims.llamaindex.copies import sharing, with_steps_of
from teola_plugin.shims.llamaindex.workflows import runs_any_workflow


class AgentRun:
    """One run of an agent."""

    def __init__(self, pool: EnginePool, run: QueryRun, tools: ToolParts, passes: tuple[Pass, ...] | None) -> None:
        self.pool, self.run, self.tools, self.passes = pool, run, tools, passes
        self._wait: ToolWait | None = None

    def turn_begins(self) -> None:
        """The model is asked: what its prompt begins with is no guess any more."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait.over()

    async def turn_ended(
        self, agent: Any, ctx: Context, asked: AgentSetup, tools: list[Any], said: AgentOutput
    ) -> None:
        """The model has answered; if it calls tools, they run from now on."""
        self._wait = await waits_for(self.pool, self.run, self.passes, agent, ctx, asked.input, tools, said)

    def tool_ended(self, result: ToolCallResult) -> None:
        if self._wait is not None:
            self._wait.came(result)

    @contextmanager
    def step(self, kind: str, name: str) -> Iterator[None]:
        """The body is a step in the query's trace: a `node` for a turn of an agent, a call of a `tool`."""
        step, outcome = self.run.step_began(kind, name), "failed"
        try:
            with placed(replace(current_place.get(), step=step)):
                yield
            outcome = "done"
        except Exception as error:
            if type(error).__name__ == _WAITS:
                outcome = "interrupted"
            raise
        finally:
            self.run.step_ended(step, outcome)


_WAITS = "WaitingForEvent"
"""What LlamaIndex raises in a step that waits for an event, and will run again."""
_current: ContextVar[AgentRun | None] = ContextVar("teola_agent_run", default=None)
_tools: ContextVar[list[Any] | None] = ContextVar("teola_agent_tools", default=None)
"""Of the turn that is taken by the running code."""


@contextmanager
def in_agent_run(run: AgentRun | None) -> Iterator[None]:
    """What begins in the body belongs to this run, and to no other agent's around it."""
    token = _current.set(run)
    try:
        yield
    finally:
        _current.reset(token)


def is_agent(workflow: Any) -> bool:
    return isinstance(workflow, (BaseWorkflowAgent, AgentWorkflow))


def agent_runner(agent: Any) -> Any:
    """What runs in the agent's place. It has the agent's class name, which spans tell of.

    The agent itself where a runtime runs only what it has been told of before.
    """
    if not runs_any_workflow(agent.runtime):
        return agent
    theirs: Any = type(agent)
    names: dict[str, Any]
    names = {make.__name__: functools.wraps(getattr(theirs, make.__name__))(make(theirs)) for make in _OVERRIDDEN}
    names |= {"__module__": theirs.__module__, "__qualname__": theirs.__qualname__, "__teola_agent__": agent}
    names |= {"model_config": {"defer_build": True}} if issubclass(theirs, BaseModel) else {}
    return sharing(with_steps_of(type(theirs)(theirs.__name__, (theirs,), names), theirs), agent)


def get_tools(theirs: Any) -> Callable[..., Any]:
    async def made(self: Any, *args: Any, **kwargs: Any) -> Any:
        run, found = _current.get(), await theirs.get_tools(self, *args, **kwargs)
        if run is None:
            return found
        fast, turn = run.tools(found), _tools.get()
        if turn is not None:
            turn[:] = fast
        return fast

    return made


def run_agent_step(theirs: Any) -> Callable[..., Any]:
    async def made(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = _current.get()
        if run is None:
            return await theirs.run_agent_step(self, *args, **kwargs)
        run.turn_begins()
        ctx, asked = _given(Context, args, kwargs), _given(AgentSetup, args, kwargs)
        turn: list[Any] = []
        token = _tools.set(turn)
        try:
            with run.step("node", getattr(asked, "current_agent_name", "")):
                said = await theirs.run_agent_step(self, *args, **kwargs)
        finally:
            _tools.reset(token)
        if isinstance(said, AgentOutput) and ctx is not None and asked is not None:
            await run.turn_ended(_speaker(self, said), ctx, asked, turn, said)
        return said

    return made


def call_tool(theirs: Any) -> Callable[..., Any]:
    async def made(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = _current.get()
        if run is None:
            return await theirs.call_tool(self, *args, **kwargs)
        with run.step("tool", getattr(_given(ToolCall, args, kwargs), "tool_name", "")):
            result = await theirs.call_tool(self, *args, **kwargs)
        if isinstance(result, ToolCallResult):
            run.tool_ended(result)
        return result

    return made


_OVERRIDDEN = (get_tools, run_agent_step, call_tool)


def _given(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, kind)), None)


def _speaker(workflow: Any, said: AgentOutput) -> Any:
    """The agent that has answered, of its own class."""
    plain = workflow.__teola_agent__
    found = plain.agents.get(said.current_agent_name) if isinstance(plain, AgentWorkflow) else plain
    session = getattr(found, "__teola_session__", None)
    return found if session is None else session.served
