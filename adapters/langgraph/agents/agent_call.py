"""One call of a graph with tools: what starts before its place while the model writes, and while tools run.

An `AgentCall` listens to the nodes that call a model. For each answer there is an `AgentAnswer`: it prefetches the tool
calls in it as the model writes them, and the beginning of the next prompt while tools run. In the place of a tool call,
the tool claims what was started for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config
from langgraph.errors import GraphBubbleUp

from teola_plugin.adapters.calls import running_loop
from teola_plugin.adapters.langchain.listening import AgentListener, AnswerListener, ModelCall, current_agent
from teola_plugin.adapters.langgraph.agents.agent_tools import AgentTool, AgentTools
from teola_plugin.adapters.langgraph.agents.tool_inputs import function_arguments
from teola_plugin.adapters.langgraph.agents.tool_prefetch import ToolPrefetch
from teola_plugin.adapters.next_prompt import KnownBeginning, keeps_prefixes
from teola_plugin.adapters.snapshots import NotCopied, exactly, own_copy, snapshot
from teola_plugin.adapters.tool_calls import Call
from teola_plugin.requests.payloads import UNKNOWN, Prompt
from teola_plugin.runtime.provider_calls import ProviderCallTable
from teola_plugin.runtime.query_run import QueryRun, SubplanRun, current_position, during
from teola_plugin.shims.langchain_interceptors import tool_claim, tool_invocation

MAX_PREFETCHES = 16
"""Prefetched tool calls that run at once: not more than a tool node runs side by side on most machines."""
MAX_ANSWERS = 256
"""Answers that are kept whose tools have yet to run, or whose next prompt may still be asked for."""
_tasks: set[asyncio.Task[None]] = set()
"""Prefetches on a loop, which holds its tasks weakly."""

running_agent: ContextVar[AgentCall | None] = ContextVar("teola_running_agent", default=None)
"""The agent whose tools run here."""


class AgentCall:
    """One call of a graph: listens to its model nodes, and lets its tools claim. Used from any thread."""

    def __init__(self, tools: AgentTools, run: QueryRun) -> None:
        self.tools, self.run = tools, run
        self.loop = running_loop()
        """The loop on which coroutines of tools run; None where the graph is called without one."""
        self.calls = ProviderCallTable()
        """The calls of tools, for prefetches and claims."""
        self._context = copy_context()
        self._answers: list[AgentAnswer] = []
        self._answers_by_call: dict[str, AgentAnswer] = {}
        """Answers by the ids of the tool calls in them."""
        self._prefetch_count = 0
        """Prefetches under way."""
        self._lock = threading.Lock()
        self._is_closed = False

    @contextmanager
    def in_node(self, name: str) -> Iterator[None]:
        """Run the body as a task of a node.

        The agent listens to models that are called there if the node leads to tools, and its tools claim their calls.
        """
        listener: AgentListener | None = self if name in self.tools.models else None
        with during(current_agent, listener), during(running_agent, self if name in self.tools.nodes else None):
            yield

    def listener_for(self, call: ModelCall) -> AnswerListener | None:
        """Return the listener to a call of a model. Drop the answers that the call goes on from."""
        with self._lock:
            continued = [answer for answer in self._answers if answer.is_continued_by(call)]
            self._forget(continued)
            is_ours = not self._is_closed and call.run is self.run
        for answer in continued:
            answer.close()
        return AgentAnswer(self, call, var_child_runnable_config.get() or {}) if is_ours else None

    def keep(self, answer: AgentAnswer, call_ids: list[str]) -> None:
        """Keep a whole answer for the tool calls in it, and drop the oldest answers if there are too many."""
        with self._lock:
            if self._is_closed:
                dropped = [answer]
            else:
                self._answers.append(answer)
                self._answers_by_call.update(dict.fromkeys(call_ids, answer))
                dropped = self._answers[:-MAX_ANSWERS]
                self._forget(dropped)
        for one in dropped:
            one.close()

    def _forget(self, dropped: list[AgentAnswer]) -> None:
        """Remove answers and their tool calls from the tables. Callers hold the lock."""
        if dropped:
            self._answers = [answer for answer in self._answers if answer not in dropped]
            self._answers_by_call = {
                call_id: answer for call_id, answer in self._answers_by_call.items() if answer not in dropped
            }

    def close(self) -> None:
        """End with the graph's call: give up what nobody has claimed."""
        with self._lock:
            self._is_closed = True
            answers, self._answers, self._answers_by_call = self._answers, [], {}
        for answer in answers:
            answer.close()
        self.calls.close()

    def answer_of(self, call_id: str) -> AgentAnswer | None:
        """Return the answer that a tool call is in, if it was listened to.

        `call_id`: the id that the model gave the call. May be called from any thread, as tools run on several.
        """
        with self._lock:
            return self._answers_by_call.get(call_id)

    def start(self, prefetch: ToolPrefetch, config: RunnableConfig, *, on_loop: bool) -> bool:
        """Start the prefetch of a tool call, on the loop or on a thread. Return False if too many are under way.

        `config`: that of the code that calls the model.
        """
        with self._lock:
            if self._prefetch_count >= MAX_PREFETCHES:
                return False
            self._prefetch_count += 1
        prefetch.on_done.append(self._count_down)
        context = prefetch.prepare(self._context, config, self.run, on_loop=on_loop)
        if not on_loop:
            target = (prefetch.run_on_thread, self.run)
            threading.Thread(target=context.run, args=target, name="teola-early-tool", daemon=True).start()
            return True
        loop = self.loop
        assert loop is not None

        def launch() -> None:
            """Create the task of the prefetch. Runs on the loop, which the code that calls the model may not be on."""
            task = loop.create_task(prefetch.run_on_loop(self.run), context=context)
            _tasks.add(task)
            task.add_done_callback(_tasks.discard)
            prefetch.cancel = lambda: _call_on(loop, task.cancel)

        if running_loop() is loop:
            launch()
        else:
            _call_on(loop, launch)
        return True

    def _count_down(self) -> None:
        with self._lock:
            self._prefetch_count -= 1


