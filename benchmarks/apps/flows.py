"""The flows of the five applications by way of running them, recorded from the very objects that `schemes` runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import Any

from benchmarks.apps.clusters import cluster
from benchmarks.apps.inputs import given
from benchmarks.apps.schemes import APPS, Scheme
from teola_plugin import EnginePool
from teola_plugin.simulation import Cluster, Flow, FlowArrival, record
from teola_plugin.simulation.flows import shared_blocks

INPUTS = 8
"""Questions and uploads of each application; queries take them in turn, with prompts of their own."""


def cluster_of(scheme: Scheme) -> Cluster:
    return cluster(scheme.policy, caching=scheme.caching)


def maker(app: str, scheme: Scheme) -> Callable[[EnginePool], Callable[[int], Awaitable[Any]]]:
    """Asks a query by its number. Every query uploads into a collection of its own."""

    def make(pool: EnginePool) -> Callable[[int], Awaitable[Any]]:
        return lambda number: scheme.ask(APPS[app], pool, collection=f"uploads{number}")(given(app, number))

    return make


@cache
def flow(app: str, scheme: Scheme, number: int) -> Flow:
    """Of the query of that number. Policies order the works of several queries: alone, there is nothing to order."""
    return record(cluster_of(scheme), app, maker(app, scheme), number)


def flow_arrivals(app: str, flows: Sequence[Flow], times: Sequence[float]) -> list[FlowArrival]:
    """Queries at these times, by the flows in turn."""
    shared = shared_blocks(flows)
    return [
        FlowArrival(at, app, flows[number % len(flows)].of_query(number, shared)) for number, at in enumerate(times)
    ]
