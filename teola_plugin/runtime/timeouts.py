"""Bounded waits for other people's code, whatever that code does with a cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def at_most(seconds: float, awaitable: Awaitable[T]) -> T:
    """Return the value of an awaitable. Raises `TimeoutError` after `seconds`, even if it ignores its cancellation."""
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait([task], timeout=seconds)
    finally:
        if not task.done():
            abandon(task)
    if not task.done():
        raise TimeoutError(f"it did not end within {seconds:g} s")
    return task.result()


async def cancel_tasks(seconds: float, tasks: Iterable[asyncio.Future[Any]]) -> set[asyncio.Future[Any]]:
    """Cancel tasks and wait until they have ended. Return those that have not within `seconds`."""
    left = {task for task in tasks if not task.done()}
    for task in left:
        abandon(task)
    if left:
        _, left = await asyncio.wait(left, timeout=seconds)
    return left


def abandon(task: asyncio.Future[Any]) -> None:
    """Cancel a task, and ignore what it raises."""
    task.add_done_callback(_ignore_exception)
    task.cancel()


def _ignore_exception(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()
