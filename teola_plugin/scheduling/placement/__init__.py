"""Which instance of an engine a request goes to."""

from teola_plugin.graph.prefix_blocks import BLOCK_TOKENS, PrefixBlocks, block_hashes
from teola_plugin.scheduling.placement.base import Asked, Fits, Placed, RequestPlacement, Why
from teola_plugin.scheduling.placement.e2 import E2
from teola_plugin.scheduling.placement.least_outstanding import LeastOutstanding
from teola_plugin.scheduling.placement.load_model import LoadModel
from teola_plugin.scheduling.placement.options import E2Options
from teola_plugin.scheduling.placement.prefix_index import Match, PrefixIndex, Run
from teola_plugin.scheduling.placement.rebalance import Move, Portion, rebalance

__all__ = [
    "BLOCK_TOKENS",
    "E2",
    "Asked",
    "E2Options",
    "Fits",
    "LeastOutstanding",
    "LoadModel",
    "Match",
    "Move",
    "Placed",
    "Portion",
    "PrefixBlocks",
    "PrefixIndex",
    "RequestPlacement",
    "Run",
    "Why",
    "block_hashes",
    "rebalance",
]
