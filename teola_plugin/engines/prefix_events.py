"""Events of a replica's prefix cache, in the names that senders give to prompts (`graph.prefix_blocks`).

An engine that can report them has two attributes: `tell_cache`, True if it shall (None: if useful), read at its start;
and `on_prefix_events`, a callable or None, which it calls on the pool's loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from teola_plugin.graph.prefix_blocks import PrefixBlocks


@dataclass(frozen=True, slots=True)
class PrefixStored:
    """An event: the replica has cached this prefix."""

    blocks: PrefixBlocks


@dataclass(frozen=True, slots=True)
class PrefixRemoved:
    """An event: the replica has only the first `keeps` blocks of this prefix left."""

    blocks: PrefixBlocks
    keeps: int = 0


@dataclass(frozen=True, slots=True)
class PrefixesCleared:
    """An event: the replica has no cached prefix left, or events were lost."""


PrefixEvents = tuple[PrefixStored | PrefixRemoved | PrefixesCleared, ...]
"""Events in the order in which they happened."""


def request_prefix_events(replicas: Sequence[object]) -> None:
    """Let several replicas report what they cache, if they can and `tell_cache` is None. Call it before they start."""
    for engine in replicas if len(replicas) > 1 else ():
        if getattr(engine, "tell_cache", False) is None:
            engine.tell_cache = True  # type: ignore[attr-defined]
