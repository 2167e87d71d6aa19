"""Runs queries on a cluster in virtual time, and reports the outcome of each."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from teola_plugin.engines.base import Engine
from teola_plugin.graph import RequestContext
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.query_run import current_request_context
from teola_plugin.runtime.virtual_time import run_virtual
from teola_plugin.simulation import meter
from teola_plugin.simulation.arrivals import Arrival
from teola_plugin.simulation.cluster import Cluster
from teola_plugin.simulation.meter import Meter, QueryOutcome

Ask = Callable[[Any], Awaitable[Any]]
"""Calls an app with one input."""
Make = Callable[[EnginePool], Ask | Awaitable[Ask]]
"""Builds an app on a pool; called once in the run, before the first query. What it awaits, e.g. filling a collection,
happens before the run's time begins."""


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one run: its queries in the order of `arrivals`, and how busy each replica was."""

    queries: tuple[QueryOutcome, ...]
    busy: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """By engine: the seconds in which each replica had something to do."""
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


def run_alone(
    cluster: Cluster, apps: Mapping[str, Make], arrivals: Sequence[Arrival], *, seed: int = 0
) -> list[QueryOutcome]:
    """Run each query on a cluster of its own, which has nothing else to do, and return the results."""
    results: list[QueryOutcome] = []
    for arrival in arrivals:
        results += simulate(cluster, {arrival.app: apps[arrival.app]}, [replace(arrival, at=0.0)], seed=seed).queries
    return results


async def _run_queries(
    cluster: Cluster,
    apps: Mapping[str, Make],
    arrivals: Sequence[Arrival],
    make_pool: Callable[[Mapping[str, Sequence[Engine]], Meter], EnginePool],
    goals: Mapping[str, float],
    progressed: Callable[[], object],
) -> Run:
    """Make engines and apps on a new pool, call the apps as queries arrive, and return the measured run."""
    results = tuple(QueryOutcome(arrival.app, arrival.at) for arrival in arrivals)
    engines = cluster.make_engines(
        {arrival.mark: arrival.output_tokens for arrival in arrivals if arrival.mark and arrival.output_tokens}
    )
    measured = Meter(results)
    measured.watch(engines)
    async with make_pool(engines, measured) as pool:
        asks = {name: await _build_app(make, pool) for name, make in apps.items()}
        measured.start()

        async def query(number: int, arrival: Arrival) -> None:
            """Wait for the query's arrival and run it, traced under its number."""
            await asyncio.sleep(arrival.at - measured.now())
            meter.number.set(number)
            current_request_context.set(RequestContext(app=arrival.app, goal=goals.get(arrival.app)))
            with pool.watching(arrival.app):
                await _run_query(asks[arrival.app], arrival.value, results[number], measured)
            progressed()

        await asyncio.gather(*(query(number, arrival) for number, arrival in enumerate(arrivals)))
        end = measured.now()
    return Run(results, {name: measured.busy(name, len(replicas)) for name, replicas in engines.items()}, end)


async def _build_app(make: Make, pool: EnginePool) -> Ask:
    """Make an app on the pool, and return the function that calls it."""
    app = make(pool)
    if inspect.isawaitable(app):
        app = await app
    return app


async def _run_query(ask: Ask, value: Any, result: QueryOutcome, measured: Meter) -> None:
    """Call the app, and record its end and the error, if it raised one."""
    try:
        await ask(value)
    except Exception as error:  # of the user's app
        result.error = f"{type(error).__name__}: {error}"
    result.ended_at = measured.now()


# ------------------------------------------------------------ figures of a run

SLO = 5.0
"""A query is served well within this many times the latency that it has alone."""


def quantile(values: Sequence[float], share: float) -> float:
    """Return the `share` quantile, linear between the two nearest values (like NumPy). Raises `ValueError` for none."""
    if not values:
        raise ValueError("a quantile needs values, and there are none")
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def figures(run: Run, idle: Mapping[str, float], *, slo: float = SLO) -> dict[str, Any]:
    """Return figures that are JSON-ready, all times in seconds. `idle` has the latency of an app's query alone on the
    cluster.

    `goodput` is the number of queries a second that were served within `slo` times that; failed ones do not count.
    """
    apps = sorted({query.app for query in run.queries})
    results = _query_figures(run.queries, idle, slo, run.seconds)
    if len(apps) > 1:
        by_app = {name: [query for query in run.queries if query.app == name] for name in apps}
        results["apps"] = {name: _query_figures(queries, idle, slo, run.seconds) for name, queries in by_app.items()}
    results["utilisation"] = {
        name: [round(busy / run.seconds, 4) if run.seconds else 0.0 for busy in seconds]
        for name, seconds in run.busy.items()
    }
    return results


def _query_figures(
    queries: Sequence[QueryOutcome], idle: Mapping[str, float], slo: float, seconds: float
) -> dict[str, Any]:
    """Return figures of these queries as JSON-ready data; `figures` says more. `seconds`: duration of the run."""
    succeeded = [query for query in queries if not query.error]
    within_slo = sum(query.seconds <= slo * idle[query.app] for query in succeeded)
    firsts = [query.first_token - query.at for query in succeeded if query.first_token is not None]
    span = max((query.ended_at for query in queries), default=0.0) - min((query.at for query in queries), default=0.0)
    return {
        "queries": len(queries),
        "failed": len(queries) - len(succeeded),
        "latency": _spread([query.seconds for query in succeeded]),
        "first_token": _spread(firsts),
        "within_slo": round(within_slo / len(queries), 4) if queries else 0.0,
        "goodput": round(within_slo / span, 4) if span else 0.0,
        "queued": round(_mean([query.queued for query in succeeded]), 4),
        "work": round(_mean([query.work for query in succeeded]), 4),
        "wasted": round(_mean([query.wasted for query in succeeded]), 4),
        "wasted_tokens": round(_mean([query.wasted_tokens for query in succeeded]), 2),
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean and quantiles of values; None without any."""
    if not values:
        return None
    quantiles = {f"p{round(100 * share)}": round(quantile(values, share), 4) for share in (0.5, 0.95, 0.99)}
    return {"mean": round(fmean(values), 4), **quantiles}


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
