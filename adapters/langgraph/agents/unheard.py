"""Where a tool's function runs before its place: nobody hears it, and what only its place can give is not there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, NoReturn

from langchain_core.globals import get_debug
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config

from teola_plugin.adapters.langchain.listening import current_agent
from teola_plugin.adapters.langgraph.agents import replay
from teola_plugin.runtime.context import current_place
from teola_plugin.shims import langchain as shims
from teola_plugin.shims.langchain_agents import graph_keys

Stop = Callable[[], NoReturn]
_OF_THE_TASK = ("langgraph_", "checkpoint_")
"""How keys of a config begin that tell where in the graph a call stands, beside those that LangGraph hides."""


class NeedsItsPlace(BaseException):
    """Stops a function that reaches for what is not there before its place. No `Exception`: it is not to be handled."""


class BodyLog(replay.EventLog):
    """Events of what a tool's function calls. Where somebody streams them, the first one stops it."""

    def __init__(self, stop: Stop | None) -> None:
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
            kwargs["tags"] = [*(tag for tag in real.tags if tag not in kwargs["tags"]), *kwargs["tags"]]
        if kwargs.get("metadata") is not None:
            own = {key: value for key, value in kwargs["metadata"].items() if type(value) is not _Lent}
            kwargs["metadata"] = {**real.metadata, **own}
        return replay.Event(event.name, event.args, kwargs)


class _Lent:
    """Stands in an early call's config for what a graph lends to a task: whoever looks at it is stopped."""

    def __init__(self, stop: Stop) -> None:
        object.__setattr__(self, "_stop", stop)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # it is copied with its config
            raise AttributeError(name)
        object.__getattribute__(self, "_stop")()

    def __call__(self, *_: Any, **__: Any) -> Any:
        object.__getattribute__(self, "_stop")()

    __setattr__ = __getitem__ = __iter__ = __contains__ = __bool__ = __call__
    __eq__ = __hash__ = __str__ = __repr__ = __format__ = __call__  # type: ignore[assignment]


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
        fits = not self.misplaced.is_set() and not (self.heard.is_set() and is_streamed(config))
        return known and free and fits


def _lending(given: Mapping[str, Any] | None, lent: _Lent) -> dict[str, Any]:
    """A part of a config, in which what is another at a tool's place is not to be looked at."""
    values = dict(given or {})
    own = [*graph_keys(values), *(key for key in values if key.startswith(_OF_THE_TASK))]
    return {**values, **dict.fromkeys(own, lent)}


def is_streamed(config: RunnableConfig) -> bool:
    """Whether somebody streams what is called here."""
    callbacks = config.get("callbacks")
    return shims.streams(callbacks if isinstance(callbacks, list) else getattr(callbacks, "handlers", ()))


def apart(base: Context, config: RunnableConfig, log: BodyLog, stop: Stop, run: Any, *, sync: bool) -> Context:
    """A context to run in, made of that in which the graph is called. `config`: where the model is called, whose query
    is `run`; `log` hears of what is called, `stop` stops whoever looks at what is lent."""
    lent = _Lent(stop)
    own: RunnableConfig = {key: config[key] for key in ("tags", "recursion_limit") if key in config}  # type: ignore
    own["configurable"] = _lending(config.get("configurable"), lent)
    own["metadata"] = _lending(config.get("metadata"), lent)
    context = base.copy()
    for variable in (current_agent, var_child_runnable_config):  # of what is around the graph
        context.run(variable.set, None)
    context.run(current_place.set, current_place.get())
    replay.prepare(context, context.run(replay.early_config, own, {}, log, sync=sync), run)
    return context
