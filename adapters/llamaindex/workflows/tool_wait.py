"""While an agent's tools run, the known beginning of its next prompt is prefilled.

What the prompt will be is found out by the framework's own code, on copies and with a model that asks nobody: the
agent handles the results that are there, and takes its next step. Results stand in the prompt in the order in which
they come.
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

from teola_plugin.adapters.early_work import log_fallback
from teola_plugin.adapters.llamaindex.binding.engine_proxy import EngineProxy
from teola_plugin.adapters.llamaindex.llm import TeolaLLM
from teola_plugin.adapters.next_prompt import KnownBeginning, prefills
from teola_plugin.passes import Pass
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import UNKNOWN, Generate, Prompt
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.shims.llamaindex.copies import run_without_waiting, with_attributes
from teola_plugin.shims.llamaindex.workflows import tool_arguments
from teola_plugin.tracer.llamaindex.classes import find_override

PAUSE_S = 0.005
"""Seconds after which it is looked at what is known: tools that are faster leave no time to prefill anything."""
_MEMORY = {FunctionAgent: "scratchpad_key", ReActAgent: "reasoning_key"}
"""Agents that are understood; where the name is under which each keeps what it has said and heard in this run."""


async def waits_for(
    pool: EnginePool,
    run: QueryRun,
    passes: tuple[Pass, ...] | None,
    agent: Any,
    ctx: Context,
    asked: Sequence[ChatMessage],
    tools: Sequence[Any],
    said: AgentOutput,
) -> ToolWait | None:
    """Of the tools that the model has called; None where its next prompt is not known to begin as this one."""
    called = {call.tool_name for call in said.tool_calls}
    if not called or any(tool.metadata.return_direct for tool in tools if tool.metadata.name in called):
        return None  # it ends, or hands off
    if not _understood(agent, tools, pool) or not prefills(pool, agent.llm.engine, passes):
        return None
    key = getattr(agent, _MEMORY[_kind(agent)])
    heard = list(await ctx.store.get(key, default=[]))
    return ToolWait(pool, run, _Turn(agent, key, heard, list(asked), list(tools)), len(said.tool_calls))


def _kind(agent: Any) -> Any:
    return next((kind for kind in type(agent).__mro__ if kind in _MEMORY), None)


def _understood(agent: Any, tools: Sequence[Any], pool: EnginePool) -> bool:
    """Whether nothing but the framework's own code, and ours, decides how the prompt is written."""
    kind = _kind(agent)
    if kind is None or find_override(agent, kind) or not _is_ours(agent.llm, pool):
        return False
    own = [*tools, *([agent.formatter] if kind is ReActAgent else [])]
    return all(type(one).__module__.startswith("llama_index.core.") for one in own)


def _is_ours(llm: Any, pool: EnginePool) -> bool:
    """Whether it is a chat model that an engine of the pool serves, whose requests can be known before."""
    served = isinstance(llm, EngineProxy) and hasattr(llm, "payload_of_messages")
    if not served and not (type(llm) is TeolaLLM and llm.is_chat_model):
        return False
    return bool(llm.pool.runtime is pool.runtime)


# ------------------------------------------------------------ what will be asked


class _Asked(Exception):
    """Ends the agent's step at its question."""

    def __init__(self, messages: Sequence[ChatMessage], tools: Sequence[Any], arguments: dict[str, Any]) -> None:
        self.messages, self.tools, self.arguments = messages, tools, arguments


class _AsksNobody:
    """In place of an agent's model."""

    def __init__(self, llm: Any) -> None:
        self.metadata = llm.metadata

    async def achat(self, messages: Sequence[ChatMessage], **arguments: Any) -> Any:
        raise _Asked(messages, (), arguments)

    async def achat_with_tools(self, tools: Sequence[Any], chat_history: list[ChatMessage], **arguments: Any) -> Any:
        raise _Asked(chat_history, tools, arguments)

    astream_chat, astream_chat_with_tools = achat, achat_with_tools


@dataclass(frozen=True, slots=True)
class _Turn:
    """What an agent's next question is made of, but for the results of its tools."""

    agent: Any
    key: str
    heard: list[Any]
    """What it keeps under that name, its answer included."""
    asked: list[ChatMessage]
    tools: list[Any]

    def prompt(self, results: Sequence[ToolCallResult]) -> Prompt:
        """With these results, and others after them."""
        found: Prompt = run_without_waiting(self._prompt([*results, _more()]))
        return found

    async def _prompt(self, results: list[ToolCallResult]) -> Prompt:
        llm, ctx = self.agent.llm, SimpleAgentContext()
        dry = with_attributes(self.agent, {"llm": _AsksNobody(llm)})
        await ctx.store.set(self.key, list(self.heard))
        await dry.handle_tool_call_results(ctx, results, None)
        try:
            await dry.take_step(ctx, list(self.asked), self.tools, None)
        except _Asked as asked:
            if asked.tools:
                arguments = tool_arguments(llm, asked.tools, asked.messages, asked.arguments)
            else:
                arguments = {"messages": list(asked.messages)}
            payload: Generate = llm.payload_of_messages(arguments.pop("messages"), **arguments)
            return payload.prompt
        raise ValueError("the agent asks nothing")


def _more() -> ToolCallResult:
    output = ToolOutput(tool_name="", content=UNKNOWN, raw_input={}, raw_output=None)
    return ToolCallResult(tool_name="", tool_kwargs={}, tool_id="", tool_output=output, return_direct=False)


# ------------------------------------------------------------ while tools run


class ToolWait:
    """From the model's answer to its next question."""

    def __init__(self, pool: EnginePool, run: QueryRun, turn: _Turn, calls: int) -> None:
        self._turn, self._calls = turn, calls
        self._results: list[ToolCallResult] = []
        self._next = KnownBeginning(run, pool, turn.agent.llm.engine)
        self._timer: asyncio.TimerHandle | None = None
        self._soon()

    def came(self, result: ToolCallResult) -> None:
        """The next one in the order of the prompt; with the last, the model is asked."""
        self._results.append(result)
        if len(self._results) < self._calls:
            self._soon()
        else:
            self._rest()

    def over(self) -> None:
        """The model is asked, or the run has ended."""
        self._rest()
        self._next.over()

    def _soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PAUSE_S, self._look)

    def _rest(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _look(self) -> None:
        self._timer = None
        try:
            prompt = self._turn.prompt(self._results)
            asked = replace(prompt, messages=prompt.messages[: -2 - len(self._results)])  # before the answer to it
            self._next.grown(prompt, have=asked.flat())
        except Exception as error:  # the agent itself will tell, if it is wrong with it
            log_fallback(error, None, "the next prompt of an agent")
            self._calls = 0
