"""Which live query the running code belongs to, and what its config asks for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config

from teola_plugin.adapters.calls import astreamed_in, streamed_in
from teola_plugin.adapters.terms import NOTHING_REQUESTED, CallContext, RequestedTerms, context_of
from teola_plugin.requests.payloads import AnswerForm
from teola_plugin.runtime.context import current_run, during
from teola_plugin.shims.langchain import may_stream

DEADLINE, TENANT, WEIGHT = "teola_deadline_s", "teola_tenant", "teola_weight"
"""Keys in `config["configurable"]`: seconds after which the query fails with `QueryTimeout`; whose prefixes it may
share (a cache salt); its share among the queries of a pool (1.0 is ordinary)."""
_KEYS = (DEADLINE, TENANT, WEIGHT)

_innermost: ContextVar[tuple[Any, Any] | None] = ContextVar("teola_called", default=None)
"""The config of the innermost call of a pool-backed object, and LangChain's ambient one at that time."""


def active_run(callbacks: Any = None) -> Any:
    """Return the query run that a call made here and now joins; None outside every accelerated query."""
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
    """Return the query runs that handlers among `callbacks` stand for, outermost first."""
    handlers: Sequence[Any] = callbacks if isinstance(callbacks, list) else getattr(callbacks, "handlers", ())
    runs = (getattr(handler, "teola_run", None) for handler in handlers)
    return [run for run in runs if run is not None]


def form_of_answers(config: Mapping[str, Any]) -> AnswerForm:
    """Return the form in which models answer that are called by `invoke` with a config.

    Models that always answer in one form say so in their requests, see `Generate.form`.
    """
    return AnswerForm.UNKNOWN if may_stream(config.get("callbacks")) else AnswerForm.WHOLE


def requested_terms(config: Mapping[str, Any] | None) -> RequestedTerms:
    """Return the terms that a config asks for; the ambient config's where it says nothing.

    Raises `RegistrationError`.
    """
    outer, of_config = _ambient().get("configurable") or {}, (config or {}).get("configurable") or {}
    values = {key: source[key] for source in (outer, of_config, config or {}) for key in _KEYS if key in source}
    return RequestedTerms.of(values, tenant=TENANT, deadline_s=DEADLINE, weight=WEIGHT) if values else NOTHING_REQUESTED


@contextmanager
def config_scope(config: RunnableConfig | None) -> Iterator[None]:
    """A pool-backed object is called with this config: what it asks for counts for all that is called in the body."""
    if config is None:
        yield
        return
    with during(_innermost, (config, var_child_runnable_config.get())):
        yield


class ConfigScoped:
    """Stands before the framework's class in the order of methods: calls are made on the terms of their config."""

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
            chunks = super().astream(input, config, **kwargs)
            async with aclosing(astreamed_in(*self._context(config), chunks)) as scoped_chunks:
                async for chunk in scoped_chunks:
                    yield chunk

    def _context(self, config: RunnableConfig | None) -> CallContext:
        with config_scope(config):
            return call_context(self.pool, None if config is None else config.get("callbacks"))


def call_context(pool: Any, callbacks: Any = None) -> CallContext:
    """Return the context of a call into `pool` made here: its live query, or the terms that it has without one."""
    config, ambient = _innermost.get() or (None, None)
    inner = config if ambient is var_child_runnable_config.get() else None  # else another call has begun since
    if callbacks is None and inner is not None:  # LangChain hands none to `_stream`
        callbacks = inner.get("callbacks")
    return context_of(requested_terms(inner), active_runs(callbacks), pool)


def _ambient() -> Mapping[str, Any]:
    return var_child_runnable_config.get() or {}
