"""One simulator: apps under load on a cluster in virtual time, with the schedulers and drivers of real queries.

Apps are real objects (LangChain, LangGraph, LlamaIndex, workflows, any async function) on a pool whose engines are the
shipped fakes with the profile of some machine. A run is repeated exactly from its seed. See docs/simulation.md.
"""

from teola_plugin.simulation.arrivals import Arrival, arriving, bursty, poisson, read_trace, zipf
from teola_plugin.simulation.cluster import Cluster, SimulatedEngine, machine_named, mark
from teola_plugin.simulation.flows import Flow, FlowRequest, FlowWork, shared_blocks
from teola_plugin.simulation.live_flows import FlowArrival
from teola_plugin.simulation.meter import QueryOutcome
from teola_plugin.simulation.recording import record
from teola_plugin.simulation.replay import replay, replayed
from teola_plugin.simulation.run import Ask, Make, Run, figures, on_the_clock, quantile, run_alone, simulate

__all__ = [
    "Arrival",
    "Ask",
    "Cluster",
    "Flow",
    "FlowArrival",
    "FlowRequest",
    "FlowWork",
    "Make",
    "QueryOutcome",
    "Run",
    "SimulatedEngine",
    "arriving",
    "bursty",
    "figures",
    "machine_named",
    "mark",
    "on_the_clock",
    "poisson",
    "quantile",
    "read_trace",
    "record",
    "replay",
    "replayed",
    "run_alone",
    "shared_blocks",
    "simulate",
    "zipf",
]
