"""The end of a run's query: when the handler of `run()` has its result, or the deadline has passed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any

from llama_index.core.workflow.errors import WorkflowCancelledByUser  # type: ignore[attr-defined]
from llama_index.core.workflow.handler import WorkflowHandler  # type: ignore[attr-defined]

from teola_plugin.adapters.calls import joined
from teola_plugin.adapters.llamaindex.session import StartedCall
from teola_plugin.adapters.terms import Deadline, interrupting
from teola_plugin.shims.llamaindex.workflows import Result, call_when_ended, intercept_result

GRACE_S = 5.0
"""Seconds in which a run may end by itself after its deadline, as in `handler.cancel_run()`."""


def keep_query_open(call: StartedCall, handler: Any) -> Any:
    """Return what `run()` returned; the query ends when that has its result."""
    if isinstance(handler, WorkflowHandler):
        if call.deadline is not None:
            deadline = call.deadline
            intercept_result(handler, lambda result, cancel: in_time(deadline, result, cancel))
        call_when_ended(handler, lambda error: _close_call(call, error))
        return handler
    if asyncio.iscoroutine(handler):  # a `run` of the user's own
        return _await_in_query(call, handler)
    call.close()
    return handler


def _close_call(call: StartedCall, error: BaseException | None) -> None:
    if error is None:
        call.close()
        return
    is_cancelled = isinstance(error, WorkflowCancelledByUser)
    with contextlib.suppress(BaseException), call.failing():
        raise asyncio.CancelledError() if is_cancelled else error


async def _await_in_query(call: StartedCall, run: Awaitable[Any]) -> Any:
    with call.ending(), joined(call.query_run, call.terms):
        async with interrupting(call.deadline):
            return await run


async def in_time(deadline: Deadline, result: Result, cancel: Result) -> Any:
    """Return the event that ends the run. Raise the error with which the run failed.

    Raise `QueryTimeout` after the deadline: the run is cancelled first, so that readers of its events learn of it.
    """
    task = asyncio.ensure_future(result())
    try:
        await asyncio.wait({task}, timeout=max(0.0, deadline.at - deadline.clock()))
        if not task.done():
            await cancel()
            await asyncio.wait({task}, timeout=GRACE_S)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raise
    if not task.done():
        task.cancel()
    elif not deadline.passed or (not task.cancelled() and _failed_by_itself(task)):
        return task.result()
    raise deadline.error()


def _failed_by_itself(task: asyncio.Future[Any]) -> bool:
    """Return True if the run failed with an error of its own."""
    error = task.exception()
    return error is not None and not isinstance(error, WorkflowCancelledByUser)
