"""Tests of the benchmark's apps in virtual time, where promises about latency can be tested exactly.

CPU time costs nothing here. `benchmarks.single_query` measures it in wall-clock time.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.runnables import Runnable

from benchmarks.rag import apps, bound
from benchmarks.single_query import APPS
from teola_plugin import EnginePool, accelerate
from teola_plugin.engines import profiles
from teola_plugin.runtime.virtual_time import run_virtual

GIVEN = {"question": apps.QUESTION, "document": apps.document()}


async def seconds(runnable: Runnable[Any, Any], given: Any) -> tuple[float, Any]:
    loop = asyncio.get_running_loop()
    start = loop.time()
    answer = await runnable.ainvoke(given)
    return loop.time() - start, answer


async def fresh(bench: apps.Bench) -> None:
    await bench.pool.runtime.areset()
    store: Any = bench.pool.engine("store")
    await store.delete_collection(apps.COLLECTION)
    bench.observed.clear()


async def both(name: str, tokens: int) -> tuple[float, float, float]:
    """Return the virtual seconds of the original, the accelerated app, and the bound."""
    bench = apps.fake_pool(profiles.rtx3090(), EnginePool.on_this_loop)
    async with bench.pool:
        make, least_of = APPS[name]
        chain = make(bench, tokens)
        plain, expected = await seconds(chain, GIVEN)
        least = least_of(bound.Machine(bench.pool.profiles), bench.observed)
        await fresh(bench)
        accelerated, answer = await seconds(accelerate(chain, pool=bench.pool), GIVEN)
        assert answer == expected
        return plain, accelerated, least


@pytest.mark.parametrize("name", list(APPS))
@pytest.mark.parametrize("tokens", [10, 60])
def test_accelerated_time_is_near_the_bound_and_below_original(name: str, tokens: int) -> None:
    plain, accelerated, least = run_virtual(both(name, tokens))
    assert least <= accelerated <= 1.10 * least
    assert accelerated <= plain


def test_advanced_rag_reaches_the_speedup_of_the_profile() -> None:
    plain, accelerated, least = run_virtual(both("advanced/sequential", 10))
    assert 1.45 < plain / least < 1.65
    assert plain / accelerated > 1.4
