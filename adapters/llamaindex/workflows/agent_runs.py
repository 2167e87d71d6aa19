"""Runs of agents: tools are parts of the run's query, which learns when a turn of the model and when each tool ends.

An agent runs as an object of a subclass that shares all attributes with it. The methods that it overrides call the
original's, and report to the run which tools there are, which of them the model has called, and each result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from llama_index.core.agent.workflow import AgentWorkflow, ToolCall, ToolCallResult
from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent
from llama_index.core.agent.workflow.workflow_events import AgentOutput, AgentSetup
from llama_index.core.tools import QueryEngineTool, RetrieverTool
from llama_index.core.workflow import Context
from pydantic import BaseModel

from teola_plugin.adapters.llamaindex.copies import Accelerate
from teola_plugin.adapters.llamaindex.workflows.tool_wait import ToolWait, wait_for_tools
from teola_plugin.passes import Pass
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.query_run import QueryRun, current_position, during
from teola_plugin.shims.llamaindex.copies import sharing, with_attributes, with_steps_of
from teola_plugin.shims.llamaindex.records import Unreadable
from teola_plugin.shims.llamaindex.workflows import QueryEngineToolParts, RetrieverToolParts, runs_any_workflow
from teola_plugin.tracer.llamaindex.classes import find_override

# ------------------------------------------------------------ tools that call engines and retrievers

PartsClass = type[QueryEngineToolParts] | type[RetrieverToolParts]
_PARTS_OF_TOOLS: dict[type, PartsClass] = {QueryEngineTool: QueryEngineToolParts, RetrieverTool: RetrieverToolParts}
MAX_TOOLS = 64
"""Copies that are remembered; a tool retriever may make new tools for each call."""


def called_part(tool: Any) -> Any | None:
    """Return the engine or retriever that a tool calls; None for a tool that may do anything else."""
    kind = _PARTS_OF_TOOLS.get(type(tool))
    if kind is None or find_override(tool, type(tool)):
        return None
    try:
        return kind.of(tool).part
    except Unreadable:
        return None


class ToolAccelerator:
    """Makes the accelerated copies of tools, each once."""

    def __init__(self, accelerate: Accelerate) -> None:
        self._accelerate_part = accelerate
        self._copies: dict[int, tuple[Any, Any, Any]] = {}

    def __call__(self, tools: Sequence[Any]) -> list[Any]:
        """Return the tools; those that call an engine or a retriever are copies that call an accelerated one."""
        return [self._accelerate_tool(tool) for tool in tools]

    def _accelerate_tool(self, tool: Any) -> Any:
        """Return a copy of a tool that calls an accelerated engine or retriever; the tool if it calls neither."""
        part = called_part(tool)
        if part is None:
            return tool
        remembered = self._copies.get(id(tool))
        if remembered is None or remembered[0] is not tool or remembered[1] is not part:
            fast = self._accelerate_part(part)
            fast_tool = (
                tool if fast is part else with_attributes(tool, _PARTS_OF_TOOLS[type(tool)].as_attributes(part=fast))
            )
            remembered = self._copies[id(tool)] = (tool, part, fast_tool)
            if len(self._copies) > MAX_TOOLS:
                self._copies.pop(next(iter(self._copies), 0), None)
        return remembered[2]


# ------------------------------------------------------------ one run


class AgentRun:
    """One run of an agent."""

    def __init__(
        self, pool: EnginePool, run: QueryRun, tools: ToolAccelerator, passes: tuple[Pass, ...] | None
    ) -> None:
        self.pool, self.run, self.tools, self.passes = pool, run, tools, passes
        self._wait: ToolWait | None = None

    def turn_begins(self) -> None:
        """End the prefilling of the next prompt: the model is called now."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait.close()

    async def turn_ended(
        self, agent: Any, ctx: Context, setup: AgentSetup, tools: list[Any], output: AgentOutput
    ) -> None:
        """Start to prefill the next prompt if the model's answer calls tools, which run from now on."""
        self._wait = await wait_for_tools(self.pool, self.run, self.passes, agent, ctx, setup.input, tools, output)

    def tool_ended(self, result: ToolCallResult) -> None:
        """Add the result of a tool to the known beginning of the next prompt."""
        if self._wait is not None:
            self._wait.add_result(result)

    @contextmanager
    def step(self, kind: str, name: str) -> Iterator[None]:
        """Trace the body as a step of the query: a `node` for a turn of an agent, a `tool` for a call of one."""
        step, outcome = self.run.step_began(kind, name), "failed"
        try:
            with during(current_position, replace(current_position.get(), step=step)):
                yield
            outcome = "done"
        except Exception as error:
            if type(error).__name__ == _WAITING_ERROR:
                outcome = "interrupted"
            raise
        finally:
            self.run.step_ended(step, outcome)


