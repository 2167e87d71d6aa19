"""The two schedulers as pure state machines: events in, instructions out; no clock, no I/O."""

from teola_plugin.scheduling.engine_scheduler import EngineScheduler
from teola_plugin.scheduling.graph_scheduler import GraphScheduler
from teola_plugin.scheduling.live_query import LiveQuery, Status
from teola_plugin.scheduling.policies import (
    POLICIES,
    BatchPolicy,
    PerInvocation,
    ThroughputOriented,
    TopologyAware,
)

__all__ = [
    "POLICIES",
    "BatchPolicy",
    "EngineScheduler",
    "GraphScheduler",
    "LiveQuery",
    "PerInvocation",
    "Status",
    "ThroughputOriented",
    "TopologyAware",
]
