"""The live query that running code belongs to, and tool calls that are read while a model still writes its answer.

Such a tool call is speculative until the answer is whole. A listener changes nothing of the answer, nor of how it is
made: an error of a listener is logged, and the call goes on.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config

from teola_plugin.adapters.calls import (
    NOTHING_REQUESTED,
    CallContext,
    RequestedContext,
    astreamed_in,
    context_of,
    giving_up,
    streamed_in,
)
from teola_plugin.adapters.tool_calls import Call, CallReader
from teola_plugin.requests.payloads import AnswerForm, Prompt
from teola_plugin.runtime.loop_thread import CallHandle
from teola_plugin.runtime.query_run import QueryRun, current_run, during
from teola_plugin.shims.langchain import may_stream


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call of a pool model with tools, inside a live query."""

    pool: Any
    engine: str
    run: QueryRun
    prompt: Prompt
    names: Collection[str]
    """Of the tools that the model is told of."""
    to_prompt: Callable[[Sequence[BaseMessage]], Prompt]
    """How the model spells messages."""

    def prompt_with(self, more: Sequence[BaseMessage]) -> Prompt:
        """The prompt, with these messages behind it. Raises what `to_prompt` raises."""
        return replace(self.prompt, messages=self.prompt.messages + self.to_prompt(more).messages)


class AnswerListener(Protocol):
    """Hears of one answer, where the model is called: in the caller's thread, or on its loop."""

    def called(self, index: int, call: Call) -> None:
        """The JSON of a call has closed: the one of this number in the answer, if the whole of it is as it seems."""
        ...

    def answered(self, message: AIMessage) -> None:
        """The answer is whole, and these are its calls."""
        ...

    def failed(self) -> None:
        """There will be no answer."""
        ...


class AgentListener(Protocol):
    """Says whether anybody listens to a call."""

    def listener_for(self, call: ModelCall) -> AnswerListener | None: ...


composite_rules: ContextVar[Any] = ContextVar("teola_composite_rules", default=None)
"""The `CompositeRules` of the accelerated object whose code runs here; None if no composite's calls are prefetched."""
current_agent: ContextVar[AgentListener | None] = ContextVar("teola_agent", default=None)
"""The agent whose model node the running code belongs to."""


def listening(call: ModelCall) -> Hearing | None:
    """Return the listener to a call that is made here; None for nobody."""
    agent = current_agent.get()
    if agent is None:
        return None
    try:
        listener = agent.listener_for(call)
    except Exception as error:
        _log(error)
        return None
    return None if listener is None else Hearing(listener, call.names)


class Hearing:
    """One answer, as it is heard."""

    def __init__(self, listener: AnswerListener, names: Collection[str]) -> None:
        self._listener: AnswerListener | None = listener
        self._reader = CallReader(names)
        self._next_number = 0

    def piece(self, text: str) -> None:
        for call in self._reader.feed(text):
            number, self._next_number = self._next_number, self._next_number + 1
            self._tell(lambda listener, n=number, call=call: listener.called(n, call))  # type: ignore[misc]

    def answered(self, message: AIMessage) -> None:
        self._tell(lambda listener: listener.answered(message))

    def failed(self) -> None:
        self._tell(lambda listener: listener.failed())

    def _tell(self, tell: Callable[[AnswerListener], None]) -> None:
        """Call the listener of an answer; if it raises, log the error and call it no more.

        A model's call must never fail because of the agent that listens to it.
        """
        if self._listener is None:
            return
        try:
            tell(self._listener)
        except Exception as error:
            self._listener = None
            _log(error)


class PendingAnswer:
    """The values of a model's call, to be waited for by `result()` or by `await`. Somebody may be listening."""

    def __init__(self, handle: CallHandle, hearing: Hearing | None) -> None:
        self._handle, self._hearing = handle, hearing

    def result(self) -> list[Any]:
        """Return the values, as `CallHandle.result` does."""
        hearing = self._hearing
        if hearing is None:
            return self._handle.result()
        try:
            with giving_up(self._handle):
                for piece in self._handle.pieces:
                    hearing.piece(piece.text)
                return self._handle.result()
        except BaseException:
            hearing.failed()
            raise

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self._wait().__await__()

    async def _wait(self) -> list[Any]:
        """Return the values of the call once all are there, and pass each piece of text to the listener meanwhile.

        The request is cancelled if the waiting task is.
        """
        hearing = self._hearing
        if hearing is None:
            return await self._handle
        try:
            with giving_up(self._handle):
                async for piece in self._handle.pieces:
                    hearing.piece(piece.text)
                return await self._handle
        except BaseException:
            hearing.failed()
            raise

    def is_whole(self, message: AIMessage) -> None:
        """Tell who listens what became of it."""
        if self._hearing is not None:
            self._hearing.answered(message)


def _log(error: Exception) -> None:
    """Log an error of a listener as a bug of this package, with its traceback."""
    logging.getLogger("teola_plugin").warning(
        "an agent cannot listen to its model (%s is a bug of teola-plugin: please report it)",
        type(error).__name__,
        exc_info=error,
    )


