"""One embedded PostgreSQL serves the session; each test has collections of its own."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

from teola_plugin.engines.embedded_postgres import EmbeddedPostgres
from teola_plugin.engines.vector_pgvector import PgVectorEngine

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgres_dsn() -> Iterator[str]:
    server = EmbeddedPostgres()
    server.start()
    try:
        yield server.dsn
    finally:
        server.stop()


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
    """A name that no other test uses."""
    return f"tests/{next(_numbers)} – 'Ünïcode'; \"quotes\" %s 中文"
