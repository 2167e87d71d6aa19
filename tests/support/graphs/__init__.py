"""Graphs and agents as people write them.

`GRAPHS` holds each with its inputs; they are built from the objects of a `Kit`.
"""

from __future__ import annotations

from support.graphs import (
    agents,
    ahead,
    caching,
    chains,
    failures,
    functional,
    interrupts,
    joins,
    middleware,
    observing,
    rag,
    routing,
    sending,
    state,
    stores,
    streams,
    subgraphs,
)
from support.graphs.case import GRAPHS, Case, Turn
from support.graphs.kit import Kit

__all__ = ["GRAPHS", "Case", "Kit", "Turn"]

_ = (
    agents,
    ahead,
    caching,
    chains,
    failures,
    functional,
    interrupts,
    joins,
    middleware,
    observing,
    rag,
    routing,
    sending,
    state,
    stores,
    streams,
    subgraphs,
)  # importing them fills the table
