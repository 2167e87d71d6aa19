"""Prefetched calls of read-only tools: the function of a tool runs while its call is still being written.

A prefetch enters the tool's method (`_run`, `_arun`) where nobody listens, and stands in the `ProviderCallTable` of the
agent's call. In the place of the tool call, LangChain runs the tool as it always does, and its events, errors and
messages are its own. Where it enters the method, it gets the outcome of the prefetch.

What only that place can give (a stream to write to, a store, a checkpoint, an answer of a human) is missing in a
prefetch. Code that reaches for it is stopped, and the original makes the call itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn
from uuid import uuid4

from langchain_core.callbacks import AsyncCallbackManager, BaseCallbackHandler, CallbackManager
from langchain_core.callbacks.manager import ahandle_event, handle_event
from langchain_core.globals import get_debug
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tools import BaseTool

from teola_plugin.adapters.langchain.listening import current_agent
from teola_plugin.adapters.langchain.prefetching import untraced
from teola_plugin.adapters.snapshots import NotCopied, snapshot
from teola_plugin.observe.steps import OpenStep
from teola_plugin.runtime.call_limits import is_inside_prefetch
from teola_plugin.runtime.claims import Caller
from teola_plugin.runtime.provider_calls import CallScope, ProviderCallTable
from teola_plugin.runtime.query_run import CallPosition, QueryRun, current_position, current_run, during
from teola_plugin.shims import langchain as shims
from teola_plugin.shims.langchain_agents import graph_keys
from teola_plugin.shims.langchain_interceptors import ToolInvocation, ToolOutcome, tool_claim

_TASK_PREFIXES = ("langgraph_", "checkpoint_")
"""How keys of a config begin that say where in the graph a call is made, besides the keys that LangGraph hides."""


class RequiresRuntimeContext(BaseException):
    """Stops a function that reaches for what its prefetch lacks. Not an `Exception`, so that nobody handles it."""


@dataclass(frozen=True, slots=True)
class ToolHistory:
    """The experience with earlier prefetches of a tool."""

    needs_runtime_context: threading.Event = field(default_factory=threading.Event)
    """Set once its function reached for what only its place can give, or changed its arguments."""
    is_heard: threading.Event = field(default_factory=threading.Event)
    """Set once its function called another object of the framework while somebody streamed."""

    def allows_prefetch(self, config: RunnableConfig) -> bool:
        """Return True if a prefetch can be hidden from everybody who listens here, and nothing forbids it.

        `config`: that of the code that calls the model. A limit of concurrency in it forbids prefetches.
        """
        is_silent = shims.listeners_are_known() and not get_debug() and not shims.attached_by_environment()
        in_graph = config.get("max_concurrency") is None and bool(graph_keys(config.get("configurable") or {}))
        is_heard = self.is_heard.is_set() and is_streamed(config)
        return is_silent and in_graph and not self.needs_runtime_context.is_set() and not is_heard


def is_streamed(config: RunnableConfig) -> bool:
    """Return True if somebody streams the events of what is called with this config."""
    return shims.streams(shims.handlers_in(config.get("callbacks")))


# ------------------------------------------------------------ the prefetch


class ToolPrefetch:
    """One prefetched call of a tool. Created where the model is called, and claimed where the tool is."""

    def __init__(self, invocation: ToolInvocation, history: ToolHistory, table: ProviderCallTable) -> None:
        self.tool: BaseTool = invocation.target
        self.is_done = False
        """True once the function has ended, or once nobody wants it any more."""
        self.on_done: list[Callable[[], object]] = []
        """Called when it is done, once."""
        self.events = NestedEvents()
        self.is_claimed = False
        """True once the original has the outcome."""
        self.cancel: Callable[[], object] = bool
        """Cancels the task that makes the call, if there is one. A thread cannot be cancelled."""
        self._invocation, self._history, self._table = invocation, history, table
        self._scope = CallScope(table, Caller.PLANNER, self._keep_nothing, is_user_code=True)
        self._scope.on_change, self._scope.stop = history.needs_runtime_context.set, lambda: self.cancel()
        self._is_stopped = False
        self._step: OpenStep | None = None
        self._ended_at: float | None = None

    def prepare(self, base: Context, config: RunnableConfig, run: QueryRun, *, on_loop: bool) -> Context:
        """Return a context, made of `base`, in which nobody hears of the call. The trace of `run` shows it from now on.

        `base`: the context in which the graph is called. `config`: that of the code that calls the model.
        """
        self._step = run.step_began("tool", self.tool.name, early=True)
        if is_streamed(config):
            self.events.stop = self._stopper(self._history.is_heard)
        context = base.copy()
        context.run(self._silence, config, run, current_position.get(), on_loop=on_loop)
        return context

    def _silence(self, config: RunnableConfig, run: QueryRun, call_position: CallPosition, *, on_loop: bool) -> None:
        """Set up the current context for the prefetch, where no handler of the user's hears of the call.

        Events go to `NestedEvents` instead. What only the tool's place has is replaced by objects that stop the
        function when it reads them. `call_position`: that of the model's call.
        """
        absent = _Absent(self._stopper(self._history.needs_runtime_context))
        silent: RunnableConfig = {key: config[key] for key in ("tags", "recursion_limit") if key in config}  # type: ignore
        silent["configurable"] = _without_runtime_context(config.get("configurable"), absent)
        silent["metadata"] = _without_runtime_context(config.get("metadata"), absent)
        manager = AsyncCallbackManager if on_loop else CallbackManager
        silent["callbacks"] = manager([self.events], [self.events], parent_run_id=self.events.root)
        self._invocation.set_config(silent)
        var_child_runnable_config.set(silent)
        current_run.set(run)
        current_position.set(call_position)
        current_agent.set(None)
        tool_claim.set(None)
        is_inside_prefetch.set(True)
        shims.silence()

    def _stopper(self, reason: threading.Event) -> Callable[[], NoReturn]:
        """Return a function that stops the prefetch, and sets `reason`, which counts for the tool's next prefetches."""

        def stop() -> NoReturn:
            self._is_stopped = True
            reason.set()
            raise RequiresRuntimeContext

        return stop

    def _keep_nothing(self, outcome: ToolOutcome) -> NoReturn:
        """Leave the outcome to the original, unless the function went on although it was stopped."""
        raise RequiresRuntimeContext if self._is_stopped else TypeError

    def run_on_thread(self, run: QueryRun) -> None:
        """Make the call, on a thread of its own.

        Nothing is returned or raised: the call in its place takes the result, and is made by the original if this one
        failed.
        """
        with self._ending(run), untraced():
            list(self._scope.items(self._invocation))

    async def run_on_loop(self, run: QueryRun) -> None:
        """Make the call, as a task.

        It is `run_on_thread` for a tool that is awaited; cancelling the task ends the call.
        """
        with self._ending(run), untraced():
            async for _ in self._scope.aitems(self._invocation):
                pass

    @contextlib.contextmanager
    def _ending(self, run: QueryRun) -> Iterator[None]:
        """Run the body, which makes the call; note when it ended, and suppress its error."""
        try:
            with contextlib.suppress(BaseException):  # the original calls the function itself, and it raises there
                yield
        finally:
            self._ended_at = run.runtime.time()
            self._finish()

    def _finish(self) -> None:
        """Mark the prefetch as done and call each function in `on_done` once. Called from any thread, maybe twice."""
        self.is_done = True
        with contextlib.suppress(IndexError):  # another thread has called them
            while True:
                self.on_done.pop()()

    def claim(self) -> ToolClaim:
        """Return the original's claim to the call, in its place.

        A call that has not begun is taken back: the original makes it, and does not wait for a thread to start.
        """
        if not self._scope.calls:
            self._scope.is_dropped = True
        return ToolClaim(self.tool, self, CallScope(self._table, Caller.ORIGINAL, _not_copied, is_user_code=True))

    def close(self, run: QueryRun) -> None:
        """Give the call up unless it was claimed, and write to the trace what became of it."""
        self._scope.drop()
        self._finish()
        if self._step is not None:
            at = run.runtime.time() if self._ended_at is None else self._ended_at
            run.steps.end(self._step, at, "claimed" if self.is_claimed else "wasted", {})