DEADLINE, TENANT, WEIGHT = "teola_deadline_s", "teola_tenant", "teola_weight"
"""Keys in `config["configurable"]`: seconds after which the query fails with `QueryTimeout`; whose prefixes it may
share (a cache salt); its share among the queries of a pool (1.0 is ordinary)."""
_KEYS = (DEADLINE, TENANT, WEIGHT)

_innermost: ContextVar[tuple[Any, Any] | None] = ContextVar("teola_called", default=None)
"""The config of the innermost call of a pool-backed object, and LangChain's ambient one at that time."""


def active_run(callbacks: Any = None) -> Any:
    """Return the query run that a call made here and now joins; None outside every accelerated query.

    It is the innermost run that is not closed. If all are closed, the innermost one is returned, so that a call which
    comes too late is recognized as part of it.
    """
    runs = active_runs(callbacks)
    return next((run for run in runs if not run.closed), runs[0] if runs else None)


def active_runs(callbacks: Any = None) -> list[Any]:
    """Return the query runs that code here belongs to, innermost first.

    In order: the ambient context (`current_run`); handlers with an attribute `teola_run` among `callbacks` (a run
    manager, a callback manager, or a list of handlers); such handlers in LangChain's ambient config. The last two
    find the run where user code has moved to a thread without copying its context.
    """
    ambient_run = current_run.get()
    candidates = [ambient_run, *reversed(runs_in(callbacks)), *reversed(runs_in(_ambient().get("callbacks")))]
    return list({id(run): run for run in candidates if run is not None}.values())


def runs_in(callbacks: Any) -> list[Any]:
    """Return the query runs that handlers among `callbacks` stand for, outermost first.

    `callbacks`: a list of handlers, a callback manager or a run manager; anything else, such as None, has no handlers.
    """
    handlers: Sequence[Any] = callbacks if isinstance(callbacks, list) else getattr(callbacks, "handlers", ())
    runs = (getattr(handler, "teola_run", None) for handler in handlers)
    return [run for run in runs if run is not None]


def form_of_answers(config: Mapping[str, Any]) -> AnswerForm:
    """Return the form in which models answer that are called by `invoke` with a config.

    Models that always answer in one form say so in their requests, see `Generate.form`.
    """
    return AnswerForm.UNKNOWN if may_stream(config.get("callbacks")) else AnswerForm.WHOLE


def requested_context(config: Mapping[str, Any] | None) -> RequestedContext:
    """Return the request context that a config asks for; the ambient config's where it says nothing.

    Raises `RegistrationError`.
    """
    outer, of_config = _ambient().get("configurable") or {}, (config or {}).get("configurable") or {}
    values = {key: source[key] for source in (outer, of_config, config or {}) for key in _KEYS if key in source}
    return (
        RequestedContext.of(values, tenant=TENANT, deadline_s=DEADLINE, weight=WEIGHT) if values else NOTHING_REQUESTED
    )


@contextmanager
def config_scope(config: RunnableConfig | None) -> Iterator[None]:
    """A pool-backed object is called with this config: what it asks for counts for all that is called in the body."""
    if config is None:
        yield
        return
    with during(_innermost, (config, var_child_runnable_config.get())):
        yield


class ConfigScoped:
    """Stands before the framework's class in the order of methods: calls have the request context of their config."""

    if not TYPE_CHECKING:  # type checkers see those of the framework's class, and what they give

        def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
            with config_scope(config):
                return super().invoke(input, config, **kwargs)

        async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
            with config_scope(config):
                return await super().ainvoke(input, config, **kwargs)


class ConfigScopedModel(ConfigScoped):
    """`ConfigScoped` for models. LangChain hands no callbacks to `_stream`: the query is looked for here."""

    pool: Any

    if not TYPE_CHECKING:

        def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
            chunks = super().stream(input, config, **kwargs)
            yield from streamed_in(*self._context(config), chunks)

        async def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:
            """Yield the model's chunks; the engine's request belongs to the query that `config` stands for."""
            chunks = super().astream(input, config, **kwargs)
            async with aclosing(astreamed_in(*self._context(config), chunks)) as scoped_chunks:
                async for chunk in scoped_chunks:
                    yield chunk

    def _context(self, config: RunnableConfig | None) -> CallContext:
        with config_scope(config):
            return call_context(self.pool, None if config is None else config.get("callbacks"))


def call_context(pool: Any, callbacks: Any = None) -> CallContext:
    """Return the context of a call into `pool` made here: its live query, or the request context without one."""
    config, ambient = _innermost.get() or (None, None)
    inner = config if ambient is var_child_runnable_config.get() else None  # else another call has begun since
    if callbacks is None and inner is not None:  # LangChain hands none to `_stream`
        callbacks = inner.get("callbacks")
    return context_of(requested_context(inner), active_runs(callbacks), pool)


def _ambient() -> Mapping[str, Any]:
    return var_child_runnable_config.get() or {}
