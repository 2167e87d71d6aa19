"""Tests of virtual time: exact clocks, a fixed order, and a clear error instead of endless waiting."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from teola_plugin.errors import TeolaError
from teola_plugin.runtime.virtual_time import run_virtual


async def test_outer_event_loop_keeps_real_time() -> None:
    assert asyncio.get_running_loop().time() > 0


def test_virtual_day_passes_at_once_and_exactly() -> None:
    async def day() -> float:
        for _ in range(24 * 6):
            await asyncio.sleep(600)
        return asyncio.get_running_loop().time()

    start = time.perf_counter()
    assert run_virtual(day()) == pytest.approx(86400, abs=1e-6)
    assert time.perf_counter() - start < 30


def test_events_are_ordered_by_time_and_reproducible() -> None:
    async def story() -> list[tuple[float, int]]:
        seen: list[tuple[float, int]] = []

        async def worker(number: int) -> None:
            for _ in range(5):
                await asyncio.sleep(random.random())
                seen.append((asyncio.get_running_loop().time(), number))

        await asyncio.gather(*(worker(i) for i in range(10)))
        return seen

    first = run_virtual(story(), seed=3)
    assert first == run_virtual(story(), seed=3)
    assert first != run_virtual(story(), seed=4)
    assert [at for at, _ in first] == sorted(at for at, _ in first)


def test_global_random_state_is_restored_afterwards() -> None:
    random.seed(1)
    expected = random.Random(1).random()
    run_virtual(asyncio.sleep(1))
    assert random.random() == expected


def test_endless_wait_raises_and_names_the_waiting_task() -> None:
    async def forgotten() -> None:
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        await asyncio.sleep(2.5)
        await asyncio.create_task(forgotten(), name="the-forgotten-one")

    with pytest.raises(TeolaError, match=r"2\.500000 s.*the-forgotten-one at .*test_virtual_time"):
        run_virtual(main())


def test_exceptions_and_timeouts_work_in_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await asyncio.sleep(1000)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(7)

    async def fails() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_virtual(fails())


def test_clock_stands_still_while_a_thread_runs() -> None:
    async def main() -> tuple[str, float]:
        ticker = asyncio.create_task(asyncio.sleep(3600))
        value = await asyncio.to_thread(lambda: time.sleep(0.05) or "done")
        at = asyncio.get_running_loop().time()
        await ticker
        return value, at

    assert run_virtual(main()) == ("done", 0.0)
