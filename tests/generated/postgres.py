"""Random programs on the embedded PostgreSQL, where another connection writes without the pool."""

from __future__ import annotations

from generated.another import Another
from generated.seeing import Stage
from generated.words import writers
from generated.worlds import COLLECTIONS, Latency, World, fakes, ingested

from teola_plugin.engines.base import Engine
from teola_plugin.engines.pgvector import PgVectorEngine


def stage(dsn: str) -> Stage:
    """Return a stage of fakes and a store on this server. Every call finds the same two rows."""
    another = Another(dsn)

    def engines(latency: Latency) -> list[Engine]:
        return [*(engine for engine in fakes(latency) if engine.name != "store"), PgVectorEngine(dsn=dsn, pool_size=4)]

    async def first(world: World) -> None:
        for name in COLLECTIONS:
            await world.store.forget(name)
        for id, text in (("a", "apple oven in the garden"), ("old", "old bread")):
            await ingested(world.store, "notes", id, text)

    return Stage(engines, writers, lambda world: another.rows(), first, lambda: another, virtual=False)
