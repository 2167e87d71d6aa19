"""Queries on a cluster in virtual time: who came when, and what became of them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from teola_plugin.engines.base import Engine
from teola_plugin.graph import Terms
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.context import current_terms
from teola_plugin.runtime.virtual_time import run_virtual
from teola_plugin.simulation import meter
from teola_plugin.simulation.arrivals import Arrival
from teola_plugin.simulation.cluster import Cluster
from teola_plugin.simulation.meter import Meter, Served

Ask = Callable[[Any], Awaitable[Any]]
"""Asks an app with one value."""
Make = Callable[[EnginePool], Ask | Awaitable[Ask]]
"""Builds an app on a pool; called once in the run, before the first query. What it awaits, as when it fills a
collection, happens before the run's time begins."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its queries in the order of `arrivals`, and how busy each instance was."""

    served: tuple[Served, ...]
    busy: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """By engine: of each instance, the seconds in which it had something to do."""
    seconds: float = 0.0
    """From the start to the end of the last query."""
    batch_sizes: Mapping[str, float] = field(default_factory=dict)
    """By engine: requests in a batch, in the mean. Of replays; empty for other runs, as is what follows."""
    cached: Mapping[str, float] = field(default_factory=dict)
    """By LLM: the share of its prompts' tokens that its prefix caches held."""


def simulate(
    cluster: Cluster,
    apps: Mapping[str, Make],
    arrivals: Sequence[Arrival],
    *,
    seed: int = 0,
    goals: Mapping[str, float] | None = None,
    progressed: Callable[[], object] = lambda: None,
) -> Run:
    """Ask the apps as the queries arrive; all on one pool, so apps compete. The same seed gives the same run.

    `goals`: by app, the seconds that a query should take, for policies that look at that; nothing ends with them.
    `progressed` is called at the end of each query. A query that fails is counted and disturbs nobody. Raises what
    building an app raises, and `TeolaError` where a query waits for something that cannot happen in virtual time.
    """

    def made(engines: Mapping[str, Sequence[Engine]], measured: Meter) -> EnginePool:
        return EnginePool.on_this_loop(engines, policy=cluster.policies, sink=measured)

    return run_virtual(_asked(cluster, apps, arrivals, made, goals or {}, progressed), seed, inline=True)


def on_the_clock(
    cluster: Cluster,
    apps: Mapping[str, Make],
    arrivals: Sequence[Arrival],
    *,
    goals: Mapping[str, float] | None = None,
    progressed: Callable[[], object] = lambda: None,
) -> Run:
    """`simulate` in real time: the same engines sleep, and what processors do takes what it takes."""

    def made(engines: Mapping[str, Sequence[Engine]], measured: Meter) -> EnginePool:
        pool = EnginePool.local(engines, policy=cluster.policies)
        pool.runtime.recorder.sink = measured
        return pool

    return asyncio.run(_asked(cluster, apps, arrivals, made, goals or {}, progressed))


def alone(cluster: Cluster, apps: Mapping[str, Make], arrivals: Sequence[Arrival], *, seed: int = 0) -> list[Served]:
    """Each query on a cluster of its own, which has nothing else to do: what is possible at best."""
    found: list[Served] = []
    for one in arrivals:
        found += simulate(cluster, {one.app: apps[one.app]}, [replace(one, at=0.0)], seed=seed).served
    return found


async def _asked(
    cluster: Cluster,
    apps: Mapping[str, Make],
    arrivals: Sequence[Arrival],
    made: Callable[[Mapping[str, Sequence[Engine]], Meter], EnginePool],
    goals: Mapping[str, float],
    progressed: Callable[[], object],
) -> Run:
    served = tuple(Served(one.app, one.at) for one in arrivals)
    engines = cluster.made({one.mark: one.output_tokens for one in arrivals if one.mark and one.output_tokens})
    measured = Meter(served)
    measured.watch(engines)
    async with made(engines, measured) as pool:
        asks = {name: await _made(make, pool) for name, make in apps.items()}
        measured.start()

        async def query(number: int, arrival: Arrival) -> None:
            await asyncio.sleep(arrival.at - measured.now())
            meter.number.set(number)
            current_terms.set(Terms(app=arrival.app, goal=goals.get(arrival.app)))
            with pool.watching(arrival.app):
                await _ask(asks[arrival.app], arrival.value, served[number], measured)
            progressed()

        await asyncio.gather(*(query(number, one) for number, one in enumerate(arrivals)))
        end = measured.now()
    return Run(served, {name: measured.busy(name, len(found)) for name, found in engines.items()}, end)


async def _made(make: Make, pool: EnginePool) -> Ask:
    made = make(pool)
    if inspect.isawaitable(made):
        made = await made
    return made


async def _ask(ask: Ask, value: Any, served: Served, measured: Meter) -> None:
    try:
        await ask(value)
    except Exception as error:  # of the user's app
        served.error = f"{type(error).__name__}: {error}"
    served.ended = measured.now()
