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

from langchain_core.globals import get_debug
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config

from teola_plugin.adapters.langchain.listening import current_agent
from teola_plugin.adapters.langchain.own_models import replay
from teola_plugin.adapters.langchain.own_models.leaf_calls import Outcome, aoutcome_of, outcome_of
from teola_plugin.adapters.langgraph.agents.arguments import Given
from teola_plugin.adapters.snapshots import exactly, snapshot
from teola_plugin.shims import langchain as shims
from teola_plugin.shims.langchain_agents import graph_keys

_OF_THE_TASK = ("checkpoint",)
"""How keys of a config begin that tell where in the graph a call stands, beside those that LangGraph hides."""


class NeedsItsPlace(BaseException):
    """Stops a function that reaches for what is not there before its place. No `Exception`: it is not to be handled."""


class _State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    CLAIMED = "claimed"
    """Also by a plain call that came before it had begun, and makes the call itself."""
    DROPPED = "dropped"


class BodyLog(replay.EventLog):
    """Events of what a tool's function calls. Where somebody streams them, the first one stops it."""

    def __init__(self, stop: Callable[[], NoReturn] | None) -> None:
        super().__init__()
        self._stop = stop

    def record(self, event: replay.Event) -> None:
        if self._stop is not None:
            self._stop()
        super().record(event)

    def moved(self, event: replay.Event, leaf_tags: list[str], real: Any) -> replay.Event:
        """As what the tool's function calls in its place would have told it: all of it has the tool's tags."""
        kwargs = dict(event.kwargs)
        for key in ("run_id", "parent_run_id"):
            if kwargs.get(key) == self.parent:
                kwargs[key] = real.parent_run_id
        if kwargs.get("tags") is not None:
            kwargs["tags"] = [*real.tags, *(tag for tag in kwargs["tags"] if tag not in real.tags)]
        if kwargs.get("metadata") is not None:
            kwargs["metadata"] = {**real.metadata, **kwargs["metadata"]}
        return replay.Event(event.name, event.args, kwargs)


class _Lent:
    """Stands in an early call's config for what a graph lends to a task: whoever touches it is stopped."""

    def __init__(self, stop: Callable[[], NoReturn]) -> None:
        object.__setattr__(self, "_stop", stop)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # who copies or prints a config means no harm
            raise AttributeError(name)
        object.__getattribute__(self, "_stop")()

    def __call__(self, *_: Any, **__: Any) -> Any:
        object.__getattribute__(self, "_stop")()

    __setattr__ = __getitem__ = __iter__ = __contains__ = __call__


@dataclass(frozen=True, slots=True)
class Found:
    """What calls of a tool's function have shown."""

    misplaced: threading.Event = field(default_factory=threading.Event)
    """It reaches for what only its place can give, or changes what it is called with."""
    heard: threading.Event = field(default_factory=threading.Event)
    """It calls what tells of itself, and somebody streamed that."""

    def may_run_early(self, config: RunnableConfig) -> bool:
        """Whether a call made ahead can be kept from everybody who listens here, and limits do not forbid it."""
        known = shims.listeners_are_known() and not get_debug() and not shims.attached_by_environment()
        free = config.get("max_concurrency") is None and bool(graph_keys(config.get("configurable") or {}))
        fits = not self.misplaced.is_set() and not (self.heard.is_set() and _is_streamed(config))
        return known and free and fits


def _is_streamed(config: RunnableConfig) -> bool:
    callbacks = config.get("callbacks")
    return shims.streams(callbacks if isinstance(callbacks, list) else getattr(callbacks, "handlers", ()))


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
    log: replay.EventLog = field(default_factory=replay.EventLog)
    outcome: Future[Outcome | None] = field(default_factory=Future)
    """None where it has to be called in its place."""
    stop: Callable[[], object] = bool
    """Gives it up, where that is possible."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    # ------------------------------------------------------------ ahead

    def prepared(self, base: Context, config: RunnableConfig, run: Any, *, sync: bool) -> Context:
        """A context of its own to run in; `config`: where the model is called."""
        self.log = BodyLog(self._stopper(self.found.heard) if _is_streamed(config) else None)
        configurable, lent = config.get("configurable") or {}, _Lent(self._stopper(self.found.misplaced))
        kept = {key: value for key, value in configurable.items() if not key.startswith(_OF_THE_TASK)}
        own: RunnableConfig = {"configurable": {**kept, **dict.fromkeys(graph_keys(configurable), lent)}}
        if "recursion_limit" in config:
            own["recursion_limit"] = config["recursion_limit"]
        context = base.copy()
        for variable in (current_agent, claimable):  # of a graph around this one
            context.run(variable.set, None)
        replay.prepare(context, replay.early_config(own, {}, self.log, sync=sync), run)
        return context

    def _stopper(self, found: threading.Event) -> Callable[[], NoReturn]:
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
        with replay.untraced():
            outcome = outcome_of(lambda: self.function(*args, **named))
        self._end(outcome, given)

    async def arun(self) -> None:
        """The coroutine function, as a task."""
        if not self._take_up():
            return
        args, named = given = snapshot(self.asked)
        with replay.untraced():
            outcome = await aoutcome_of(self.function(*args, **named))
        self._end(outcome, given)

    def _take_up(self) -> bool:
        with self._lock:
            if self.state is _State.WAITING:
                self.state = _State.RUNNING
                return True
        self._resolve(None)
        return False

    def _end(self, outcome: Outcome, given: Given) -> None:
        if not exactly(given, self.asked):  # what the plain call is made with has to change
            self.stopped = True
            self.found.misplaced.set()
        fits = not self.stopped and (outcome.error is None or isinstance(outcome.error, Exception))
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
        self.stop()
        self._resolve(None)

    # ------------------------------------------------------------ in its place

    def claimed(self, function: Callable[..., Any], given: Given) -> bool:
        """Whether the plain call of this function, with these arguments, is this very call, and has begun. Once."""
        with self._lock:
            if self.state not in (_State.WAITING, _State.RUNNING) or function is not self.function:
                return False
            begun, same = self.state is _State.RUNNING, exactly(given, self.asked)
            self.state = _State.CLAIMED if same else _State.DROPPED
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
