"""What an instance says of its prefix cache, in the names that senders give to prompts (`graph.prefix_blocks`).

An engine that can tell has two attributes: `tell_cache`, whether it shall (None: if it is of use), read when it starts;
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
"""In the order in which they happened."""


def request_prefix_events(instances: Sequence[object]) -> None:
    """Before they start: of several instances, all that can shall tell what they cache, unless somebody decided."""
    for engine in instances if len(instances) > 1 else ():
        if getattr(engine, "tell_cache", False) is None:
            engine.tell_cache = True  # type: ignore[attr-defined]
