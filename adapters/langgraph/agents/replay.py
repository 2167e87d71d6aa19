"""Callback events of a call made ahead: kept back, and delivered when the plain object makes that very call.

An early call sees one handler, an `EventLog`. When it is claimed, the log's events go to the handlers that the plain
call would have had, with its parent, tags and metadata. An unclaimed call leaves no trace.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import Context
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from langchain_core.callbacks import AsyncCallbackManager, BaseCallbackHandler, CallbackManager
from langchain_core.callbacks.manager import ahandle_event, handle_event
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import merge_configs, var_child_runnable_config

from teola_plugin.adapters.snapshots import NotCopied, snapshot
from teola_plugin.runtime.call_limits import inside_early
from teola_plugin.runtime.context import current_run
from teola_plugin.shims import langchain as shims

IGNORED_BY = {
    "on_llm_start": "ignore_llm",
    "on_chat_model_start": "ignore_chat_model",
    "on_llm_new_token": "ignore_llm",
    "on_stream_event": "ignore_llm",
    "on_llm_end": "ignore_llm",
    "on_llm_error": "ignore_llm",
    "on_chain_start": "ignore_chain",
    "on_chain_end": "ignore_chain",
    "on_chain_error": "ignore_chain",
    "on_tool_start": "ignore_agent",
    "on_tool_end": "ignore_agent",
    "on_tool_error": "ignore_agent",
    "on_agent_action": "ignore_agent",
    "on_agent_finish": "ignore_agent",
    "on_retriever_start": "ignore_retriever",
    "on_retriever_end": "ignore_retriever",
    "on_retriever_error": "ignore_retriever",
    "on_retry": "ignore_retry",
    "on_text": None,
    "on_custom_event": "ignore_custom_event",
}
"""Events, and the attribute of a handler that makes the framework skip them."""


class Event(NamedTuple):
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class EventLog(BaseCallbackHandler):
    """The only handler of an early call. Filled where that call runs, drained where it is claimed."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._lock = threading.Lock()
        self.parent = uuid4()
        """Stands for the run that the plain call will be a child of."""
        self._parents: dict[UUID, UUID | None] = {}

    def record(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)

    def drain(self) -> list[Event]:
        """The events since the last time, in order."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def moved(self, event: Event, leaf_tags: list[str], real: Any) -> Event:
        """The event as the plain call would have emitted it; `real` manages the plain call's callbacks."""
        kwargs = dict(event.kwargs)
        run_id: UUID = kwargs.get("run_id") or self.parent
        if event.name.endswith("_start"):
            self._parents[run_id] = kwargs.get("parent_run_id")
        nested = self._parents.get(run_id, self.parent) != self.parent
        first = run_id == next(iter(self._parents), None)
        for key in ("run_id", "parent_run_id"):
            if kwargs.get(key) == self.parent:
                kwargs[key] = real.parent_run_id
        if not nested and kwargs.get("tags") is not None:
            own = leaf_tags if first else [t for t in kwargs["tags"] if t not in real.tags]
            kwargs["tags"] = [*(t for t in real.tags if t not in own), *own]
        if kwargs.get("metadata") is not None:
            kwargs["metadata"] = {**(real.inheritable_metadata if nested else real.metadata), **kwargs["metadata"]}
        return Event(event.name, event.args, kwargs)


def _recorder(name: str) -> Callable[..., None]:
    def record(self: EventLog, *args: Any, **kwargs: Any) -> None:
        self.record(Event(name, _as_told(args) if name.endswith("_start") else args, kwargs))

    record.__name__ = name
    return record


for _name in IGNORED_BY:
    setattr(EventLog, _name, shims.inline_callback(_recorder(_name)))


def _as_told(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call begins with (its description, its input) as it is now: when it is told of, it may be another."""
    try:
        return (*args[:1], *snapshot(args[1:]))
    except NotCopied:
        return args


def _inherited(manager: type[CallbackManager] | type[AsyncCallbackManager], config: RunnableConfig) -> Any:
    """The callback manager that a call with this config would have."""
    return manager.configure(
        config.get("callbacks"), inheritable_tags=config.get("tags"), inheritable_metadata=config.get("metadata")
    )


def deliver(log: EventLog, config: RunnableConfig, leaf_tags: list[str]) -> None:
    """What the log has gathered goes to the handlers of `config`. Raises what a handler with `raise_error` raises."""
    events = log.drain()
    if not events:
        return
    real = _inherited(CallbackManager, config)
    for event in events:
        moved = log.moved(event, leaf_tags, real)
        handle_event(real.handlers, moved.name, IGNORED_BY[moved.name], *moved.args, **moved.kwargs)


async def adeliver(log: EventLog, config: RunnableConfig, leaf_tags: list[str]) -> None:
    """`deliver` in a loop, where async handlers are awaited."""
    events = log.drain()
    if not events:
        return
    real = _inherited(AsyncCallbackManager, config)
    for event in events:
        moved = log.moved(event, leaf_tags, real)
        await ahandle_event(real.handlers, moved.name, IGNORED_BY[moved.name], *moved.args, **moved.kwargs)


def prepare(context: Context, config: RunnableConfig, run: Any) -> None:
    """Make `context` one in which nothing but the config's callbacks hears of a call."""

    def setup() -> None:
        current_run.set(run)
        inside_early.set(True)
        var_child_runnable_config.set(config)
        shims.silence()

    context.run(setup)


def early_config(base: RunnableConfig, bound: RunnableConfig, log: EventLog, *, sync: bool) -> RunnableConfig:
    """The config of an early call: the plain child config, with the log in place of its callbacks."""
    child: RunnableConfig = {k: v for k, v in base.items() if k not in ("callbacks", "run_name", "run_id")}  # type: ignore[assignment]
    merged = merge_configs(bound, child)
    manager = CallbackManager if sync else AsyncCallbackManager
    merged["callbacks"] = manager([log], [log], parent_run_id=log.parent)
    return merged
