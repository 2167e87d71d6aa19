"""One call of a graph with tools: what begins early in it, while its model writes and while its tools run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config

from teola_plugin.adapters.langchain.listening import AgentListener, AnswerListener, ModelCall, current_agent
from teola_plugin.adapters.langgraph.agents.arguments import given
from teola_plugin.adapters.langgraph.agents.eager_tools import EagerTool, EagerTools
from teola_plugin.adapters.langgraph.agents.early_calls import EarlyCall, ToolSpan, claimable
from teola_plugin.adapters.langgraph.agents.next_prompt import NextPrompt
from teola_plugin.adapters.plain_data import own_copy
from teola_plugin.adapters.snapshots import NotCopied, exactly, snapshot
from teola_plugin.adapters.tool_calls import Call
from teola_plugin.runtime.query_run import PartRun, QueryRun


@dataclass(slots=True, eq=False)
class Begun:
    """What was begun early for one call that the model wrote."""

    call: Call
    part: PartRun | None
    """Of its engine work."""
    early: EarlyCall | None
    """Its function, if that runs."""

    def end(self) -> None:
        """The call has been made in its place, or will not be."""
        if self.early is not None:
            self.early.drop()
        if self.part is not None:
            self.part.close()


class AgentCall:
    """Listens to the model nodes of one call of a graph, and waits at its tools. Used from any thread."""

    def __init__(self, eager: EagerTools, run: QueryRun) -> None:
        self.eager, self.run = eager, run
        self._context = copy_context()
        self._loop = _running_loop()
        """Where coroutines of tools run; None where the graph is called without a loop."""
        self._answers: list[HeardAnswer] = []
        self._by_id: dict[str, HeardAnswer] = {}
        self._lock = threading.Lock()
        self._closed = False

    # ------------------------------------------------------------ its nodes

    @contextmanager
    def in_node(self, name: str) -> Iterator[None]:
        """A node's task runs in the body."""
        listener: AgentListener | None = self if name in self.eager.models else None
        tools = self if name in self.eager.nodes else None
        with _during(current_agent, listener), _during(_tools_of, tools):
            yield

    def asked(self, call: ModelCall) -> AnswerListener | None:
        """A model is asked: whoever continues a conversation needs no more of its beginning."""
        with self._lock:
            over = [one for one in self._answers if one.continued_by(call)]
            self._forget(over)
        for one in over:
            one.close()
        if self._closed or call.run is not self.run:
            return None
        return HeardAnswer(self, call, _ambient())

    def keep(self, answer: HeardAnswer, ids: Iterable[str]) -> None:
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
        with self._lock:
            return self._by_id.get(tool_call)

    def span(self, tool: str) -> ToolSpan:
        """Of one more early call in the query's trace."""
        made = ToolSpan(self.run, f"{tool}.early#{next(_numbers)}")
        made.queued()
        return made

    def start(self, early: EarlyCall, config: RunnableConfig, *, in_loop: bool) -> None:
        """Run a tool's function early, as its kind asks for."""
        context = early.prepared(self._context, config, self.run, sync=not in_loop)
        if not in_loop:
            threading.Thread(target=context.run, args=(early.run,), name="teola-early-tool", daemon=True).start()
            return
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

    @property
    def has_loop(self) -> bool:
        return self._loop is not None


_numbers = itertools.count(1)
KEPT = 256
"""Answers whose tools have yet to run, or whose next prompt may still be asked for."""
_tasks: set[asyncio.Task[None]] = set()
"""Early coroutines: a loop holds its tasks weakly."""
_tools_of: ContextVar[AgentCall | None] = ContextVar("teola_tools_of", default=None)
"""The call whose tools run here."""


