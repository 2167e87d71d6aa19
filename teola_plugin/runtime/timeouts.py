"""Waiting for somebody else's code: never for longer than is said, whatever that code does with a cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def at_most(seconds: float, work: Awaitable[T]) -> T:
    """Its value. Raises `TimeoutError` after `seconds`; what goes on after it was cancelled is left behind."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=seconds)
    finally:
        if not task.done():
            abandon(task)
    if not task.done():
        raise TimeoutError(f"it did not end within {seconds:g} s")
    return task.result()


async def ended(seconds: float, tasks: Iterable[asyncio.Future[Any]]) -> set[asyncio.Future[Any]]:
    """Cancel tasks and wait until they have ended; returns those that have not within `seconds`."""
    left = {task for task in tasks if not task.done()}
    for task in left:
        abandon(task)
    if left:
        _, left = await asyncio.wait(left, timeout=seconds)
    return left


def abandon(task: asyncio.Future[Any]) -> None:
    """Cancel it; what it raises some time is nobody's any more."""
    task.add_done_callback(_seen)
    task.cancel()


def _seen(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()
