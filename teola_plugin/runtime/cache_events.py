"""What an instance says of its prefix cache, as events for its scheduler."""

from __future__ import annotations

from collections.abc import Iterator

from teola_plugin.engines.prefix_events import PrefixEvents, PrefixRemoved, PrefixStored
from teola_plugin.scheduling.engine_events import CacheCleared, CacheEvent, CacheRemoved, CacheStored, CacheUse


def cache_events(at: float, instance: str, news: PrefixEvents, used: float) -> Iterator[CacheEvent]:
    """`used`: the share of the cache that running requests occupy now."""
    for said in news:
        if isinstance(said, PrefixStored):
            yield CacheStored(at, instance, said.blocks)
        elif isinstance(said, PrefixRemoved):
            yield CacheRemoved(at, instance, said.blocks, said.keeps)
        else:
            yield CacheCleared(at, instance)
    yield CacheUse(at, instance, used)
