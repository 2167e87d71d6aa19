"""The two schedulers as pure state machines: events in, instructions out; no clock, no I/O."""

from teola_plugin.graph.prefix_blocks import PrefixBlocks, block_hashes
from teola_plugin.scheduling.engine_scheduler import EngineScheduler
from teola_plugin.scheduling.graph_scheduler import GraphScheduler
from teola_plugin.scheduling.live_query import LiveQuery, Status
from teola_plugin.scheduling.placement import E2, E2Options, LeastOutstanding, RequestPlacement
from teola_plugin.scheduling.policies import (
    POLICIES,
    BatchPolicy,
    CriticalPath,
    EarliestDeadline,
    PerInvocation,
    ShortestRemaining,
    ThroughputOriented,
    TopologyAware,
)

__all__ = [
    "E2",
    "POLICIES",
    "BatchPolicy",
    "CriticalPath",
    "E2Options",
    "EarliestDeadline",
    "EngineScheduler",
    "GraphScheduler",
    "LeastOutstanding",
    "LiveQuery",
    "PerInvocation",
    "PrefixBlocks",
    "RequestPlacement",
    "ShortestRemaining",
    "Status",
    "ThroughputOriented",
    "TopologyAware",
    "block_hashes",
]
