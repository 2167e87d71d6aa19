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
from teola_plugin.adapters.langgraph.agents.eager_tools import EagerTools
from teola_plugin.adapters.langgraph.agents.early_calls import EarlyCall, EarlyStep
from teola_plugin.adapters.langgraph.agents.heard_answer import HeardAnswer
from teola_plugin.adapters.langgraph.agents.tool_places import during, tools_of
from teola_plugin.runtime.query_run import QueryRun

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

    # ------------------------------------------------------------ its tools

    def answer_of(self, tool_call: str) -> HeardAnswer | None:
        """The answer that a tool call is in, if anybody heard it."""
        with self._lock:
            return self._by_id.get(tool_call)

    @property
    def has_loop(self) -> bool:
        return self._loop is not None

    def start(self, early: EarlyCall, name: str, config: RunnableConfig, *, in_loop: bool) -> bool:
        """Run a function of the tool of that name early, as its kind asks for; `config`: where the model is called.

        False where too many run already.
        """
        with self._lock:
            if self._running >= MOST:
                return False
            self._running += 1
        early.outcome.add_done_callback(self._ended)
        early.step = EarlyStep(self.run, self.run.step_began("tool", name, early=True))
        context = early.prepared(self._context, config, self.run, sync=not in_loop)
        if not in_loop:
            threading.Thread(target=context.run, args=(early.run,), name="teola-early-tool", daemon=True).start()
            return True
        loop = self._loop
        assert loop is not None

        def launch() -> None:
            task = loop.create_task(early.arun(), context=context)
            _tasks.add(task)
            task.add_done_callback(_tasks.discard)
            early.stop = lambda: _on(loop, task.cancel)

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
