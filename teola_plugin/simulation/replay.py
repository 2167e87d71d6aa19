"""Flows under load: engine schedulers, placement and the engines' timelines, driven by one heap of events.

What `run.simulate` does with apps, without their code. Works of a graph are asked for at once when what they wait for
has happened, before the slots of what ended are offered; calls of the plain object a moment after, as in a runtime.
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
    """Run all queries; the same every time."""
    clock = EventClock()
    served = tuple(Served(one.app, one.at) for one in arrivals)
    ports = {name: ReplayPort(name, engine, clock) for name, engine in cluster.engines.items()}
    for number, one in enumerate(arrivals):
        query = LiveFlow(f"q{number}", one, served[number], ports, clock, progressed)
        clock.call_at(one.at, query.begin)
    clock.run()
    if stuck := [one for one in served if math.isnan(one.ended)]:
        raise TeolaError(
            f"{len(stuck)} queries of the app {stuck[0].app!r} wait for what never happens in their flow.",
            hint="record it again with another seed, or simulate the app itself",
        )
    end = max((one.ended for one in served), default=0.0)
    return Run(
        served,
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
    """Queries at these times (seconds, app) by the flows of their apps in turn, each with prompts of its own.

    `flows`: at least two of each app, recorded with different inputs: what their prompts have in common is what all
    queries have. Raises `ValueError` for fewer.
    """
    if few := [name for name, found in flows.items() if len(found) < 2]:
        raise ValueError(f"the app {few[0]!r} has {len(flows[few[0]])} flow: record two inputs or more")
    shared = {name: shared_blocks(found) for name, found in flows.items()}
    turn = {name: itertools.cycle(found) for name, found in flows.items()}
    arrivals = [
        FlowArrival(at, app, next(turn[app]).of_query(number, shared[app]), (goals or {}).get(app))
        for number, (at, app) in enumerate(times)
    ]
    return replay(cluster, arrivals, progressed)