def _not_copied(outcome: ToolOutcome) -> NoReturn:
    """Say that an outcome is for one party only."""
    raise TypeError


@dataclass(frozen=True, slots=True, eq=False)
class ToolClaim:
    """The original's claim to a prefetched call, in the place of that call."""

    tool: BaseTool
    prefetch: ToolPrefetch
    scope: CallScope

    def result(self, invocation: ToolInvocation) -> Any:
        """Return or raise what the tool's function did: in the prefetch, or else in a call that is made here."""
        with during(tool_claim, None):  # calls of the same tool in its own function are no claims
            outcomes = list(self.scope.items(invocation))
        if not invocation.is_started:
            self.prefetch.is_claimed = True
            self.prefetch.events.report(var_child_runnable_config.get() or {})
        return outcomes[0].get()

    async def aresult(self, invocation: ToolInvocation) -> Any:
        """`result` for a method of a loop."""
        with during(tool_claim, None):
            try:
                outcomes = [outcome async for outcome in self.scope.aitems(invocation)]
            except asyncio.CancelledError:  # the function was cancelled with the claim, and events are told until then
                if not invocation.is_started:
                    await self.prefetch.events.areport(var_child_runnable_config.get() or {})
                raise
        if not invocation.is_started:
            self.prefetch.is_claimed = True
            await self.prefetch.events.areport(var_child_runnable_config.get() or {})
        return outcomes[0].get()


# ------------------------------------------------------------ what a prefetch lacks


