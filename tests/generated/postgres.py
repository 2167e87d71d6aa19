"""Programs on the embedded PostgreSQL: another connection writes past the pool, and reads what is there in the end."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
from generated.seeing import Stage
from generated.words import writers
from generated.worlds import COLLECTIONS, Latency, World, fakes, ingested, row

from teola_plugin.engines.base import Engine
from teola_plugin.engines.fake import embed_words
from teola_plugin.engines.payloads import Chunk
from teola_plugin.engines.vector_pgvector import PgVectorEngine


class Another:
    """A connection of its own, as another program has it: plain SQL."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    def _run(self, statement: str, collection: str, *values: Any) -> list[Any]:
        """`%t` in the statement is the collection's table; nothing happens where there is none."""
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            found = connection.execute("SELECT place FROM teola.collections WHERE name = %s", (collection,)).fetchone()
            if found is None or found[0] is None:
                return []
            made: Any = statement.replace("%t", f"teola.{found[0]}")
            cursor = connection.execute(made, values)
            return cursor.fetchall() if cursor.description else []

    def put_now(self, collection: str, id: str, text: str) -> None:
        vector = str(list(embed_words(text, "document")))
        statement = """INSERT INTO %t (id, body, metadata, embedding) VALUES (%s, %s, '{"by": "another"}', %s)
            ON CONFLICT (id) DO UPDATE SET body = excluded.body, embedding = excluded.embedding"""
        self._run(statement, collection, id, text, vector)

    def delete_now(self, collection: str, ids: list[str]) -> None:
        self._run("DELETE FROM %t WHERE id = ANY(%s)", collection, ids)

    async def put(self, collection: str, id: str, text: str) -> None:
        await asyncio.to_thread(self.put_now, collection, id, text)

    async def delete(self, collection: str, ids: list[str]) -> None:
        await asyncio.to_thread(self.delete_now, collection, ids)

    def rows(self) -> list[str]:
        """Of all collections, by id."""
        statement = "SELECT id, body, metadata FROM %t ORDER BY id"
        return [f"{name} {row(Chunk(*each))}" for name in COLLECTIONS for each in self._run(statement, name)]


def stage(dsn: str) -> Stage:
    """Fakes, and a store on this server; every call finds the same two rows."""
    another = Another(dsn)

    def engines(latency: Latency) -> list[Engine]:
        return [*(engine for engine in fakes(latency) if engine.name != "store"), PgVectorEngine(dsn=dsn, pool_size=4)]

    async def first(world: World) -> None:
        for name in COLLECTIONS:
            await world.store.forget(name)
        for id, text in (("a", "apple oven in the garden"), ("old", "old bread")):
            await ingested(world.store, "notes", id, text)

    return Stage(engines, writers, lambda world: another.rows(), first, lambda: another, virtual=False)