class HeardAnswer:
    """One answer of the model, from its first token to the next call of the model."""

    def __init__(self, agent: AgentCall, call: ModelCall, config: RunnableConfig) -> None:
        self._agent, self._call, self._config = agent, call, config
        self._begun: list[Begun] = []
        self._by_id: dict[str, Begun] = {}
        self._others = False
        """Whether a tool was called that may change something: what is read after it is read in its place."""
        self._next: NextPrompt | None = None

    # ------------------------------------------------------------ while it is written

    def called(self, index: int, call: Call) -> None:
        eager = self._agent.eager.tools.get(call.name)
        if eager is None:
            self._others = True
            return
        self._others = self._others or not eager.reads
        if not any(_same(one.call, call) for one in self._begun):  # the second of two equal calls is the plain one's
            self._begin(eager, call)

    def _begin(self, eager: EagerTool, call: Call) -> None:
        early = self._started(eager, call) if eager.runs and not self._others else None
        part = None
        if early is None and eager.work is not None:
            with contextlib.suppress(Exception):  # arguments that the tool does not take
                part = eager.work.begin(self._agent.run, own_copy(call.args))
        if early is not None or part is not None:
            self._begun.append(Begun(call, part, early))

    def _started(self, eager: EagerTool, call: Call) -> EarlyCall | None:
        """The function, running with what the model wrote; None where it has to wait for its place."""
        in_loop = self._agent.has_loop and eager.coroutine is not None
        function = eager.coroutine if in_loop else eager.function
        if function is None or not eager.found.may_run_early(self._config):
            return None
        try:
            asked = given(eager.tool, own_copy(call.args))
            if asked is None:
                return None
            early = EarlyCall(function, snapshot(asked), eager.found, span=self._agent.span(call.name))
        except (NotCopied, TypeError, ValueError):  # arguments that the tool refuses, or that cannot be compared
            return None
        self._agent.start(early, self._config, in_loop=in_loop)
        return early

    # ------------------------------------------------------------ when it is whole

    def answered(self, message: AIMessage) -> None:
        left = list(self._begun)
        for made in message.tool_calls:
            call = Call(made["name"], made["args"])
            found = next((one for one in left if _same(one.call, call)), None)
            if found is not None and made["id"]:
                left.remove(found)
                self._by_id[made["id"]] = found
        for one in left:  # guesses that the whole answer does not bear out
            one.end()
        self._begun = list(self._by_id.values())
        if message.tool_calls:
            self._next = NextPrompt(self._call, message)
            self._agent.keep(self, [one["id"] for one in message.tool_calls if one["id"]])
            self._next.begin()

    def failed(self) -> None:
        self.close()

    def close(self) -> None:
        """Nobody will come for what is left."""
        for one in self._begun:
            one.end()
        if self._next is not None:
            self._next.close()

    def continued_by(self, call: ModelCall) -> bool:
        return self._next is not None and self._next.continued_by(call.prompt)

    # ------------------------------------------------------------ its tools

    def begun(self, tool_call: str) -> Begun | None:
        return self._by_id.get(tool_call)

    def ended(self, tool_call: str, result: Any) -> None:
        """A tool call has been made in its place."""
        found = self._by_id.get(tool_call)
        if found is not None:
            found.end()
        if self._next is not None:
            self._next.result(result)


def _same(one: Call, other: Call) -> bool:
    return one.name == other.name and exactly(one.args, other.args)


# ------------------------------------------------------------ around one tool call


def around(run_one: Callable[..., Any]) -> Callable[..., Any]:
    """What runs one tool call of a tool node, with what was begun for it at hand."""

    def run(call: Any, *args: Any, **kwargs: Any) -> Any:
        with _place(call) as told:
            result = run_one(call, *args, **kwargs)
            told(result)
            return result

    return run


def in_loop(run_one: Callable[..., Any]) -> Callable[..., Any]:
    """`around` for a loop."""

    async def run(call: Any, *args: Any, **kwargs: Any) -> Any:
        with _place(call) as told:
            result = await run_one(call, *args, **kwargs)
            told(result)
            return result

    return run


@contextmanager
def _place(call: Any) -> Iterator[Callable[[Any], None]]:
    """The place of a tool call: its function finds what was begun for it, and what it calls is nobody's model node."""
    agent, name = _tools_of.get(), call.get("id") if isinstance(call, dict) else None
    answer = agent.answer_of(name) if agent is not None and name else None
    found = answer.begun(name) if answer is not None and name else None
    results: list[Any] = []
    with _during(claimable, found.early if found is not None else None), _during(current_agent, None):
        try:
            yield results.append
        finally:
            if answer is not None and name:
                _safely(lambda: answer.ended(name, results[0] if results else None))


def _safely(does: Callable[[], None]) -> None:
    try:
        does()
    except Exception as error:
        logging.getLogger("teola_plugin").warning(
            "what was begun early for a tool is left alone (%s is a bug of teola-plugin: please report it)",
            type(error).__name__,
            exc_info=error,
        )


@contextmanager
def _during(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # a generator may be closed in another context than it began in
            variable.reset(token)


def _ambient() -> RunnableConfig:
    return var_child_runnable_config.get() or {}


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _on(loop: asyncio.AbstractEventLoop, does: Callable[[], Any]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(does)
