"""Placement: the replica of an engine that a request goes to."""

from teola_plugin.graph.prefix_blocks import BLOCK_TOKENS, PrefixBlocks, block_hashes
from teola_plugin.scheduling.placement.base import (
    Fits,
    LeastOutstanding,
    PlacementChoice,
    PlacementRequest,
    PlacementRule,
    RequestPlacement,
)
from teola_plugin.scheduling.placement.e2 import E2, E2Options
from teola_plugin.scheduling.placement.load_model import LoadModel
from teola_plugin.scheduling.placement.prefix_index import Match, PrefixIndex, Run
from teola_plugin.scheduling.placement.rebalance import Move, Portion, rebalance

__all__ = [
    "BLOCK_TOKENS",
    "E2",
    "E2Options",
    "Fits",
    "LeastOutstanding",
    "LoadModel",
    "Match",
    "Move",
    "PlacementChoice",
    "PlacementRequest",
    "PlacementRule",
    "Portion",
    "PrefixBlocks",
    "PrefixIndex",
    "RequestPlacement",
    "Run",
    "block_hashes",
    "rebalance",
]
