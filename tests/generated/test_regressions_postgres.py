"""Programs on PostgreSQL that random generation found, each shrunk."""

from __future__ import annotations

import asyncio
import random

import pytest

from teola_plugin.engines.pgvector import PgVectorEngine
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import Chunk, Done, IngestRow, Request, SearchVector

pytestmark = pytest.mark.postgres


async def test_concurrent_requests_lose_no_connection(postgres_dsn: str) -> None:
    """The task of a request that has ended was cancelled while it gave its connection to the next one.

    That connection was gone for good: after as many of them as the pool has, the store answered nobody.
    """
    store, draw = PgVectorEngine(dsn=postgres_dsn, pool_size=2), random.Random(0)

    async def one(number: int) -> bool:
        await asyncio.sleep(draw.random() * 0.004)
        kind, payload = PrimitiveKind.SEARCHING, SearchVector("side by side", (1.0, number), 2)
        if draw.random() < 0.3:
            kind, payload = PrimitiveKind.INGESTION, IngestRow("side by side", Chunk("a", f"{number}"), (1.0, number))
        results = [result async for result in store.execute([Request(f"r{number}", kind, payload)])]
        return isinstance(results[0], Done)

    await store.start()
    try:
        for first in range(0, 900, 6):
            async with asyncio.timeout(5):
                assert all(await asyncio.gather(*(one(number) for number in range(first, first + 6))))
    finally:
        await store.stop()
