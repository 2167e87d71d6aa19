"""Runs queries on a cluster in virtual time, and reports the outcome of each."""

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
"""Calls an app with one input."""
Make = Callable[[EnginePool], Ask | Awaitable[Ask]]
"""Builds an app on a pool; called once in the run, before the first query. What it awaits, e.g. filling a collection,
happens before the run's time begins."""


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one run: its queries in the order of `arrivals`, and how busy each instance was."""

    served: tuple[Served, ...]
    busy: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """By engine: the seconds in which each instance had something to do."""
    seconds: float = 0.0
    """Seconds from the start to the end of the last query."""
    batch_sizes: Mapping[str, float] = field(default_factory=dict)
    """By engine: mean number of requests in a batch. Only of replays, as is `cached`."""
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
    """Call the apps as the queries arrive; all on one pool, so apps compete. The same seed gives the same run.

    `goals` are the seconds by app that a query should take, for policies that use them; nothing ends with them.
    `progressed` is called at the end of each query. A query that fails is counted and disturbs no other. Raises what
    building an app raises, and `TeolaError` if a query waits for something that cannot happen in virtual time.
    """

    def make_pool(engines: Mapping[str, Sequence[Engine]], measured: Meter) -> EnginePool:
        return EnginePool.on_this_loop(engines, policy=cluster.policies, sink=measured)

    return run_virtual(_run_queries(cluster, apps, arrivals, make_pool, goals or {}, progressed), seed, inline=True)


def on_the_clock(
    cluster: Cluster,
    apps: Mapping[str, Make],
    arrivals: Sequence[Arrival],
    *,
    goals: Mapping[str, float] | None = None,
    progressed: Callable[[], object] = lambda: None,
) -> Run:
    """Like `simulate`, in real time: the same engines sleep, and computing takes the time that it takes."""

    def make_pool(engines: Mapping[str, Sequence[Engine]], measured: Meter) -> EnginePool:
        pool = EnginePool.local(engines, policy=cluster.policies)
        pool.runtime.recorder.sink = measured
        return pool

    return asyncio.run(_run_queries(cluster, apps, arrivals, make_pool, goals or {}, progressed))


def alone(cluster: Cluster, apps: Mapping[str, Make], arrivals: Sequence[Arrival], *, seed: int = 0) -> list[Served]:
    """Run each query on a cluster of its own, which has nothing else to do, and return the results."""
    results: list[Served] = []
    for arrival in arrivals:
        results += simulate(cluster, {arrival.app: apps[arrival.app]}, [replace(arrival, at=0.0)], seed=seed).served
    return results


async def _run_queries(
    cluster: Cluster,
    apps: Mapping[str, Make],
    arrivals: Sequence[Arrival],
    make_pool: Callable[[Mapping[str, Sequence[Engine]], Meter], EnginePool],
    goals: Mapping[str, float],
    progressed: Callable[[], object],
) -> Run:
    results = tuple(Served(arrival.app, arrival.at) for arrival in arrivals)
    engines = cluster.made(
        {arrival.mark: arrival.output_tokens for arrival in arrivals if arrival.mark and arrival.output_tokens}
    )
    measured = Meter(results)
    measured.watch(engines)
    async with make_pool(engines, measured) as pool:
        asks = {name: await _build_app(make, pool) for name, make in apps.items()}
        measured.start()

        async def query(number: int, arrival: Arrival) -> None:
            await asyncio.sleep(arrival.at - measured.now())
            meter.number.set(number)
            current_terms.set(Terms(app=arrival.app, goal=goals.get(arrival.app)))
            with pool.watching(arrival.app):
                await _run_query(asks[arrival.app], arrival.value, results[number], measured)
            progressed()

        await asyncio.gather(*(query(number, arrival) for number, arrival in enumerate(arrivals)))
        end = measured.now()
    return Run(results, {name: measured.busy(name, len(instances)) for name, instances in engines.items()}, end)


async def _build_app(make: Make, pool: EnginePool) -> Ask:
    app = make(pool)
    if inspect.isawaitable(app):
        app = await app
    return app


async def _run_query(ask: Ask, value: Any, result: Served, measured: Meter) -> None:
    try:
        await ask(value)
    except Exception as error:  # of the user's app
        result.error = f"{type(error).__name__}: {error}"
    result.ended = measured.now()
