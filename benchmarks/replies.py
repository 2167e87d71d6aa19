"""The wait for a reply of somebody else's API, as exact on an event loop as in a thread."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

_AT_ONCE = 64
"""Replies waited for side by side: more than any benchmark's application has under way."""
_replies = ThreadPoolExecutor(_AT_ONCE, "reply")


async def reply_after(seconds: float) -> None:
    """Waits so long, as `time.sleep` does, and wakes the loop as a socket does.

    A loop's own timers count in whole milliseconds and fire up to one late (`selectors`: epoll), which would make every
    asynchronous call of a model slower than the synchronous one, in plain objects and accelerated ones alike.
    """
    await asyncio.wrap_future(_replies.submit(time.sleep, seconds))
