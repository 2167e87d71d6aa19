"""The life of a run's query: it begins with `run()`, and ends when the handler has its result."""

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
"""Seconds that a run has to end after its deadline, as in `handler.cancel_run()`."""


def kept_open(call: StartedCall, made: Any) -> Any:
    """What `run()` gives; the query ends with it."""
    if isinstance(made, WorkflowHandler):
        if call.deadline is not None:
            deadline = call.deadline
            intercept_result(made, lambda result, cancel: in_time(deadline, result, cancel))
        call_when_ended(made, lambda error: _over(call, error))
        return made
    if asyncio.iscoroutine(made):  # a `run` of the user's own
        return _awaited(call, made)
    call.close()
    return made


def _over(call: StartedCall, error: BaseException | None) -> None:
    if error is None:
        call.close()
        return
    given_up = isinstance(error, WorkflowCancelledByUser)
    with contextlib.suppress(BaseException), call.failing():
        raise asyncio.CancelledError() if given_up else error


async def _awaited(call: StartedCall, made: Awaitable[Any]) -> Any:
    with call.ending(), joined(call.whole, call.terms):
        async with interrupting(call.deadline):
            return await made


async def in_time(deadline: Deadline, result: Result, cancel: Result) -> Any:
    """The event that ends the run, or `QueryTimeout`: then the run is cancelled, so that who reads its events is told.

    Raises what the run failed with.
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
    elif not deadline.passed or (not task.cancelled() and _own_error(task)):
        return task.result()
    raise deadline.error()


def _own_error(task: asyncio.Future[Any]) -> bool:
    """Whether the run failed by itself."""
    error = task.exception()
    return error is not None and not isinstance(error, WorkflowCancelledByUser)
