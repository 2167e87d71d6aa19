"""Calls that no handler hears of: neither those of callback managers nor those of the instrumentation.

LlamaIndex keeps handlers in objects that all calls share, so whether they hear is decided where it tells them.
"""

from __future__ import annotations

import functools
import inspect
from contextvars import ContextVar
from typing import Any
from uuid import uuid4

from llama_index.core.callbacks import CallbackManager
from llama_index_instrumentation.dispatcher import Dispatcher

from teola_plugin.errors import RegistrationError

_silent: ContextVar[bool] = ContextVar("teola_silent", default=False)
_TELLING: tuple[tuple[type, tuple[str, ...]], ...] = (
    (CallbackManager, ("on_event_start", "on_event_end", "start_trace", "end_trace")),
    (Dispatcher, ("event", "aevent", "span_enter", "span_exit", "span_drop")),
)
"""The methods through which handlers are told, by class."""


def silence() -> None:
    """No handler hears of what is called in this context from now on. `silenceable` must have been called before."""
    _silent.set(True)


def silenceable() -> None:
    """From now on `silence` has its effect; everybody else's calls are told of as always.

    Touches the methods by which `CallbackManager` and `Dispatcher` tell their handlers: they ask first. Without them
    (another version): raises `RegistrationError`.
    """
    for kind, names in _TELLING:
        for name in names:
            told = inspect.getattr_static(kind, name, None)
            if not inspect.isfunction(told):
                raise _unknown_listeners()
            if not hasattr(told, "__teola_asks__"):
                setattr(kind, name, _asking(told))


def _asking(told: Any) -> Any:
    if inspect.iscoroutinefunction(told):

        @functools.wraps(told)
        async def atell(*args: Any, **kwargs: Any) -> Any:
            return None if _silent.get() else await told(*args, **kwargs)

        made: Any = atell
    else:

        @functools.wraps(told)
        def tell(*args: Any, **kwargs: Any) -> Any:
            if not _silent.get():
                return told(*args, **kwargs)
            return kwargs.get("event_id") or str(uuid4())  # of an event that begins

        made = tell
    made.__teola_asks__ = True
    return made


def _unknown_listeners() -> RegistrationError:
    from importlib.metadata import version

    return RegistrationError(
        f"shadow= is not possible with llama-index-core {version('llama-index-core')}: it tells its handlers in "
        "another way.",
        hint="install llama-index-core 0.14 or a later release of teola-plugin",
    )
