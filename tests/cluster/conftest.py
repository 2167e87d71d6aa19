"""One shared pool of fake engines for all tests of the shared pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from teola_plugin.cluster import deploy
from teola_plugin.cluster.config import PoolConfig
from teola_plugin.pool import EnginePool

ENGINES: dict[str, Any] = {
    "llm": {"kind": "fake"},
    "embedder": {"kind": "fake"},
    "reranker": {"kind": "fake"},
    "store": {"kind": "fake"},
    "slow": {"kind": "fake", "options": {"like": "embedder", "seconds": 0.25}},
    "wide": {"factory": "teola_plugin.engines.fake.engines:FakeEmbedder", "options": {"dimension": 96}},
}


@pytest.fixture(scope="session")
def fakes_address(ray_address: str) -> str:
    """Return the address of a cluster that has the pool `fakes`."""
    deploy.up(PoolConfig.model_validate({"name": "fakes", "engines": ENGINES}), ray_address)
    return ray_address


@pytest.fixture
def shared(fakes_address: str) -> Iterator[EnginePool]:
    with EnginePool.connect(fakes_address, pool="fakes") as pool:
        yield pool
