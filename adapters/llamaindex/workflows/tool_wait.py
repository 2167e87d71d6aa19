"""Prefilling of the known beginning of an agent's next prompt while its tools run.

The framework's own code makes that prompt, on copies and with a model that makes no call: the copy of the agent handles
the results that are there, and takes its next step. The prompt contains the results in the order in which they come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from llama_index.core.agent.workflow import FunctionAgent, ReActAgent, ToolCallResult
from llama_index.core.agent.workflow.agent_context import SimpleAgentContext
from llama_index.core.agent.workflow.workflow_events import AgentOutput
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import ToolOutput
from llama_index.core.workflow import Context

from teola_plugin.adapters.llamaindex.llm import TeolaLLM
from teola_plugin.adapters.next_prompt import KnownBeginning, prefills
from teola_plugin.adapters.planned_queries import log_fallback
from teola_plugin.passes import Pass
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import UNKNOWN, Generate, Prompt
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.shims.llamaindex.copies import run_without_waiting, with_attributes
from teola_plugin.shims.llamaindex.workflows import tool_arguments
from teola_plugin.tracer.llamaindex.classes import find_override, pool_backed

PAUSE_S = 0.005
"""Seconds that tools run before the prompt is made: faster tools leave no time to prefill anything."""
_MEMORY_KEYS = {FunctionAgent: "scratchpad_key", ReActAgent: "reasoning_key"}
"""For each known class of agents, the attribute with the key under which it stores the messages of this run."""


async def wait_for_tools(
    pool: EnginePool,
    run: QueryRun,
    passes: tuple[Pass, ...] | None,
    agent: Any,
    ctx: Context,
    messages: Sequence[ChatMessage],
    tools: Sequence[Any],
    output: AgentOutput,
) -> ToolWait | None:
    """Start the wait for the tools that the model has called; None if the beginning of its next prompt is not known."""
    called = {call.tool_name for call in output.tool_calls}
    if not called or any(tool.metadata.return_direct for tool in tools if tool.metadata.name in called):
        return None  # the run ends, or another agent goes on
    llm = _pool_model(agent.llm, pool)
    if llm is None or not _has_known_prompt(agent, tools) or not prefills(pool, llm.engine, passes):
        return None
    key = getattr(agent, _MEMORY_KEYS[_kind(agent)])
    memory = list(await ctx.store.get(key, default=[]))
    return ToolWait(pool, run, _Turn(agent, llm, key, memory, list(messages), list(tools)), len(output.tool_calls))


def _kind(agent: Any) -> Any:
    return next((kind for kind in type(agent).__mro__ if kind in _MEMORY_KEYS), None)


def _has_known_prompt(agent: Any, tools: Sequence[Any]) -> bool:
    """Return True if only the framework's own code, and that of this package, writes the prompt."""
    kind = _kind(agent)
    if kind is None or find_override(agent, kind):
        return False
    writers = [*tools, *([agent.formatter] if kind is ReActAgent else [])]
    return all(type(one).__module__.startswith("llama_index.core.") for one in writers)


def _pool_model(llm: Any, pool: EnginePool) -> Any:
    """Return the chat model that sends an LLM's requests to the pool, if these can be made before its calls.

    None for any other LLM.
    """
    model = pool_backed(llm)
    is_known = model is not llm or type(llm) is TeolaLLM
    if model is None or not is_known or not hasattr(model, "payload_of_messages") or not model.metadata.is_chat_model:
        return None
    return model if model.pool.runtime is pool.runtime else None


# ------------------------------------------------------------ the next prompt


class _ModelCalled(Exception):
    """Ends the agent's step where it calls its model."""

    def __init__(self, messages: Sequence[ChatMessage], tools: Sequence[Any], arguments: dict[str, Any]) -> None:
        self.messages, self.tools, self.arguments = messages, tools, arguments