_WAITING_ERROR = "WaitingForEvent"
"""The name of the class that LlamaIndex raises in a step that waits for an event and will run again."""
_current: ContextVar[AgentRun | None] = ContextVar("teola_agent_run", default=None)
_tools: ContextVar[list[Any] | None] = ContextVar("teola_agent_tools", default=None)
"""The tools of the turn that the running code takes."""


def in_agent_run(run: AgentRun | None) -> AbstractContextManager[None]:
    """Return a context whose calls belong to this run, and not to another agent's around it."""
    return during(_current, run)


def is_agent(workflow: Any) -> bool:
    return isinstance(workflow, (BaseWorkflowAgent, AgentWorkflow))


def agent_runner(agent: Any) -> Any:
    """Return the object that runs in the agent's place. It has the agent's class name, which spans contain.

    Return the agent itself if its runtime runs only workflows that were registered with it before.
    """
    if not runs_any_workflow(agent.runtime):
        return agent
    original: Any = type(agent)
    members: dict[str, Any]
    members = {
        override.__name__: functools.wraps(getattr(original, override.__name__))(override(original))
        for override in _OVERRIDDEN
    }
    members |= {"__module__": original.__module__, "__qualname__": original.__qualname__, "__teola_agent__": agent}
    members |= {"model_config": {"defer_build": True}} if issubclass(original, BaseModel) else {}
    return sharing(with_steps_of(type(original)(original.__name__, (original,), members), original), agent)


def get_tools(original: Any) -> Callable[..., Any]:
    """Return the runner's `get_tools`: the original's, with accelerated copies of tools, noted for the turn."""

    async def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = _current.get()
        tools = await original.get_tools(self, *args, **kwargs)
        if run is None:
            return tools
        accelerated, turn = run.tools(tools), _tools.get()
        if turn is not None:
            turn[:] = accelerated
        return accelerated

    return method


def run_agent_step(original: Any) -> Callable[..., Any]:
    """Return the runner's `run_agent_step`: the original's, which tells the run when a turn begins and ends."""

    async def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = _current.get()
        if run is None:
            return await original.run_agent_step(self, *args, **kwargs)
        run.turn_begins()
        ctx, setup = _first_of_type(Context, args, kwargs), _first_of_type(AgentSetup, args, kwargs)
        turn: list[Any] = []
        with during(_tools, turn), run.step("node", getattr(setup, "current_agent_name", "")):
            output = await original.run_agent_step(self, *args, **kwargs)
        if isinstance(output, AgentOutput) and ctx is not None and setup is not None:
            await run.turn_ended(_answering_agent(self, output), ctx, setup, turn, output)
        return output

    return method


def call_tool(original: Any) -> Callable[..., Any]:
    """Return the runner's `call_tool`: the original's, traced as a step, with its result reported to the run."""

    async def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = _current.get()
        if run is None:
            return await original.call_tool(self, *args, **kwargs)
        with run.step("tool", getattr(_first_of_type(ToolCall, args, kwargs), "tool_name", "")):
            result = await original.call_tool(self, *args, **kwargs)
        if isinstance(result, ToolCallResult):
            run.tool_ended(result)
        return result

    return method


_OVERRIDDEN = (get_tools, run_agent_step, call_tool)


def _first_of_type(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the first argument that is a `kind`; None if there is none."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, kind)), None)


def _answering_agent(workflow: Any, output: AgentOutput) -> Any:
    """Return the agent that has answered."""
    original = workflow.__teola_agent__
    agent = original.agents.get(output.current_agent_name) if isinstance(original, AgentWorkflow) else original
    session = getattr(agent, "__teola_session__", None)
    return agent if session is None else session.original