def _call_on(loop: asyncio.AbstractEventLoop, function: Callable[[], Any]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(function)


# ------------------------------------------------------------ answers of the model


@dataclass(slots=True, eq=False)
class ToolCallWork:
    """The work that was started for one tool call that the model wrote."""

    call: Call
    part: SubplanRun | None = None
    """Its requests to engines, if those were started."""
    prefetch: ToolPrefetch | None = None

    def close(self, run: QueryRun) -> None:
        """End after the call was made in its place, or once it will not be made."""
        if self.prefetch is not None:
            self.prefetch.close(run)
        if self.part is not None:
            self.part.close()


class AgentAnswer:
    """One answer of the agent's model: listens where the model is called, and ends where the tools in it have run."""

    def __init__(self, agent: AgentCall, call: ModelCall, config: RunnableConfig) -> None:
        self._agent, self._call, self._config = agent, call, config
        self._work: list[ToolCallWork] = []
        self.work_by_id: dict[str, ToolCallWork] = {}
        """The work for tool calls, by their ids, once the answer is whole."""
        self._may_write = False
        """True once a tool was called that may change something: what is read after it is read in its place."""
        self._next_prompt: NextPrompt | None = None

    def called(self, index: int, call: Call) -> None:
        """Start the work for a tool call that the model has just written."""
        tool = self._agent.tools.tools.get(call.name)
        if tool is None:
            self._may_write = True
            return
        self._may_write = self._may_write or not tool.is_read_only
        if any(_is_same(work.call, call) for work in self._work):  # the original makes the second of two equal calls
            return
        work = ToolCallWork(call)
        if not self._may_write and tool.may_prefetch(self._config):
            work.prefetch = self._prefetch(tool, call)
        if work.prefetch is None and tool.work is not None:
            with contextlib.suppress(Exception):  # arguments that the tool does not take
                work.part = tool.work.start(self._agent.run, own_copy(call.args))
        if work.prefetch is not None or work.part is not None:
            self._work.append(work)

    def _prefetch(self, tool: AgentTool, call: Call) -> ToolPrefetch | None:
        """Prefetch a tool call with what the model wrote; return None where it has to wait for its place."""
        method = tool.method(has_loop=self._agent.loop is not None)
        if method is None:
            return None
        try:
            arguments = function_arguments(tool.tool, own_copy(call.args))
            invocation = None if arguments is None else tool_invocation(tool.tool, method, *snapshot(arguments))
        except (NotCopied, TypeError, ValueError):  # arguments that the tool refuses, or that cannot be compared
            return None
        if invocation is None:
            return None
        prefetch = ToolPrefetch(invocation, tool.history, self._agent.calls)
        return prefetch if self._agent.start(prefetch, self._config, on_loop=method == "_arun") else None

    def answered(self, message: AIMessage) -> None:
        """Match the work with the calls of the whole answer, and prefill the next prompt while they are made."""
        self._match(message)
        if not message.tool_calls:
            return
        if self._agent.tools.returning.issuperset(call["name"] for call in message.tool_calls):
            self._next_prompt = NextPrompt(self._call, message, self._takes_time)
        self._agent.keep(self, [call["id"] for call in message.tool_calls if call["id"]])
        if self._next_prompt is not None:
            self._next_prompt.prefill()

    def _match(self, message: AIMessage) -> None:
        """Give the work the ids of its calls, and end work for calls that are not in the whole answer."""
        unmatched = list(self._work)
        for tool_call in message.tool_calls:
            call = Call(tool_call["name"], tool_call["args"])
            work = next((one for one in unmatched if _is_same(one.call, call)), None)
            if work is not None and tool_call["id"]:
                unmatched.remove(work)
                self.work_by_id[tool_call["id"]] = work
        for one in unmatched:
            one.close(self._agent.run)
        self._work = list(self.work_by_id.values())

    def _takes_time(self, call_id: str) -> bool:
        """Return True if a call that is yet to be made will take its time there; False where most of it is done.

        Most of it is done where its prefetch has ended, or where only its requests to engines were started early.
        """
        work = self.work_by_id.get(call_id)
        return work is None or (work.prefetch is not None and not work.prefetch.is_done)

    def failed(self) -> None:
        """End the work that was started for the tool calls written so far: the model's call has failed.

        See `AnswerListener`.
        """
        self.close()

    def close(self) -> None:
        """End the work that nobody will claim."""
        for work in self._work:
            work.close(self._agent.run)
        if self._next_prompt is not None:
            self._next_prompt.close()

    def is_continued_by(self, call: ModelCall) -> bool:
        """Return True if a call of the model goes on from this answer."""
        return self._next_prompt is not None and self._next_prompt.is_continued_by(call.prompt)

    def tool_ended(self, call_id: str, result: Any) -> None:
        """End the work for a tool call that was made in its place. `result`: its message, or None if it raised."""
        work = self.work_by_id.get(call_id)
        if work is not None:
            work.close(self._agent.run)
        if self._next_prompt is not None:
            self._next_prompt.add_result(result)


def _is_same(call: Call, other: Call) -> bool:
    return call.name == other.name and exactly(call.args, other.args)


class NextPrompt:
    """The prompt of the model's next call, prefilled as far as it is known while tools run. Used from any thread.

    It begins as the last one did; then comes the answer, then the results of the tool calls, in the order of the calls.
    The next call finds this beginning in the engine's cache. If it sends another prompt, only idle time is lost.
    """

    def __init__(self, call: ModelCall, message: AIMessage, takes_time: Callable[[str], bool]) -> None:
        """`takes_time`: returns True for a tool call that is yet to be made and will take its time."""
        self._call, self._answer, self._takes_time = call, message, takes_time
        self._ids = [tool_call["id"] or "" for tool_call in message.tool_calls]
        self._results: dict[str, BaseMessage] = {}
        self._lock = threading.RLock()
        self._is_over = not keeps_prefixes(call.pool, call.engine)
        self._beginning = KnownBeginning(call.run, call.pool, call.engine)

    def prefill(self) -> None:
        """Prefill what is known, unless the model will be called at once."""
        with self._lock:
            results = [self._results[call_id] for call_id in takewhile(self._results.__contains__, self._ids)]
            pending = [call_id for call_id in self._ids if call_id not in self._results]
            if self._is_over or not any(map(self._takes_time, pending)):
                return
            try:
                prompt = self._call.prompt_with([self._answer, *results, ToolMessage(UNKNOWN, tool_call_id="")])
            except Exception:  # the model does not take such a message: the next call will say so
                self._is_over = True
                return
            self._beginning.extend(prompt, have=self._call.prompt.flat())

    def add_result(self, message: Any) -> None:
        """Add the result of a tool call. If it is no message of a tool, the rest of the prompt stays unknown.

        Each result makes more of the next prompt known, which is prefilled while other tools still run, if that pays.
        May be called from any thread.
        """
        with self._lock:
            if isinstance(message, ToolMessage):
                self._results[message.tool_call_id] = message
                self.prefill()

    def is_continued_by(self, prompt: Prompt) -> bool:
        """Return True if a prompt goes on from this answer."""
        messages = self._call.prompt.messages
        return len(prompt.messages) > len(messages) and prompt.messages[: len(messages)] == messages

    def close(self) -> None:
        """Stop prefilling: nobody needs it any more.

        Results that come later are not prefilled. May be called from any thread.
        """
        with self._lock:
            self._is_over = True
            self._beginning.close()


# ------------------------------------------------------------ places of tool calls


def in_tool_call(run_call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function of a tool node that runs one tool call, so that the tool claims what was started for it."""

    def run(call: Any, *args: Any, **kwargs: Any) -> Any:
        with _tool_call(call) as note_result:
            result = run_call(call, *args, **kwargs)
            note_result(result)
            return result

    return run


def ain_tool_call(run_call: Callable[..., Any]) -> Callable[..., Any]:
    """`in_tool_call` for a coroutine function."""

    async def run(call: Any, *args: Any, **kwargs: Any) -> Any:
        with _tool_call(call) as note_result:
            result = await run_call(call, *args, **kwargs)
            note_result(result)
            return result

    return run


@contextmanager
def _tool_call(call: Any) -> Iterator[Callable[[Any], None]]:
    """Run the body as the place of a tool call. What it calls in turn belongs to no agent."""
    agent, tool_call = running_agent.get(), call if isinstance(call, dict) else {}
    call_id = tool_call.get("id") or ""
    answer = None if agent is None else agent.answer_of(call_id)
    work = None if answer is None else answer.work_by_id.get(call_id)
    claim = None if work is None or work.prefetch is None else work.prefetch.claim()
    results: list[Any] = []
    with _tool_step(agent, tool_call), outside_agents(), during(tool_claim, claim):
        try:
            yield results.append
        finally:
            if answer is not None:
                _end_safely(answer, call_id, results[0] if results else None)


def _end_safely(answer: AgentAnswer, call_id: str, result: Any) -> None:
    """End the work that was started for a tool call; log an error of it, so that the tool's own result stands."""
    try:
        answer.tool_ended(call_id, result)
    except Exception as error:
        logging.getLogger("teola_plugin").warning(
            "a prefetched call of a tool is left alone (%s is a bug of teola-plugin: please report it)",
            type(error).__name__,
            exc_info=error,
        )


@contextmanager
def _tool_step(agent: AgentCall | None, call: Mapping[str, Any]) -> Iterator[None]:
    """Show the body as a step in the trace of the agent's query."""
    if agent is None:
        yield
        return
    step, outcome = agent.run.step_began("tool", str(call.get("name", ""))), "failed"
    try:
        with during(current_position, replace(current_position.get(), step=step)):
            yield
        outcome = "done"
    except GraphBubbleUp:  # an interrupt, a command for the graph around
        outcome = "interrupted"
        raise
    finally:
        agent.run.step_ended(step, outcome)


def is_in_agent() -> bool:
    """Return True if an agent listens to models, or to tools, that are called here."""
    return current_agent.get() is not None or running_agent.get() is not None


@contextmanager
def outside_agents() -> Iterator[None]:
    """Run the body so that what it calls belongs to no agent: models are not listened to, tools claim nothing."""
    with during(current_agent, None), during(running_agent, None):
        yield