class _RecordingModel:
    """A replacement of an agent's model that makes no call, but raises its arguments."""

    def __init__(self, llm: Any) -> None:
        self.metadata = llm.metadata

    async def achat(self, messages: Sequence[ChatMessage], **arguments: Any) -> Any:
        raise _ModelCalled(messages, (), arguments)

    async def achat_with_tools(self, tools: Sequence[Any], chat_history: list[ChatMessage], **arguments: Any) -> Any:
        raise _ModelCalled(chat_history, tools, arguments)

    astream_chat, astream_chat_with_tools = achat, achat_with_tools


@dataclass(frozen=True, slots=True)
class _Turn:
    """Everything that an agent's next prompt is made of, except the results of its tools."""

    agent: Any
    llm: Any
    """The pool-backed model that answers for the agent's."""
    key: str
    memory: list[Any]
    """What the agent stores under that key, its answer included."""
    messages: list[ChatMessage]
    tools: list[Any]

    def prompt(self, results: Sequence[ToolCallResult]) -> Prompt:
        """Return the next prompt as far as it is known while tools run.

        That is: with the results so far, and a placeholder for the next one. A timer asks for it again and again, first
        without any result.
        """
        prompt: Prompt = run_without_waiting(self._prompt([*results, _unknown_result()]))
        return prompt

    async def _prompt(self, results: list[ToolCallResult]) -> Prompt:
        """Return the agent's next prompt for these tool results.

        The agent's own code makes it, on a copy that calls no model. Raise `ValueError` if the agent would not call its
        model.
        """
        llm, ctx = self.llm, SimpleAgentContext()
        dry_agent = with_attributes(self.agent, {"llm": _RecordingModel(llm)})
        await ctx.store.set(self.key, list(self.memory))
        await dry_agent.handle_tool_call_results(ctx, results, None)
        try:
            await dry_agent.take_step(ctx, list(self.messages), self.tools, None)
        except _ModelCalled as call:
            if call.tools:
                arguments = tool_arguments(llm, call.tools, call.messages, call.arguments)
            else:
                arguments = {"messages": list(call.messages)}
            payload: Generate = llm.payload_of_messages(arguments.pop("messages"), **arguments)
            return payload.prompt
        raise ValueError("the agent asks nothing")


def _unknown_result() -> ToolCallResult:
    output = ToolOutput(tool_name="", content=UNKNOWN, raw_input={}, raw_output=None)
    return ToolCallResult(tool_name="", tool_kwargs={}, tool_id="", tool_output=output, return_direct=False)


# ------------------------------------------------------------ while tools run


class ToolWait:
    """The time from the model's answer to its next call, in which tools run and the next prompt is prefilled."""

    def __init__(self, pool: EnginePool, run: QueryRun, turn: _Turn, calls: int) -> None:
        self._turn, self._calls = turn, calls
        self._results: list[ToolCallResult] = []
        self._beginning = KnownBeginning(run, pool, turn.llm.engine)
        self._timer: asyncio.TimerHandle | None = None
        self._start_timer()

    def add_result(self, result: ToolCallResult) -> None:
        """Add the result that comes next in the prompt. After the last one the model is called."""
        self._results.append(result)
        if len(self._results) < self._calls:
            self._start_timer()
        else:
            self._stop_timer()

    def close(self) -> None:
        """End the wait: the model is called, or the run has ended."""
        self._stop_timer()
        self._beginning.close()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PAUSE_S, self._prefill)

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _prefill(self) -> None:
        """Prefill the known beginning of the next prompt. Runs on the loop when tools have run for `PAUSE_S`.

        If the prompt cannot be made, that is logged and no more is prefilled in this wait.
        """
        self._timer = None
        try:
            prompt = self._turn.prompt(self._results)
            # The prompt of the last call, without the answer to it.
            earlier = replace(prompt, messages=prompt.messages[: -2 - len(self._results)])
            self._beginning.extend(prompt, have=earlier.flat())
        except Exception as error:  # if something is wrong with it, the agent's own step raises
            log_fallback(error, None, "the next prompt of an agent")
            self._calls = 0
