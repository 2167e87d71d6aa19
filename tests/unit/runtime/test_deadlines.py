"""Tests of the one timer for all deadlines."""

from __future__ import annotations

import asyncio

from teola_plugin.runtime.driver.graph_driver import Deadlines
from teola_plugin.runtime.virtual_time import run_virtual


def test_timer_fires_at_each_deadline_that_remains() -> None:
    async def body() -> list[float]:
        loop, rung = asyncio.get_running_loop(), list[float]()
        deadlines = Deadlines(lambda: rung.append(loop.time()))
        for at in (3.0, 1.0, 2.0, 2.0):
            deadlines.add(at)
        deadlines.drop(1.0)
        deadlines.drop(2.0)
        deadlines.drop(7.0)  # unknown
        assert 2.0 in deadlines and 1.0 not in deadlines
        await asyncio.sleep(5.0)
        return rung

    assert run_virtual(body()) == [2.0, 3.0]


def test_dropped_deadlines_leave_no_timer() -> None:
    async def body() -> list[object]:
        deadlines = Deadlines(lambda: None)
        for number in range(50):
            deadlines.add(60.0 + number)
        for number in range(50):
            deadlines.drop(60.0 + number)
        waiting: list[object] = list(asyncio.get_running_loop()._scheduled)  # type: ignore[attr-defined]
        return [timer for timer in waiting if not timer.cancelled()]  # type: ignore[attr-defined]

    assert run_virtual(body()) == []
