"""A lock for coroutines of an object that outlives event loops."""

from __future__ import annotations

import asyncio


class LoopLock:
    """An `asyncio.Lock` of the running loop: an engine may be started again on another loop.

    It must not be held when its loop ends.
    """

    def __init__(self) -> None:
        self._lock: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def _of_running_loop(self) -> asyncio.Lock:
        """Return the lock of the running loop; make a new one if the last was for another loop."""
        loop = asyncio.get_running_loop()
        if self._lock is None or self._loop is not loop:
            self._lock, self._loop = asyncio.Lock(), loop
        return self._lock

    async def __aenter__(self) -> None:
        await self._of_running_loop().acquire()

    async def __aexit__(self, *_: object) -> None:
        self._of_running_loop().release()
