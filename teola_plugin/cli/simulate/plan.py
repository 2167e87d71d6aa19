"""The runs that the command makes: each rate, each way, each seed; in processes side by side."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from teola_plugin.cli.simulate.apps import App
from teola_plugin.observe import progress
from teola_plugin.runtime.virtual_time import run_virtual
from teola_plugin.simulation import (
    Arrival,
    Cluster,
    alone,
    arriving,
    bursty,
    figures,
    machine_named,
    poisson,
    read_trace,
    simulate,
)

if TYPE_CHECKING:
    from teola_plugin.observe.progress import Bar

PROCESSES = ("poisson", "bursty")
IDLE = 3
"""Queries of each app that are asked alone, for what it takes when nobody else is there."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The description of a simulation, as plain data that can be sent to other processes."""

    pool: str
    apps: tuple[App, ...]
    arrivals: str
    queries: int
    machine: str = ""
    policy: str = ""
    output_tokens: int = 0
    popularity: float | None = None
    slo: float = 5.0

    def cluster(self) -> Cluster:
        found = Cluster.read(
            self.pool, machine_named(self.machine) if self.machine else None, output_tokens=self.output_tokens
        )
        return found.under(self.policy) if self.policy else found

    def coming(self, rate: float, seed: int) -> list[Arrival]:
        """The same for every way. Raises `ConfigError`, `RegistrationError`."""
        inputs = self._inputs(seed)
        if self.arrivals in PROCESSES:
            times = poisson(rate, seed) if self.arrivals == "poisson" else bursty(rate, seed)
            return arriving(times, inputs, self.queries, popularity=self.popularity, seed=seed)
        samples = {name: values[0] for name, values in inputs.items()}
        return read_trace(self.arrivals, list(inputs), samples, self.queries)

    def _inputs(self, seed: int) -> dict[str, list[Any]]:
        async def found() -> dict[str, list[Any]]:
            from teola_plugin.pool import EnginePool

            async with EnginePool.on_this_loop(self.cluster().made()) as pool:
                return {app.name: await app.values(pool, self.queries, seed) for app in self.apps}

        return run_virtual(found(), inline=True)

    def job(
        self, way: str, rate: float, seed: int, idle: Mapping[str, float], bar: Bar | None = None
    ) -> dict[str, Any]:
        """One run's figures."""
        makes = {app.name: partial(app.make, way) for app in self.apps}
        told = (lambda: None) if bar is None else bar.advance
        run = simulate(self.cluster(), makes, self.coming(rate, seed), seed=seed, progressed=told)
        errors = sorted({one.error for one in run.served if one.error})
        found = figures(run, idle, slo=self.slo)
        return {"rate": rate or None, "way": way, "seed": seed, **found, "errors": errors[:3]}

    def idle(self, way: str) -> dict[str, float]:
        """Return, by app, the median latency of queries that run alone on the cluster, in seconds."""
        arrivals = self.coming(1.0, 0)
        found = {}
        for app in self.apps:
            own = [one for one in arrivals if one.app == app.name][:IDLE]
            times = sorted(one.seconds for one in alone(self.cluster(), {app.name: partial(app.make, way)}, own))
            found[app.name] = times[len(times) // 2] if times else float("nan")
        return found


def carry_out(
    plan: Plan, rates: Sequence[float], ways: Sequence[str], seeds: Sequence[int], workers: int
) -> tuple[dict[str, dict[str, float]], list[dict[str, Any]]]:
    """Idle latencies by way and app, and the figures of all runs. Limits are by the plain object's idle latency."""
    idle = {way: plan.idle(way) for way in dict.fromkeys(("plain", *ways))}
    jobs = list(itertools.product(ways, rates, seeds))
    with progress(len(jobs) * plan.queries, "simulated queries") as bar:
        if workers == 1:
            return idle, [plan.job(*job, idle["plain"], bar) for job in jobs]
        return idle, list(_side_by_side(plan, jobs, idle["plain"], workers, bar))


def _side_by_side(
    plan: Plan, jobs: Sequence[tuple[str, float, int]], idle: Mapping[str, float], workers: int, bar: Bar
) -> Iterator[dict[str, Any]]:
    """In the order of the jobs."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(jobs)), context) as processes:
        futures = [processes.submit(plan.job, *job, idle) for job in jobs]
        for _ in as_completed(futures):
            bar.advance(plan.queries)
        for future in futures:
            yield future.result()