class _Absent:
    """Stands in a config for what a graph lends to a task: whoever looks at it is stopped."""

    def __init__(self, stop: Callable[[], NoReturn]) -> None:
        object.__setattr__(self, "teola_stop", stop)

    def __getattr__(self, name: str) -> Any:
        """Stop the prefetch, because the tool reads something that exists only at its place in the run.

        Special names raise `AttributeError` instead, since the value is copied together with the config that holds it.
        """
        if name.startswith("__"):  # it is copied with its config
            raise AttributeError(name)
        object.__getattribute__(self, "teola_stop")()

    def __call__(self, *_: Any, **__: Any) -> Any:
        object.__getattribute__(self, "teola_stop")()

    __setattr__ = __getitem__ = __iter__ = __contains__ = __bool__ = __call__
    __eq__ = __hash__ = __str__ = __repr__ = __format__ = __call__  # type: ignore[assignment]


def _without_runtime_context(part: Mapping[str, Any] | None, absent: _Absent) -> dict[str, Any]:
    """Return `configurable` or `metadata` of a config, without what is another at the tool's place."""
    values = dict(part or {})
    names = [*graph_keys(values), *(name for name in values if name.startswith(_TASK_PREFIXES))]
    return {**values, **dict.fromkeys(names, absent)}


# ------------------------------------------------------------ events of what a tool's function calls


class _Event(NamedTuple):
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class NestedEvents(BaseCallbackHandler):
    """The only handler of a prefetch: keeps the events of what the function calls, until the outcome is claimed.

    The tool's own events are none of them: they happen above its method, in its place.
    """

    def __init__(self) -> None:
        self.root = uuid4()
        """Stands for the tool's run, as the parent of what its function calls."""
        self.stop: Callable[[], object] = bool
        """Called before an event is kept: it raises where somebody streams, who had to hear of the event at once."""
        self._events: list[_Event] = []

    def report(self, config: RunnableConfig) -> None:
        """Hand the events to the handlers of `config`, which is that of the tool's function in its place.

        Raises what a handler with `raise_error` raises.
        """
        manager = CallbackManager.configure(**_as_configured(config)) if self._events else None
        for event in self._events:
            name, args, kwargs = self._moved(event, manager)
            handle_event(manager.handlers, name, _IGNORED_BY[name], *args, **kwargs)  # type: ignore[union-attr]

    async def areport(self, config: RunnableConfig) -> None:
        """Report the recorded events to the handlers of a config, as `report` does, and await async handlers.

        Called where the original makes the tool's call and takes the prefetched result. Without events nothing is
        configured.
        """
        manager = AsyncCallbackManager.configure(**_as_configured(config)) if self._events else None
        for event in self._events:
            name, args, kwargs = self._moved(event, manager)
            await ahandle_event(manager.handlers, name, _IGNORED_BY[name], *args, **kwargs)  # type: ignore[union-attr]

    def _moved(self, event: _Event, manager: Any) -> _Event:
        """Return an event as it would have been in the tool's place, whose callbacks `manager` manages."""
        kwargs = dict(event.kwargs)
        for key in ("run_id", "parent_run_id"):
            if kwargs.get(key) == self.root:
                kwargs[key] = manager.parent_run_id
        if kwargs.get("tags") is not None:
            kwargs["tags"] = [*(tag for tag in manager.tags if tag not in kwargs["tags"]), *kwargs["tags"]]
        if kwargs.get("metadata") is not None:
            metadata = {key: value for key, value in kwargs["metadata"].items() if type(value) is not _Absent}
            kwargs["metadata"] = {**manager.metadata, **metadata}
        return _Event(event.name, event.args, kwargs)


def _as_configured(config: RunnableConfig) -> dict[str, Any]:
    """Return the arguments of `configure` for the callbacks of what is called with a config."""
    return {
        "inheritable_callbacks": config.get("callbacks"),
        "inheritable_tags": config.get("tags"),
        "inheritable_metadata": config.get("metadata"),
    }


def _recorder(name: str) -> Callable[..., None]:
    """Return the handler method for one kind of event, which keeps the event until the outcome is claimed."""

    def record(self: NestedEvents, *args: Any, **kwargs: Any) -> None:
        """Record one event of what the tool's function calls, to be reported when the original makes the call.

        `stop` raises first where somebody would have to hear of it at once. The input of a start is copied, as far as
        it can be, since what is called may change it.
        """
        self.stop()
        if name.endswith("_start"):  # what is called may change its input before this is told
            with contextlib.suppress(NotCopied):
                args = (*args[:1], *snapshot(args[1:]))
        self._events.append(_Event(name, args, kwargs))

    return record


_IGNORED_BY = {
    **{
        f"on_{kind}_{point}": f"ignore_{kind}"
        for kind in ("llm", "chain", "retriever")
        for point in ("start", "end", "error")
    },
    **dict.fromkeys(("on_llm_new_token", "on_stream_event"), "ignore_llm"),
    **dict.fromkeys(
        ("on_tool_start", "on_tool_end", "on_tool_error", "on_agent_action", "on_agent_finish"), "ignore_agent"
    ),
    "on_chat_model_start": "ignore_chat_model",
    "on_retry": "ignore_retry",
    "on_text": None,
    "on_custom_event": "ignore_custom_event",
}
"""Events, and the attribute of a handler that makes the framework skip them."""
for _name in _IGNORED_BY:
    setattr(NestedEvents, _name, shims.inline_callback(_recorder(_name)))
