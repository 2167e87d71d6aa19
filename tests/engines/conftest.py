"""Vector stores on the session's embedded PostgreSQL. Each test has collections of its own."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import pytest

from teola_plugin.engines.pgvector import PgVectorEngine

_numbers = itertools.count(1)


@pytest.fixture
async def store(postgres_dsn: str) -> AsyncIterator[PgVectorEngine]:
    engine = PgVectorEngine(dsn=postgres_dsn)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@pytest.fixture
def collection() -> str:
    """Return a name that no other test uses."""
    return f"tests/{next(_numbers)} – 'Ünïcode'; \"quotes\" %s 中文"
