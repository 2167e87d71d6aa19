"""Flows under load: engine schedulers, placement and the engines' timelines, driven by one heap of events.

Does what `run.simulate` does with apps, without their code. A graph's works are requested as soon as what they wait for
has happened, before freed slots are offered; calls of the original a moment later, as in a runtime.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from teola_plugin.errors import TeolaError
from teola_plugin.simulation.cluster import Cluster
from teola_plugin.simulation.event_clock import EventClock
from teola_plugin.simulation.flows import Flow, shared_blocks
from teola_plugin.simulation.live_flows import FlowArrival, LiveFlow
from teola_plugin.simulation.meter import Served
from teola_plugin.simulation.replay_ports import ReplayPort
from teola_plugin.simulation.run import Run


def replay(cluster: Cluster, arrivals: Sequence[FlowArrival], progressed: Callable[[], object] = lambda: None) -> Run:
    """Run all queries; the result is the same every time."""
    clock = EventClock()
    queries = tuple(Served(arrival.app, arrival.at) for arrival in arrivals)
    ports = {name: ReplayPort(name, engine, clock) for name, engine in cluster.engines.items()}
    for number, arrival in enumerate(arrivals):
        query = LiveFlow(f"q{number}", arrival, queries[number], ports, clock, progressed)
        clock.call_at(arrival.at, query.begin)
    clock.run()
    if stuck := [arrival for arrival in queries if math.isnan(arrival.ended)]:
        raise TeolaError(
            f"{len(stuck)} queries of the app {stuck[0].app!r} wait for what never happens in their flow.",
            hint="record it again with another seed, or simulate the app itself",
        )
    end = max((arrival.ended for arrival in queries), default=0.0)
    return Run(
        queries,
        {name: port.busy(end) for name, port in ports.items()},
        end,
        {name: port.requests / port.batches for name, port in ports.items() if port.batches},
        {name: port.cached / port.prompted for name, port in ports.items() if port.prompted},
    )


def replayed(
    cluster: Cluster,
    flows: Mapping[str, Sequence[Flow]],
    times: Iterable[tuple[float, str]],
    *,
    goals: Mapping[str, float] | None = None,
    progressed: Callable[[], object] = lambda: None,
) -> Run:
    """Run queries at these times (seconds, app) by the flows of their apps in turn, each with prompts of its own.

    `flows` has at least two of each app, recorded with different inputs: what their prompts have in common is what all
    queries share. Raises `ValueError` for fewer.
    """
    if too_few := [name for name, recorded in flows.items() if len(recorded) < 2]:
        raise ValueError(f"the app {too_few[0]!r} has {len(flows[too_few[0]])} flow: record two inputs or more")
    shared = {name: shared_blocks(recorded) for name, recorded in flows.items()}
    turn = {name: itertools.cycle(recorded) for name, recorded in flows.items()}
    arrivals = [
        FlowArrival(at, app, next(turn[app]).of_query(number, shared[app]), (goals or {}).get(app))
        for number, (at, app) in enumerate(times)
    ]
    return replay(cluster, arrivals, progressed)
