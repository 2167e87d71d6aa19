"""Functions of tools that run while their call's place has not come yet: once, unheard, and claimed there.

Whatever such a function calls is heard of when its call is claimed. What only its place can give it (a stream to write
to, a store, a checkpoint, an answer of a human) is not there: whoever reaches for that is stopped, and called in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config

from teola_plugin.adapters.langchain.prefetching import untraced
from teola_plugin.adapters.langgraph.agents import replay
from teola_plugin.adapters.langgraph.agents.arguments import Given
from teola_plugin.adapters.langgraph.agents.unheard import BodyLog, Found, NeedsItsPlace, Stop, apart, is_streamed
from teola_plugin.adapters.own_calls import Outcome, aoutcome_of, outcome_of
from teola_plugin.adapters.snapshots import exactly, snapshot
from teola_plugin.observe.steps import OpenStep
from teola_plugin.runtime.query_run import QueryRun


class _State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    CLAIMED = "claimed"
    """Also by a plain call that came before it had begun, and makes the call itself."""
    DROPPED = "dropped"


@dataclass(slots=True, eq=False)
class EarlyStep:
    """An early call in the trace of its query: what became of it is known later than when it ended."""

    run: QueryRun
    step: OpenStep
    at: float | None = None
    """When the function ended."""

    def ended(self) -> None:
        self.at = self.run.runtime.time()

    def settled(self, *, claimed: bool) -> None:
        """Its outcome was taken, or nobody will take it."""
        at = self.run.runtime.time() if self.at is None else self.at
        self.run.steps.ended(self.step, at, "claimed" if claimed else "wasted", {})


claimable: ContextVar[EarlyCall | None] = ContextVar("teola_early_tool", default=None)
"""What was begun early for the tool call that is running here."""


@dataclass(slots=True, eq=False)
class EarlyCall:
    """One call of a tool's function. Used where the model is called, where the function runs, and where the tool is."""

    function: Callable[..., Any]
    asked: Given
    """What it is called with, as it was: shared with nobody, and never handed out."""
    found: Found
    """Of the tool."""
    state: _State = _State.WAITING
    stopped: bool = False
    """It has to be called in its place."""
    step: EarlyStep | None = None
    """In the trace of its query."""
    over: bool = False
    """The function has ended."""
    log: replay.EventLog = field(default_factory=replay.EventLog)
    outcome: Future[Outcome | None] = field(default_factory=Future)
    """None where it has to be called in its place."""
    stop: Callable[[], object] = bool
    """Gives it up, where that is possible."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    # ------------------------------------------------------------ ahead

    def prepared(self, base: Context, config: RunnableConfig, run: Any, *, sync: bool) -> Context:
        """A context of its own to run in; `config`: where the model is called."""
        log = self.log = BodyLog(self._stopper(self.found.heard) if is_streamed(config) else None)
        context = apart(base, config, log, self._stopper(self.found.misplaced), run, sync=sync)
        context.run(claimable.set, None)
        return context

    def _stopper(self, found: threading.Event) -> Stop:
        def stop() -> NoReturn:
            self.stopped = True
            found.set()
            raise NeedsItsPlace

        return stop

    def run(self) -> None:
        """The function, on a thread of its own."""
        if not self._take_up():
            return
        args, named = given = snapshot(self.asked)
        with untraced():
            outcome = outcome_of(lambda: self.function(*args, **named))
        self._end(outcome, given)

    async def arun(self) -> None:
        """The coroutine function, as a task."""
        if not self._take_up():
            return
        args, named = given = snapshot(self.asked)
        with untraced():
            outcome = await aoutcome_of(self.function(*args, **named))
        self._end(outcome, given)

    def _take_up(self) -> bool:
        with self._lock:
            begins = self.state is _State.WAITING
            if begins:
                self.state = _State.RUNNING
        if not begins:
            self._resolve(None)
        return begins

    def _end(self, outcome: Outcome, given: Given) -> None:
        if not exactly(given, self.asked):  # what the plain call is made with has to change
            self.stopped = True
            self.found.misplaced.set()
        fits = not self.stopped and (outcome.error is None or isinstance(outcome.error, Exception))
        with self._lock:
            self.over = True
            if self.step is not None:
                self.step.ended()
            if not fits and self.state is _State.RUNNING:
                self.state = _State.DROPPED
            if self.state is not _State.RUNNING:
                self._settle(claimed=fits and self.state is _State.CLAIMED)
        self._resolve(outcome if fits else None)

    def _resolve(self, outcome: Outcome | None) -> None:
        with contextlib.suppress(Exception):  # it is there
            self.outcome.set_result(outcome)

    def drop(self) -> None:
        """Nobody will claim it."""
        with self._lock:
            if self.state is _State.CLAIMED:
                return
            self.state = _State.DROPPED
            self._settle(claimed=False)
        self.stop()
        self._resolve(None)

    def _settle(self, *, claimed: bool) -> None:
        if self.step is not None:
            self.step.settled(claimed=claimed)

    # ------------------------------------------------------------ in its place

    def claimed(self, function: Callable[..., Any], given: Given) -> bool:
        """Whether the plain call of this function, with these arguments, is this very call, and has begun. Once."""
        with self._lock:
            if self.state not in (_State.WAITING, _State.RUNNING) or function is not self.function:
                return False
            begun, same = self.state is _State.RUNNING, exactly(given, self.asked)
            self.state = _State.CLAIMED if same else _State.DROPPED
            if self.over or not (begun and same):  # else it is known when the function ends
                self._settle(claimed=begun and same)
        if not same:
            self.stop()
        return begun and same


def claiming(function: Callable[..., Any]) -> Callable[..., Any]:
    """A tool's function that takes what came of the same call made ahead, value or exception."""

    @functools.wraps(function)
    def run(*args: Any, **named: Any) -> Any:
        call = claimable.get()
        if call is None or not call.claimed(function, (args, named)):
            return function(*args, **named)
        outcome = call.outcome.result()
        if outcome is None:
            return function(*args, **named)
        replay.deliver(call.log, var_child_runnable_config.get() or {}, [])
        return outcome.get()

    return run


def aclaiming(function: Callable[..., Any]) -> Callable[..., Any]:
    """`claiming` for a coroutine function."""

    @functools.wraps(function)
    async def run(*args: Any, **named: Any) -> Any:
        call = claimable.get()
        if call is None or not call.claimed(function, (args, named)):
            return await function(*args, **named)
        waiter = asyncio.wrap_future(call.outcome)
        try:
            outcome = await asyncio.shield(waiter)
        except asyncio.CancelledError:
            call.stop()  # as the function itself would have been
            await asyncio.shield(waiter)
            await replay.adeliver(call.log, var_child_runnable_config.get() or {}, [])
            raise
        if outcome is None:
            return await function(*args, **named)
        await replay.adeliver(call.log, var_child_runnable_config.get() or {}, [])
        return outcome.get()

    return run
