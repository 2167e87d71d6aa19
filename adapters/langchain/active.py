"""Which live query the running code belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from teola_plugin.runtime.context import current_run


def active_run(callbacks: Any = None) -> Any:
    """The query run that a call made here and now joins; None outside every accelerated query.

    In order: the ambient context (`current_run`); a handler with an attribute `teola_run` among `callbacks` (a run
    manager, a callback manager, or a list of handlers); such a handler in LangChain's ambient config. The last two
    find the run where user code has moved to a thread without copying its context.
    """
    run = current_run.get()
    if run is None:
        run = _run_of(callbacks)
    if run is None:
        run = _run_of(_ambient_callbacks())
    return run


def _ambient_callbacks() -> Any:
    from langchain_core.runnables.config import var_child_runnable_config

    config = var_child_runnable_config.get()
    return None if config is None else config.get("callbacks")


def _run_of(callbacks: Any) -> Any:
    return next(iter(runs_in(callbacks)), None)


def runs_in(callbacks: Any) -> list[Any]:
    """The query runs that handlers among `callbacks` stand for, outermost first."""
    handlers: Sequence[Any] = callbacks if isinstance(callbacks, list) else getattr(callbacks, "handlers", ())
    runs = (getattr(handler, "teola_run", None) for handler in handlers)
    return [run for run in runs if run is not None]
