"""Tests of the lock of an engine that is started on one loop and later on another."""

from __future__ import annotations

import asyncio

from teola_plugin.engines.loop_lock import LoopLock


def test_lock_works_on_two_loops_in_sequence() -> None:
    lock, order = LoopLock(), []

    async def one(number: int) -> None:
        async with lock:
            order.append(number)
            await asyncio.sleep(0.01)
            order.append(number)

    async def three() -> None:
        await asyncio.gather(*(one(number) for number in range(3)))

    for _ in range(2):
        asyncio.run(three())
    assert order == [0, 0, 1, 1, 2, 2] * 2
