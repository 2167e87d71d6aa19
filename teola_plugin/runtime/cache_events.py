"""What an instance says of its prefix cache, as events for its scheduler."""

from __future__ import annotations

from collections.abc import Iterator

from teola_plugin.engines.cache_news import CacheNews, Forgot, Holds
from teola_plugin.scheduling.engine_events import CacheCleared, CacheEvent, CacheRemoved, CacheStored, CacheUse


def cache_events(at: float, instance: str, news: CacheNews, used: float) -> Iterator[CacheEvent]:
    """`used`: the share of the cache that running requests occupy now."""
    for said in news:
        if isinstance(said, Holds):
            yield CacheStored(at, instance, said.blocks)
        elif isinstance(said, Forgot):
            yield CacheRemoved(at, instance, said.blocks, said.keeps)
        else:
            yield CacheCleared(at, instance)
    yield CacheUse(at, instance, used)
