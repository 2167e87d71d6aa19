"""One call of a graph with tools: what begins early in it, while its model writes and while its tools run."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config

from teola_plugin.adapters.langchain.listening import AgentListener, AnswerListener, ModelCall, current_agent
from teola_plugin.adapters.langgraph.agents.arguments import Given
from teola_plugin.adapters.langgraph.agents.eager_tools import EagerTool, EagerTools
from teola_plugin.adapters.langgraph.agents.heard_answer import HeardAnswer
from teola_plugin.adapters.langgraph.agents.tool_places import tools_of
from teola_plugin.adapters.langgraph.agents.tool_prefetch import ToolPrefetch, during
from teola_plugin.runtime.provider_calls import ProviderCallTable
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.shims.langchain_interceptors import tool_invocation

MOST = 16
"""Functions of tools that run early at once: not more than a tool node runs side by side on most machines."""
KEPT = 256
"""Answers whose tools have yet to run, or whose next prompt may still be asked for."""
_tasks: set[asyncio.Task[None]] = set()
"""Early coroutines: a loop holds its tasks weakly."""


class AgentCall:
    """Listens to the model nodes of one call of a graph, and waits at its tools. Used from any thread."""

    def __init__(self, eager: EagerTools, run: QueryRun) -> None:
        self.eager, self.run = eager, run
        self._table = ProviderCallTable()
        self._context = copy_context()
        self._loop = _running_loop()
        """Where coroutines of tools run; None where the graph is called without a loop."""
        self._answers: list[HeardAnswer] = []
        self._by_id: dict[str, HeardAnswer] = {}
        self._running = 0
        """Early functions under way."""
        self._lock = threading.Lock()
        self._closed = False

    # ------------------------------------------------------------ its nodes

    @contextmanager
    def in_node(self, name: str) -> Iterator[None]:
        """A node's task runs in the body."""
        listener: AgentListener | None = self if name in self.eager.models else None
        with during(current_agent, listener), during(tools_of, self if name in self.eager.nodes else None):
            yield

    def asked(self, call: ModelCall) -> AnswerListener | None:
        """A model is asked: whoever goes on with a conversation prefills what is left of its beginning."""
        with self._lock:
            over = [one for one in self._answers if one.continued_by(call)]
            self._forget(over)
            hears = not self._closed and call.run is self.run
        for one in over:
            one.close()
        return HeardAnswer(self, call, var_child_runnable_config.get() or {}) if hears else None

    def keep(self, answer: HeardAnswer, ids: list[str]) -> None:
        """An answer is whole; these tool calls are in it."""
        with self._lock:
            if self._closed:
                over = [answer]
            else:
                self._answers.append(answer)
                self._by_id.update(dict.fromkeys(ids, answer))
                over = self._answers[:-KEPT]
                self._forget(over)
        for one in over:
            one.close()

    def _forget(self, over: list[HeardAnswer]) -> None:
        if over:
            self._answers = [one for one in self._answers if one not in over]
            self._by_id = {name: one for name, one in self._by_id.items() if one not in over}

    def close(self) -> None:
        """The graph's call is over: whatever nobody claimed is given up."""
        with self._lock:
            self._closed = True
            answers, self._answers, self._by_id = self._answers, [], {}
        for one in answers:
            one.close()
        self._table.close()

    # ------------------------------------------------------------ its tools

    def answer_of(self, tool_call: str) -> HeardAnswer | None:
        """The answer that a tool call is in, if anybody heard it."""
        with self._lock:
            return self._by_id.get(tool_call)

    @property
    def has_loop(self) -> bool:
        return self._loop is not None

    def prefetch_of(self, eager: EagerTool, method: str, arguments: Given) -> ToolPrefetch | None:
        """Create the prefetch of a tool call; None if that method of the tool is not intercepted."""
        invocation = tool_invocation(eager.tool, method, *arguments)
        return None if invocation is None else ToolPrefetch(invocation, eager.history, self._table)

    def start(self, prefetch: ToolPrefetch, config: RunnableConfig, *, on_loop: bool) -> bool:
        """Start the prefetch of a tool call, on the loop or on a thread. Return False if too many are under way.

        `config`: that of the code that calls the model.
        """
        with self._lock:
            if self._running >= MOST:
                return False
            self._running += 1
        prefetch.over.add_done_callback(self._ended)
        context = prefetch.prepare(self._context, config, self.run, on_loop=on_loop)
        if not on_loop:
            target = (prefetch.run_on_thread, self.run)
            threading.Thread(target=context.run, args=target, name="teola-early-tool", daemon=True).start()
            return True
        loop = self._loop
        assert loop is not None

        def launch() -> None:
            task = loop.create_task(prefetch.run_on_loop(self.run), context=context)
            _tasks.add(task)
            task.add_done_callback(_tasks.discard)
            prefetch.cancel = lambda: _on(loop, task.cancel)

        if _running_loop() is loop:
            launch()
        else:
            _on(loop, launch)
        return True

    def _ended(self, _: Any) -> None:
        with self._lock:
            self._running -= 1


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _on(loop: asyncio.AbstractEventLoop, does: Callable[[], Any]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(does)
